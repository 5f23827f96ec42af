"""Speed rows of the delta bench: the codec against numpy on the same arrays in the same minute.

What always holds: one core means one core (the thread is pinned), diff and apply are included,
kinds of work take turns so that a disturbance meets them all, and medians count. Pairs of runs
with one and two threads take the best of several, as nothing else shows what two cores can do on a
machine that others use too.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.coded import (
    Arrays,
    Model,
    arena_of,
    arrays_of,
    copied,
    decoded_into,
    encoded,
    plans_of,
    published,
    undone,
)
from bench.report import Row
from transport.weights.cell_sums import COMPILED_CELLS
from transport.weights.delta_file import decode_delta
from transport.weights.digest import StateDigest, change_sum, tensor_key
from transport.weights.patch import Patch, values_before
from transport.weights.segments import CodecSettings
from transport.weights.state import WeightArena

REPETITIONS = 5
TWO_CORES_MIN = 1.7
"""Of what the machine gives, the row of memcpy with two threads is a measure."""
TARGETS = {"fast": (0.35, 0.18), "small": (0.15, 0.08)}
"""By coder: the least speed of encoding (to numpy's diff) and of decoding (to memcpy)."""


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the calling thread, and those it starts, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _diff(old: Arrays, new: Arrays) -> None:
    for name, cells in old.items():
        np.nonzero(cells != new[name])


def _copy(target: Arrays, source: Arrays) -> None:
    for name, cells in target.items():
        np.copyto(cells, source[name])


def one_core_rows(versions: Mapping[str, tuple[Model, Model]], judged: str) -> list[Row]:
    """Rows for pairs of old and new weights by their label; ``judged`` has the targets."""
    rows = []
    for label, (old, new) in versions.items():
        with one_core():
            seconds = _one_core_seconds(arrays_of(old), arrays_of(new), old)
        megabytes = sum(tensor.size_bytes for tensor in old.values()) / 1e6
        for work, reference in (("diff", "numpy != and nonzero"), ("copy", "memcpy")):
            rows.append(
                Row(metric=f"{label}: {reference}", value=megabytes / seconds[work], unit="MB/s")
            )
        for coder, targets in TARGETS.items():
            for work, reference, least in zip(
                ("encode", "decode"), ("diff", "copy"), targets, strict=True
            ):
                ratio = seconds[reference] / seconds[f"{coder} {work}"]
                rows.append(
                    Row(
                        metric=f"{label}: {coder}, {work}, one core",
                        value=megabytes / seconds[f"{coder} {work}"],
                        unit="MB/s",
                        reference="numpy != and nonzero" if reference == "diff" else "memcpy",
                        ratio=ratio,
                        target=f">= {least}" if label == judged else "",
                        ok=label != judged or ratio >= least,
                    )
                )
    return rows


def _one_core_seconds(old: Arrays, new: Arrays, model: Model) -> dict[str, float]:
    plans = plans_of(model)
    receiver = copied(old)
    taken: dict[str, list[float]] = {}
    for repetition in range(REPETITIONS + 1):
        seconds = {
            "diff": timed(lambda: _diff(old, new)),
            "copy": timed(lambda: _copy(receiver, old)),
        }
        for coder in ("fast", "small"):
            settings = CodecSettings(coder=coder)
            begin = time.perf_counter()
            segments = encoded(plans, old, new, settings)
            between = time.perf_counter()
            undo = decoded_into(plans, segments, receiver)
            seconds[f"{coder} decode"] = time.perf_counter() - between
            seconds[f"{coder} encode"] = between - begin
            undone(undo)
        if repetition:  # the first one compiles and touches memory
            for work, value in seconds.items():
                taken.setdefault(work, []).append(value)
    return {work: statistics.median(values) for work, values in taken.items()}


def _copy_with(threads: int, halves: Sequence[tuple[Arrays, Arrays]]) -> None:
    if threads == 1:
        for target, source in halves:
            _copy(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_copy, target, source) for target, source in halves]:
            done.result()


