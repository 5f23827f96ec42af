"""Catch-up: the bytes of the plans that the real weight store's versions offer, rows of
``bench.fanout``.

A policy of simulated weights (learning rate 1e-6) is published version by version into a real
``WeightVersions`` on disk; after each version (``--quick``: each tenth) upkeep makes composites
and cumulatives as in the store's process, for a fleet in which some agents always lag by 4, 16 and
64 versions.

What always holds: the best offered single plan is found without the store's own search: deltas
alone; one composite (or cumulative) wherever it ends, and deltas on; a snapshot and deltas on.
"""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from bench.fanout_cloud import RUN, next_version
from bench.report import Row, main
from bench.weight_simulation import simulate
from scheduler.weight_composites import perform
from scheduler.weight_reading import PolicyShelf, StoreReader
from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.keys import SigningKey
from transport.messages import WeightsPlan
from transport.weights.folder import write_model_folder
from transport.weights.manifest import decode_manifest, sign
from transport.weights.plan import Leg
from transport.weights.publication import build_version0

POLICY = f"{RUN}/catch-up"
RATE = 1e-6
VERSIONS = 100
MISSED = (1, 4, 16, 64)
JOINER_TARGET = 0.12
QUICK_CELLS, FULL_CELLS = 100_000, 4_000_000
QUICK_EVERY = 10
MAX_JOBS = 16
"""Made at one time at most; each turn of the store's upkeep makes one thing."""


def catchup_rows(folder: Path, quick: bool) -> list[Row]:
    """Bytes for agents that missed versions, and for joiners with and without version 0."""
    cells = QUICK_CELLS if quick else FULL_CELLS
    versions = _published(folder, cells, upkeep_every=QUICK_EVERY if quick else 1)
    shelf = StoreReader(folder / "versions").shelf(POLICY)
    legs = {number: list(shelf.legs_to(number)) for number in shelf.versions}
    full = shelf.root.manifest.full_bytes
    size = f"{cells / 1e6:g} M cells"
    rows = []
    for missed in MISSED:
        have = VERSIONS - missed
        rows.append(_missed_row(versions, shelf, legs, have, f"missed {missed}, {size}"))
    rows.append(_missed_row(versions, shelf, legs, 0, f"joiner with version 0, {size}"))
    joiner = _bytes(_plan(versions, shelf, 0))
    rows.append(
        Row(
            metric=f"joiner with version 0 at version {VERSIONS}, lr 1e-6, {size}",
            value=joiner,
            unit="bytes",
            reference="full copy",
            ratio=joiner / full,
            target=f"<= {JOINER_TARGET}",
            ok=joiner <= JOINER_TARGET * full,
        )
    )
    empty = _bytes(_plan(versions, shelf, None))
    best = min(_offers(legs, None), default=empty)
    rows.append(
        Row(
            metric=f"joiner with nothing, {size}",
            value=empty,
            unit="bytes",
            reference="best offered single plan",
            ratio=empty / best,
            target="<= 1.0",
            ok=empty <= best,
        )
    )
    return rows


def _published(folder: Path, cells: int, *, upkeep_every: int) -> WeightVersions:
    """The store's folder after ``VERSIONS`` versions and upkeep every so many of them."""
    states = simulate(cells, [RATE], range(VERSIONS + 1))[RATE]
    key = SigningKey.generate("catch-up", POLICY)
    write_model_folder(folder / "model", states[0], {"config.json": b"{}"})
    versions = WeightVersions(folder / "versions", trusted={key.key_id: key.public})
    last = build_version0(folder / "model", run=RUN, policy=POLICY, created_wall_s=0.0)
    versions.add_version(sign(last.manifest, key), last.files)
    for number in range(1, VERSIONS + 1):
        last = next_version(states[number - 1], states[number], last, policy=POLICY)
        versions.add_version(sign(last.manifest, key), last.files)
        del states[number - 1]
        if number % upkeep_every == 0:
            _keep_up(versions, number)
    return versions


def _keep_up(versions: WeightVersions, head: int) -> None:
    lags = [missed for missed in MISSED if missed <= head]
    asked = [Asked(head - missed, head) for missed in lags]
    for _ in range(MAX_JOBS):
        versions.maintain(POLICY, acked=[ask.have for ask in asked])
        job = versions.next_job(POLICY, asked, composites=True)
        if job is None:
            return
        versions.adopt(perform(job, threading.Event()))


def _plan(versions: WeightVersions, shelf: PolicyShelf, have: int | None) -> WeightsPlan:
    digest = "" if have is None else shelf.version(have).manifest.digest
    plan = versions.plan(POLICY, have, digest)
    assert plan is not None
    assert plan.version == VERSIONS
    return plan


def _bytes(plan: WeightsPlan) -> int:
    """What a plan moves of weights."""
    total = 0
    for step in plan.steps:
        for entry in decode_manifest(step.manifest).files:
            if entry.name in step.files and entry.kind != "artefact":
                total += entry.size_bytes
    return total


def _offers(legs: dict[int, list[Leg]], have: int | None) -> Iterator[int]:
    """Bytes of every single plan from ``have`` to the head: at most one leg that is no delta,
    first, and then deltas alone."""
    after = 0  # of the deltas from ``number`` to the head
    for number in range(VERSIONS, -1, -1):
        if number == have:
            yield after
            return
        for leg in legs[number]:
            if leg.base is None or (leg.base == have and leg.base != number - 1):
                yield leg.size_bytes + after
        delta = [leg for leg in legs[number] if leg.base == number - 1]
        if not delta:
            return
        after += delta[0].size_bytes


def _missed_row(
    versions: WeightVersions,
    shelf: PolicyShelf,
    legs: dict[int, list[Leg]],
    have: int,
    who: str,
) -> Row:
    picked = _bytes(_plan(versions, shelf, have))
    best = min(_offers(legs, have))
    return Row(
        metric=f"catch-up, {who}",
        value=picked,
        unit="bytes",
        reference="best offered single plan",
        ratio=picked / best,
        target="<= 1.0",
        ok=picked <= best,
    )


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="farflow-catch-up-") as scratch:
        return catchup_rows(Path(scratch), quick)


if __name__ == "__main__":
    main("fanout_catchup", measure)
