"""Learning in one process: the torch engine draws, the verifier scores, the torch trainer learns.

What always holds: nothing here looks at a clock, so that what is learnt is the same on any machine
up to the rounding of its arithmetic; training items and held-out items are disjoint.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

import numpy as np

from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from edge_agent.reward_worker import ScoreRequest, answer
from scheduler.tasks import open_source
from transport.messages import Item, RewardSpec
from transport.runs import PartSpec, TaskSpec
from transport.weights.patch import CellRun
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    from scheduler.task_items import ItemSource

MODEL: Final = Path(__file__).parents[1] / "examples" / "models" / "arithmetic-1m"
POLICY: Final = "bench/solver"
REWARD: Final = RewardSpec(name="reasoning-gym", dataset="chain_sum")
GROUPS: Final = 32
SIBLINGS: Final = 8
TOKENS: Final = 8
"""Groups per batch, sequences per group and tokens per sequence, as in the main job."""

LEARNING_RATE: Final = 1e-4

State = dict[str, TensorBytes]
Group = list[TrainingSequence]
T = TypeVar("T")


def sums(terms: int, digits: int) -> dict[str, int]:
    """Settings of reasoning-gym's ``chain_sum`` for exactly so many terms and digits."""
    return {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}


def task(parts: dict[str, tuple[int, int]]) -> TaskSpec:
    """Chains of (terms, digits), in equal parts; a single part is no mixture and has no family."""
    if len(parts) == 1:
        [(terms, digits)] = parts.values()
        return TaskSpec(source="reasoning-gym", dataset="chain_sum", settings=sums(terms, digits))
    named = tuple(
        PartSpec(family=name, source="reasoning-gym", dataset="chain_sum", settings=sums(*shape))
        for name, shape in parts.items()
    )
    return TaskSpec(source="mixture", parts=named)


ARITHMETIC: Final = task({"two_2": (2, 2)})
"""The items of ``examples/arithmetic.toml``."""


class Asked(NamedTuple):
    """A group that is to be drawn; ``name`` and ``seed`` make its draws repeatable."""

    name: str
    item: Item
    seed: int


class Learner:
    """One policy, its engine and its trainer. ``served`` counts the states that the engine was
    given; tokens carry it as their version."""

    def __init__(self, spec: TaskSpec, seed: int, settings: dict[str, Any]) -> None:
        self.served = 0
        self.source: ItemSource = open_source(spec, seed)
        self._engine = TorchEngine(GROUPS * SIBLINGS, threads=1)
        self._trainer = TorchTrainer({"lr": LEARNING_RATE, **settings}, threads=1)

    async def __aenter__(self) -> Self:
        self._trainer.load(MODEL)
        await self._engine.start()
        await self._engine.load_policy(POLICY, MODEL, 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._engine.close()

    async def draw(self, asked: Sequence[Asked]) -> list[Group]:
        """One scored group for each, of the state that the engine serves."""
        requests = [self._request(one, n=SIBLINGS, temperature=1.0) for one in asked]
        drawn = await asyncio.gather(*map(self._engine.generate, requests))
        return [
            self._group(one.item, request, completions)
            for one, request, completions in zip(asked, requests, drawn, strict=True)
        ]

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step; the trainer's metrics."""
        return await asyncio.to_thread(self._trainer.step, groups)

    def state(self) -> State:
        """The trainer's weights, as it publishes them."""
        return self._trainer.published_state()

    def served_state(self) -> State:
        """A copy of the weights that the engine draws with."""
        return {
            name: TensorBytes(one.dtype, one.shape, memoryview(bytes(one.data)))
            for name, one in self._engine.read_weights(POLICY)
        }

    async def serve(self, state: State) -> None:
        """Let the engine draw with these weights from now on."""
        patch = {name: (CellRun(0, np.array(one.cells())),) for name, one in state.items()}
        self.served += 1
        await self._engine.apply(POLICY, self.served, patch)

    async def accuracy(self, items: Sequence[Item]) -> float:
        """Share of right greedy answers of the state that the engine serves."""
        asked = [Asked(f"eval/{item.index}", item, 0) for item in items]
        requests = [self._request(one, n=1, temperature=0.0) for one in asked]
        drawn = await asyncio.gather(*map(self._engine.generate, requests))
        right = [self._rewards(item, one)[0] >= 1.0 for item, one in zip(items, drawn, strict=True)]
        return sum(right) / len(right)

    def _request(self, asked: Asked, *, n: int, temperature: float) -> GenerationRequest:
        return GenerationRequest(
            request_id=asked.name,
            policy=POLICY,
            prompt_tokens=self._engine.encode(POLICY, asked.item.prompt),
            n=n,
            sampling=SamplingParams(
                max_new_tokens=TOKENS, temperature=temperature, seed=asked.seed
            ),
        )

    def _group(
        self, item: Item, request: GenerationRequest, completions: Sequence[Completion]
    ) -> Group:
        return [
            TrainingSequence(
                group=request.request_id,
                prompt_tokens=request.prompt_tokens,
                tokens=one.tokens,
                logprobs=one.logprobs,
                versions=one.versions,
                loss_mask=(True,) * len(one.tokens),
                reward=reward,
            )
            for one, reward in zip(completions, self._rewards(item, completions), strict=True)
        ]

    def _rewards(self, item: Item, completions: Sequence[Completion]) -> tuple[float, ...]:
        texts = [self._engine.decode(POLICY, one.tokens) for one in completions]
        reply = answer(ScoreRequest(spec=REWARD, pairs=tuple((item, text) for text in texts)))
        assert not reply.error, reply.error
        return reply.rewards


class Learnt(NamedTuple):
    """``accuracies`` at every evaluation, the first one before training; ``kl_behaviour`` is the
    mean KL to the policy that drew, over the steps."""

    accuracies: tuple[float, ...]
    kl_behaviour: float


async def learn_late(
    learner: Learner, seed: int, lags: Sequence[Sequence[int]], every: int, held_out: int
) -> Learnt:
    """One step for each entry of ``lags``, which says of each group of the batch how many steps
    before its own the weights were made that draw it (none are older than the first). Evaluated
    every ``every`` steps on ``held_out`` items, with the trainer's newest weights."""
    items = learner.source.items("eval", 0, held_out)
    most = max(map(max, lags))
    states = [learner.served_state()]
    accuracies = [await learner.accuracy(items)]
    kls: list[float] = []
    first = 0
    for step, batch in enumerate(lags):
        fresh = learner.source.items("train", first, len(batch))
        first += len(batch)
        asked = [Asked(f"{step}/{item.index}", item, seed * 100_003 + step) for item in fresh]
        groups: list[Group] = []
        for lag, some in itertools.groupby(
            sorted(zip(batch, asked, strict=True), key=lambda one: one[0]), key=lambda one: one[0]
        ):
            await learner.serve(states[-1 - min(lag, len(states) - 1)])
            groups += await learner.draw([one for _, one in some])
        facts = await learner.step(groups)
        kls.append(facts.get("kl_behaviour", 0.0))
        states = [*states[-most:], learner.state()] if most else [learner.state()]
        if (step + 1) % every == 0:
            await learner.serve(states[-1])
            accuracies.append(await learner.accuracy(items))
    return Learnt(tuple(accuracies), sum(kls) / len(kls))


def finished(found: Sequence[T | None]) -> list[T]:
    """Results of ``sim.parallel.map_some``, none of which may be missing.

    Raises:
        KeyboardInterrupt: the work was interrupted; a part of a table is none.
    """
    done = [one for one in found if one is not None]
    if len(done) < len(found):
        raise KeyboardInterrupt
    return done
