"""What a new version costs to send: bytes against the bound and published formats, speed, memory.

    python -m bench.delta --json [--quick]

Weights are simulated as ``bench.weight_simulation`` says, unless a row names a trained model; a
row begins with the size of its model. The bound is ``bench.entropy``'s for old exponents, the
published formats are ``bench.references``. ``--quick`` takes smaller models (16 M cells instead of
100 M, and so on) and leaves out the model of 1 G cells, whose rows it repeats from
``bench/results/delta.json``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.coded import Model, body_bytes, published
from bench.delta_memory import memory_rows, stream_rows
from bench.delta_speed import digest_rows, one_core_rows, two_core_rows
from bench.entropy import Bound
from bench.real_versions import MIDDLE_LR, TOY_LR, middle_versions, toy_versions
from bench.references import REFERENCES
from bench.report import Row, main
from bench.weight_simulation import simulate, tensor_bytes
from transport.weights.digest import StateDigest
from transport.weights.segments import CodecSettings

BYTE_RATES = (1e-6, 3e-6, 5e-6)
SPEED_RATES = {3e-7: "0.3 %", 1e-6: "1 %", 3e-6: "3 %", 6e-6: "5 %"}
"""Learning rates at which about that share of the cells changes in a step."""
LAST = 40  # the step whose delta is measured
TO_BOUND_MAX = {"small": 1.15, "fast": 1.30, "portable": 1.45}
SMALLER_MIN = {"int32 + bf16": 6.0, "dense XOR, zstd-1": 2.5}
JOINER_MAX = 0.12
CUMULATIVE_EVERY = 16
JOINER_AT = 100
STREAM = "1 G cells"


@dataclass(frozen=True)
class Sizes:
    """How large the models are."""

    cells: int
    segment_cells: int  # for two cores: at least four segments
    joiner_cells: int
    memory_cells: int
    middle: tuple[int, int]  # hidden size and layers
    steps: int  # of trained models


FULL = Sizes(100_000_000, 1 << 24, 1 << 24, 1 << 27, (512, 8), 12)
QUICK = Sizes(1 << 24, 1 << 22, 1 << 22, 1 << 25, (256, 6), 4)


def labelled(cells: int) -> str:
    """A number of cells for people."""
    return f"{cells / 1e6:.3g} M cells"


def byte_rows(label: str, old: Model, new: Model, *, judged: bool, note: str = "") -> Iterator[Row]:
    """Bytes for each changed cell, of our coders and of published formats; ``note`` comes once."""
    bound = Bound()
    for name, tensor in old.items():
        bound.add(tensor.dtype, tensor.cells(), new[name].cells())
    changed = bound.changed
    least = bound.exponent_bytes()
    yield Row(metric=f"{label}: changed{note}", value=100 * changed / bound.cells, unit="%")
    yield Row(
        metric=f"{label}: exponent bound",
        value=least / changed,
        unit="B/changed",
        reference="order-0 bound",
        ratio=least / bound.order_zero_bytes(),
    )
    small = 0
    for coder in ("small", "fast", "portable", "auto"):
        size, chosen = body_bytes(old, new, CodecSettings(coder=coder))
        small = size if coder == "small" else small
        limit = TO_BOUND_MAX.get(coder) if judged else None
        yield Row(
            metric=f"{label}: {coder}" + (f" ({chosen})" if coder == "auto" else ""),
            value=size / changed,
            unit="B/changed",
            reference="exponent bound",
            ratio=size / least,
            target="" if limit is None else f"<= {limit}",
            ok=limit is None or size / least <= limit,
        )
    for reference in REFERENCES:
        size = 0
        for name, tensor in old.items():
            cells, after = tensor.cells(), new[name].cells()
            body = reference.encode(cells, after)
            assert np.array_equal(reference.decode(cells, body), after), reference.name
            size += len(body)
        wanted = SMALLER_MIN.get(reference.name) if judged else None
        yield Row(
            metric=f"{label}: {reference.name} ({reference.used_by})",
            value=size / changed,
            unit="B/changed",
            reference="small",
            ratio=size / small,
            target="" if wanted is None else f">= {wanted:g}",
            ok=wanted is None or size / small >= wanted,
        )


def file_rows(label: str, old: Model, new: Model) -> Iterator[Row]:
    """What a file adds to its bodies, and what a full copy shrinks to."""
    made = published(old, new, StateDigest.of(old), CodecSettings(coder="small")).delta
    bodies = sum(made.coded_bytes.values())
    yield Row(
        metric=f"{label}: delta file with header, digests and checksums",
        value=len(made.data),
        unit="B",
        reference="its bodies",
        ratio=len(made.data) / bodies,
    )
    # Against zeros, as for somebody who has nothing.
    nothing = {name: tensor_bytes(np.zeros(t.cells().size, np.uint16)) for name, t in new.items()}
    size, chosen = body_bytes(nothing, new, CodecSettings(coder="absolute"))
    full = sum(tensor.size_bytes for tensor in new.values())
    yield Row(
        metric=f"{label}: full copy, compressed ({chosen})",
        value=100 * size / full,
        unit="% of full",
    )


def catch_up_rows(cells: int) -> Iterator[Row]:
    """What somebody who holds only version 0 needs at versions 40 and 100 of a run at 1e-6."""
    newest = JOINER_AT // CUMULATIVE_EVERY * CUMULATIVE_EVERY
    steps = [0, LAST, *range(newest, JOINER_AT + 1)]
    versions = simulate(cells, [1e-6], steps, seed=2)[1e-6]
    full = sum(tensor.size_bytes for tensor in versions[0].values())
    settings = CodecSettings(coder="small")
    label = f"{labelled(cells)}, lr 1e-06"

    def row(what: str, size: int, limit: float | None = None) -> Row:
        return Row(
            metric=f"{label}: {what}",
            value=100 * size / full,
            unit="% of full",
            target="" if limit is None else f"<= {100 * limit:g}",
            ok=limit is None or size <= limit * full,
        )

    cumulative = {
        step: body_bytes(versions[0], versions[step], settings)[0]
        for step in (LAST, newest, JOINER_AT)
    }
    chain = sum(
        body_bytes(versions[before], versions[after], settings)[0]
        for before, after in pairwise(range(newest, JOINER_AT + 1))
    )
    yield row(f"cumulative delta 0 to {LAST}", cumulative[LAST])
    yield row(f"cumulative delta 0 to {JOINER_AT}", cumulative[JOINER_AT])
    yield row(f"chain {newest} to {JOINER_AT}", chain)
    joiner = f"joiner at version {JOINER_AT}: cumulative to {newest} and the chain from there"
    yield row(joiner, cumulative[newest] + chain, JOINER_MAX)


def real_rows(sizes: Sizes) -> Iterator[Row]:
    """Trained models: the last of some consecutive versions."""
    hidden, layers = sizes.middle
    made: list[tuple[str, str, Callable[[], Iterator[Model]]]] = [
        (
            f"arithmetic-1m, lr {TOY_LR:g}",
            " (a toy at a toy's rate: a third or more moves in every step)",
            lambda: toy_versions(sizes.steps),
        ),
        (
            f"random transformer, lr {MIDDLE_LR:g}",
            "",
            lambda: middle_versions(sizes.steps, hidden=hidden, layers=layers),
        ),
    ]
    for name, note, versions in made:
        *_, old, new = versions()
        cells = sum(tensor.cells().size for tensor in old.values())
        yield from byte_rows(f"{labelled(cells)}, {name}", old, new, judged=False, note=note)


def committed_rows() -> list[Row]:
    """The rows of the largest model from the last full run."""
    path = Path(__file__).parent / "results" / "delta.json"
    if not path.exists():
        return []
    rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    return [
        replace(row, metric=f"{row.metric} (from bench/results)")
        for row in rows
        if row.metric.startswith(STREAM)
    ]


def measure(quick: bool) -> list[Row]:
    sizes = QUICK if quick else FULL
    label = labelled(sizes.cells)
    rates = sorted({*BYTE_RATES, *SPEED_RATES})
    versions = simulate(sizes.cells, rates, [LAST - 1, LAST])
    pairs = {rate: (versions[rate][LAST - 1], versions[rate][LAST]) for rate in rates}
    rows: list[Row] = []
    for rate in BYTE_RATES:
        rows.extend(byte_rows(f"{label}, lr {rate:g}", *pairs[rate], judged=True))
    rows.extend(file_rows(f"{label}, lr 1e-06", *pairs[1e-6]))
    speeds = {f"{label}, {share} changed": pairs[rate] for rate, share in SPEED_RATES.items()}
    rows.extend(one_core_rows(speeds, f"{label}, 1 % changed"))
    rows.extend(two_core_rows(*pairs[1e-6], sizes.segment_cells, f"{label}, 1 % changed"))
    rows.extend(digest_rows(*pairs[1e-6], f"{label}, 1 % changed"))
    del versions, pairs, speeds
    rows.extend(catch_up_rows(sizes.joiner_cells))
    rows.extend(real_rows(sizes))
    rows.extend(memory_rows(sizes.memory_cells, labelled(sizes.memory_cells)))
    rows.extend(committed_rows() if quick else stream_rows(1 << 30, STREAM))
    return rows


if __name__ == "__main__":
    main("delta", measure)
