"""What a plan must prove, and which versions may join the tree."""

import msgspec
import pytest
from signing import signing_key

from transport.errors import AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded
from transport.messages import PlanStep, VersionRef, WeightsPlan
from transport.weights.manifest import (
    SignedManifest,
    VersionManifest,
    composite_name,
    describe_file,
    sign,
)
from transport.weights.manifest_folder import StoredManifest
from transport.weights.plan import (
    MAX_PLAN_STEPS,
    check_plan,
    check_successor,
)

KEY = signing_key()
TRUSTED = {KEY.key_id: KEY.public}


def manifest(version, parent, files=(), **changes):
    fields = {
        "run": "r",
        "policy": "r/p",
        "version": version,
        "parent": parent,
        "step": version,
        "digest": f"{version:064d}",
        "base_digest": None if parent is None else f"{parent:064d}",
        "files": tuple(files),
        "full_bytes": 8,
        "fingerprint": "f" * 64,
        "created_wall_s": 0.0,
    }
    return VersionManifest(**{**fields, **changes})


def delta(version, parent, **changes):
    entry = describe_file("delta.safetensors", "delta", b"d%d" % version)
    return manifest(version, parent, [entry], **changes)


CONFIG = describe_file("config.json", "artefact", b"{}")
SNAPSHOT = describe_file("model.safetensors", "snapshot", b"weights")
INDEX = describe_file("model.safetensors.index.json", "snapshot", b"{}")
ROOT = manifest(0, None, [CONFIG, SNAPSHOT])
SHARDED = manifest(0, None, [SNAPSHOT, INDEX])


def step(manifest, files=None, key=KEY):
    names = tuple(entry.name for entry in manifest.files) if files is None else tuple(files)
    if key is None:
        data = msgspec.msgpack.encode(manifest)
        return PlanStep(manifest=data, signature=b"", key_id="", files=names)
    return StoredManifest(manifest, sign(manifest, key)).step(
        [entry for entry in manifest.files if entry.name in names]
    )


def plan(*steps, version, policy="r/p"):
    return WeightsPlan(policy=policy, version=version, steps=steps)


def catalogue(version, files=(SNAPSHOT,), **changes):
    return manifest(version, version - 1, files, **changes)


def composite(version, base, **changes):
    """The catalogue of a composite; its version's own parent is the one before."""
    entry = describe_file(composite_name(base), "composite", b"c%d" % version)
    fields = {"base_digest": f"{base:064d}", **changes}
    return manifest(version, base, fields.pop("files", [entry]), **fields)


def test_a_plan_for_somebody_with_nothing_is_checked_step_by_step():
    steps = check_plan(
        plan(
            step(ROOT, ["config.json"]),
            step(delta(4, 3), []),
            step(catalogue(4), key=None),
            step(delta(5, 4)),
            version=5,
        ),
        TRUSTED,
    )
    assert [(s.manifest.version, [e.name for e in s.files]) for s in steps] == [
        (0, ["config.json"]),
        (4, ["model.safetensors"]),
        (5, ["delta.safetensors"]),
    ]
    assert steps[1].signed.key_id == KEY.key_id
    assert steps[2].delta is not None
    assert steps[1].delta is None
    assert [step.base and step.base.version for step in steps] == [None, None, 4]


def test_composites_are_proved_by_the_signed_version_and_join_what_is_around_them():
    steps = check_plan(
        plan(
            step(ROOT),
            step(delta(4, 3), []),
            step(composite(4, 0), key=None),
            step(delta(5, 4)),
            step(delta(9, 8), []),
            step(composite(9, 5), key=None),
            version=9,
        ),
        TRUSTED,
    )
    assert [s.base for s in steps[1:]] == [
        VersionRef(version=version, digest=f"{version:064d}") for version in (0, 4, 5)
    ]
    assert [s.delta.name for s in steps[1:]] == [
        "delta-from-00000000.safetensors",
        "delta.safetensors",
        "delta-from-00000005.safetensors",
    ]
    assert steps[1].signed.key_id == KEY.key_id
    (only,) = check_plan(
        plan(step(delta(9, 8), []), step(composite(9, 3), key=None), version=9), TRUSTED
    )
    assert only.base == VersionRef(version=3, digest=f"{3:064d}")


HUGE = msgspec.structs.replace(
    describe_file(composite_name(0), "composite", b"c"),
    size_bytes=1 << 30, chunk_bytes=1 << 20, chunk_digests=(bytes(16),) * 1024,
)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (AuthenticationFailed, [step(composite(4, 0), key=None)]),
        (AuthenticationFailed, [step(delta(5, 4), []), step(composite(4, 0), key=None)]),
        (
            AuthenticationFailed,
            [step(delta(4, 3), []), step(composite(4, 0, digest="e" * 64), key=None)],
        ),
        (
            AuthenticationFailed,
            [step(delta(4, 3), []), step(composite(4, 0, fingerprint="e" * 64), key=None)],
        ),
        (RemoteProtocolError, [step(delta(4, 3), []), step(composite(4, 0))]),
        (RemoteProtocolError, [step(delta(4, 3), []), step(composite(4, 5), key=None)]),
        (
            RemoteProtocolError,
            [step(delta(4, 3), []), step(composite(4, 0, base_digest="x"), key=None)],
        ),
        (
            RemoteProtocolError,
            [
                step(delta(4, 3), []),
                step(composite(4, 1, files=composite(4, 0).files), key=None),
            ],
        ),
        (
            RemoteProtocolError,
            [
                step(delta(4, 3), []),
                step(composite(4, 0, files=[*composite(4, 0).files, SNAPSHOT]), key=None),
            ],
        ),
        (
            RemoteProtocolError,
            [step(delta(4, 3), []), step(composite(4, 3, files=delta(4, 3).files), key=None)],
        ),
        (
            SizeLimitExceeded,
            [step(delta(4, 3), []), step(composite(4, 0, files=[HUGE]), key=None)],
        ),
        # The base is not what precedes it: another version, or another state of that version.
        (
            RemoteProtocolError,
            [step(delta(3, 2)), step(delta(4, 3), []), step(composite(4, 2), key=None)],
        ),
        (
            RemoteProtocolError,
            [
                step(delta(3, 2)),
                step(delta(4, 3), []),
                step(composite(4, 3, base_digest="a" * 64), key=None),
            ],
        ),
        # A snapshot's catalogue keeps its parent.
        (
            AuthenticationFailed,
            [step(delta(4, 3), []), step(manifest(4, 2, [SNAPSHOT]), key=None)],
        ),
    ],
)
def test_a_composite_that_does_not_prove_its_way_is_refused(error, steps):
    with pytest.raises(error):
        check_plan(plan(*steps, version=4), TRUSTED)


