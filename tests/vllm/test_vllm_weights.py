"""Weights in vLLM: the published bits after every swap, and what is computed with them."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from vllm_bench import TABLE

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.vllm_engine import VllmEngine
from transport.errors import GenerationFailed, WeightApplyFailed
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellList, CellRun

pytestmark = pytest.mark.asyncio(loop_scope="session")

VERSIONS = 50
QUESTIONS = [f"State the answer: {a} + {b} =" for a, b in ((3, 4), (12, 5), (7, 7), (40, 2))]


async def test_it_holds_the_bits_of_the_folder_it_was_loaded_from(bench):
    await bench.back()
    assert dict(bench.engine.read_weights(bench.policy)) == read_model_folder(bench.folder)
    sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
    assert sockets.name.startswith("farflow-sockets-")
    assert os.listdir(sockets), "it has them elsewhere"


async def test_after_each_of_fifty_deltas_the_weights_are_the_published_ones(bench, tmp_path):
    """Then a fresh vLLM of the last version's snapshot has the same parameters by vLLM's own
    checksums, writes the same greedy text, and computes the same log-probabilities."""
    await bench.back()
    pauses = []
    for number in range(VERSIONS):
        share = (0.001, 0.05, 0.4)[number % 3]
        pauses.append(await bench.advance(share))
        assert bench.engine.version(bench.policy) == bench.version
        read = await asyncio.to_thread(lambda: dict(bench.engine.read_weights(bench.policy)))
        assert read == bench.weights
    print(f"{bench.policy}: pause p50 {1e3 * float(np.median(pauses)):.1f} ms")  # noqa: T201
    assert bench.weights != read_model_folder(bench.folder)

    ours = [
        (await bench.generate(1, prompt=question, temperature=0.0, max_new_tokens=48))[0]
        for question in QUESTIONS
    ]
    fresh = VllmEngine(0, TABLE)
    await fresh.start()
    try:
        await fresh.load_policy("fresh", bench.snapshot(tmp_path / "snapshot"), bench.version)
        assert await asyncio.to_thread(fresh.checksums, "fresh") == await asyncio.to_thread(
            bench.engine.checksums, bench.policy
        )
        for question, mine in zip(QUESTIONS, ours, strict=True):
            request = GenerationRequest(
                request_id=question,
                policy="fresh",
                prompt_tokens=fresh.encode("fresh", question),
                n=1,
                sampling=SamplingParams(max_new_tokens=48, temperature=0.0),
            )
            assert await fresh.generate(request) == [mine]
    finally:
        await fresh.close()


async def test_log_probabilities_are_those_of_the_torch_engine(bench, tmp_path):
    """Of which a model in bf16 is as far away in torch itself as in vLLM."""
    await bench.advance(0.4)
    drawn = await bench.generate(8, temperature=1.0, max_new_tokens=24)
    prompt = bench.engine.encode(bench.policy, "State the answer: 3 + 4 =")
    folder = bench.snapshot(tmp_path / "snapshot")
    ours = recomputed(folder, prompt, drawn, "float32")
    rounded = np.abs(ours - recomputed(folder, prompt, drawn, "bfloat16"))
    theirs = np.concatenate([c.logprobs for c in drawn])
    difference = np.abs(ours - theirs)
    print(f"{bench.policy}: mean {difference.mean():.4f}, in torch {rounded.mean():.4f}")  # noqa: T201
    assert difference.mean() < 1.5 * rounded.mean()
    assert difference.max() < 3 * rounded.max()


def recomputed(folder, prompt, completions, dtype):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.inference_mode():
        for completion in completions:
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
            rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].numpy())
    return np.concatenate(found)


async def test_single_cells_are_read_where_they_are_published(bench):
    await bench.back()
    rng = np.random.default_rng(3)
    for name, tensor in bench.weights.items():
        positions = rng.integers(0, tensor.cells().size, 16)
        read = bench.engine.read_cells(bench.policy, name, positions)
        assert read.tolist() == tensor.cells()[positions].tolist()
    with pytest.raises(WeightApplyFailed):
        bench.engine.read_cells(bench.policy, name, np.array([tensor.cells().size]))
    with pytest.raises(GenerationFailed, match="run/nobody"):
        bench.engine.read_cells("run/nobody", name, np.array([0]))


@pytest.mark.parametrize("fault", ["name", "range", "order", "type", "infinity"])
async def test_what_does_not_fit_changes_nothing(bench, fault):
    await bench.back()
    (good, tensor), (name, other), *_ = bench.weights.items()
    two, end = other.cells()[:2], other.cells().size
    wrong = {
        "name": {"no.such.weight": (CellRun(0, two),)},
        "range": {name: (CellList(np.array([3, end]), two),)},
        "order": {name: (CellList(np.array([3, 2]), two),)},
        "type": {name: (CellRun(0, two.view(np.uint8)),)},
        "infinity": {name: (CellRun(0, np.array([0x7F80], np.uint16)),)},
    }[fault]
    change = {good: (CellRun(0, np.roll(tensor.cells(), 1)),), **wrong}
    with pytest.raises(WeightApplyFailed):
        await bench.engine.apply(bench.policy, bench.version + 1, change)
    assert bench.engine.version(bench.policy) == bench.version
    assert dict(bench.engine.read_weights(bench.policy)) == bench.weights
    await bench.advance()
    assert dict(bench.engine.read_weights(bench.policy)) == bench.weights
