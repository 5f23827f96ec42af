"""Policies that are published as adapters, on a model that stays as it is."""

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from adapters import write_adapter, write_merged
from torch_models import random_gpt2, served_llama
from vllm_bench import TABLE, VllmBench

from edge_agent.engines.vllm_engine import VllmEngine
from transport.errors import ModelError, WeightApplyFailed
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellRun

pytestmark = pytest.mark.asyncio(loop_scope="session")

POLICY = "run/adapted"
VERSIONS = 12
QUESTIONS = [f"State the answer: {a} + {b} =" for a, b in ((3, 4), (40, 2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_llama(tmp_path_factory.mktemp("base") / "llama", seed=2)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    return write_adapter(model, tmp_path_factory.mktemp("adapter") / "f32")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(model, adapter):
    engine = VllmEngine(0, TABLE)
    await engine.start()
    await engine.load_policy(POLICY, adapter, 0, model)
    yield engine
    await engine.close()


@pytest.fixture
def bench(engine, adapter):
    return VllmBench(engine, POLICY, adapter)


async def held(bench):
    return await asyncio.to_thread(lambda: dict(bench.engine.read_weights(bench.policy)))


async def drawn(bench, policy=POLICY, engine=None, **sampling):
    engine = engine or bench.engine
    found = []
    for question in QUESTIONS:
        request = bench.request(1, question, question, temperature=0.0, **sampling)
        found += await engine.generate(msgspec.structs.replace(request, policy=policy))
    return found


async def test_after_each_delta_vllm_has_the_published_adapter_and_the_models_own_bits(
    bench, model, tmp_path
):
    """Then a fresh vLLM of the last version's snapshot draws the same, and torch computes the same
    log-probabilities on the model with the adapter merged into it, in float32."""
    engine = bench.engine
    assert engine.takes_adapters
    assert bench.weights == read_model_folder(bench.folder)
    base = await asyncio.to_thread(engine.checksums, POLICY)
    first = await drawn(bench)
    for number in range(VERSIONS):
        await bench.advance((0.02, 0.4, 1.0)[number % 3], bits=18)
        assert engine.version(POLICY) == bench.version
        assert await held(bench) == bench.weights
    assert await asyncio.to_thread(engine.checksums, POLICY) == base

    ours = await drawn(bench, max_new_tokens=24)
    assert [each.tokens[:16] for each in ours] != [each.tokens for each in first]
    assert {version for each in ours for version in each.versions} == {bench.version}
    snapshot = bench.snapshot(tmp_path / "snapshot")
    fresh = VllmEngine(0, TABLE)
    await fresh.start()
    try:
        await fresh.load_policy("run/fresh", snapshot, bench.version, model)
        assert await drawn(bench, "run/fresh", fresh, max_new_tokens=24) == ours
        assert await asyncio.to_thread(fresh.checksums, "run/fresh") == base
    finally:
        await fresh.close()

    merged = write_merged(model, snapshot, bench.weights, tmp_path / "merged")
    exact = logprobs(merged, bench, ours, "float32")
    rounded = np.abs(exact - logprobs(merged, bench, ours, "bfloat16"))
    without = np.abs(exact - logprobs(model, bench, ours, "float32"))
    difference = np.abs(exact - np.concatenate([each.logprobs for each in ours]))
    print(  # noqa: T201
        f"mean {difference.mean():.4f}, merged in bfloat16 {rounded.mean():.4f},"
        f" without the adapter {without.mean():.4f}"
    )
    assert difference.mean() < 2 * rounded.mean()
    assert difference.mean() < 0.1 * without.mean()


def logprobs(folder, bench, completions, dtype):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.inference_mode():
        for question, completion in zip(QUESTIONS, completions, strict=True):
            prompt = bench.engine.encode(POLICY, question)
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
            rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].numpy())
    return np.concatenate(found)


async def test_sequences_go_on_and_say_which_version_drew_them(bench):
    before = bench.version
    drawing = [asyncio.create_task(bench.generate(4, max_new_tokens=300)) for _ in range(3)]
    while not all(task.done() for task in drawing) and bench.version < before + 20:
        await bench.advance(1.0)
    done = [each for task in drawing for each in await task]
    for each in done:
        assert list(each.versions) == sorted(each.versions)
        assert before <= each.versions[0] <= each.versions[-1] <= bench.version
    assert any(len(set(each.versions)) > 1 for each in done)
    (after,) = await bench.generate(1)
    assert set(after.versions) == {bench.version}
    assert await held(bench) == bench.weights


async def test_the_cache_of_an_earlier_version_is_not_used(bench):
    """A prompt of several blocks that the cache has, new weights, and the same weights again."""
    prompt = [5 + (7 * n) % 200 for n in range(400)]
    before = await bench.generate(1, prompt=prompt, temperature=0.0, name="now")
    await bench.advance(1.0, bits=20)
    now = await bench.generate(1, prompt=prompt, temperature=0.0, name="now")
    await bench.advance(0.0)
    fresh = await bench.generate(1, prompt=prompt, temperature=0.0, name="now")
    assert [each.logprobs for each in now] != [each.logprobs for each in before]
    assert [each.tokens for each in now] == [each.tokens for each in fresh]
    assert [each.logprobs for each in now] == [each.logprobs for each in fresh]


async def test_what_does_not_fit_changes_nothing(bench):
    (good, tensor), (name, other), *_ = bench.weights.items()
    huge = np.full(other.cells().size, 0x7F7FFFFF, np.uint32)  # finite, and none in bfloat16
    change = {good: (CellRun(0, np.roll(tensor.cells(), 1)),), name: (CellRun(0, huge),)}
    with pytest.raises(WeightApplyFailed, match="too large for BF16"):
        await bench.engine.apply(POLICY, bench.version + 1, change)
    assert bench.engine.version(POLICY) == bench.version
    assert await held(bench) == bench.weights
    await bench.advance()
    assert await held(bench) == bench.weights


async def test_cells_that_are_not_the_versions_do_not_pass_for_it(bench):
    """As after a bit flip: the policy's own copy says nothing about what vLLM has."""
    policy = bench.engine._hosted[POLICY].policy
    name, tensor = next(iter(bench.weights.items()))
    at = np.array([0, 3])
    read = bench.engine.read_cells(POLICY, name, at)
    assert read.tolist() == tensor.cells()[at].tolist()
    other = tensor.cells()[3:4] ^ np.uint32(1 << 20)
    keeps, policy.weights._bits.written = policy.weights._bits.written, lambda patch: None
    await bench.engine.apply(POLICY, bench.version, {name: (CellRun(3, other),)})
    policy.weights._bits.written = keeps
    read = bench.engine.read_cells(POLICY, name, at)
    assert (read == tensor.cells()[at]).tolist() == [True, False]
    assert await held(bench) != bench.weights
    await bench.back()
    assert await held(bench) == bench.weights


async def test_another_snapshot_of_the_adapter_is_taken_in_place(bench, model, tmp_path):
    process = bench.engine._hosted[POLICY].policy
    await bench.advance(0.3)
    snapshot, weights = bench.snapshot(tmp_path / "later"), bench.weights
    await bench.advance(0.3)
    await bench.engine.load_policy(POLICY, snapshot, 77, model)
    assert bench.engine._hosted[POLICY].policy is process
    assert bench.engine.version(POLICY) == 77
    assert await held(bench) == weights


async def test_two_workers_have_their_slices_of_an_adapter_whose_scale_rounds(model, tmp_path):
    """And all of its processes end with the process that started them."""
    adapter = write_adapter(model, tmp_path / "adapter", alpha=12.0, dtype="BF16")
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    roots = [Path(__file__).parents[2], Path(__file__).parents[1] / "support"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, script, model, adapter, tmp_path / "found"), env=environment
    )
    try:
        while not (tmp_path / "found").exists() and owner.returncode is None:
            await asyncio.sleep(0.1)
        found = json.loads((tmp_path / "found").read_bytes())
        processes = [psutil.Process(pid) for pid in found["processes"]]
    finally:
        owner.kill()
        await owner.wait()
    assert found["equal"] == [True] * 6
    assert len(processes) >= 3  # the engine core and two workers
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    assert not left


