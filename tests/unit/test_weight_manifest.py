"""Manifests: what they may say and who may say it."""

import hashlib

import msgspec
import pytest
from signing import signing_key

from transport.errors import (
    AuthenticationFailed,
    RemoteProtocolError,
    SizeLimitExceeded,
)
from transport.weights.manifest import (
    CHUNK_BYTES,
    LARGE_CHUNK_BYTES,
    LARGE_FILE_BYTES,
    MAX_ARTEFACT_BYTES,
    MAX_FILE_BYTES,
    FileEntry,
    SignedManifest,
    VersionManifest,
    check_manifest,
    chunk_bytes_for,
    composite_name,
    decode_manifest,
    describe_file,
    is_artefact_name,
    sign,
    verify,
)


def entry(name="delta.safetensors", kind="delta", data=b"x" * 10, chunk_bytes=4):
    return describe_file(name, kind, data, chunk_bytes=chunk_bytes)


def manifest(**changes):
    fields = {
        "run": "r",
        "policy": "r/p",
        "version": 3,
        "parent": 2,
        "step": 3,
        "digest": "a" * 64,
        "base_digest": "b" * 64,
        "files": (entry(),),
        "full_bytes": 100,
        "fingerprint": "c" * 64,
        "created_wall_s": 1.5,
    }
    return VersionManifest(**{**fields, **changes})


def trusting(key, policy="r/p"):
    return {key.key_id: msgspec.structs.replace(key.public, policy=policy)}


def test_a_file_is_described_chunk_by_chunk():
    described = entry(data=b"0123456789")
    assert described.digest == hashlib.sha256(b"0123456789").hexdigest()
    assert [described.chunk_size_bytes(i) for i in range(3)] == [4, 4, 2]
    assert described.chunk_matches(2, b"89")
    assert not described.chunk_matches(2, b"98")
    assert not described.chunk_matches(1, b"89")
    assert not described.chunk_matches(3, b"")
    assert not described.chunk_matches(-1, b"89")
    assert entry(data=b"").chunk_digests == ()


def test_large_files_get_larger_chunks():
    assert chunk_bytes_for(LARGE_FILE_BYTES) == CHUNK_BYTES
    assert chunk_bytes_for(LARGE_FILE_BYTES + 1) == LARGE_CHUNK_BYTES


def test_a_signed_manifest_comes_back():
    key = signing_key()
    signed = sign(manifest(), key)
    assert verify(signed, trusting(key)) == manifest()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=SignedManifest)
    assert verify(again, trusting(key)) == manifest()


def test_unknown_keys_other_policies_and_changed_bytes_are_refused():
    key, other = signing_key(), signing_key("22" * 32)
    signed = sign(manifest(), key)
    with pytest.raises(AuthenticationFailed, match="not trusted"):
        verify(signed, trusting(other))
    with pytest.raises(AuthenticationFailed, match="r/q"):
        verify(signed, trusting(key, "r/q"))
    with pytest.raises(AuthenticationFailed, match="signature"):
        verify(signed, {key.key_id: other.public})
    for position in range(0, len(signed.manifest), 9):
        changed = bytearray(signed.manifest)
        changed[position] ^= 1
        with pytest.raises(AuthenticationFailed):
            verify(msgspec.structs.replace(signed, manifest=bytes(changed)), trusting(key))
    with pytest.raises(AuthenticationFailed):
        verify(msgspec.structs.replace(signed, signature=b"short"), trusting(key))


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (RemoteProtocolError, {"version": -1, "parent": None, "base_digest": None}),
        (RemoteProtocolError, {"step": -1}),
        (RemoteProtocolError, {"full_bytes": -1}),
        (RemoteProtocolError, {"parent": 3}),
        (RemoteProtocolError, {"parent": None}),
        (RemoteProtocolError, {"base_digest": None}),
        (RemoteProtocolError, {"base_digest": "B" * 64}),
        (RemoteProtocolError, {"digest": "a" * 63}),
        (RemoteProtocolError, {"fingerprint": "../" + "a" * 61}),
        (RemoteProtocolError, {"full_digest": "a" * 63}),
        (RemoteProtocolError, {"full_digest": ""}),
        (RemoteProtocolError, {"files": (entry(), entry())}),
        (SizeLimitExceeded, {"files": (entry(),) * 5000}),
        (RemoteProtocolError, {"files": (entry("../delta.safetensors"),)}),
        (RemoteProtocolError, {"files": (entry("config.json", "snapshot"),)}),
        (RemoteProtocolError, {"files": (entry("modeling.py", "artefact"),)}),
        (RemoteProtocolError, {"files": (entry("delta.safetensors", "composite"),)}),
        (RemoteProtocolError, {"files": (entry("delta-from-0000001.safetensors", "composite"),)}),
        (RemoteProtocolError, {"files": (entry("delta-from-00000001.safetensors"),)}),
        (RemoteProtocolError, {"files": (entry("model.safetensors\n", "snapshot"),)}),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(error, changes):
    with pytest.raises(error):
        check_manifest(manifest(**changes))
    with pytest.raises(error):
        sign(manifest(**changes), signing_key())


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (RemoteProtocolError, {"digest": "x" * 64}),
        (RemoteProtocolError, {"size_bytes": -1}),
        (RemoteProtocolError, {"chunk_bytes": 0}),
        (RemoteProtocolError, {"chunk_bytes": LARGE_CHUNK_BYTES + 1}),
        (RemoteProtocolError, {"chunk_digests": ()}),
        (RemoteProtocolError, {"chunk_digests": (b"x" * 15,) * 3}),
        (SizeLimitExceeded, {"size_bytes": MAX_FILE_BYTES + 1}),
    ],
)
def test_a_file_entry_that_cannot_be_is_refused(error, changes):
    with pytest.raises(error):
        check_manifest(manifest(files=(msgspec.structs.replace(entry(), **changes),)))


