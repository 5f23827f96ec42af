"""A policy in two workers, each with its slices of the weights."""

import msgspec
import numpy as np
import pytest
from vllm_bench import LLAMA, TABLE, VllmBench

from edge_agent.engines.vllm_engine import VllmEngine
from transport.weights.folder import read_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_each_worker_gets_its_slices_and_gives_them_back(folders):
    engine = VllmEngine(0, msgspec.structs.replace(TABLE, tensor_parallel=2))
    await engine.start()
    try:
        await engine.load_policy("p", folders[LLAMA], 0)
        bench = VllmBench(engine, "p", folders[LLAMA])
        assert bench.weights == read_model_folder(folders[LLAMA])
        for share in (0.001, 0.1, 0.5):
            await bench.advance(share)
            assert dict(engine.read_weights("p")) == bench.weights
        rng = np.random.default_rng(1)
        for name, tensor in bench.weights.items():
            positions = rng.integers(0, tensor.cells().size, 20)
            read = engine.read_cells("p", name, positions)
            assert read.tolist() == tensor.cells()[positions].tolist()
        await bench.back()
        assert dict(engine.read_weights("p")) == bench.weights
        assert {v for c in await bench.generate(2) for v in c.versions} == {bench.version}
    finally:
        await engine.close()
