"""Every preset steps a real model, and the reference is the run's version 0 and stays it."""

import random

import pytest
from torch_models import random_qwen3

from cloud_trainer.presets import PRESETS
from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("qwen") / "model")


def trainer_of(folder, **settings):
    trainer = TorchTrainer({"lr": 1e-3, "warmup_steps": 0, "max_tokens": 6, **settings})
    trainer.load(folder)
    return trainer


def groups_of(seed, *, groups=2, siblings=4):
    rng = random.Random(seed)

    def sequence(prompt):
        tokens = tuple(rng.randrange(5, 317) for _ in range(rng.randint(1, 6)))
        return TrainingSequence(
            group="g",
            prompt_tokens=prompt,
            tokens=tokens,
            logprobs=tuple(-4 + rng.gauss(0, 0.1) for _ in tokens),
            versions=(0,) * len(tokens),
            loss_mask=(True,) * len(tokens),
            reward=float(tokens[0] < 160),
        )

    prompts = [tuple(rng.randrange(5, 317) for _ in range(3)) for _ in range(groups)]
    return [[sequence(prompt) for _ in range(siblings)] for prompt in prompts]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_steps_a_model(qwen, preset):
    trainer = trainer_of(qwen, preset=preset)
    before = trainer.published_state()
    facts = trainer.step(groups_of(1))
    assert (facts["skipped"], facts["malformed_groups"]) == (0.0, 0.0)
    assert facts["grad_norm"] > 0
    assert all(type(value) is float for value in facts.values())
    assert trainer.published_state() != before
    assert ("kl_reference" in facts) == (preset == "grpo")
    assert ("second_moment" in facts) == (preset == "m2po")


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_is_version_zero_also_after_a_restart(qwen, kl_in):
    settings = {"kl_coefficient": 0.1, "kl_in": kl_in}
    trainer = trainer_of(qwen, **settings)
    distances = [trainer.step(groups_of(seed))["kl_reference"] for seed in range(3)]
    assert distances[0] == 0.0
    assert min(distances[1:]) > 0.0
    restarted = trainer_of(qwen, **settings)
    restarted.load_state_dict(*trainer.state_dict())
    facts, expected = restarted.step(groups_of(3)), trainer.step(groups_of(3))
    assert facts == expected
    assert facts["kl_reference"] > 0.0
    assert restarted.published_state() == trainer.published_state()


def test_a_strong_kl_pulls_back_to_the_reference(qwen):
    trainer = trainer_of(qwen, lr=3e-3)
    for seed in range(3):
        trainer.step(groups_of(seed))
    pulled = trainer_of(qwen, kl_coefficient=1e3, kl_estimator="k2", lr=3e-4)
    pulled.load_state_dict(*trainer.state_dict())
    same = [groups_of(9, groups=6)] * 8
    distances = [pulled.step(groups)["kl_reference"] for groups in same]
    assert distances[-1] < distances[0] / 2


def test_without_a_kl_there_is_no_second_model(qwen):
    assert trainer_of(qwen)._learner.reference is None
    reference = trainer_of(qwen, kl_coefficient=0.1)._learner.reference
    assert not any(parameter.requires_grad for parameter in reference.parameters())
