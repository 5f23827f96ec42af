"""The fake engine: its times, its texts, and that a policy can learn from it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_trainer.numpy_trainer import NumpyTrainer, make_numpy_model
from cloud_trainer.trainer import TrainingSequence
from edge_agent.config import FakeEngineTable
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.fake import FakeEngine, ServiceTimes
from edge_agent.engines.fake_text import END, solve
from transport.errors import GenerationFailed, ModelError, WeightApplyFailed
from transport.runtime.clock import ManualClock
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellList, CellRun, whole

POLICY = "toy/solver"


class VirtualTime:
    """Sleeps that end when the test moves the clock over them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.clock.monotonic_s() + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        end = self.clock.monotonic_s() + seconds
        while True:
            await settle()
            due = [entry for entry in self._sleepers if entry[0] <= end and not entry[1].done()]
            if not due:
                break
            first = min(due, key=lambda entry: entry[0])
            self._sleepers.remove(first)
            self.clock.advance(max(0.0, first[0] - self.clock.monotonic_s()))
            first[1].set_result(None)
        self.clock.advance(end - self.clock.monotonic_s())
        await settle()


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


def request(prompt: tuple[int, ...] = (), **changes: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "policy": POLICY,
        "prompt_tokens": prompt,
        "n": 1,
        "sampling": SamplingParams(max_new_tokens=32, seed=7),
    }
    return GenerationRequest(**{**values, **changes})


async def engine_of(folder: Path, time: VirtualTime, slots: int = 4, **table: Any) -> FakeEngine:
    values: dict[str, Any] = {"tokens_per_s": 10.0, "first_token_s": 1.0, "cv_tokens": 0.0}
    settings = FakeEngineTable(**{**values, **table})
    engine = FakeEngine(slots, settings, clock=time.clock, sleep=time.sleep)
    await engine.start()
    await engine.load_policy(POLICY, folder, 0)
    return engine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_numpy_model(tmp_path / "model", seed=3)


def test_the_service_time_model_has_the_mean_and_spread_that_it_is_told() -> None:
    times = ServiceTimes(FakeEngineTable(mean_tokens=40.0, cv_tokens=0.5))
    lengths = [times.tokens(u, 10_000) for u in np.random.default_rng(0).random(4000)]
    assert np.mean(lengths) == pytest.approx(40.0, rel=0.05)
    assert np.std(lengths) / np.mean(lengths) == pytest.approx(0.5, rel=0.1)
    assert times.tokens(0.0, 10) >= 1
    assert times.tokens(1.0, 10) == 10
    assert times.tokens_after(times.duration_s(12) + 1e-9) == 12
    assert times.tokens_after(0.0) == 0


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ("3 + 4 =", "7"),
        ("What is 12 - 30 + 1?", "-17"),
        ("first 1 + 1 then 10+20+30", "60"),
        ("-5 + 2", "-3"),
        ("no numbers here", ""),
        ("just 42", ""),
        ("1" * 200 + " + 1", ""),
    ],
)
def test_sums_are_solved_and_nothing_else(prompt: str, value: str) -> None:
    assert solve(prompt) == value


@pytest.mark.asyncio
async def test_sequences_take_their_slots_and_their_time(model: Path) -> None:
    time = VirtualTime()
    engine = await engine_of(model, time, slots=2, mean_tokens=20.0)
    prompt = engine.encode(POLICY, "1 + 1 =")
    task = asyncio.create_task(engine.generate(request(prompt, n=3)))
    await time.advance(2.0)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.tokens_generated) == (2, 1, 20)
    assert stats.busy_s == pytest.approx(2.0)
    await time.advance(1.0)
    assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    await time.advance(3.0)
    completions = await task
    assert [len(c.tokens) for c in completions] == [20, 20, 20]
    assert engine.stats().tokens_generated == 60
    assert engine.stats().busy_s == pytest.approx(6.0)


@pytest.mark.asyncio
async def test_answers_are_right_or_wrong_by_the_thoughts_before_them(model: Path) -> None:
    time = VirtualTime()
    engine = await engine_of(model, time, slots=64, mean_tokens=10.0)
    prompt = engine.encode(POLICY, "17 + 4 =")
    assert engine.decode(POLICY, prompt) == "17 + 4 ="
    task = asyncio.create_task(engine.generate(request(prompt, n=64)))
    await time.advance(60.0)
    texts = []
    for completion in await task:
        thoughts = [token for token in completion.tokens if token < 64]
        low = sum(token < 32 for token in thoughts)
        text = engine.decode(POLICY, completion.tokens)
        assert text == ("21" if 2 * low > len(thoughts) else "22")
        assert completion.tokens[-1] == END
        assert completion.finish_reason == "stop"
        assert completion.logprobs[len(thoughts) :] == (0.0,) * 3
        assert all(logprob < 0 for logprob in completion.logprobs[: len(thoughts)])
        texts.append(text)
    assert {"21", "22"} == set(texts)


