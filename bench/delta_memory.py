r"""Memory rows of the delta bench, each measured in a process of its own.

    python -m bench.delta_memory \
        '{"work": "sides", "coders": ["fast"], "share": 0.05, "cells": 67108864}'

*sides*: the most memory that encoding a delta, and decoding and applying it, take beyond the
weights that the side holds anyway (the trainer old and new ones, the agent its copy); the file, the
patch and the undo log count. *stream*: a model whose old and new weights are files, mapped.

What always holds: compilers and libraries are warmed up on a part of the model before, the mark
is the kernel's own (``VmHWM``, reset in between), and the decoded state's digest is the encoder's.
"""

import ctypes
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.coded import Model, Published, arena_of, published
from bench.report import Row
from bench.weight_simulation import one_step
from transport.weights.delta_file import decode_delta
from transport.weights.digest import StateDigest
from transport.weights.segments import CodecSettings
from transport.weights.state import Undo, WeightArena
from transport.weights.tensors import TensorBytes

CODERS = ("fast", "small")
EXTRA_MAX = 0.5
SHARE = 0.05
STREAM_SHARE = 0.01
STREAM_LIMIT_GB = 24.0
WORK_LIMIT_S = 900

_Made = TypeVar("_Made")


def memory_rows(cells: int, size: str) -> list[Row]:
    """Peak extra memory of both sides in units of the model, at 5 % changed."""
    rows = []
    facts = _measured(work="sides", coders=CODERS, share=SHARE, cells=cells)
    for coder in CODERS:
        for side in ("encode", "decode and apply"):
            extra = facts[f"{coder}, {side}"] / facts["model_bytes"]
            rows.append(
                Row(
                    metric=f"{size}, 5 % changed: {coder}, memory to {side}",
                    value=extra,
                    unit="x model",
                    target=f"<= {EXTRA_MAX}",
                    ok=extra <= EXTRA_MAX,
                )
            )
    return rows


def stream_rows(cells: int, size: str) -> list[Row]:
    """A model that is not held in memory, through encode and decode."""
    facts = _measured(work="stream", coder="fast", share=STREAM_SHARE, cells=cells)
    megabytes = facts["model_bytes"] / 1e6
    peak = facts["peak_bytes"] / 1e9
    name = f"{size} as files, 1 % changed: fast, two cores"
    return [
        Row(metric=f"{name}, encode", value=megabytes / facts["encode_s"], unit="MB/s"),
        Row(metric=f"{name}, decode and apply", value=megabytes / facts["decode_s"], unit="MB/s"),
        Row(
            metric=f"{name}, peak memory with mapped files and the agent's copy",
            value=peak,
            unit="GB",
            target=f"<= {STREAM_LIMIT_GB:g}",
            ok=peak <= STREAM_LIMIT_GB,
        ),
    ]


def _measured(**task: Any) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.delta_memory", json.dumps(task)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=WORK_LIMIT_S,
    )
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


# ---- in the process of its own ------------------------------------------------------------


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this bench needs Linux")


def extra_bytes(work: Callable[[], _Made]) -> tuple[int, _Made]:
    """The peak of resident memory during ``work``, less what was resident before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status_bytes("VmRSS")
    made = work()
    return _status_bytes("VmHWM") - before, made


def _part(model: Model) -> Model:
    name = min(model)
    return {name: model[name]}


def _read_only(model: Model) -> Model:
    """What an arena copies instead of taking over."""
    return {
        name: TensorBytes(tensor.dtype, tensor.shape, memoryview(tensor.data).toreadonly())
        for name, tensor in model.items()
    }


def _sides(coders: list[str], share: float, cells: int) -> dict[str, float]:
    old, new = one_step(cells, share)
    base = StateDigest.of(old)
    arena = arena_of(_read_only(old), base)
    facts: dict[str, float] = {"model_bytes": sum(t.size_bytes for t in old.values())}
    for coder in coders:
        settings = _warm(coder, old, new)
        facts[f"{coder}, encode"], made = extra_bytes(
            functools.partial(published, old, new, base, settings)
        )
        facts[f"{coder}, decode and apply"], undo = extra_bytes(
            functools.partial(_receive, arena, made)
        )
        assert arena.rescan().hex == made.manifest.digest
        arena.undo(undo)
        del made, undo  # the next coder starts from the same memory
    return facts


def _receive(arena: WeightArena, made: Published, threads: int = 1) -> Undo:
    decoded = decode_delta(arena, made.delta.data, made.manifest, made.entry, threads=threads)
    return arena.apply(decoded.patch, 1, decoded.digests)


def _warm(coder: str, old: Model, new: Model) -> CodecSettings:
    """Code a part of the model: what is loaded or compiled once is no part of a delta's cost."""
    settings = msgspec.convert({"coder": coder}, CodecSettings)
    base = StateDigest.of(_part(old))
    made = published(_part(old), _part(new), base, settings)
    _receive(arena_of(_part(_read_only(old)), base), made)
    return settings


def _stream(coder: str, share: float, cells: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        old, new = one_step(cells, share, tensors=16, folder=Path(scratch))
        settings = _warm(coder, old, new)
        base = StateDigest.of(old, threads=2)
        arena = arena_of(_read_only(old), base, threads=2)
        Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        made = published(old, new, base, settings, threads=2)
        between = time.perf_counter()
        _receive(arena, made, threads=2)
        end = time.perf_counter()
        assert arena.rescan(threads=2).hex == made.manifest.digest
        return {
            "model_bytes": sum(t.size_bytes for t in old.values()),
            "encode_s": between - begin,
            "decode_s": end - between,
            "peak_bytes": _status_bytes("VmHWM"),
        }


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    work = task.pop("work")
    print(json.dumps(_sides(**task) if work == "sides" else _stream(**task)))