@pytest.mark.parametrize(
    "segments",
    [
        ((-1, 2),),
        ((0, 0),),
        ((0, -1),),
        ((0, 11),),
        ((10, 1),),
        ((1 << 62, 1 << 62),),
        ((4, 2), (0, 2)),
        ((0, 3), (2, 2)),
        ((0, 3), (0, 3)),
    ],
)
def test_segments_lie_inside_the_file_in_order_and_apart(segments):
    good = msgspec.structs.replace(entry(), segments=((0, 3), (3, 1), (5, 5)))
    check_manifest(manifest(files=(good,)))
    with pytest.raises(RemoteProtocolError, match="segment"):
        check_manifest(manifest(files=(msgspec.structs.replace(good, segments=segments),)))


def test_only_deltas_and_composites_have_segments():
    composite = entry(composite_name(7), "composite")
    check_manifest(manifest(files=(msgspec.structs.replace(composite, segments=((0, 1),)),)))
    snapshot = entry("model.safetensors", "snapshot")
    with pytest.raises(RemoteProtocolError, match="no segments"):
        check_manifest(manifest(files=(msgspec.structs.replace(snapshot, segments=((0, 1),)),)))


def test_a_manifest_finds_its_delta_and_its_composite():
    composite = entry(composite_name(12345678), "composite")
    both = manifest(files=(entry(), composite), full_digest="d" * 64)
    check_manifest(both)
    assert (both.delta, both.composite) == (entry(), composite)
    assert manifest(files=()).composite is None
    assert decode_manifest(msgspec.msgpack.encode(both)) == both


def test_artefacts_have_a_limit_of_their_own():
    large = FileEntry(
        name="tokenizer.json",
        kind="artefact",
        digest="a" * 64,
        size_bytes=MAX_ARTEFACT_BYTES + 1,
        chunk_bytes=CHUNK_BYTES,
        chunk_digests=(b"x" * 16,) * 65,
    )
    with pytest.raises(SizeLimitExceeded, match=r"tokenizer\.json"):
        check_manifest(manifest(files=(large,)))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x91" * 100_000])
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(RemoteProtocolError):
        decode_manifest(data)


def test_a_huge_manifest_is_refused_before_it_is_read():
    with pytest.raises(SizeLimitExceeded):
        decode_manifest(bytes(10_000_000))


def test_fields_of_a_later_release_are_ignored():
    fields = msgspec.to_builtins(manifest(), builtin_types=(bytes,))
    fields["later"] = {"more": 1}
    assert decode_manifest(msgspec.msgpack.encode(fields)) == manifest()


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
     "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model", "preprocessor_config.json"],
)  # fmt: skip
def test_files_that_describe_a_model_travel(name):
    assert is_artefact_name(name)


@pytest.mark.parametrize(
    "name",
    ["modeling_x.py", "model.safetensors", "pytorch_model.bin", ".model", "a/b.model", "x.sh"],
)
def test_weights_and_program_text_do_not(name):
    assert not is_artefact_name(name)


def test_a_published_signature_stays_valid():
    """The signed bytes are what later releases must be able to check."""
    key = signing_key("07" * 32)
    assert key.verify_key == "ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c"
    signed = SignedManifest(
        manifest=msgspec.msgpack.encode(manifest()),
        signature=sign(manifest(), key).signature,
        key_id=key.key_id,
    )
    assert verify(signed, trusting(key)) == manifest()
