"""What was once on the wire stays readable, by us and by any MessagePack library."""

import base64
import json
from typing import Any

import golden
import msgpack
import msgspec
import pytest
from msgspec import inspect

from transport.envelope import LIMITS, decode, encode
from transport.errors import RemoteProtocolError
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Body,
    Heartbeat,
    Message,
    Plane,
    Role,
    TrajectoryAck,
    TrajectoryRefused,
    VersionDurable,
    VersionRejected,
    WeightsPlan,
)
from transport.permissions import PERMISSIONS

NAMES = sorted(path.stem for path in golden.FOLDER.glob("*.bin"))
WEIGHTS = LIMITS[Plane.WEIGHTS]
SPEAKERS = (Role.AGENT, Role.TRAINER, Role.SERVICE)


def read(name: str) -> tuple[list[bytes], dict[str, Any]]:
    frames = golden.split_frames((golden.FOLDER / f"{name}.bin").read_bytes())
    return frames, json.loads((golden.FOLDER / f"{name}.json").read_text())


def plain(value: Any) -> Any:
    """As JSON has it: bytes are base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def missing(expected: Any, found: Any, path: str = "$") -> list[str]:
    """Where ``found`` lacks something of ``expected``; new fields with defaults are no loss."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            problem
            for key, value in expected.items()
            for problem in missing(value, found.get(key, "absent"), f"{path}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            problem
            for index, (want, have) in enumerate(zip(expected, found, strict=True))
            for problem in missing(want, have, f"{path}[{index}]")
        ]
    return [] if expected == found else [f"{path}: {expected!r} became {found!r}"]


def test_every_kind_has_a_golden_message_and_every_golden_message_a_kind():
    assert set(NAMES) == {kind_type.__name__ for kind_type in KINDS.values()}
    assert {path.stem for path in golden.FOLDER.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_message_still_means_the_same(name):
    frames, expected = read(name)
    message, payload = decode(frames, WEIGHTS)
    assert type(message).__name__ == name
    assert KINDS[expected["kind"]] is type(message)
    assert missing(expected["header"], plain(msgspec.to_builtins(message))) == []
    assert [frame.hex() for frame in payload] == expected["payload"]
    again, _ = decode(encode(message, payload), WEIGHTS)
    assert again == message


@pytest.mark.parametrize("name", NAMES)
def test_an_independent_library_reads_the_same(name):
    frames, expected = read(name)
    prefix, header, *payload = frames
    assert prefix == bytes([PROTOCOL_VERSION, expected["kind"]])
    assert plain(msgpack.unpackb(header)) == expected["header"]
    assert [frame.hex() for frame in payload] == expected["payload"]


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_a_later_version_is_ignored(name):
    frames, expected = read(name)
    header = {"from_the_future": [1, {"a": None}], **msgpack.unpackb(frames[1])}
    message, _ = decode([frames[0], msgpack.packb(header), *frames[2:]], WEIGHTS)
    assert missing(expected["header"], plain(msgspec.to_builtins(message))) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_message_fits_each_plane_that_carries_its_kind(name):
    frames, _ = read(name)
    planes = {plane for (_, plane), kinds in PERMISSIONS.items() if of(name) in kinds}
    assert planes
    for plane in planes:
        decode(frames, LIMITS[plane])


def of(name: str) -> type[Message]:
    return next(kind_type for kind_type in KINDS.values() if kind_type.__name__ == name)


def test_the_samples_cover_every_field_of_every_message():
    for message, _ in golden.SAMPLES:
        for field in msgspec.structs.fields(message):
            if field.required:
                continue
            default = field.default_factory() if field.default is msgspec.NODEFAULT else None
            value = getattr(message, field.name)
            stays_at_default = {"found", "protocol"}
            assert field.name in stays_at_default or value not in (default, field.default), (
                f"{type(message).__name__}.{field.name}"
            )


def test_writing_again_touches_nothing(tmp_path):
    assert len(golden.write_missing(tmp_path)) == len(KINDS)
    (tmp_path / "Ping.bin").write_bytes(b"as it was")
    (tmp_path / "Pong.json").unlink()
    assert golden.write_missing(tmp_path) == []
    assert (tmp_path / "Ping.bin").read_bytes() == b"as it was"


CHECKED_BY_THEIR_READER = {
    "GroupSummary",  # transport.trajectory.summary_fault, which answers the sender
    "SchedulerStatus",
    "RunSpec",  # transport.runs has bounds of its own
}


def unbounded(kind: Any, path: str) -> list[str]:
    """Numbers and ids within a type that have no bound."""
    if isinstance(kind, inspect.StructType):
        if kind.cls.__name__ in CHECKED_BY_THEIR_READER:
            return []
        return [p for field in kind.fields for p in unbounded(field.type, f"{path}.{field.name}")]
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return [] if None not in (kind.ge, kind.le) else [path]
    inner = [getattr(kind, name, None) for name in ("item_type", "value_type")]
    inner += getattr(kind, "types", ())
    if isinstance(kind, inspect.TupleType):  # a fence, which is only compared
        return []
    return [p for part in inner if isinstance(part, inspect.Type) for p in unbounded(part, path)]


def test_every_number_of_a_peer_is_bounded_where_it_is_decoded():
    """So that no sum of them outgrows a row."""
    said = {kind for (role, _), kinds in PERMISSIONS.items() if role in SPEAKERS for kind in kinds}
    answers = {TrajectoryAck, TrajectoryRefused, VersionDurable, VersionRejected, WeightsPlan, Body}
    found = [
        p for kind in said - answers for p in unbounded(inspect.type_info(kind), kind.__name__)
    ]
    assert sorted(found) == ["Refuse.retry_s", "StepReport.metrics"]


@pytest.mark.parametrize("number", [2**64 - 1, 2**53 + 1, -1])
def test_an_impossible_count_is_malformed_and_named(number):
    prefix, header = encode(Heartbeat(sequence=1, sent_s=0.0, tokens_generated=number))
    with pytest.raises(RemoteProtocolError, match=r"Heartbeat: .*tokens_generated"):
        decode([prefix, header], LIMITS[Plane.CONTROL])