@pytest.mark.parametrize(
    ("error", "bad"),
    [
        (SizeLimitExceeded, plan(version=1)),
        (SizeLimitExceeded, plan(*[step(delta(1, 0))] * (MAX_PLAN_STEPS + 1), version=1)),
        (RemoteProtocolError, plan(step(delta(1, 0)), version=2)),
        (RemoteProtocolError, plan(step(delta(1, 0)), version=1, policy="r/q")),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(delta(3, 2)), version=3)),
        (
            RemoteProtocolError,
            plan(step(delta(1, 0)), step(delta(2, 1, base_digest="a" * 64)), version=2),
        ),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(ROOT), version=0)),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(ROOT, ["config.json"]), version=1)),
        (RemoteProtocolError, plan(step(ROOT, ["config.json"]), version=0)),
        (RemoteProtocolError, plan(step(ROOT, []), version=0)),
        (
            RemoteProtocolError,
            plan(
                PlanStep(
                    manifest=step(ROOT).manifest,
                    signature=step(ROOT).signature,
                    key_id=KEY.key_id,
                    files=("model.safetensors", "passwd"),
                ),
                version=0,
            ),
        ),
        (
            RemoteProtocolError,
            plan(
                PlanStep(
                    manifest=step(ROOT).manifest,
                    signature=step(ROOT).signature,
                    key_id=KEY.key_id,
                    files=("model.safetensors", "model.safetensors"),
                ),
                version=0,
            ),
        ),
        (AuthenticationFailed, plan(step(delta(1, 0), key=signing_key("22" * 32)), version=1)),
        (AuthenticationFailed, plan(step(delta(1, 0), key=None), version=1)),
        (AuthenticationFailed, plan(step(catalogue(4), key=None), version=4)),
        (
            AuthenticationFailed,
            plan(step(delta(3, 2), []), step(catalogue(4), key=None), version=4),
        ),
        (
            AuthenticationFailed,
            plan(
                step(delta(4, 3), []),
                step(catalogue(4, digest="e" * 64), key=None),
                version=4,
            ),
        ),
        (
            RemoteProtocolError,
            plan(
                step(delta(4, 3), []),
                step(catalogue(4, [CONFIG, SNAPSHOT]), key=None),
                version=4,
            ),
        ),
        (
            SizeLimitExceeded,
            plan(
                step(delta(4, 3), []),
                step(
                    catalogue(4, [msgspec.structs.replace(
                        SNAPSHOT, size_bytes=1 << 30, chunk_bytes=1 << 20,
                        chunk_digests=(bytes(16),) * 1024,
                    )]),
                    key=None,
                ),
                version=4,
            ),
        ),
        (RemoteProtocolError, plan(step(SHARDED, ["model.safetensors"]), version=0)),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_prove_its_way_is_refused(error, bad):
    with pytest.raises(error):
        check_plan(bad, TRUSTED)


def test_a_plan_over_the_byte_limit_is_refused():
    whole = plan(step(ROOT), version=0)
    assert len(check_plan(whole, TRUSTED, max_bytes=9)) == 1
    with pytest.raises(SizeLimitExceeded, match="moves 9 bytes"):
        check_plan(whole, TRUSTED, max_bytes=8)


def test_garbage_in_a_plan_is_refused():
    for data in (b"", b"\xc1", b"\x80"):
        bad = PlanStep(manifest=data, signature=b"", key_id="", files=())
        with pytest.raises(RemoteProtocolError):
            check_plan(plan(bad, version=1), TRUSTED)


def stored(*manifests):
    nothing = SignedManifest(manifest=b"", signature=b"", key_id="")
    return {m.version: StoredManifest(m, nothing) for m in manifests}


def test_the_next_version_has_a_new_number_and_a_known_parent():
    check_successor(ROOT, {})
    check_successor(delta(1, 0), stored(ROOT))
    check_successor(delta(7, 0), stored(ROOT, delta(1, 0)))


@pytest.mark.parametrize(
    "candidate",
    [
        ROOT,
        manifest(5, None, [SNAPSHOT]),
        delta(1, 0, digest="d" * 64),
        delta(5, 4),
        delta(5, 1, base_digest="a" * 64),
        delta(5, 1, fingerprint="a" * 64),
        delta(5, 1, run="other"),
        manifest(5, 1, [SNAPSHOT]),
        manifest(5, 1, []),
    ],
)
def test_other_successors_are_refused(candidate):
    with pytest.raises(RemoteProtocolError):
        check_successor(candidate, stored(ROOT, delta(1, 0)))


def test_a_first_version_needs_its_weights():
    with pytest.raises(RemoteProtocolError, match="snapshot"):
        check_successor(manifest(0, None, [CONFIG]), {})
