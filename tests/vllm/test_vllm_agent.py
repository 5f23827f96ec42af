"""A whole agent that generates with vLLM: it loads, swaps, works, and outlives its engine."""

import asyncio
import os
import signal

import pytest
from agent_cloud import POLICY, AgentCloud
from torch_models import served_llama
from vllm_bench import TABLE

from edge_agent.daemon import make_engine
from transport.memory_links import MemoryNetwork
from transport.messages import AttemptFailed, Hello, VersionServing

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_agent_serves_swaps_and_loads_again_what_its_engine_lost(tmp_path):
    stop, engines = asyncio.Event(), []

    def making(config, clock):
        engines.append(make_engine(config, clock))
        return engines[-1]

    model = served_llama(tmp_path / "llama")
    async with AgentCloud(tmp_path, MemoryNetwork(), model) as cloud, asyncio.timeout(500):
        cloud.publish()
        life = cloud.start(
            stop,
            engines=making,
            engine="vllm",
            slots=0,
            vllm=TABLE,
            local_models={"adapted": str(model)},
        )
        hello = await cloud.hear(Hello)
        assert hello.agent.bases == ("adapted",)  # it could have its adapter
        assert (hello.agent.engine, hello.agent.slots) == ("vllm", TABLE.max_sequences)
        await cloud.hear(VersionServing)
        cloud.publish()
        serving = await cloud.hear(VersionServing, 2)
        assert (serving.version, serving.digest) == (1, cloud.digest())
        assert 0 < serving.pause_s < 5
        first = cloud.offer(1)
        await cloud.until(lambda: first.attempt in cloud.groups())

        long = cloud.offer(2, max_new_tokens=400, group_size=16)
        (engine,) = engines
        while not engine.stats().running:
            await asyncio.sleep(0.01)
        vllm = engine._hosted[POLICY].policy._llm
        os.kill(vllm.engine_core.resources.engine_manager.processes[0].pid, signal.SIGKILL)
        failed = await cloud.hear(AttemptFailed)
        assert (failed.attempt, failed.code) == (long.attempt, "engine.crashed")
        again = await cloud.hear(VersionServing, 3)
        assert (again.version, again.digest) == (1, cloud.digest())
        second = cloud.offer(3)
        await cloud.until(lambda: second.attempt in cloud.groups())
        stop.set()
        assert await life == 0
    assert (tmp_path / "agent" / "vllm-room.json").exists()