@pytest.mark.asyncio
async def test_an_answer_that_does_not_fit_is_cut_off(model: Path) -> None:
    time = VirtualTime()
    engine = await engine_of(model, time)
    sampling = SamplingParams(max_new_tokens=2)
    prompt = engine.encode(POLICY, "10 + 20")
    task = asyncio.create_task(engine.generate(request(prompt, sampling=sampling)))
    await time.advance(5.0)
    (completion,) = await task
    assert len(completion.tokens) == 2
    assert completion.finish_reason == "length"


@pytest.mark.asyncio
async def test_tokens_before_and_after_a_swap_carry_their_versions(model: Path) -> None:
    time = VirtualTime()
    engine = await engine_of(model, time, mean_tokens=20.0)
    task = asyncio.create_task(engine.generate(request((5,))))
    await time.advance(1.75)
    bias = dict(engine.read_weights(POLICY))["bias"]
    steered = np.zeros(64, np.float32)
    steered[9] = 1e4
    cells = (steered.view(np.uint32) >> 16).astype("<u2")
    assert cells.size == bias.cells().size
    await engine.apply(POLICY, 1, {"bias": (CellRun(0, cells),)})
    await time.advance(5.0)
    (completion,) = await task
    assert completion.versions == (0,) * 7 + (1,) * 13
    assert set(completion.tokens[7:19]) == {9}
    assert 9 not in completion.tokens[:7]


@pytest.mark.asyncio
async def test_any_safetensors_folder_loads_and_thinks_evenly(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    time = VirtualTime()
    engine = await engine_of(model, time)
    task = asyncio.create_task(engine.generate(request((5,))))
    await time.advance(5.0)
    (completion,) = await task
    assert completion.logprobs[0] == pytest.approx(-np.log(64))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json"),
        ('{"model_type": "farflow-numpy", "vocab_size": 4096}', "takes 2 to 2048"),
        ('{"model_type": "farflow-numpy", "vocab_size": 32}', "not finite \\[32, 32\\]"),
    ],
)
@pytest.mark.asyncio
async def test_a_folder_that_does_not_load_is_named(model: Path, config: str, words: str) -> None:
    (model / "config.json").write_text(config)
    with pytest.raises(ModelError, match=words):
        await FakeEngine(1).load_policy(POLICY, model, 0)


@pytest.mark.asyncio
async def test_weights_that_are_not_finite_are_refused(model: Path) -> None:
    engine = FakeEngine(1)
    await engine.load_policy(POLICY, model, 0)
    before = dict(engine.read_weights(POLICY))
    poison = CellList(np.array([5]), np.array([0x7FC0], "<u2"))
    with pytest.raises(WeightApplyFailed, match="not finite"):
        await engine.apply(POLICY, 1, {"bias": (poison,)})
    assert engine.version(POLICY) == 0
    assert dict(engine.read_weights(POLICY)) == before == read_model_folder(model)


@pytest.mark.asyncio
async def test_top_p_is_refused_and_not_ignored(model: Path) -> None:
    engine = await engine_of(model, VirtualTime())
    with pytest.raises(GenerationFailed, match="top_p"):
        await engine.generate(request(sampling=SamplingParams(max_new_tokens=4, top_p=0.9)))


def right_share(completions: list[Completion], engine: FakeEngine, answer: str) -> float:
    return float(np.mean([engine.decode(POLICY, c.tokens) == answer for c in completions]))


@pytest.mark.asyncio
async def test_the_numpy_trainer_learns_from_it(model: Path) -> None:
    time = VirtualTime()
    engine = await engine_of(model, time, slots=512, mean_tokens=8.0)
    trainer = NumpyTrainer({"lr": 0.03})
    trainer.load(model)
    prompt = engine.encode(POLICY, "3 + 4 =")
    shares = []
    for step in range(25):
        wanted = request(prompt, n=64, request_id=f"step {step}")
        task = asyncio.create_task(engine.generate(wanted))
        await time.advance(30.0)
        completions = await task
        shares.append(right_share(completions, engine, "7"))
        trainer.step([training_group(completions, prompt, engine)])
        await engine.apply(POLICY, step + 1, whole(trainer.published_state()))
    assert np.mean(shares[:3]) < 0.7
    assert np.mean(shares[-3:]) > 0.9


def training_group(
    completions: list[Completion], prompt: tuple[int, ...], engine: FakeEngine
) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            group="g",
            prompt_tokens=prompt,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            loss_mask=(True,) * len(completion.tokens),
            reward=float(engine.decode(POLICY, completion.tokens) == "7"),
        )
        for completion in completions
    ]
