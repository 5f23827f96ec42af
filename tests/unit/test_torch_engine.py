"""The torch engine: exact log-probabilities, repeatable draws, weights that change in flight."""

import asyncio
import gc
import math

import numpy as np
import pytest
import pytest_asyncio
from torch_models import EXAMPLE, random_gpt2, random_qwen3

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from edge_agent.engines.torch_policy import HostedPolicy
from transport.errors import GenerationFailed, ModelError, WeightApplyFailed
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellList, CellRun, whole
from transport.weights.tensors import TensorBytes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return random_gpt2(tmp_path_factory.mktemp("gpt2") / "model")


@pytest_asyncio.fixture
async def engine():
    engine = TorchEngine(slots=16)
    await engine.start()
    yield engine
    await engine.close()


def request(prompt, *, name="r", policy="p", n=1, **sampling):
    return GenerationRequest(
        request_id=name,
        policy=policy,
        prompt_tokens=tuple(prompt),
        n=n,
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
    )


def recomputed(folder, prompt, completion, temperature=1.0):
    """Log-probabilities of a completion by one plain forward pass of the stock model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[*prompt, *completion.tokens]])
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs[range(len(completion.tokens)), list(completion.tokens)].tolist()


async def test_log_probabilities_match_a_full_forward_pass_whatever_the_padding(engine, qwen, gpt2):
    prompts = [(3, 7, 9), (5,), (3, 7, 9), (11, 12, 13, 14, 15, 16, 17), (9,) * 40]
    for policy, folder in (("q", qwen), ("g", gpt2)):
        await engine.load_policy(policy, folder, 0)
        results = await asyncio.gather(
            *(
                engine.generate(
                    request(p, name=f"r{i}", policy=policy, n=3, temperature=0.7, seed=i)
                )
                for i, p in enumerate(prompts)
            )
        )
        for prompt, completions in zip(prompts, results, strict=True):
            for completion in completions:
                expected = recomputed(folder, prompt, completion, 0.7)
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                assert len(completion.versions) == len(completion.tokens)


async def test_greedy_is_what_transformers_generates(engine):
    import torch
    from transformers import AutoModelForCausalLM

    await engine.load_policy("p", EXAMPLE, 0)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32).eval()
    prompts = [engine.encode("p", QUESTION.format(17 + i, 80 - i)) for i in range(12)]
    results = await asyncio.gather(*(engine.generate(request(p, temperature=0.0)) for p in prompts))
    for prompt, (completion,) in zip(prompts, results, strict=True):
        tokens = torch.tensor([prompt])
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False
        )
        assert completion.tokens == tuple(whole[0, len(prompt) :].tolist())
        assert completion.finish_reason == "stop"
        assert completion.tokens[-1] == 1


async def test_a_request_draws_the_same_alone_and_in_company(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    wanted = request((3, 7, 9), name="wanted", n=4, max_new_tokens=20, seed=5)
    alone = await engine.generate(wanted)
    others = [request((9, i), name=f"o{i}", n=2, max_new_tokens=3 + i) for i in range(8)]
    company = await asyncio.gather(*map(engine.generate, [*others, wanted]))
    assert [c.tokens for c in company[-1]] == [c.tokens for c in alone]
    assert len({c.tokens for c in alone}) == 4
    other_seed = await engine.generate(request((3, 7, 9), name="wanted", n=4, seed=6))
    assert [c.tokens[:8] for c in alone] != [c.tokens for c in other_seed]


async def test_more_siblings_than_slots_run_in_several_waves(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    completions = await engine.generate(request((3, 4), n=50, max_new_tokens=3))
    assert len(completions) == 50
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.stats().tokens_generated == sum(len(c.tokens) for c in completions)
    assert engine.stats().busy_s > 0


async def test_a_sequence_ends_at_a_stop_token_or_at_its_length(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    (free,) = await engine.generate(request((3, 4), max_new_tokens=6))
    assert (len(free.tokens), free.finish_reason) == (6, "length")
    (stopped,) = await engine.generate(
        request((3, 4), max_new_tokens=6, stop_token_ids=(free.tokens[2],))
    )
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]
    assert stopped.finish_reason == "stop"


async def test_the_nucleus_holds_whatever_else_is_in_the_batch(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    narrow, wide = await asyncio.gather(
        engine.generate(request((3, 4), name="a", n=8, top_p=1e-6)),
        engine.generate(request((3, 4), name="b", n=8)),
    )
    assert len({c.tokens for c in narrow}) == 1
    assert all(logprob == 0 for c in narrow for logprob in c.logprobs)
    assert len({c.tokens for c in wide}) == 8


async def test_the_chat_template_is_used_where_there_is_one(engine, qwen, gpt2):
    await engine.load_policy("chat", qwen, 0)
    await engine.load_policy("raw", gpt2, 0)
    prompt = QUESTION.format(12, 34)
    chat, raw = engine.encode("chat", prompt), engine.encode("raw", prompt)
    assert chat == (3, *raw, 4)
    assert engine.decode("chat", (*chat, 1)) == prompt


# ---- weights ---------------------------------------------------------------------------------


def changed_weights(folder, factor=1.5):
    """Every matrix of a bf16 folder times ``factor``, in exact bf16."""
    changed = {}
    for name, tensor in read_model_folder(folder).items():
        values = (tensor.cells().astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        cells = (values.view(np.uint32) >> 16).astype("<u2")
        changed[name] = TensorBytes("BF16", tensor.shape, cells.tobytes())
    return changed


async def test_sequences_in_flight_go_on_with_the_new_weights_and_say_so(engine, qwen):
    await engine.load_policy("p", qwen, 3)
    running = asyncio.create_task(engine.generate(request((3, 4), n=16, max_new_tokens=400)))
    async with asyncio.timeout(20):
        while engine.stats().tokens_generated == 0:
            await asyncio.sleep(0.001)
    pause_s = await engine.apply("p", 4, whole(changed_weights(qwen)))
    assert 0 <= pause_s < 1
    assert engine.version("p") == 4
    completions = await running
    assert all(list(c.versions) == sorted(c.versions) for c in completions)
    assert any(c.versions[0] == 3 and c.versions[-1] == 4 for c in completions)
    fresh = await engine.generate(request((3, 4)))
    assert set(fresh[0].versions) == {4}


async def test_the_weights_read_back_are_the_bits_that_were_loaded_and_applied(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    before = list(engine.read_weights("p"))
    assert before == list(read_model_folder(qwen).items())
    new = changed_weights(qwen)
    await engine.apply("p", 1, whole(new))
    await engine.apply("p", 1, whole(new))
    assert list(engine.read_weights("p")) == list(new.items())


async def test_new_weights_change_the_log_probabilities_to_those_of_the_new_model(
    engine, qwen, tmp_path
):
    other = random_qwen3(tmp_path / "other", seed=9)
    await engine.load_policy("p", qwen, 0)
    await engine.apply("p", 1, whole(read_model_folder(other)))
    (completion,) = await engine.generate(request((3, 4, 5), max_new_tokens=20))
    expected = recomputed(other, (3, 4, 5), completion)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def cells(*values):
    return np.array(values, "<u2")


NORM = "model.norm.weight"
UNFIT = {
    "unknown name": ({"model.nrm.weight": (CellRun(0, cells(0)),)}, "no tensor"),
    "too many": ({NORM: (CellRun(0, cells(*range(33))),)}, "33 cells"),
    "wrong type": ({NORM: (CellRun(0, cells(0).astype("<u4")),)}, "uint32"),
    "not finite": ({NORM: (CellList(np.array([9]), cells(0x7F80)),)}, "not finite"),
}


@pytest.mark.parametrize(("bad", "message"), UNFIT.values(), ids=UNFIT.keys())
async def test_weights_that_do_not_fit_change_nothing(engine, qwen, bad, message):
    await engine.load_policy("p", qwen, 7)
    good = changed_weights(qwen)
    first = min(good)
    with pytest.raises(WeightApplyFailed) as error:
        await engine.apply("p", 8, {**whole({first: good[first]}), **bad})
    assert message in str(error.value)
    assert "p version 8" in str(error.value)
    assert engine.version("p") == 7
    assert dict(engine.read_weights("p")) == read_model_folder(qwen)


async def test_an_unloaded_policy_leaves_the_memory(engine, qwen):
    def loaded():
        return sum(type(each) is HostedPolicy for each in gc.get_objects())

    gc.collect()
    before = loaded()
    await engine.load_policy("p", qwen, 0)
    await engine.generate(request((3, 4), n=2))
    assert loaded() == before + 1
    await engine.unload_policy("p")
    assert loaded() == before


async def test_policies_do_not_share_weights_versions_or_batches(engine, qwen, tmp_path):
    other = random_qwen3(tmp_path / "other", seed=9)
    await engine.load_policy("a", qwen, 1)
    await engine.load_policy("b", other, 5)
    results = await asyncio.gather(
        *(
            engine.generate(request((3, 4), name=f"r{i}", policy="ab"[i % 2], n=3))
            for i in range(10)
        )
    )
    for i, completions in enumerate(results):
        folder, version = ((qwen, 1), (other, 5))[i % 2]
        for completion in completions:
            assert set(completion.versions) == {version}
            expected = recomputed(folder, (3, 4), completion)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    await engine.apply("a", 2, whole(changed_weights(qwen)))
    assert (engine.version("a"), engine.version("b"), engine.version("c")) == (2, 5, None)


# ---- failures --------------------------------------------------------------------------------

BAD_REQUESTS = {
    "unknown policy": ({"policy": "q"}, "'q' is not loaded"),
    "no prompt": ({"prompt": ()}, "no tokens"),
    "token outside": ({"prompt": (3, 317)}, "vocabulary of 317"),
    "no siblings": ({"n": 0}, "at least 1"),
    "no tokens wanted": ({"max_new_tokens": 0}, "at least 1"),
    "too long": ({"max_new_tokens": 600}, "512 positions"),
    "temperature": ({"temperature": -1.0}, "temperature"),
    "temperature is not a number": ({"temperature": math.nan}, "temperature"),
    "top_p": ({"top_p": 0.0}, "top_p"),
}


@pytest.mark.parametrize(("change", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
async def test_a_bad_request_fails_alone_and_says_why(engine, qwen, change, message):
    await engine.load_policy("p", qwen, 0)
    bad = request(**{"prompt": (3, 4), "name": "bad", **change})
    good, failure = await asyncio.gather(
        engine.generate(request((3, 4))), engine.generate(bad), return_exceptions=True
    )
    assert isinstance(failure, GenerationFailed)
    assert message in str(failure)
    assert len(good) == 1


async def test_a_cancelled_request_leaves_the_engine_and_the_others(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    long = asyncio.create_task(engine.generate(request((3, 4), name="l", n=16, max_new_tokens=500)))
    queued = asyncio.create_task(engine.generate(request((3, 5), name="q", n=16)))
    await asyncio.sleep(0)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert len(await queued) == 16
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.stats().tokens_generated < 16 * 500


async def test_logits_that_are_not_finite_fail_the_request_and_new_weights_heal_it(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    good = dict(read_model_folder(qwen))
    largest = cells(0x7F7F)  # 3.39e38
    await engine.apply("p", 1, {NORM: (CellRun(0, largest.repeat(32)),)})
    with pytest.raises(GenerationFailed, match="p version 1: the logits are not finite"):
        await engine.generate(request((3, 4), n=4))
    await engine.apply("p", 2, whole({NORM: good[NORM]}))
    assert len(await engine.generate(request((3, 4), n=4))) == 4


async def test_closing_fails_what_is_open_and_what_comes_later(qwen):
    engine = TorchEngine(slots=4)
    with pytest.raises(GenerationFailed, match="not running"):
        await engine.generate(request((3, 4)))
    await engine.start()
    await engine.load_policy("p", qwen, 0)
    open_requests = [
        asyncio.create_task(engine.generate(request((3, 4), name=f"r{i}", n=4, max_new_tokens=500)))
        for i in range(3)
    ]
    await asyncio.sleep(0)
    await engine.close()
    results = await asyncio.gather(*open_requests, return_exceptions=True)
    assert all(isinstance(result, GenerationFailed) for result in results)
    with pytest.raises(GenerationFailed, match="not running"):
        await engine.generate(request((3, 4)))
    with pytest.raises(WeightApplyFailed, match="not running"):
        await engine.apply("p", 1, {})
    await engine.close()
    await engine.start()
    assert len(await engine.generate(request((3, 4)))) == 1
    await engine.close()


async def test_weights_of_a_policy_that_is_not_loaded_are_refused(engine):
    with pytest.raises(WeightApplyFailed, match="not loaded"):
        await engine.apply("p", 1, {})


async def test_a_folder_that_does_not_load_leaves_the_policy_as_it_was(engine, qwen, tmp_path):
    await engine.load_policy("p", qwen, 2)
    with pytest.raises(ModelError, match=r"config\.json: is missing"):
        await engine.load_policy("p", tmp_path, 3)
    assert engine.version("p") == 2
    assert len(await engine.generate(request((3, 4)))) == 1


async def test_the_event_loop_stays_responsive_while_the_engine_decodes(engine, qwen):
    await engine.load_policy("p", qwen, 0)
    running = asyncio.create_task(engine.generate(request((3, 4), n=16, max_new_tokens=300)))
    turns = 0
    while not running.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10
