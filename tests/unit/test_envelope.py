"""Frames on the wire: what is refused, and where the text points."""

import msgpack
import msgspec
import pytest

from transport.envelope import (
    KIND_OF,
    LIMITS,
    PAYLOAD_FRAMES,
    Limits,
    decode,
    encode,
    peek,
)
from transport.errors import LocalProtocolError, RemoteProtocolError, VersionRefused
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Body,
    Chunk,
    ChunkRequest,
    Heartbeat,
    HelloRequired,
    Message,
    PartialPut,
    Ping,
    Plane,
    TrajectoryPut,
)

CONTROL = LIMITS[Plane.CONTROL]
WEIGHTS = LIMITS[Plane.WEIGHTS]
PING = Ping(sequence=1, sent_s=2.0)
PREFIX = bytes([PROTOCOL_VERSION, KIND_OF[Ping]])


def test_a_message_comes_back_equal_with_its_payload():
    chunk = Chunk(digest="ab", index=3)
    assert decode(encode(chunk, [b"bytes"]), WEIGHTS) == (chunk, [b"bytes"])
    assert decode(encode(PING), CONTROL) == (PING, [])


def test_a_header_is_a_plain_map_with_string_keys():
    assert msgpack.unpackb(encode(PING)[1]) == {"sequence": 1, "sent_s": 2.0}


def test_kind_bytes_and_types_are_one_to_one():
    assert len(KIND_OF) == len(KINDS)
    assert all(0 < kind < 256 for kind in KINDS)


def test_the_kind_is_known_without_decoding_the_header():
    assert peek([PREFIX, b"\xc1 not MessagePack"]) is Ping


@pytest.mark.parametrize("prefix", [b"\x00\x05", b"\x02\x05", b"\xff", b"\x02\x05\x05"])
def test_another_version_is_told_apart_from_garbage(prefix):
    with pytest.raises(VersionRefused, match=f"protocol {prefix[0]}"):
        decode([prefix, encode(PING)[1]], CONTROL)


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "version"),
        ([b""], "version"),
        ([b"\x01"], "version"),
        ([PREFIX + b"\0", b"\x80"], "version"),
        ([bytes([PROTOCOL_VERSION, 0x7F]), b"\x80"], "kind"),
        ([bytes([PROTOCOL_VERSION, 0]), b"\x80"], "kind"),
        ([PREFIX], "header"),
        ([PREFIX, b""], "header"),
        ([PREFIX, b"\xc1"], "header"),
        ([PREFIX, encode(PING)[1] + b"\0"], "header"),
        ([PREFIX, encode(PING)[1][:-1]], "header"),
        ([PREFIX, b"\x91" * 100_000], "header"),
        ([PREFIX, b"\x81\xa1x" + b"\x91" * 100_000], "header"),
        ([PREFIX, b"\xdf\xff\xff\xff\xff"], "header"),
        ([PREFIX, msgpack.packb({1: 2})], "header"),
        ([PREFIX, msgpack.packb({"sequence": 1, "sent_s": 2.0}), b"payload"], "payload"),
    ],
)
def test_what_is_malformed_is_the_peers_fault_and_names_the_field(frames, field):
    with pytest.raises(RemoteProtocolError, match=f"^{field}"):
        decode(frames, CONTROL)


@pytest.mark.parametrize(
    ("header", "path"),
    [
        ({"sequence": "1", "sent_s": 2.0}, r"\$\.sequence"),
        ({"sequence": 1.5, "sent_s": 2.0}, r"\$\.sequence"),
        ({"sent_s": 2.0}, "sequence"),
        ({"sequence": 1, "sent_s": None}, r"\$\.sent_s"),
        ([1, 2.0], "Expected `object`"),
    ],
)
def test_a_wrong_field_is_named(header, path):
    with pytest.raises(RemoteProtocolError, match=f"Ping.*{path}"):
        decode([PREFIX, msgpack.packb(header)], CONTROL)


