"""Swaps, aborts and crashes while vLLM draws."""

import asyncio
import os
import random
import signal

import numpy as np
import psutil
import pytest
from vllm_bench import LLAMA, QWEN, VllmBench, moved

from transport.errors import EngineCrashed, EngineError, GenerationFailed
from transport.weights.patch import CellList, whole
from transport.weights.tensors import TensorBytes

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE = 0x3F80
"""1.0 in bfloat16."""
FIRST = 10
"""Of the tokens that tell a version."""
ACTIONS = 1000


@pytest.fixture
def llama(engine, folders):
    return VllmBench(engine, LLAMA, folders[LLAMA])


@pytest.fixture
def qwen(engine, folders):
    return VllmBench(engine, QWEN, folders[QWEN])


def constant(tensors):
    """A model that draws the same token whatever it reads: layers that add nothing, one embedding
    for all tokens, and a head that knows one row."""
    made = {}
    for name, tensor in tensors.items():
        adds = name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight"))
        cells = np.full(tensor.cells().size, 0 if adds else ONE, np.uint16)
        made[name] = TensorBytes(tensor.dtype, tensor.shape, cells.tobytes())
    return made


def says(tensors, token):
    """The patch that makes a constant model draw ``token`` and no other."""
    rows, width = tensors["lm_head.weight"].shape
    at = np.arange(FIRST * width, (FIRST + 60) * width, dtype=np.int64)
    values = np.zeros(at.size, np.uint16)
    values[(token - FIRST) * width : (token - FIRST + 1) * width] = ONE
    assert token < rows
    return {"lm_head.weight": (CellList(at, values),)}


async def test_every_token_says_which_version_drew_it(llama):
    """Each version draws a token of its own, so a wrong label is seen; nothing is lost."""
    start = llama.version + 1
    await llama.engine.apply(LLAMA, start, {**whole(constant(llama.weights))})
    await llama.engine.apply(LLAMA, start, says(llama.weights, FIRST))
    drawing = [
        asyncio.create_task(llama.generate(4, max_new_tokens=tokens, temperature=0.0))
        for tokens in (40, 120, 200, 300)
    ]
    swaps = 0
    while swaps < 40 and not all(task.done() for task in drawing):
        swaps += 1
        await llama.engine.apply(LLAMA, start + swaps, says(llama.weights, FIRST + swaps))
        await asyncio.sleep(0.02)
    done = [completion for task in drawing for completion in await task]
    assert [len(each.tokens) for each in done] == [n for n in (40, 120, 200, 300) for _ in range(4)]
    for completion in done:
        assert [token - FIRST for token in completion.tokens] == [
            version - start for version in completion.versions
        ]
    assert len({version for each in done for version in each.versions}) > 5
    await llama.back_at(start + swaps + 1)


async def test_the_cache_of_earlier_weights_is_not_used(bench):
    """A prompt of several blocks that the cache had from the version before; then the same weights
    once more, as a swap that leaves nothing cached."""
    prompt = [5 + (7 * n) % 200 for n in range(400)]
    await bench.generate(2, prompt=prompt, temperature=0.0)
    await bench.advance(0.4)
    now = await bench.generate(2, prompt=prompt, temperature=0.0, name="now")
    bench.version += 1
    await bench.engine.apply(bench.policy, bench.version, whole(bench.weights))
    fresh = await bench.generate(2, prompt=prompt, temperature=0.0, name="now")
    assert [each.tokens for each in now] == [each.tokens for each in fresh]
    assert [each.logprobs for each in now] == [each.logprobs for each in fresh]


async def test_a_thousand_aborts_and_swaps_leave_nothing_behind(qwen):
    rng = random.Random(7)
    engine, open_requests, failed = qwen.engine, [], []
    steps = [moved(qwen.weights, 0.01, seed) for seed in (1, 2)]
    memory = []
    for action in range(ACTIONS):
        kind = rng.random()
        if kind < 0.5:
            sampling = {"max_new_tokens": rng.randint(1, 60), "seed": action}
            n = rng.randint(1, 4)
            open_requests.append(asyncio.create_task(qwen.generate(n, **sampling)))
        elif kind < 0.9 and open_requests:
            open_requests.pop(rng.randrange(len(open_requests))).cancel()
        else:
            qwen.version += 1
            await engine.apply(QWEN, qwen.version, whole(steps[action % 2]))
        while len(open_requests) > 12:
            failed += await asyncio.gather(open_requests.pop(0), return_exceptions=True)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
        if action in (ACTIONS // 2, ACTIONS - 1):
            memory.append(resident_bytes())
    failed += await asyncio.gather(*open_requests, return_exceptions=True)
    assert not [each for each in failed if isinstance(each, BaseException)]
    assert engine.stats().running == engine.stats().waiting == 0
    vllm = engine._hosted[QWEN].policy._llm
    async with asyncio.timeout(20):
        while vllm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.05)
    assert memory[1] < 1.05 * memory[0]
    full = await qwen.generate(32, max_new_tokens=4)  # all places are free
    assert len(full) == 32
    await qwen.back()


def resident_bytes():
    own = psutil.Process()
    return sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))


async def test_a_bad_request_is_refused_before_vllm_sees_it(bench):
    for bad in (
        {"prompt": ()},
        {"prompt": (10**6,)},
        {"max_new_tokens": 600},
        {"temperature": -1.0},
        {"temperature": 2.5},
        {"temperature": 0.001},
        {"top_p": 0.0},
        {"stop": ("",)},
    ):
        with pytest.raises(GenerationFailed):
            await bench.generate(**bad)
    assert len(await bench.generate(1)) == 1


async def test_log_probabilities_are_of_what_was_drawn_from(qwen):
    """A nucleus that holds one token says so: it was certain."""
    for completion in await qwen.generate(4, temperature=0.7, top_p=1e-6, max_new_tokens=8):
        assert completion.logprobs == (0.0,) * len(completion.tokens)
    cold, hot = [
        (await qwen.generate(1, temperature=t, max_new_tokens=1, seed=3))[0] for t in (0.05, 2.0)
    ]
    assert cold.logprobs[0] > hot.logprobs[0]


async def test_a_process_that_dies_fails_its_requests_at_once_and_comes_back(qwen, tmp_path):
    engine, lost = qwen.engine, []
    engine.when_lost = lost.append
    long = [asyncio.create_task(qwen.generate(4, max_new_tokens=400)) for _ in range(3)]
    await asyncio.sleep(0.2)
    manager = engine._hosted[QWEN].policy._llm.engine_core.resources.engine_manager
    os.kill(manager.processes[0].pid, signal.SIGKILL)
    async with asyncio.timeout(15):
        answers = await asyncio.gather(*long, return_exceptions=True)
    assert all(isinstance(each, EngineCrashed) for each in answers)
    assert answers[0].code == "engine.crashed"
    async with asyncio.timeout(15):
        while not lost:
            await asyncio.sleep(0.05)
    assert lost == [QWEN]
    assert engine.version(QWEN) is None
    assert engine.stats().running == 0
    with pytest.raises(EngineError):
        await qwen.generate(1)
    assert engine.version(LLAMA) is not None  # the other one lives

    await engine.load_policy(QWEN, qwen.snapshot(tmp_path / "copy"), qwen.version)
    assert dict(engine.read_weights(QWEN)) == qwen.weights
    assert {v for c in await qwen.generate(2) for v in c.versions} == {qwen.version}
    engine.when_lost = None
