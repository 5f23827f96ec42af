"""The doctor's look at vLLM, its memory and model folders. There is no GPU: what the system's own
programs would print is given."""

import asyncio

from torch_models import EXAMPLE

from edge_agent.config import AgentTable, VllmTable
from edge_agent.engine_probes import models_verdict, vllm_memory_verdict, vllm_verdict

CUDA = AgentTable(engine="vllm", device="cuda:1", vllm=VllmTable(memory_share=0.5))
CPU = AgentTable(engine="vllm", vllm=VllmTable(kv_cache_gib=0.001))


def prints(status, out):
    async def call(*argv):
        return status, out

    return call


def ask(verdict, table, status, out=""):
    return asyncio.run(verdict(table, prints(status, out)))


def test_vllm_is_there_and_made_for_the_device():
    assert ask(vllm_verdict, CUDA, 0, "a warning\n0.32.0 2.13.0 cuda\n").remedy == ""
    assert "cuda:1" in ask(vllm_verdict, CUDA, 0, "0.32.0 2.13.0+cpu cpu").text
    missing = ask(vllm_verdict, CUDA, 1, "Traceback\nModuleNotFoundError: No module named 'vllm'\n")
    assert "No module named 'vllm'" in missing.text
    assert "farflow[vllm]" in missing.remedy
    assert ask(vllm_verdict, CUDA, None).remedy


def test_the_memory_that_it_is_to_take_is_free():
    two = "100, 80000\n{}, 80000\n"
    assert ask(vllm_memory_verdict, CUDA, 0, two.format(50000)).remedy == ""
    assert (
        "lower agent.vllm.memory_share" in ask(vllm_memory_verdict, CUDA, 0, two.format(9)).remedy
    )
    assert ask(vllm_memory_verdict, CUDA, 0, "100, 80000\n").remedy
    assert ask(vllm_memory_verdict, CUDA, 9).remedy
    assert ask(vllm_memory_verdict, CUDA, 0, two.format("[N/A]")).remedy  # memory shared with a CPU
    assert ask(vllm_memory_verdict, CPU, 0).remedy == ""
    assert "kv_cache_gib" in ask(vllm_memory_verdict, AgentTable(engine="vllm"), 0).remedy
    huge = AgentTable(engine="vllm", vllm=VllmTable(kv_cache_gib=1e6))
    assert "lower" in ask(vllm_memory_verdict, huge, 0).remedy


def test_local_models_are_models(tmp_path):
    assert models_verdict(AgentTable()).remedy == ""
    good = models_verdict(AgentTable(local_models={"solver": str(EXAMPLE)}))
    assert (good.remedy, good.text[:14]) == ("", "solver: qwen3,")
    bad = models_verdict(AgentTable(local_models={"solver": str(tmp_path)}))
    assert "config.json" in bad.text
    assert bad.remedy
