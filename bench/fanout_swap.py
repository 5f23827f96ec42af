"""Swap against restart of the torch engine, rows of ``bench.fanout``.

What always holds: the engine generates while weights are swapped; the pause is what the engine
itself reports (no token is computed meanwhile); a restart is loading the new version's folder into
an engine that has torch imported already, which favours it; both on the same model.
"""

import asyncio
import statistics
import time
from pathlib import Path

import numpy as np

from bench.fanout_model import ModelSize, TwoVersions, write_model
from bench.report import Row
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from transport.weights.patch import CellList, Patch

PAUSE_TARGET = 0.05
SEQUENCES = 2
PROMPT = (5, 6, 7, 8)
_POLICY = "bench/swap"
_BEGUN_S = 120.0


def patch_between(two: TwoVersions, *, back: bool = False) -> Patch:
    """What changed as an engine gets it; ``back`` from new to old."""
    old, new = (two.new, two.old) if back else (two.old, two.new)
    patch: dict[str, tuple[CellList, ...]] = {}
    for name, tensor in new.items():
        before, after = old[name].cells(), tensor.cells()
        where = np.flatnonzero(before != after).astype(np.int32)
        if where.size:
            patch[name] = (CellList(where, after[where]),)
    return patch


async def swap_rows(folder: Path, size: ModelSize, two: TwoVersions, quick: bool) -> list[Row]:
    """Pause and restart, and the versions of the tokens around a swap."""
    write_model(folder / "old", size, two.old)
    write_model(folder / "new", size, two.new)
    repeats = 2 if quick else 5
    tokens = 16 if quick else 24
    engine = TorchEngine(SEQUENCES, threads=2)
    await engine.start()
    try:
        restarts = []
        await engine.load_policy(_POLICY, folder / "new", 1)  # imports torch and transformers
        for _ in range(repeats):
            began_s = time.monotonic()
            await engine.load_policy(_POLICY, folder / "new", 1)
            restarts.append(time.monotonic() - began_s)
            await engine.unload_policy(_POLICY)
        await engine.load_policy(_POLICY, folder / "old", 0)
        patches = (patch_between(two), patch_between(two, back=True))
        pauses, applies = [], []
        counts = {"old": 0, "new": 0, "other": 0}
        for number in range(repeats):
            generating = asyncio.create_task(_generate(engine, tokens, number))
            await _begun(engine, generating)
            began_s = time.monotonic()
            pauses.append(await engine.apply(_POLICY, number + 1, patches[number % 2]))
            applies.append(time.monotonic() - began_s)
            _count(counts, await generating, number, tokens)
    finally:
        await engine.close()
    return _rows(f"{two.cells / 1e6:.0f} M cells", restarts, pauses, applies, counts)


async def _generate(engine: TorchEngine, tokens: int, number: int) -> list[Completion]:
    return await engine.generate(
        GenerationRequest(
            request_id=f"swap-{number}",
            policy=_POLICY,
            prompt_tokens=PROMPT,
            n=SEQUENCES,
            sampling=SamplingParams(max_new_tokens=tokens, seed=number),
        )
    )


async def _begun(engine: TorchEngine, generating: "asyncio.Task[list[Completion]]") -> None:
    """Until this request has drawn some tokens (bounded)."""
    before = engine.stats().tokens_generated
    async with asyncio.timeout(_BEGUN_S):
        while (  # noqa: ASYNC110 - a thread of the engine counts
            engine.stats().tokens_generated < before + 3 * SEQUENCES and not generating.done()
        ):
            await asyncio.sleep(0.002)


def _count(counts: dict[str, int], done: list[Completion], number: int, tokens: int) -> None:
    """Tokens by version; one that has no version of the two, or an older one after a newer, is
    ``other``, and so is one that is missing."""
    for completion in done:
        newest = number
        for version in completion.versions:
            right = version in (number, number + 1) and version >= newest
            kind = "other" if not right else "old" if version == number else "new"
            counts[kind] += 1
            newest = version if right else newest
        counts["other"] += len(completion.tokens) - len(completion.versions)
        if completion.finish_reason == "length":
            counts["other"] += tokens - len(completion.tokens)


def _rows(
    size: str,
    restarts: list[float],
    pauses: list[float],
    applies: list[float],
    counts: dict[str, int],
) -> list[Row]:
    restart_s, pause_s = statistics.median(restarts), statistics.median(pauses)
    seen = counts["old"] > 0 and counts["new"] > 0 and counts["other"] == 0
    return [
        Row(metric=f"engine restart (load the folder), {size}", value=restart_s, unit="s"),
        Row(
            metric=f"pause of a swap while generating, {size}",
            value=pause_s,
            unit="s",
            reference="engine restart",
            ratio=pause_s / restart_s,
            target=f"<= {PAUSE_TARGET}",
            ok=pause_s <= PAUSE_TARGET * restart_s,
        ),
        Row(
            metric=f"whole apply (staging and pause) while generating, {size}",
            value=statistics.median(applies),
            unit="s",
            reference="engine restart",
            ratio=statistics.median(applies) / restart_s,
        ),
        Row(
            metric="tokens of the old version around the swaps", value=counts["old"], unit="tokens"
        ),
        Row(metric="tokens of the new version after the swaps", value=counts["new"], unit="tokens"),
        Row(
            metric="tokens without their version, or out of order",
            value=counts["other"],
            unit="tokens",
            target="0, and some of either version",
            ok=seen,
        ),
    ]
