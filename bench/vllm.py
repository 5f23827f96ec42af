"""The vLLM engine, with real vLLM: weights swapped in place under load, against a restart and
against vLLM's own ways; throughput under updates; log-probabilities against torch.

    .venv-vllm/bin/python -m bench.vllm --json [--quick]

It needs the environment of ``make test-vllm`` (docs/vllm.md), so ``make bench`` leaves it out. The
model is the example's (1 M cells); in full a simulated Qwen3 of 100 M cells, too. Two versions are
applied in turn, which differ in ``CHANGED`` of their cells. A restart is what loading the folder
into an engine takes that has imported vLLM already, which favours it. ``--quick`` takes as long as
vLLM takes to start, and a minute.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from bench.fanout_model import (
    CHANGED,
    EXAMPLE,
    ModelSize,
    Tensors,
    TwoVersions,
    two_versions,
    write_model,
)
from bench.fanout_swap import patch_between
from bench.report import Row, main
from bench.vllm_agreement import agreement_rows
from bench.vllm_load import Load
from edge_agent.config import VllmTable
from edge_agent.engines import vllm_arguments
from edge_agent.engines.vllm_engine import VllmEngine
from transport.weights.delta_file import decode_delta
from transport.weights.folder import read_artefacts, read_model_folder, write_model_folder
from transport.weights.manifest import DELTA_NAME
from transport.weights.patch import CellList
from transport.weights.publication import Publication, build_delta_version
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes

POLICY: Final = "bench/solver"
LARGE: Final = ModelSize(hidden=1024, layers=8)
TABLE: Final = VllmTable(max_model_len=512, max_sequences=64, kv_cache_gib=0.25, enforce_eager=True)
SEQUENCES: Final = 16
THREADS: Final = 2
PAUSE_TARGET: Final = 0.05
RATE_TARGET: Final = 0.90
EVERY_S: Final = 5.0
SETTLE_S: Final = 0.1


@dataclass(frozen=True)
class Sizes:
    """How much is measured of one model."""

    swaps: int
    natives: int
    pairs: int
    window_s: float


QUICK: Final = Sizes(swaps=20, natives=3, pairs=1, window_s=10.0)
FULL: Final = Sizes(swaps=60, natives=5, pairs=4, window_s=10.0)
SLOW: Final = Sizes(swaps=60, natives=5, pairs=2, window_s=30.0)
"""Of the large model: tokens are counted 16 at a time, so slow sequences need long windows."""


class Bench:
    """One model in one vLLM; ``two`` are its versions, the older one in ``folder``/old."""

    def __init__(self, engine: VllmEngine, folder: Path, name: str, two: TwoVersions) -> None:
        self.engine = engine
        self.folder = folder
        self.name = name
        self.two = two
        self.patches = (patch_between(two), patch_between(two, back=True))
        self.changed = sum(c.values.size for changes in self.patches[0].values() for c in changes)
        self.version = 0

    @property
    def now(self) -> dict[str, TensorBytes]:
        """What the engine should hold."""
        return dict(self.two.new if self.version % 2 else self.two.old)

    async def apply(self) -> tuple[float, float]:
        """The other version; seconds of pause, and of it all."""
        began_s = time.monotonic()
        patch = self.patches[self.version % 2]
        pause_s = await self.engine.apply(POLICY, self.version + 1, patch)
        self.version += 1
        return pause_s, time.monotonic() - began_s

    async def check(self) -> bool:
        """Whether the engine's weights are the version's, bit by bit."""
        held = await asyncio.to_thread(lambda: dict(self.engine.read_weights(POLICY)))
        return held == self.now

    async def beside(self, method: str, **arguments: Any) -> float:
        """Seconds for which vLLM is paused, requests kept, while its workers do something that
        is not ours: how it is used without us."""
        policy = self.engine._hosted[POLICY].policy  # vLLM itself is measured

        async def paused() -> float:
            llm = policy._llm
            began_s = time.monotonic()
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.collective_rpc(method, kwargs=arguments)
            await llm.resume_generation()
            return time.monotonic() - began_s

        return await asyncio.to_thread(policy._call, paused())

    # ---- rows ----------------------------------------------------------------------------------

    async def swap_rows(self, restart_s: float, sizes: Sizes) -> list[Row]:
        """Pauses under load, against a restart and against vLLM's reload of a folder."""
        pauses, wholes, reloads = [], [], []
        async with Load(self.engine, POLICY, SEQUENCES) as load:
            for _ in range(sizes.swaps):
                pause_s, whole_s = await self.apply()
                pauses.append(pause_s)
                wholes.append(whole_s)
                await asyncio.sleep(SETTLE_S)
            for _ in range(sizes.natives):
                self.version += 1
                where = str(self.folder / ("new" if self.version % 2 else "old"))
                reloads.append(await self.beside("reload_weights", weights_path=where))
                await asyncio.sleep(SETTLE_S)
        equal = await self.check()
        reload_s = statistics.median(reloads)
        rows = [Row(metric=f"restart, {self.name}", value=restart_s, unit="s")]
        for share in (50, 99):
            pause_s = float(np.percentile(pauses, share))
            rows.append(
                Row(
                    metric=f"pause p{share} of {sizes.swaps} swaps under load, {self.name}",
                    value=1e3 * pause_s,
                    unit="ms",
                    reference="restart",
                    ratio=pause_s / restart_s,
                    target=f"<= {PAUSE_TARGET:g}",
                    ok=pause_s <= PAUSE_TARGET * restart_s,
                )
            )
        return [
            *rows,
            Row(
                metric=f"whole swap p50 (staged beside the running model), {self.name}",
                value=1e3 * statistics.median(wholes),
                unit="ms",
            ),
            Row(
                metric=f"vLLM's reload of a folder in place, paused, {self.name}",
                value=1e3 * reload_s,
                unit="ms",
                reference="our pause p50",
                ratio=reload_s / statistics.median(pauses),
            ),
            Row(
                metric=f"requests lost of {load.done} meanwhile, {self.name}",
                value=load.lost,
                unit="requests",
                target="0",
                ok=not load.lost,
            ),
            Row(
                metric=f"weights bit-equal to the version after it all, {self.name}",
                value=float(equal),
                unit="yes",
                target="1",
                ok=equal,
            ),
        ]

    async def cell_rows(self, sizes: Sizes) -> list[Row]:
        """Nanoseconds per changed cell without load: ours, and vLLM's patches of a checkpoint."""
        files = [self._native_file(number) for number in (0, 1)]
        shapes = {name: list(self.two.old[name].shape) for name in self.patches[0]}
        ours, staged, native = [], [], []
        for _ in range(sizes.natives):
            pause_s, whole_s = await self.apply()
            ours.append(pause_s)
            staged.append(whole_s)
            path = str(files[self.version % 2])
            native.append(await self.beside("native_patch", path=path, shapes=shapes))
            self.version += 1
        equal = await self.check()

        def per_cell(metric: str, seconds: Iterable[float], **more: Any) -> Row:
            value = 1e9 * statistics.median(seconds) / self.changed
            return Row(metric=f"{metric}, {self.name}", value=value, unit="ns/changed cell", **more)

        ratio = statistics.median(native) / statistics.median(ours)
        return [
            Row(metric=f"changed cells, {self.name}", value=self.changed, unit="cells"),
            per_cell("swap, paused", ours),
            per_cell("swap, with staging", staged),
            per_cell("vLLM's own patches, paused", native, reference="our pause", ratio=ratio),
            Row(
                metric=f"bit-equal after both in turn, {self.name}",
                value=float(equal),
                unit="yes",
                target="1",
                ok=equal,
            ),
        ]

    def _native_file(self, number: int) -> Path:
        """The patch as a file that ``bench.vllm_worker`` reads."""
        import torch
        from safetensors.torch import save_file

        held = {}
        for name, (change,) in self.patches[number].items():
            assert isinstance(change, CellList)
            held[f"{name}#at"] = torch.from_numpy(change.positions.astype(np.int32))
            bits = torch.from_numpy(change.values.view(np.int16).copy())
            held[f"{name}#to"] = bits.view(torch.bfloat16)
        path = self.folder / f"patch-{number}.safetensors"
        save_file(held, path)
        return path

    async def rate_rows(self, sizes: Sizes) -> list[Row]:
        """Tokens per second with a version every ``EVERY_S``, decoded as an agent does it, and
        without, in turn."""
        published = [_published(self.two, back) for back in (False, True)]
        rates: list[tuple[float, float]] = []
        async with Load(self.engine, POLICY, SEQUENCES) as load:
            for pair in range(sizes.pairs):
                measured = {}
                for updated in (pair % 2 == 0, pair % 2 != 0):
                    updates = asyncio.create_task(self._update(published)) if updated else None
                    measured[updated] = await load.rate(sizes.window_s)
                    if updates is not None:
                        updates.cancel()
                        await asyncio.gather(updates, return_exceptions=True)
                rates.append((measured[True], measured[False]))
        share = statistics.median(one / other for one, other in rates)
        return [
            Row(
                metric=f"tokens/s without updates, {self.name}",
                value=statistics.median(other for _, other in rates),
                unit="tokens/s",
            ),
            Row(
                metric=f"{EVERY_S:g} s between versions, pairs: {sizes.pairs}, {self.name}",
                value=statistics.median(one for one, _ in rates),
                unit="tokens/s",
                reference="without updates",
                ratio=share,
                target=f">= {RATE_TARGET:g}",
                ok=share >= RATE_TARGET,
            ),
        ]

    async def _update(self, published: list[tuple[WeightArena, Publication]]) -> None:
        while True:
            arena, publication = published[self.version % 2]
            manifest = publication.manifest
            data = publication.files[DELTA_NAME]
            assert manifest.delta is not None
            await asyncio.to_thread(decode_delta, arena, data, manifest, manifest.delta)
            await asyncio.shield(self.apply())
            await asyncio.sleep(EVERY_S)