def memcpy_row(old: Model, size: str) -> Row:
    """What a second core adds where the memory is all there is to do."""
    arrays = arrays_of(old)
    receiver = copied(arrays)
    halves = []
    for part in (0, 1):
        cut = {
            name: slice(part * cells.size // 2, (part + 1) * cells.size // 2)
            for name, cells in arrays.items()
        }
        halves.append(
            (
                {name: receiver[name][cut[name]] for name in arrays},
                {name: arrays[name][cut[name]] for name in arrays},
            )
        )
    best = {
        threads: min(timed(partial(_copy_with, threads, halves)) for _ in range(REPETITIONS))
        for threads in (1, 2)
    }
    return Row(
        metric=f"{size}: memcpy, two cores",
        value=sum(tensor.size_bytes for tensor in old.values()) / 1e6 / best[2],
        unit="MB/s",
        reference="one core",
        ratio=best[1] / best[2],
    )


def two_core_rows(old: Model, new: Model, segment_cells: int, size: str) -> list[Row]:
    """Whole files (digests included) with two threads against one."""
    base = StateDigest.of(old)
    arena = arena_of(old, base)
    rows = [memcpy_row(old, size)]
    for coder in ("fast", "small"):
        settings = CodecSettings(coder=coder)
        best: dict[tuple[str, int], float] = {}
        for _ in range(REPETITIONS):
            for threads in (1, 2):
                begin = time.perf_counter()
                made = published(
                    old, new, base, settings, threads=threads, segment_cells=segment_cells
                )
                between = time.perf_counter()
                decode_delta(arena, made.delta.data, made.manifest, made.entry, threads=threads)
                for work, value in (
                    ("encode", between - begin),
                    ("decode", time.perf_counter() - between),
                ):
                    best[work, threads] = min(value, best.get((work, threads), value))
        megabytes = sum(tensor.size_bytes for tensor in old.values()) / 1e6
        for work in ("encode", "decode"):
            ratio = best[work, 1] / best[work, 2]
            rows.append(
                Row(
                    metric=f"{size}: {coder}, {work} of the whole file, two cores",
                    value=megabytes / best[work, 2],
                    unit="MB/s",
                    reference="one core",
                    ratio=ratio,
                    target=f">= {TWO_CORES_MIN}",
                    ok=ratio >= TWO_CORES_MIN,
                )
            )
    return rows


def moved_digest(arena: WeightArena, patch: Patch) -> StateDigest:
    """The digest after a patch, from the changed cells alone."""
    cells = sum(tensor.cells().size for tensor in arena.tensors.values())
    moves = []
    for name, changes in patch.items():
        old = arena.tensors[name].cells()
        key = tensor_key(name, arena.digests.kinds[name])
        for change in changes:
            before = values_before(old, change)
            moves.append((name, change_sum(key, change, before, compiled=cells >= COMPILED_CELLS)))
    return arena.digests.moved(moves)


def digest_rows(old: Model, new: Model, size: str) -> list[Row]:
    """What the state digest costs: all cells, and only those that changed."""
    base = StateDigest.of(old)
    made = published(old, new, base, CodecSettings(coder="fast"))
    arena = arena_of(old, base)
    patch = decode_delta(arena, made.delta.data, made.manifest, made.entry).patch
    cells = sum(tensor.cells().size for tensor in old.values())
    with one_core():
        scan = min(timed(arena.rescan) for _ in range(REPETITIONS))
        update = min(timed(lambda: moved_digest(arena, patch)) for _ in range(REPETITIONS))
    assert moved_digest(arena, patch).hex == made.manifest.digest
    return [
        Row(metric=f"{size}: digest of the whole state", value=1e9 * scan / cells, unit="ns/cell"),
        Row(
            metric=f"{size}: digest of the changes",
            value=1e9 * update / made.delta.changed_cells,
            unit="ns/changed cell",
            reference="digest of the whole state",
            ratio=update / scan,
        ),
    ]
