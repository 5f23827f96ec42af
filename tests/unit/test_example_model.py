"""The shipped model: stock, small, below one half, and teachable."""

import importlib.util
import random
from collections import deque

import pytest
from torch_models import EXAMPLE

from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.torch_engine import TorchEngine
from scheduler.tasks import is_held_out, open_source
from transport.runs import TaskSpec
from transport.weights.patch import whole

pytestmark = pytest.mark.slow

TASK = TaskSpec(
    source="reasoning-gym",
    dataset="chain_sum",
    settings={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    held_out_one_in=5,
)


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location(
        "make_arithmetic", EXAMPLE.with_name("make_arithmetic.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(EXAMPLE)


def test_it_is_a_small_stock_folder_with_bf16_weights():
    import torch
    from transformers import AutoModelForCausalLM

    assert sum(path.stat().st_size for path in EXAMPLE.iterdir()) <= 4 * 2**20
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype="auto")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert 500_000 <= sum(weight.numel() for weight in model.parameters()) <= 2_000_000


def test_a_question_of_the_task_is_nine_tokens_and_any_text_survives(loaded, recipe):
    _, tokenizer = loaded
    for item in open_source(TASK, seed=3).items("train", 0, 200):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}], tokenize=False, add_generation_prompt=True
        )
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 9
        assert tokenizer.decode(tokenizer.encode(item.answer), skip_special_tokens=True) == (
            item.answer
        )
        _, a, operator, b, _ = item.prompt.rsplit(" ", 4)
        assert recipe.question((int(a), operator, int(b))) == item.prompt
    strange = "Zwölf: 12 * 'x'\n\t日本"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange


def test_greedy_held_out_accuracy_is_between_two_fifths_and_one_half(loaded, recipe):
    model, tokenizer = loaded
    problems = recipe.held_out_problems()
    assert len(problems) > 3000
    assert 0.40 <= recipe.held_out_accuracy(model, tokenizer, problems) <= 0.50


def test_the_recipe_shows_no_held_out_question_and_right_answers_only_where_it_says(recipe, loaded):
    _, tokenizer = loaded
    held_out = frozenset(recipe.held_out_problems())
    for careless in (False, True):
        tokens, labels = recipe.make_batch(tokenizer, held_out, random.Random(1), careless=careless)
        right = 0
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
            text = tokenizer.decode(row[:9], skip_special_tokens=True)
            assert not is_held_out(text, 5)
            _, a, operator, b, _ = text.rsplit(" ", 4)
            answer = tokenizer.decode([t for t in label if t > 1])
            right += answer == str(recipe.true_answer((int(a), operator, int(b))))
        assert right == 256 if not careless else 90 < right < 180


def test_the_pupil_errs_in_carry_borrow_and_sign_only(recipe):
    rng = random.Random(2)
    for problem, allowed in {
        (12, "+", 34): {"46"},
        (18, "+", 34): {"52", "42"},
        (56, "-", 34): {"22"},
        (53, "-", 34): {"19", "29"},
        (34, "-", 56): {"-22", "22"},
        (34, "-", 53): {"-19", "19", "-29", "29"},
    }.items():
        assert {recipe.pupil_answer(problem, rng) for _ in range(200)} == allowed


def test_the_same_seed_makes_the_same_start_and_another_seed_another(recipe):
    import torch

    one, again, other = (recipe.make_model(317, seed).state_dict() for seed in (17, 17, 18))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


STEPS, GROUPS, LAG = 30, 32, 2


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_thirty_steps_with_stale_rollouts_teach_it_most_of_what_it_lacks():
    import asyncio

    source = open_source(TASK, seed=1)
    trainer = TorchTrainer({"lr": 1e-4, "warmup_steps": 5})
    trainer.load(EXAMPLE)
    engine = TorchEngine(slots=64)
    await engine.start()
    await engine.load_policy("p", EXAMPLE, 0)

    async def answers(item, n, temperature):
        prompt = engine.encode("p", item.prompt)
        sampling = SamplingParams(max_new_tokens=8, temperature=temperature)
        request = GenerationRequest(
            request_id=f"{item.index}", policy="p", prompt_tokens=prompt, n=n, sampling=sampling
        )
        return [
            TrainingSequence(
                group=f"{item.index}",
                prompt_tokens=prompt,
                tokens=c.tokens,
                logprobs=c.logprobs,
                versions=c.versions,
                loss_mask=(True,) * len(c.tokens),
                reward=float(engine.decode("p", c.tokens) == item.answer),
            )
            for c in await engine.generate(request)
        ]

    async def accuracy():
        items = source.items("eval", 0, 512)
        found = await asyncio.gather(*(answers(item, 1, 0.0) for item in items))
        return sum(group[0].reward for group in found) / len(items)

    before = await accuracy()
    published = deque([trainer.published_state()] * (LAG + 1), maxlen=LAG + 1)
    for step in range(STEPS):
        await engine.apply("p", max(0, step - LAG), whole(published[0]))
        items = source.items("train", step * GROUPS, GROUPS)
        groups = await asyncio.gather(*(answers(item, 8, 1.0) for item in items))
        facts = trainer.step(groups)
        assert facts["skipped"] == facts["malformed_groups"] == 0
        published.append(trainer.published_state())
    await engine.apply("p", STEPS, whole(published[-1]))
    after = await accuracy()
    await engine.close()
    assert before <= 0.5
    assert after >= 0.75
