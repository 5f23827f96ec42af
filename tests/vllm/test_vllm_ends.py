"""What vLLM does when it hangs or dies while it starts, and who waits when a policy ends: parts
that the real one cannot be made to do at will are stood in for."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future

import msgspec
import psutil
import pytest
import pytest_asyncio
from vllm_bench import LLAMA, QWEN, TABLE

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines import vllm_policy
from edge_agent.engines.vllm_engine import VllmEngine, _Hosted
from edge_agent.engines.vllm_policy import VllmPolicy
from transport.errors import EngineCrashed, WeightApplyFailed
from transport.runtime.clock import SystemClock

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Held:
    """In place of ``AsyncLLM``: its start hangs until ``go``, and then it is dead."""

    errored = True

    def __init__(self):
        self.go = threading.Event()
        self.ended = threading.Event()

    def from_engine_args(self, arguments):
        self.go.wait(30)
        self.vllm_config = Anything()
        return self

    async def collective_rpc(self, method, args=()):
        await asyncio.get_running_loop().create_future()  # as vLLM leaves it when it dies

    def shutdown(self, within_s):
        self.ended.set()


class Anything:
    num_gpu_blocks = block_size = max_model_len = 8

    def __getattr__(self, name):
        return self

    def get_vocab_size(self):
        return 8


@pytest.fixture
def held(monkeypatch):
    held = Held()
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM", held)
    monkeypatch.setattr(vllm_policy, "END_S", 0.2, raising=False)
    yield held
    held.go.set()


class Spawning(Held):
    """Its start waits for a process that it started, and that has one itself."""

    def from_engine_args(self, arguments):
        tree = "import subprocess; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True)"
        with subprocess.Popen(
            [sys.executable, "-c", f"{tree}; p.wait()"], stdout=subprocess.PIPE
        ) as started:
            self.below = int(started.stdout.readline())
            started.wait()
        self.go.set()
        raise RuntimeError("it ended")


async def crash_of_start(folder, start_timeout_s):
    """What the start of a policy raises, within a few seconds."""
    table = msgspec.structs.replace(TABLE, start_timeout_s=start_timeout_s)
    over = asyncio.get_running_loop().create_future()

    def start(loop):
        try:
            VllmPolicy(
                QWEN, folder, 0, table, device="cpu", clock=SystemClock(), lost=lambda *_: None
            )
        except EngineCrashed as error:
            loop.call_soon_threadsafe(over.set_result, error)

    loop = asyncio.get_running_loop()
    threading.Thread(target=start, args=(loop,), daemon=True).start()
    async with asyncio.timeout(5):
        return await over


async def test_a_start_that_hangs_is_given_up_and_ended_when_it_returns(held, folders):
    error = await crash_of_start(folders[QWEN], 0.2)
    assert "has not answered for 0.2 s" in str(error)
    assert not held.ended.is_set()
    held.go.set()
    assert await asyncio.to_thread(held.ended.wait, 5)


async def test_processes_of_a_start_that_hangs_are_killed(monkeypatch, folders):
    hangs = Spawning()
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM", hangs)
    monkeypatch.setattr(vllm_policy, "_HUNG_S", 0.1)
    error = await crash_of_start(folders[QWEN], 2.0)
    assert "has not answered for 2 s" in str(error)
    assert hangs.go.is_set()
    async with asyncio.timeout(5):
        while psutil.pid_exists(hangs.below):
            await asyncio.sleep(0.05)


async def test_a_start_that_nobody_wants_any_more_is_not_waited_for(monkeypatch, folders):
    """On a GPU it takes minutes, and the system would kill the agent."""
    hangs = Spawning()
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM", hangs)
    engine = VllmEngine(0, TABLE)
    await engine.start()
    load = asyncio.create_task(engine.load_policy(QWEN, folders[QWEN], 0))
    while not hasattr(hangs, "below"):
        await asyncio.sleep(0.05)
    load.cancel()
    await asyncio.wait({load})
    async with asyncio.timeout(10):
        await engine.close()
        assert hangs.go.is_set()
        while psutil.pid_exists(hangs.below):
            await asyncio.sleep(0.05)


async def test_a_process_that_dies_while_it_starts_is_not_waited_for(held, folders):
    held.go.set()
    error = await crash_of_start(folders[QWEN], 60.0)
    assert "died while it started" in str(error)
    assert held.ended.is_set()


async def test_a_death_during_a_swap_is_told_before_the_swap_has_failed():
    """Or the copy on the disk would count as what was wrong, and be fetched anew."""
    from vllm.v1.engine.exceptions import EngineDeadError

    class Dead:
        errored = True

        async def collective_rpc(self, method, args=()):
            raise EngineDeadError

    told = []
    policy = object.__new__(VllmPolicy)
    policy.name, policy.version, policy.dead, policy._ending = QWEN, 0, "", None
    policy._llm, policy._lost = Dead(), lambda of, why: told.append(why)
    with pytest.raises(WeightApplyFailed):
        await policy._swap("version 1", 1, "nowhere", [])
    assert told == ["vLLM died"]


async def test_a_worker_that_raises_ends_the_policy():
    """With several, vLLM leaves what the others answered to the next call."""

    class Raising:
        errored = False

        async def collective_rpc(self, method, args=()):
            raise RuntimeError("Worker failed with error 'no'")

    told = []
    policy = object.__new__(VllmPolicy)
    policy.name, policy.version, policy.dead, policy._ending = QWEN, 0, "", None
    policy._llm, policy._lost = Raising(), lambda of, why: told.append(why)
    with pytest.raises(WeightApplyFailed):
        await policy._swap("version 1", 1, "nowhere", [])
    assert len(told) == 1
    assert "Worker failed" in told[0]


class Drawn:
    """In place of a policy: what is drawn never ends by itself, weights wait for ``go``."""

    tokens_generated = 0
    dead = ""
    version = 0
    kv_tokens = 10**6

    def __init__(self, name):
        self.name = name
        self.futures = []
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.at_once = self.most = 0

    def check(self, request):
        pass

    def submit(self, request, sibling):
        self.futures.append(Future())
        return self.futures[-1]

    def apply(self, version, patch):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.release()
        self.go.wait(5)
        self.at_once -= 1
        return 0.0

    def stop(self, reason=None):
        for future in self.futures:
            if reason is not None and not future.done():
                future.set_exception(reason)


@pytest_asyncio.fixture(loop_scope="session")
async def two():
    """An engine with one place and two policies, and how to ask one of them for a sequence."""
    engine = VllmEngine(1, TABLE)
    await engine.start()
    for name in (QWEN, LLAMA):
        engine._hosted[name] = _Hosted(Drawn(name), 8, 0.0)

    def ask(policy):
        sampling = SamplingParams(max_new_tokens=4)
        request = GenerationRequest(
            request_id="r", policy=policy, prompt_tokens=(1,), n=1, sampling=sampling
        )
        return asyncio.create_task(engine.generate(request))

    yield engine, ask
    await engine.close()


async def test_who_waits_for_a_place_hears_at_once_that_the_policy_died(two):
    engine, ask = two
    runs = ask(LLAMA)
    await asyncio.sleep(0.01)
    waits = ask(QWEN)
    await asyncio.sleep(0.01)
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    engine._bury(engine._hosted[QWEN].policy, "vLLM died")
    async with asyncio.timeout(2):
        with pytest.raises(EngineCrashed):
            await waits
    assert (engine.stats().running, engine.stats().waiting) == (1, 0)
    assert not runs.done()
    runs.cancel()


async def test_a_request_that_is_cancelled_twice_leaves_nothing_behind(two):
    engine, ask = two
    task = ask(QWEN)
    await asyncio.sleep(0.01)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    assert engine._hosted[QWEN].idle.is_set()


async def test_weights_of_a_cancelled_swap_are_written_before_others(two):
    engine, _ = two
    policy = engine._hosted[QWEN].policy
    first = asyncio.create_task(engine.apply(QWEN, 1, {}))
    await asyncio.to_thread(policy.began.acquire)
    first.cancel()
    second = asyncio.create_task(engine.apply(QWEN, 2, {}))
    await asyncio.sleep(0.1)
    policy.go.set()
    await second
    assert policy.most == 1
    assert first.cancelled()


async def test_however_often_it_died_the_pause_is_bounded(two):
    engine, _ = two
    engine._crashes[QWEN] = 5000
    engine._back_off(QWEN)
    assert engine._not_before_s[QWEN] - engine._clock.monotonic_s() <= 120.0


@pytest.mark.parametrize("draws", [False, True])
async def test_a_step_that_hangs_ends_the_policy_and_a_slow_one_does_not(monkeypatch, draws):
    """Nobody else would notice while no weights come."""
    monkeypatch.setattr(vllm_policy, "_LOOK_S", 0.01)
    monkeypatch.setattr(vllm_policy, "STILL_S", 0.1)
    told = []
    policy = object.__new__(VllmPolicy)
    policy.name, policy.version, policy.dead, policy._ending = QWEN, 0, "", None
    policy.tokens_generated, policy._sequences, policy._hung = 0, set(), False
    policy._llm, policy._lost = Held(), lambda of, why: told.append(why)
    policy._llm.errored = False
    watch = asyncio.create_task(policy._watch())
    await asyncio.sleep(0.3)
    assert not watch.done()  # nothing is to be drawn
    policy._sequences.add("one")
    for _ in range(15):
        await asyncio.sleep(0.02)
        policy._drawn(int(draws))
    assert told == ([] if draws else ["vLLM has drawn no token for 0.1 s"])
    assert policy._hung is not draws
    watch.cancel()