def test_a_wrong_element_deep_inside_is_named():
    frames = encode(Heartbeat(sequence=1, sent_s=0.0))
    held = [{"attempt": "a#1", "fence": [1, 2]}, {"attempt": "a#2", "fence": [1, "x"]}]
    header = {"sequence": 1, "sent_s": 0.0, "held": held}
    with pytest.raises(RemoteProtocolError, match=r"\$\.held\[\.*\d*\.*\]\.fence"):
        decode([frames[0], msgpack.packb(header)], CONTROL)


def test_sizes_are_checked_before_anything_is_decoded():
    limits = Limits(header_bytes=10, payload_frame_bytes=4, payload_frames=1)
    prefix = bytes([PROTOCOL_VERSION, KIND_OF[Chunk]])
    with pytest.raises(RemoteProtocolError, match=r"^header: 11 bytes, at most 10"):
        decode([prefix, b"\xc1" * 11], limits)
    with pytest.raises(RemoteProtocolError, match=r"^payload\[0\]: 5 bytes, at most 4"):
        decode([prefix, b"\xc1", b"12345"], limits)
    with pytest.raises(RemoteProtocolError, match=r"^payload: 2 frames, at most 1"):
        decode([prefix, b"\xc1", b"1", b"2"], limits)


def test_the_control_plane_carries_no_payload():
    with pytest.raises(RemoteProtocolError, match=r"^payload"):
        decode(encode(Chunk(digest="ab", index=0), [b"x"]), CONTROL)


def test_only_bodies_and_chunks_have_payload():
    assert set(PAYLOAD_FRAMES) == {TrajectoryPut, PartialPut, Body, Chunk}
    with pytest.raises(LocalProtocolError, match="Ping with 1 payload"):
        encode(PING, [b"x"])
    with pytest.raises(LocalProtocolError, match="Chunk with 2 payload"):
        encode(Chunk(digest="ab", index=0), [b"x", b"y"])


def test_a_frame_may_be_any_buffer():
    chunk = Chunk(digest="ab", index=0)
    frames = encode(chunk, [memoryview(b"abc")])
    assert decode([bytearray(frames[0]), memoryview(frames[1]), frames[2]], WEIGHTS)[0] == chunk


def test_our_own_oversized_message_is_found_where_it_is_made():
    huge = ChunkRequest(digest="ab", indices=tuple(range(300_000)))
    with pytest.raises(LocalProtocolError, match="ChunkRequest: header"):
        encode(huge, limits=CONTROL)


def test_what_is_no_message_is_our_own_fault():
    class Stranger(Message, frozen=True, kw_only=True):
        x: object = None

    with pytest.raises(LocalProtocolError, match="Stranger has no kind byte"):
        encode(Stranger())


def test_what_does_not_encode_is_our_own_fault():
    with pytest.raises(LocalProtocolError, match="Ping does not encode"):
        encode(Ping(sequence=2**64, sent_s=0.0))
    with pytest.raises(LocalProtocolError, match="Ping does not encode"):
        encode(Ping(sequence=object(), sent_s=0.0))


def test_messages_without_fields_are_empty_maps():
    message = HelloRequired()
    assert encode(message)[1] == b"\x80"
    assert decode(encode(message), CONTROL) == (message, [])


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        PING.sequence = 2


def test_limits_of_a_link_cover_every_frame_of_its_plane():
    for limits in LIMITS.values():
        assert limits.frame_bytes >= limits.header_bytes
        assert limits.frame_bytes >= limits.payload_frame_bytes
        assert limits.frames == 2 + limits.payload_frames
    assert CONTROL == (256 * 1024, 0, 0)
    assert LIMITS[Plane.TRAJECTORIES].payload_frame_bytes == 4 * 2**20


def test_only_declared_message_types_reach_the_wire():
    assert all(issubclass(kind_type, Message) for kind_type in KINDS.values())
    assert all(msgspec.structs.fields(kind_type) is not None for kind_type in KINDS.values())