OWNER = """
import asyncio, json, sys, time
from pathlib import Path

if __name__ == "__main__":
    import msgspec, psutil
    from vllm_bench import TABLE, VllmBench
    from edge_agent.engines.vllm_engine import VllmEngine
    from edge_agent.engines.vllm_weights import WorkerFault
    from transport.weights.folder import read_model_folder

    model, adapter, said = map(Path, sys.argv[1:])

    async def main():
        engine = VllmEngine(0, msgspec.structs.replace(TABLE, tensor_parallel=2))
        await engine.start()
        await engine.load_policy("run/p", adapter, 0, model)
        bench = VllmBench(engine, "run/p", adapter)
        equal = [bench.weights == read_model_folder(adapter)]
        for share in (0.01, 0.5, 1.0):
            await bench.advance(share)
            equal.append(dict(engine.read_weights("run/p")) == bench.weights)
        try:  # the first worker has no such storage; the other's answer is nobody else's
            engine._hosted["run/p"].policy._ask("read_cells", [[(99, b"")], []])
        except WorkerFault:
            equal.append(dict(engine.read_weights("run/p")) == bench.weights)
        (drawn,) = await bench.generate(1)
        equal.append(set(drawn.versions) == {bench.version})
        named = psutil.Process().children(recursive=True)
        processes = [one.pid for one in named if "resource_tracker" not in " ".join(one.cmdline())]
        said.with_suffix(".new").write_text(json.dumps({"equal": equal, "processes": processes}))
        said.with_suffix(".new").rename(said)
        time.sleep(300)

    asyncio.run(main())
"""


async def test_what_cannot_be_an_adapter_here_is_refused_before_vllm_starts(
    model, adapter, tmp_path
):
    engine = VllmEngine(0, TABLE)
    await engine.start()
    with pytest.raises(ModelError, match="is an adapter"):
        await engine.load_policy("run/p", adapter, 0)
    with pytest.raises(ModelError, match="is a whole model"):
        await engine.load_policy("run/p", model, 0, model)
    gpt2 = random_gpt2(tmp_path / "gpt2")
    small = write_adapter(model, tmp_path / "gpt2-adapter", targets=("q_proj",))
    with pytest.raises(ModelError, match=r"no adapters on GPT2LMHeadModel.*lora\.publish"):
        await engine.load_policy("run/p", small, 0, gpt2)
    large = write_adapter(model, tmp_path / "large", targets=("q_proj",), rank=600)
    with pytest.raises(ModelError, match="rank 600"):
        await engine.load_policy("run/p", large, 0, model)
    await engine.close()
