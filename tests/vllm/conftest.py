"""One engine with real vLLM for the whole suite: starting one takes 20 s."""

from pathlib import Path

import pytest
import pytest_asyncio
from torch_models import served_llama, served_qwen3
from vllm_bench import LLAMA, QWEN, TABLE, VllmBench

from edge_agent.engines.vllm_engine import VllmEngine


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(600))
        # vLLM and what it imports warn about themselves.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {QWEN: served_qwen3(place / "qwen"), LLAMA: served_llama(place / "llama")}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(folders):
    """With both models loaded as version 0."""
    engine = VllmEngine(0, TABLE)
    await engine.start()
    for policy, folder in folders.items():
        await engine.load_policy(policy, folder, 0)
    yield engine
    await engine.close()


@pytest.fixture(params=[QWEN, LLAMA])
def bench(request, engine, folders):
    return VllmBench(engine, request.param, folders[request.param])
