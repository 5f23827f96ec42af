"""The process that makes one run's items: foreign generators and large files stay out of the
scheduler, and a crash in them costs nothing but a restart.

Standard input and output carry frames: a little-endian u32 size and as many bytes of MessagePack.
The first frame in is the ``RunSpec``; then ``SourceRequest`` in, ``SourceItems`` or
``SourceFailed`` out, in order. The end of the input ends the process. Whatever a generator prints
goes to standard error, where the parent keeps it as evidence.
"""

import os
import struct
import sys
from typing import BinaryIO, Final, Literal

import msgspec

from transport.errors import TaskError
from transport.messages import Item
from transport.runs import RunSpec

FRAME_BYTES: Final = 64 * 2**20
MAX_COUNT: Final = 1024
JOB_BYTES: Final = 216 * 1024
"""Items of one job travel in one control frame of 256 KiB, beside the workflow's settings (at most
``MAX_SETTINGS_BYTES``) and the ids of its policies."""

SIZE: Final = struct.Struct("<I")


class SourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make items; at most ``MAX_COUNT`` of them."""

    kind: Literal["train", "eval"]
    start: int
    count: int


class SourceItems(msgspec.Struct, frozen=True, kw_only=True, tag="items"):
    """``end`` is where the evaluation space ends, None while no end was seen: fewer evaluation
    items than asked for, or none, then mean that finding more takes another request."""

    kind: Literal["train", "eval"]
    start: int
    items: tuple[Item, ...]
    end: int | None = None


class SourceFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The source cannot go on: what is wrong with the task, for people."""

    code: str
    message: str


SourceAnswer = SourceItems | SourceFailed


def frame(value: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(value)
    return SIZE.pack(len(data)) + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, None at the end of the input, also within a frame."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    if size > FRAME_BYTES:
        return None
    data = stream.read(size)
    return data if len(data) == size else None


def check_job_sizes(items: tuple[Item, ...], per_job: int) -> None:
    """Raises TaskError when the items of an evaluation job do not fit one control frame."""
    for first in range(0, len(items), per_job):
        job = items[first : first + per_job]
        size_bytes = len(msgspec.msgpack.encode(job))
        if size_bytes > JOB_BYTES:
            fitting = max(1, JOB_BYTES * len(job) // (2 * size_bytes))
            raise TaskError(
                f"evaluation items {job[0].index} to {job[-1].index} take {size_bytes} bytes, a job"
                f" has room for {JOB_BYTES}; lower evaluation.items_per_job to {fitting}"
            )


def serve(run: RunSpec, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until they end or the source fails."""
    # Only here: the parent imports this module for its Structs and never needs the sources.
    from scheduler.tasks import open_source

    per_job = run.evaluation.items_per_job if run.evaluation is not None else 1
    decoder = msgspec.msgpack.Decoder(SourceRequest)
    try:
        source = open_source(run.task, run.seed)
        while (data := read_frame(requests)) is not None:
            request = decoder.decode(data)
            items = tuple(source.items(request.kind, request.start, min(request.count, MAX_COUNT)))
            end = None
            if request.kind == "eval":
                check_job_sizes(items, per_job)
                end = source.held_out_end()
            answer = SourceItems(kind=request.kind, start=request.start, items=items, end=end)
            answers.write(frame(answer))
            answers.flush()
    except TaskError as error:
        answers.write(frame(SourceFailed(code=error.code, message=str(error))))
        answers.flush()


def main() -> None:
    # Prints of a generator must not get between our frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    data = read_frame(requests)
    if data is not None:
        serve(msgspec.msgpack.decode(data, type=RunSpec), requests, answers)


if __name__ == "__main__":
    main()
