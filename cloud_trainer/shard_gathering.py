"""From the ranks of a sharded trainer to rank 0, and there into one delta file.

What always holds: what travels is byte tensors, never a pickle; a delta is put together only if
every cell of the model is one rank's and one rank's only. Counterpart: ``cloud_trainer.sharding``.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from cloud_trainer.sharding import Kinds, ShardDelta, kinds_bytes
from transport.errors import IntegrityError, ModelError
from transport.weights.cell_sums import add_sums
from transport.weights.delta_encode import CodedSegment, EncodedDelta, assemble_delta
from transport.weights.digest import StateDigest, zero_sums
from transport.weights.layout import Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MESSAGE_BYTES = 1 << 28
"""Of one send between ranks; longer ones go in pieces."""


class _Header(msgspec.Struct, frozen=True):
    kinds: dict[str, tuple[str, tuple[int, ...]]]
    spans: tuple[Span, ...]
    segments: tuple[CodedSegment, ...]  # without their bodies
    sizes: tuple[int, ...]


def pack_delta(delta: ShardDelta) -> bytes:
    """One message: length of the header (8 bytes), header in MessagePack, bodies of segments."""
    bodies = [segment.body for segment in delta.segments]
    header = msgspec.msgpack.encode(
        _Header(
            kinds=dict(delta.kinds),
            spans=delta.spans,
            segments=tuple(msgspec.structs.replace(s, body=b"") for s in delta.segments),
            sizes=tuple(len(body) for body in bodies),
        )
    )
    return b"".join((len(header).to_bytes(8, "little"), header, *bodies))


def unpack_delta(data: memoryview) -> ShardDelta:
    """Raises IntegrityError when ``data`` is not what ``pack_delta`` makes."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = msgspec.msgpack.decode(data[8:end], type=_Header)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"what a rank sent is malformed: {error}") from error
    if end + sum(header.sizes) != len(data) or len(header.sizes) != len(header.segments):
        raise IntegrityError(f"what a rank sent has {len(data)} bytes, which its header does not")
    segments: list[CodedSegment] = []
    for segment, size in zip(header.segments, header.sizes, strict=True):
        segments.append(msgspec.structs.replace(segment, body=bytes(data[end : end + size])))
        end += size
    return ShardDelta(header.kinds, header.spans, tuple(segments))


def gather_bytes(data: bytes, group: "ProcessGroup | None" = None) -> list[memoryview] | None:
    """On rank 0 of ``group`` what every rank gave, in the order of ranks; None on the others. All
    ranks call it; it travels as byte tensors through host memory, so the group's backend must take
    such (gloo)."""
    import torch
    from torch import distributed

    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
    if rank != 0:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for at in range(0, len(data), _MESSAGE_BYTES):
            distributed.send(sent[at : at + _MESSAGE_BYTES], group=group, group_dst=0)
        return None
    gathered = [memoryview(data)]
    for source in range(1, ranks):
        size = int(sizes[source].item())
        received = torch.empty(size, dtype=torch.uint8)
        for at in range(0, size, _MESSAGE_BYTES):
            distributed.recv(received[at : at + _MESSAGE_BYTES], group=group, group_src=source)
        gathered.append(received.numpy().data)
    return gathered


def gather_deltas(
    delta: ShardDelta, group: "ProcessGroup | None" = None
) -> list[ShardDelta] | None:
    """What every rank made, on rank 0; None on the others. All ranks call it."""
    gathered = gather_bytes(pack_delta(delta), group)
    return None if gathered is None else [unpack_delta(data) for data in gathered]


def gather_sums(
    sums: Mapping[str, bytes], kinds: Kinds, group: "ProcessGroup | None" = None
) -> StateDigest | None:
    """The digest of the whole state on rank 0, None on the others. All ranks call it."""
    gathered = gather_bytes(msgspec.msgpack.encode(dict(sums)), group)
    if gathered is None:
        return None
    total = zero_sums(kinds)
    for data in gathered:
        for name, part in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
            total[name] = add_sums(total[name], part)
    return StateDigest.from_sums(total, kinds_bytes(kinds))


def assemble(
    deltas: Sequence[ShardDelta],
    base: StateDigest,
    *,
    run: str,
    policy: str,
    version: int,
    parent: int,
) -> EncodedDelta:
    """The delta file of what all ranks made over the state ``base`` of version ``parent``, for
    ``publish_delta`` (which refuses weights that are not finite).

    Raises:
        ModelError: as ``check_coverage``.
    """
    check_coverage(deltas)
    return assemble_delta(
        (segment for shard in deltas for segment in shard.segments),
        base=base,
        run=run,
        policy=policy,
        version=version,
        parent=parent,
    )


def check_coverage(deltas: Sequence[ShardDelta]) -> None:
    """Whether every cell of every tensor is one rank's and one rank's only.

    Raises:
        ModelError: ranks disagree about the model, or a cell is nobody's or twice somebody's.
    """
    kinds = deltas[0].kinds
    if any(delta.kinds != kinds for delta in deltas):
        raise ModelError("the ranks have different tensors, types or shapes")
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for delta in deltas:
        for span in delta.spans:
            found[span.tensor].append((span.start, span.cells))
    for name, (_, shape) in kinds.items():
        at = 0
        for start, cells in sorted(found[name]):
            if start != at:
                whose = "nobody's" if start > at else "of several ranks"
                raise ModelError(f"tensor {name!r}: cells from {min(at, start)} on are {whose}")
            at += cells
        if at != math.prod(shape):
            raise ModelError(f"tensor {name!r}: cells from {at} on are nobody's")
