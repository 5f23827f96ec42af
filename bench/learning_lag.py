"""Learning under policy lag: accuracy per sample when every group is exactly so many steps old.

One process: the torch engine draws groups, the torch trainer learns from them, and the engine gets
each version ``lag`` steps late, so that the lag is the same for every token and nothing depends on
this machine's speed. Lags 0, 2, 4 and 8, with the loss of the main job, without the ratio's clip,
and with truncated importance weights (``importance_cap``); the main job's model, items, batch and
learning rate, three seeds.

The value of a row is the mean greedy accuracy over evaluations every ``EVERY`` steps (the area
under the curve per sample) on items that are never trained on; the last accuracy stands beside it.
The reference is lag 0 with the same loss. ``--quick``: 12 steps, one seed, lags 0 and 4.
"""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.report import Row, main
from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from edge_agent.reward_worker import ScoreRequest, answer
from scheduler.tasks import ItemSource, open_source
from transport.messages import Item, RewardSpec
from transport.runs import TaskSpec
from transport.runtime.logs import configure_logging
from transport.weights.patch import CellRun
from transport.weights.tensors import TensorBytes

MODEL: Final = Path(__file__).parents[1] / "examples" / "models" / "arithmetic-1m"
TASK: Final = TaskSpec(
    source="reasoning-gym",
    dataset="chain_sum",
    settings={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
)
REWARD: Final = RewardSpec(name="reasoning-gym", dataset="chain_sum")
POLICY: Final = "lag/solver"
LAGS: Final = (0, 2, 4, 8)
GROUPS, SIBLINGS, TOKENS = 32, 8, 8
LOSSES: Final[dict[str, dict[str, Any]]] = {
    "clipped": {},
    "unclipped": {"clip": "none", "ratio_max": 0.0},
    "truncated importance weights": {"importance_cap": 2.0},
}
SEEDS, STEPS, EVERY, ITEMS = 3, 80, 10, 512
QUICK_STEPS, QUICK_EVERY, QUICK_ITEMS = 12, 6, 128

State = dict[str, TensorBytes]


class Learnt(NamedTuple):
    """Accuracies at every evaluation, and the mean KL to the policy that drew, over the steps."""

    accuracies: tuple[float, ...]
    kl_behaviour: float


class Loop:
    """One policy that learns from groups of an older version of itself."""

    def __init__(self, lag: int, settings: dict[str, Any], seed: int) -> None:
        self._lag = lag
        self._seed = seed
        self._engine = TorchEngine(GROUPS * SIBLINGS, threads=2)
        self._trainer = TorchTrainer({"lr": 1e-4, **settings}, threads=2)
        self._source: ItemSource = open_source(TASK, seed)
        self._late: list[State] = []
        self._served = 0

    async def run(self, steps: int, every: int, items: int) -> Learnt:
        """Train; evaluate the trainer's own weights every ``every`` steps."""
        self._trainer.load(MODEL)
        await self._engine.start()
        try:
            await self._engine.load_policy(POLICY, MODEL, 0)
            return await self._learn(steps, every, self._source.items("eval", 0, items))
        finally:
            await self._engine.close()

    async def _learn(self, steps: int, every: int, held_out: Sequence[Item]) -> Learnt:
        accuracies: list[float] = []
        kls: list[float] = []
        for step in range(steps):
            items = self._source.items("train", step * GROUPS, GROUPS)
            groups = await self._drawn(items, step)
            facts = await asyncio.to_thread(self._trainer.step, groups)
            kls.append(facts.get("kl_behaviour", 0.0))
            self._late.append(self._trainer.published_state())
            if (step + 1) % every == 0:
                accuracies.append(await self._accuracy(held_out))
            if len(self._late) > self._lag:
                await self._serve(self._late.pop(0))
        return Learnt(tuple(accuracies), statistics.mean(kls))

    async def _drawn(self, items: Sequence[Item], step: int) -> list[list[TrainingSequence]]:
        requests = [self._request(item, step, n=SIBLINGS, temperature=1.0) for item in items]
        drawn = await asyncio.gather(*map(self._engine.generate, requests))
        groups = []
        for item, request, completions in zip(items, requests, drawn, strict=True):
            rewards = self._rewards(item, completions)
            groups.append(
                [
                    TrainingSequence(
                        group=request.request_id,
                        prompt_tokens=request.prompt_tokens,
                        tokens=one.tokens,
                        logprobs=one.logprobs,
                        versions=one.versions,
                        loss_mask=(True,) * len(one.tokens),
                        reward=reward,
                    )
                    for one, reward in zip(completions, rewards, strict=True)
                ]
            )
        return groups

    async def _accuracy(self, items: Sequence[Item]) -> float:
        """Greedy, of the newest weights: the engine serves them for as long, then goes back."""
        served = self._state()
        await self._serve(self._late[-1])
        requests = [self._request(item, -1, n=1, temperature=0.0) for item in items]
        drawn = await asyncio.gather(*map(self._engine.generate, requests))
        right = [self._rewards(item, one)[0] >= 1.0 for item, one in zip(items, drawn, strict=True)]
        await self._serve(served)
        return sum(right) / len(right)

    def _request(self, item: Item, step: int, *, n: int, temperature: float) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"{step}/{item.index}",
            policy=POLICY,
            prompt_tokens=self._engine.encode(POLICY, item.prompt),
            n=n,
            sampling=SamplingParams(
                max_new_tokens=TOKENS, temperature=temperature, seed=self._seed * 100_003 + step
            ),
        )

    def _rewards(self, item: Item, completions: Sequence[Completion]) -> tuple[float, ...]:
        texts = [self._engine.decode(POLICY, one.tokens) for one in completions]
        reply = answer(ScoreRequest(spec=REWARD, pairs=tuple((item, text) for text in texts)))
        assert not reply.error, reply.error
        return reply.rewards

    def _state(self) -> State:
        return {
            name: TensorBytes(one.dtype, one.shape, memoryview(bytes(one.data)))
            for name, one in self._engine.read_weights(POLICY)
        }

    async def _serve(self, state: State) -> None:
        patch = {name: (CellRun(0, np.array(one.cells())),) for name, one in state.items()}
        self._served += 1
        await self._engine.apply(POLICY, self._served, patch)


def lag_rows(quick: bool) -> list[Row]:
    """Every loss at every lag."""
    seeds, lags = (1, (0, 4)) if quick else (SEEDS, LAGS)
    sizes = (QUICK_STEPS, QUICK_EVERY, QUICK_ITEMS) if quick else (STEPS, EVERY, ITEMS)
    rows: list[Row] = []
    for loss, settings in LOSSES.items():
        fresh = 0.0
        for lag in lags:
            found = [asyncio.run(Loop(lag, settings, seed).run(*sizes)) for seed in range(seeds)]
            means = [statistics.mean(one.accuracies) for one in found]
            last = statistics.mean(one.accuracies[-1] for one in found)
            mean = statistics.mean(means)
            fresh = mean if lag == 0 else fresh
            rows.append(
                Row(
                    metric=f"{loss}, lag {lag}: mean accuracy, at the end {last:.3f}",
                    value=mean,
                    unit="share",
                    reference=f"lag 0, the same loss; seeds {min(means):.3f} to {max(means):.3f},"
                    f" KL {statistics.mean(one.kl_behaviour for one in found):.2g}",
                    ratio=mean / fresh if fresh else None,
                )
            )
    return rows


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    return lag_rows(quick)


if __name__ == "__main__":
    main("learning_lag", measure)
