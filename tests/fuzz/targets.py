"""What the coverage-guided fuzzer calls: bytes of a peer to the parsers that meet them first.

What always holds: a target returns on any bytes, or the parser has let something through that its
callers do not expect. What was accepted must be consistent: it can be written again, and what comes
of that reads the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import golden
import msgspec
import numpy as np
from deltas import decoded, model, published, stepped, with_file

from transport.compression import compress, decompress
from transport.envelope import LIMITS, decode, encode
from transport.errors import FarflowError, IntegrityError, ProtocolError
from transport.messages import PROTOCOL_VERSION, Plane, TrajectoryPut
from transport.summaries import summary_fault
from transport.trajectory import (
    SequenceRecord,
    TrajectoryGroup,
    pack,
    run_length,
    unpack,
)
from transport.weights.manifest import DELTA_NAME, decode_manifest
from transport.weights.patch import check_change
from transport.weights.segments import CODERS, decode_segment
from transport.weights.tensors import TensorBytes, read_header, write_safetensors

Target = Callable[[bytes], None]

MAX_BODY_BYTES: Final = 2**16
MAGIC: Final = b"fftg\x01"
TYPES: Final = {"BF16": "<u2", "F32": "<u4", "F8_E4M3": "<u1", "I64": "<u8"}


def envelope(data: bytes) -> None:
    """Kind byte, then the header of a message."""
    if not data:
        return
    frames = [bytes((PROTOCOL_VERSION, data[0])), data[1:]]
    try:
        message, _ = decode(frames, LIMITS[Plane.WEIGHTS])
    except ProtocolError:
        return
    again, _ = decode(encode(message), LIMITS[Plane.WEIGHTS])
    # Not-a-number equals nothing, itself included: what is written again must be the same bytes.
    assert encode(again) == encode(message)
    if isinstance(message, TrajectoryPut):
        summary_fault(message.summary)


def trajectory(data: bytes) -> None:
    """A whole body, or (first byte odd) what is inside of its compression."""
    if not data:
        return
    body = data[1:]
    if data[0] & 1:
        body = MAGIC + len(body).to_bytes(4, "little") + compress("zstd", body)
    try:
        group = unpack(body, max_bytes=MAX_BODY_BYTES)
    except (ProtocolError, IntegrityError):
        return
    assert pack(unpack(pack(group))) == pack(group)


def segment(data: bytes) -> None:
    """Coder, type, number of changed cells, then the body of a delta's segment."""
    if len(data) < 3:
        return
    coder = CODERS[data[0] % len(CODERS)]
    dtype = sorted(TYPES)[data[1] % len(TYPES)]
    olds = [np.arange(size).astype(TYPES[dtype]) for size in (40, 0, 7)]
    try:
        changes = decode_segment(
            coder, dtype, memoryview(data[3:]), olds, data[2] - 1, compiled=False
        )
    except IntegrityError:
        return
    for old, change in zip(olds, changes, strict=False):
        if change is not None:
            check_change(old, change)


@cache
def _publication():
    old = model(size=30)
    return old, published(old, stepped(old))


def delta(data: bytes) -> None:
    """A delta file whose publisher signed exactly these bytes."""
    old, publication = _publication()
    try:
        decoded(old, None, data, with_file(publication.manifest, data))
    except FarflowError:
        return


def manifest(data: bytes) -> None:
    """What a trusted key may have signed."""
    try:
        decode_manifest(data)
    except (ProtocolError, IntegrityError):
        return


def safetensors(data: bytes) -> None:
    """Header of a file of weights."""
    try:
        regions, metadata = read_header(data)
    except IntegrityError:
        return
    tensors = {
        name: TensorBytes(region.dtype, region.shape, bytes(data[region.start : region.end]))
        for name, region in regions.items()
    }
    again, kept = read_header(write_safetensors(tensors, metadata))
    assert again.keys() == regions.keys()
    assert kept == metadata


def _group() -> TrajectoryGroup:
    record = SequenceRecord(
        prompt=0,
        tokens=(5, 6, 7),
        logprobs=np.array([-0.5, -1.0, -2.0], dtype=np.float32),
        segments=run_length((0, 0, -1), (3, 4, 0)),
        reward=1.0,
        finish_reason="stop",
    )
    return TrajectoryGroup(
        job="r/t-1",
        attempt="r/t-1#1",
        policies=("r/p",),
        prompts=((1, 2),),
        sequences=(record,) * 2,
    )


def _envelope_seeds() -> list[bytes]:
    frames = [encode(message, payload) for message, payload in golden.SAMPLES]
    return [one[0][1:] + one[1] for one in frames]


def _trajectory_seeds() -> list[bytes]:
    packed = pack(_group())
    inside = decompress("zstd", packed[len(MAGIC) + 4 :], max_bytes=MAX_BODY_BYTES)
    return [b"\0" + packed, b"\1" + inside]


def _delta_seeds() -> list[bytes]:
    return [bytes(_publication()[1].files[DELTA_NAME])]


def _segment_seeds() -> list[bytes]:
    return [
        bytes((coder, dtype, 4)) + bytes(12) for coder in range(len(CODERS)) for dtype in range(4)
    ]


def _manifest_seeds() -> list[bytes]:
    return [msgspec.msgpack.encode(_publication()[1].manifest)]


def _safetensors_seeds() -> list[bytes]:
    return [bytes(write_safetensors(model(size=6), {"a": "b"}))]


TARGETS: Final[dict[str, tuple[Target, Callable[[], list[bytes]]]]] = {
    "envelope": (envelope, _envelope_seeds),
    "trajectory": (trajectory, _trajectory_seeds),
    "segment": (segment, _segment_seeds),
    "delta": (delta, _delta_seeds),
    "manifest": (manifest, _manifest_seeds),
    "safetensors": (safetensors, _safetensors_seeds),
}
"""Name -> what to call, and inputs to begin with."""