def _published(two: TwoVersions, back: bool) -> tuple[WeightArena, Publication]:
    """A version as a trainer publishes it, and what an agent holds before it."""
    old, new = (two.new, two.old) if back else (two.old, two.new)

    def step(before: Tensors, after: Tensors, version: int) -> Publication:
        return build_delta_version(
            before,
            after,
            run="bench",
            policy=POLICY,
            version=version,
            parent=version - 1,
            step=version,
            created_wall_s=0.0,
        )

    first, second = step(new, old, 1), step(old, new, 2)
    return WeightArena.of(old, first.manifest), second


def _example_versions() -> TwoVersions:
    """The example's weights, and ``CHANGED`` of them one unit in the last place away."""
    rng = np.random.default_rng(0)
    old, new = read_model_folder(EXAMPLE), {}
    for name, tensor in old.items():
        cells = tensor.cells().copy()
        cells[rng.random(cells.size) < CHANGED] ^= 1
        new[name] = TensorBytes(tensor.dtype, tensor.shape, cells.tobytes())
    return TwoVersions(old, new)


async def _rows(quick: bool) -> list[Row]:
    engine = VllmEngine(0, TABLE, threads=THREADS)
    await engine.start()
    rows: list[Row] = []
    try:
        models = ((None, QUICK),) if quick else ((None, FULL), (LARGE, SLOW))
        for size, sizes in models:
            with tempfile.TemporaryDirectory() as scratch:
                rows += await _of_model(engine, Path(scratch), size, sizes)
            await engine.unload_policy(POLICY)
    finally:
        await engine.close()
    return rows


