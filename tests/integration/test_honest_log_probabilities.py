"""Real engines draw, a real trainer compares, the scheduler's core judges: an agent that lies about
log-probabilities is excluded, one whose engine rounds is not."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from core_builders import SOLVER, Scene, make_run, make_scene
from torch_models import EXAMPLE

from cloud_trainer.core import events as on
from cloud_trainer.core.reports import StepReports
from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from scheduler.core import honesty
from transport.messages import GroupRef

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(300)]

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="
SIBLINGS = 4
GROUPS = 8
Lie = Callable[[Completion, random.Random], Completion]


def noisy(completion: Completion, rng: random.Random) -> Completion:
    """Log-probabilities that were not taken from the weights."""
    changed = tuple(min(0.0, value + rng.gauss(0.0, 0.5)) for value in completion.logprobs)
    return msgspec.structs.replace(completion, logprobs=changed)


def certain(completion: Completion, _: random.Random) -> Completion:
    """As if every token had been sure: their gradient is cut off or kept as the agent likes."""
    return msgspec.structs.replace(completion, logprobs=(0.0,) * len(completion.logprobs))


class Bench:
    """Two agents, one float32 and one bf16 engine, a trainer that learns, and the scheduler's core.
    ``lie`` is what the liar (agent ``a``) does to its completions; ``stale``: it draws from the
    weights of the beginning, whatever version it claims; it is always so many steps ``behind``."""

    def __init__(
        self,
        folder: Path,
        lie: Lie | None = None,
        *,
        stale: bool = False,
        behind: int = 0,
        lr: float = 3e-4,
    ) -> None:
        policy = {"steps": 200, "batch_groups": GROUPS, "max_policy_lag": 4, "checkpoint_every": 50}
        workflow = {"group_size": SIBLINGS}
        run = make_run(policy=policy, workflow=workflow, drift_tokens=30)
        self.scene: Scene = make_scene(run=run)
        for name in ("a", "b"):
            self.scene.joined(name, slots=16)
        self.folder = folder
        self.lie, self.stale, self.behind = lie, stale, behind
        self.rng = random.Random(5)
        self.trainer = TorchTrainer({"lr": lr, "warmup_steps": 0})
        self.trainer.load(EXAMPLE)
        self.engines = {"a": TorchEngine(slots=32), "b": TorchEngine(slots=32)}
        self.engines["b"]._compute = "published"  # bf16, as on a GPU
        self.reports = StepReports(SOLVER)
        self.found: dict[str, list[float]] = {"a": [], "b": []}
        self.moved: dict[str, list[float]] = {"a": [], "b": []}

    async def start(self) -> None:
        for engine in self.engines.values():
            await engine.start()
            await engine.load_policy("p", EXAMPLE, 0)

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.close()

    async def step(self, step: int) -> None:
        """Make a batch at the head, train on it, tell the scheduler, and move the agents on."""
        scene, head = self.scene, step - 1
        groups: dict[str, list[TrainingSequence]] = {}
        taken: dict[str, None] = {}
        by: dict[str, str] = {}
        while not taken:
            asked, scene.effects = scene.effects, []
            scene.produced(asked)
            for name in ("a", "b"):
                wanted = GROUPS // 2 - sum(name == made for made in by.values())
                for offer in scene.live_offers(name)[:wanted]:
                    by[offer.job] = name
                    scene.accepted(offer)
                    version = self.held(name, head)
                    groups[offer.job] = await self.group(name, offer.job, version)
                    rewards = tuple(sibling.reward for sibling in groups[offer.job])
                    scene.finished(offer, version=version, rewards=rewards, lengths=(8,) * SIBLINGS)
            scene.requested(step, groups=GROUPS)
            taken = scene.core._ctx.policies[SOLVER].taken.get(step, {})
        metrics = self.trainer.step([groups[job] for job in taken])
        done = on.StepFinished(
            step=step, metrics=metrics, drifts=self.trainer.drifts(), moved=self.trainer.moved()
        )
        refs = tuple(GroupRef(job=job, digest="d", size_bytes=1, policy_lag=0) for job in taken)
        report = self.reports.add(done, version=step, held=head, groups=refs, now=float(step))
        for drift in (*report.drifts, *report.older):
            agent = scene.core._ctx.tables.jobs[drift.job].result.agent
            self.found[agent].append(drift.difference)
            self.moved[agent].append(drift.moved)
        scene.trainer_says(report)
        scene.version_stored(step)
        self.trainer.export(self.folder / f"v{step}")
        for name, engine in self.engines.items():
            version = self.held(name, step)
            scene.serving(version, name)
            if version and not (self.stale and name == "a"):
                await engine.unload_policy("p")
                await engine.load_policy("p", self.folder / f"v{version}", version)

    def held(self, name: str, head: int) -> int:
        """The version that an agent has when the trainer holds ``head``."""
        return max(0, head - self.behind) if name == "a" else head

    async def group(self, name: str, job: str, head: int) -> list[TrainingSequence]:
        engine = self.engines[name]
        one, two = self.rng.randrange(100), self.rng.randrange(100)
        prompt = engine.encode("p", QUESTION.format(one, two))
        sampling = SamplingParams(max_new_tokens=8, temperature=1.0, seed=self.rng.randrange(2**31))
        completions = await engine.generate(
            GenerationRequest(
                request_id=job, policy="p", prompt_tokens=prompt, n=SIBLINGS, sampling=sampling
            )
        )
        if self.lie is not None and name == "a":
            completions = [self.lie(completion, self.rng) for completion in completions]
        return [
            TrainingSequence(
                group=job,
                prompt_tokens=prompt,
                tokens=completion.tokens,
                logprobs=completion.logprobs,
                versions=(head,) * len(completion.tokens),
                loss_mask=(True,) * len(completion.tokens),
                reward=float(number % 2),
            )
            for number, completion in enumerate(completions)
        ]


@pytest_asyncio.fixture
async def benches(tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*args: object, **options: object) -> Bench:
        made.append(Bench(tmp_path, *args, **options))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.mark.parametrize("lie", [noisy, certain])
async def test_an_agent_that_lies_about_log_probabilities_is_quarantined(benches, lie):
    bench = benches(lie)
    await bench.start()
    for step in range(1, 4):
        await bench.step(step)
    liar, honest = bench.scene.agent("a"), bench.scene.agent("b")
    assert (liar.state, liar.quarantined) == ("quarantined", honesty.DRIFT)
    assert len(liar.evidence) == 3
    assert (honest.state, honest.evidence) == ("ready", ())


async def test_an_agent_that_claims_a_version_which_it_does_not_serve_is_quarantined(benches):
    bench = benches(stale=True, lr=3e-3)
    await bench.start()
    for step in range(1, 9):
        await bench.step(step)
        if bench.scene.agent("a").quarantined:
            break
    assert bench.scene.agent("a").quarantined == honesty.DRIFT
    assert bench.scene.agent("b").evidence == ()


async def test_an_engine_that_rounds_is_honest_over_many_batches(benches):
    bench = benches()
    await bench.start()
    for step in range(1, 13):
        await bench.step(step)
    assert bench.scene.counter("honesty.windows") >= 20
    for name in ("a", "b"):
        assert bench.scene.agent(name).evidence == ()
    assert bench.found["b"][0] > 100 * bench.found["a"][0]  # it does round


@pytest.mark.parametrize("lie", [noisy, certain])
async def test_a_liar_that_is_always_behind_is_quarantined_too(benches, lie):
    bench = benches(lie, behind=2, lr=3e-5)
    await bench.start()
    for step in range(1, 9):
        await bench.step(step)
        if bench.scene.agent("a").quarantined:
            break
    assert bench.scene.agent("a").quarantined == honesty.DRIFT
    assert bench.scene.agent("b").evidence == ()


@pytest.mark.parametrize("lr", [3e-4, 1e-3])
async def test_an_honest_agent_that_is_always_behind_is_measured_and_right(benches, lr):
    """The policy moves by more in two steps than what an agent may drift. Windows are of 30 tokens,
    where a run's are of 1000."""
    bench = benches(behind=2, lr=lr)
    await bench.start()
    for step in range(1, 9):
        await bench.step(step)
    behind = [pair for pair in zip(bench.found["a"], bench.moved["a"], strict=True) if pair[1]]
    assert len(behind) >= 10
    assert sum(moved for _, moved in behind) / len(behind) > 0.1
    window = bench.scene.core._ctx.policies[SOLVER].drifts["a"]
    assert window.mean_moved > 0
    assert bench.scene.agent("a").evidence == ()
