"""The openai engine against a real vLLM server in a process of its own."""

import asyncio
import random
import re

import numpy as np
import pytest
import pytest_asyncio
from torch_models import served_qwen3
from vllm_bench import TABLE, VllmBench
from vllm_server import TAKES_WEIGHTS, VllmServer

from edge_agent.config import OpenaiServer, OpenaiTable
from edge_agent.engines.openai_engine import OpenaiEngine
from edge_agent.engines.vllm_engine import VllmEngine
from transport.errors import EngineCrashed, GenerationFailed, ModelError, WeightApplyFailed
from transport.weights.patch import CellRun

pytestmark = pytest.mark.asyncio(loop_scope="session")

POLICY = "run/served"
PROMPT = "State the answer: 3 + 4 ="
SLOTS = 8
UPDATES = 5
ABORTS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served_qwen3(tmp_path_factory.mktemp("openai") / "model", seed=4)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    running = VllmServer(folder, "served", log, *TAKES_WEIGHTS)
    running.wait()
    yield running
    running.stop()


def taking(server):
    return OpenaiTable(base_url=server.url, weight_updates="vllm", timeout_s=120.0, away_s=10.0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(server, folder):
    engine = OpenaiEngine(SLOTS, taking(server))
    await engine.start()
    await engine.load_policy(POLICY, folder, 0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def bench(engine, folder):
    """With the folder's weights."""
    if engine.version(POLICY) is None:
        await engine.load_policy(POLICY, folder, 0)
    made = VllmBench(engine, POLICY, folder)
    await made.back()
    return made


async def until_idle(server):
    async with asyncio.timeout(30):
        while await asyncio.to_thread(server.requests):
            await asyncio.sleep(0.05)


def distributions(folder, prompt, completion, dtype, temperature):
    """[tokens, vocabulary] log-probabilities at each token of a completion, by torch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        return (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
async def test_tokens_and_log_probabilities_are_the_models(bench, folder, temperature):
    """Of which a model in bf16 is as far away in torch itself as in vLLM."""
    prompt = bench.engine.encode(POLICY, PROMPT)
    completions = await bench.generate(6, temperature=temperature, max_new_tokens=24)
    assert len({each.tokens for each in completions}) == (6 if temperature else 1)
    theirs, ours, rounded, best = [], [], [], []
    for each in completions:
        assert len(each.tokens) == len(each.logprobs) == len(each.versions)
        exact = distributions(folder, prompt, each, "float32", temperature or 1.0)
        coarse = distributions(folder, prompt, each, "bfloat16", temperature or 1.0)
        at = np.arange(len(each.tokens)), np.array(each.tokens)
        theirs += each.logprobs
        ours += exact[at].tolist()
        best += exact.max(1).tolist()
        rounded += np.abs(exact[at] - coarse[at]).tolist()
    difference = np.abs(np.array(ours) - theirs)
    print(f"at {temperature}: mean {difference.mean():.4f}, torch {np.mean(rounded):.4f}")  # noqa: T201
    assert difference.mean() < 1.5 * np.mean(rounded)
    assert difference.max() < 3 * max(rounded)
    if not temperature:
        assert (np.array(best) - ours).max() < 3 * max(rounded)


async def test_the_same_request_draws_the_same(bench):
    first = await bench.generate(3, "again", max_new_tokens=20)
    assert await bench.generate(3, "again", max_new_tokens=20) == first
    assert await bench.generate(3, "other", max_new_tokens=20) != first


async def test_texts_and_tokens_end_a_sequence(bench):
    (drawn,) = await bench.generate(1, temperature=0.0, max_new_tokens=60)
    end = re.findall("[ -~]{2,}", bench.engine.decode(POLICY, drawn.tokens))[-1]
    (stopped,) = await bench.generate(1, temperature=0.0, max_new_tokens=60, stop=(end,))
    count = len(stopped.tokens)
    assert stopped.tokens == drawn.tokens[:count]
    assert (stopped.finish_reason, drawn.finish_reason) == ("stop", "length")
    assert end in bench.engine.decode(POLICY, stopped.tokens)
    assert end not in bench.engine.decode(POLICY, stopped.tokens[:-1])
    token = drawn.tokens[9]
    (stopped,) = await bench.generate(1, temperature=0.0, stop_token_ids=(token,))
    assert stopped.tokens == drawn.tokens[: drawn.tokens.index(token) + 1]
    assert stopped.finish_reason == "stop"


async def test_aborts_leave_nothing_behind(bench, server):
    rng = random.Random(7)
    for _ in range(ABORTS):
        task = asyncio.create_task(bench.generate(rng.randint(1, 4), max_new_tokens=200))
        await asyncio.sleep(rng.uniform(0.0, 0.08))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_idle(server)
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (0, 0)


async def test_updates_are_bit_equal_and_draw_as_a_fresh_engine_does(bench, tmp_path):
    pauses = []
    for _ in range(UPDATES):
        pauses.append(await bench.advance(0.2))
        assert dict(bench.engine.read_weights(POLICY)) == bench.weights
        name, tensor = next(iter(bench.weights.items()))
        at = np.array([0, tensor.cells().size - 1])
        read = bench.engine.read_cells(POLICY, name, at)
        assert read.tolist() == tensor.cells()[at].tolist()
    print(f"pauses of {', '.join(f'{1000 * each:.0f}' for each in pauses)} ms")  # noqa: T201
    drawn = await bench.generate(2, "greedy", temperature=0.0, max_new_tokens=40)
    assert {version for each in drawn for version in each.versions} == {bench.version}
    fresh = VllmEngine(SLOTS, TABLE)
    await fresh.start()
    try:
        await fresh.load_policy(POLICY, bench.snapshot(tmp_path / "snapshot"), bench.version)
        request = bench.request(2, "greedy", temperature=0.0, max_new_tokens=40)
        expected = await fresh.generate(request)
    finally:
        await fresh.close()
    assert [each.tokens for each in drawn] == [each.tokens for each in expected]
    assert [each.logprobs for each in drawn] == [
        pytest.approx(each.logprobs, abs=1e-3) for each in expected
    ]


async def test_sequences_go_on_through_updates_and_say_what_drew_them(bench):
    before = bench.version
    drawing = [asyncio.create_task(bench.generate(2, max_new_tokens=200)) for _ in range(6)]
    while not all(task.done() for task in drawing) and bench.version < before + 30:
        await bench.advance()
    done = [each for task in drawing for each in await task]
    for each in done:
        assert list(each.versions) == sorted(each.versions)
        assert before <= each.versions[0] <= each.versions[-1] <= bench.version
    assert any(len(set(each.versions)) > 1 for each in done)
    (after,) = await bench.generate(1)
    assert set(after.versions) == {bench.version}


async def test_what_does_not_fit_changes_nothing(bench):
    (name, tensor), *_ = bench.weights.items()
    infinite = np.full(tensor.cells().size, 0x7F80, np.uint16)
    for patch in ({"nothing": (CellRun(0, infinite[:1]),)}, {name: (CellRun(0, infinite),)}):
        with pytest.raises(WeightApplyFailed):
            await bench.engine.apply(POLICY, bench.version + 1, patch)
    assert dict(bench.engine.read_weights(POLICY)) == bench.weights
    await bench.advance()
    assert dict(bench.engine.read_weights(POLICY)) == bench.weights


async def test_weights_that_another_agent_wrote_are_noticed(bench, server, folder):
    lost = []
    bench.engine.when_lost = lost.append
    other = OpenaiEngine(SLOTS, taking(server))
    await other.start()
    try:
        await other.load_policy(POLICY, folder, bench.version)
        with pytest.raises(EngineCrashed, match="not this agent's"):
            await bench.generate(1)
        assert lost == [POLICY]
        assert bench.engine.version(POLICY) is None
        await bench.engine.load_policy(POLICY, folder, bench.version)
        assert len(await bench.generate(1)) == 1
        with pytest.raises(WeightApplyFailed, match="others write to it"):
            await other.apply(POLICY, bench.version + 1, {})
        assert other.version(POLICY) is None
    finally:
        bench.engine.when_lost = None
        await other.close()
    await bench.advance()
    assert dict(bench.engine.read_weights(POLICY)) == bench.weights


async def test_what_an_earlier_life_left_half_done_is_ended(bench, server, folder):
    await asyncio.to_thread(server.post, "/pause?mode=keep")
    await bench.engine.load_policy(POLICY, folder, bench.version + 1)
    (drawn,) = await bench.generate(1)
    assert set(drawn.versions) == {bench.version + 1}


async def test_a_frozen_policy_needs_no_routes_for_weights(bench, server, folder):
    table = OpenaiTable(base_url=server.url, accept_unverified=True)
    frozen = OpenaiEngine(SLOTS, table)
    await frozen.start()
    try:
        with pytest.raises(ModelError, match="weight_updates"):
            await frozen.load_policy(POLICY, folder, 1)
        await frozen.load_policy(POLICY, folder, 0)
        request = bench.request(2, "greedy", temperature=0.0, max_new_tokens=30)
        drawn, expected = await frozen.generate(request), await bench.engine.generate(request)
        assert [each.tokens for each in drawn] == [each.tokens for each in expected]
        assert {version for each in drawn for version in each.versions} == {0}
        tasks = [asyncio.create_task(frozen.generate(request)) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(server)
        with pytest.raises(GenerationFailed, match="exceed"):
            await frozen.generate(bench.request(1, max_new_tokens=400))
    finally:
        await frozen.close()


async def test_a_second_policy_does_not_get_the_same_server(bench, server, folder):
    with pytest.raises(ModelError, match="one policy only"):
        await bench.engine.load_policy("run/second", folder, 0)
    named = OpenaiServer(base_url=server.url, model="another", weight_updates="vllm")
    wrong = OpenaiEngine(1, OpenaiTable(servers={POLICY: named}))
    with pytest.raises(ModelError, match="not 'another'"):
        await wrong.load_policy(POLICY, folder, 0)