async def _of_model(
    engine: VllmEngine, folder: Path, size: ModelSize | None, sizes: Sizes
) -> list[Row]:
    if size is None:
        two = _example_versions()
        for name, tensors in (("old", two.old), ("new", two.new)):
            write_model_folder(folder / name, tensors, read_artefacts(EXAMPLE))
    else:
        two = two_versions(size)
        write_model(folder / "old", size, two.old)
        write_model(folder / "new", size, two.new)
    began_s = time.monotonic()
    await engine.load_policy(POLICY, folder / "old", 0)
    restart_s = time.monotonic() - began_s
    bench = Bench(engine, folder, f"{two.cells / 1e6:.0f} M cells", two)
    rows = await bench.swap_rows(restart_s, sizes)
    rows += await bench.cell_rows(sizes)
    rows += await bench.rate_rows(sizes)
    if size is None:  # the other one has nothing to say that a model learnt
        place = folder / "held"
        write_model_folder(place, bench.now, read_artefacts(folder / "old"))
        rows += await agreement_rows(engine, POLICY, place, bench.name)
    return rows


def measure(quick: bool) -> list[Row]:
    # What we print is for programs.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    vllm_arguments.environment(THREADS)
    import vllm.v1.engine.async_llm  # noqa: F401 - a restart does not import it again

    extension = "bench.vllm_worker.NativeExtension"
    vllm_arguments._EXTENSION = extension  # type: ignore[misc]
    return asyncio.run(_rows(quick))


if __name__ == "__main__":
    main("vllm", measure)
