"""The process that makes one run's items: foreign generators and large files stay out of the
scheduler, and a crash in them costs nothing but a restart.

Standard input and output carry frames: a little-endian u32 size and as many bytes of MessagePack.
The first frame in is the ``RunSpec``; then ``SourceRequest`` in, ``SourceItems`` or
``SourceFailed`` out, in order. The end of the input ends the process. Whatever a generator prints
goes to standard error, where the parent keeps it as evidence. The arguments are the modules of
users' own task sources that may be imported (``scheduler.task_modules``).
"""

import os
import struct
import sys
from collections.abc import Collection
from typing import BinaryIO, Final, Literal

import msgspec

from transport.errors import TaskError
from transport.messages import Item
from transport.runs import HELD_OUT, RunSpec

FRAME_BYTES: Final = 64 * 2**20
MAX_COUNT: Final = 1024

SIZE: Final = struct.Struct("<I")


class SourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make items; at most ``MAX_COUNT`` of them. Those of kind ``eval`` are for ``evaluation``."""

    kind: Literal["train", "eval"]
    start: int
    count: int
    evaluation: str = HELD_OUT


class SourceItems(msgspec.Struct, frozen=True, kw_only=True, tag="items"):
    """``end`` is where the evaluation space ends, None while no end was seen: fewer evaluation
    items than asked for, or none, then mean that finding more takes another request."""

    kind: Literal["train", "eval"]
    start: int
    items: tuple[Item, ...]
    end: int | None = None
    evaluation: str = HELD_OUT


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


def serve(
    run: RunSpec, requests: BinaryIO, answers: BinaryIO, modules: Collection[str] = ()
) -> None:
    """Answer requests until they end or a source fails."""
    # Only here: the parent imports this module for its Structs and never needs the sources.
    from scheduler.tasks import evaluation_source, open_source

    decoder = msgspec.msgpack.Decoder(SourceRequest)
    try:
        source = open_source(run.task, run.seed, modules)
        own = {
            name: evaluation_source(name, spec, run.seed, modules) or source
            for name, spec in run.all_evaluations().items()
        }
        while (data := read_frame(requests)) is not None:
            request = decoder.decode(data)
            asked = source if request.kind == "train" else own.get(request.evaluation, source)
            items = tuple(asked.items(request.kind, request.start, min(request.count, MAX_COUNT)))
            answer = SourceItems(
                kind=request.kind,
                start=request.start,
                items=items,
                end=asked.held_out_end() if request.kind == "eval" else None,
                evaluation=request.evaluation,
            )
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
        serve(msgspec.msgpack.decode(data, type=RunSpec), requests, answers, sys.argv[1:])


if __name__ == "__main__":
    main()
