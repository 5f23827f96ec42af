"""The critic on real models: what it teaches and whom, warm-up, exact resume, nothing published."""

import itertools
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from torch_models import random_gpt2, random_qwen3
from training_groups import groups_of

from cloud_trainer.batching import make_batch
from cloud_trainer.critic import add_critic, explained_variance
from cloud_trainer.presets import resolve_settings
from cloud_trainer.spread import OneProcess
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from transport.errors import ModelError
from transport.weights.folder import read_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return random_gpt2(tmp_path_factory.mktemp("gpt2") / "model")


def trainer_of(folder, *, critic=None, **settings):
    given = {"preset": "ppo", "lr": 1e-3, "warmup_steps": 0, "critic": critic or {}}
    trainer = TorchTrainer({**given, **settings})
    trainer.load(folder)
    return trainer


def state_of(trainer, of=""):
    return {name: a for name, a in trainer.state_dict()[0].items() if name.startswith(of)}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


def gradients_with(folder, groups, coefficient):
    """By name, with a head that is not zero; and its weights."""
    import torch

    trainer = trainer_of(folder, critic={"trunk_coefficient": coefficient})
    learner = trainer._loaded()
    torch.manual_seed(3)
    with torch.no_grad():
        learner.critic.head.weight.normal_(std=0.3)
        learner.critic.head.bias.fill_(0.2)
    batch = make_batch(groups, trainer.settings, vocabulary=learner.vocabulary)
    facts = accumulate(learner, batch, trainer.settings, device="cpu")
    found = {name: p.grad.clone() for name, p in learner.trained.items() if p.grad is not None}
    head = learner.critic.head
    return found, (head.weight.detach(), head.bias.detach(), head.weight.grad, facts)


@pytest.mark.parametrize("model", ["qwen", "gpt2"])
def test_the_trunk_gets_its_share_of_the_value_loss_and_the_head_all_of_it(request, model):
    import torch
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(model)
    groups = groups_of(2)
    without, alone = gradients_with(folder, groups, 0.0)
    found, (weight, bias, by_head, facts) = gradients_with(folder, groups, 0.5)

    # The same by the stock model, one sequence at a time: with value_lam 1 a token's return is the
    # reward of its sequence.
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = sum(sum(s.loss_mask) for group in groups for s in group)
    head = weight.clone().requires_grad_()
    loss = torch.zeros(())
    for s in itertools.chain(*groups):
        tokens = torch.tensor([[*s.prompt_tokens, *s.tokens]])
        hidden = stock(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
        values = (hidden @ head.T + bias)[len(s.prompt_tokens) - 1 : -1, 0]
        loss = loss + ((values - s.reward).square() / 2)[list(s.loss_mask)].sum() / own
    loss.backward()
    assert facts["value_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert torch.allclose(by_head, head.grad, rtol=1e-3, atol=1e-5)
    assert torch.allclose(by_head, alone[2])
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    seen = 0
    for name in found.keys() & expected.keys():
        change = found[name] - without[name]
        scale = expected[name].abs().max().item()
        assert (change - 0.5 * expected[name]).abs().max().item() <= 1e-3 * scale + 1e-6, name
        seen += scale > 1e-3
    assert seen > 10


def test_the_policy_alone_does_not_feel_what_the_head_learns(qwen):
    """With detached hidden states and no values in the advantages but those of the start."""
    updates = []
    for lr in (0.0, 0.1):
        trainer = trainer_of(qwen, critic={"trunk_coefficient": 0.0, "lr": lr})
        trainer.step(groups_of(1))
        updates.append((state_of(trainer, "master."), state_of(trainer, "critic.master.")))
    assert equal(updates[0][0], updates[1][0])
    assert not equal(updates[0][1], updates[1][1])


def test_during_the_warm_up_only_the_head_learns(qwen):
    trainer = trainer_of(qwen, critic={"warmup_steps": 2, "trunk_coefficient": 1.0})
    start = trainer.published_state()
    begun = state_of(trainer)
    for _ in range(2):
        facts = trainer.step(groups_of(1))
        assert (facts["lr"], facts["grad_norm"], facts["skipped"]) == (0, 0, 0)
    after = state_of(trainer)
    assert trainer.published_state() == start
    policy = [name for name in begun if not name.startswith("critic.")]
    assert all(np.array_equal(begun[name], after[name]) for name in policy)
    assert np.abs(after["critic.master.weight"]).max() > 0
    facts = trainer.step(groups_of(1))
    assert facts["lr"] == 1e-3
    assert facts["grad_norm"] > 0
    assert trainer.published_state() != start
    assert trainer.step_count == 3


def test_three_and_three_steps_are_six_bit_for_bit(qwen):
    given = {"critic": {"warmup_steps": 2, "lr": 1e-2}, "warmup_steps": 3}
    whole = trainer_of(qwen, **given)
    curve = [whole.step(groups_of(seed)) for seed in range(6)]
    first = trainer_of(qwen, **given)
    for seed in range(3):
        first.step(groups_of(seed))
    arrays, meta = first.state_dict()
    second = trainer_of(qwen, **given)
    second.step(groups_of(77))  # forgotten by what is loaded over it
    second.load_state_dict(arrays, msgspec.msgpack.decode(msgspec.msgpack.encode(meta)))
    assert equal(second.state_dict()[0], arrays)
    assert [second.step(groups_of(seed)) for seed in range(3, 6)] == curve[3:]
    assert equal(second.state_dict()[0], whole.state_dict()[0])
    assert second.state_dict()[1] == whole.state_dict()[1]


def test_a_state_without_the_head_is_refused_and_changes_nothing(qwen):
    trainer = trainer_of(qwen)
    arrays, meta = trainer.state_dict()
    headless = {name: a for name, a in arrays.items() if not name.startswith("critic.")}
    with pytest.raises(ModelError, match=r"critic\.master\."):
        trainer.load_state_dict(headless, meta)
    assert equal(trainer.state_dict()[0], arrays)


@pytest.mark.parametrize("model", ["qwen", "gpt2"])
def test_what_is_published_and_exported_has_no_head(request, model, tmp_path):
    folder = request.getfixturevalue(model)
    trainer = trainer_of(folder)
    trainer.step(groups_of(1))
    trainer.export(tmp_path / "out")
    assert trainer.published_state().keys() == read_model_folder(folder).keys()
    assert read_model_folder(tmp_path / "out") == trainer.published_state()


SAME = {
    "micro-batches": {"micro_batch_tokens": 30},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_how_it_is_computed_changes_only_rounding(qwen, change):
    settings = {"critic": {"lr": 1e-2, "trunk_coefficient": 0.5}, "epsilon": 1e-4}
    plain, other = trainer_of(qwen, **settings), trainer_of(qwen, **settings, **change)
    for seed in range(4):
        facts = plain.step(groups_of(seed))
        assert other.step(groups_of(seed)) == pytest.approx(facts, rel=1e-3, abs=1e-4)


def test_adapters_and_a_critic_go_together(qwen):
    lora = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    trainer = trainer_of(qwen, lora=lora, critic={"lr": 1e-2, "trunk_coefficient": 1.0})
    for seed in range(3):
        facts = trainer.step(groups_of(seed))
    assert facts["grad_norm"] > 0
    names = {name.rpartition(".")[2] for name in state_of(trainer, "master.")}
    assert names == {"lora_A", "lora_B"}
    assert trainer.published_state().keys() == read_model_folder(qwen).keys()


def test_a_gradient_that_is_not_finite_changes_neither_head_nor_policy(qwen):
    trainer = trainer_of(qwen)
    trainer.step(groups_of(1))
    arrays, meta = trainer.state_dict()
    arrays["critic.master.weight"][:] = 3e38
    trainer.load_state_dict(arrays, meta)
    facts = trainer.step(groups_of(2))
    assert facts["skipped"] == 1
    assert all(np.isfinite(value) for value in facts.values())
    assert equal(trainer.state_dict()[0], arrays)


def test_groups_of_equal_rewards_teach_too(qwen):
    group = [msgspec.structs.replace(s, reward=1.0) for s in groups_of(2)[0]]
    facts = trainer_of(qwen, normalisation="none").step([group])
    assert facts["trained_tokens"] == facts["tokens"] > 0
    assert facts["grad_norm"] > 0
    assert facts["explained_variance"] == 0.0  # there is nothing to explain


def foretold_groups(rng, *, sequences=48):
    """The first token says what comes of it: 10 is right."""

    def sequence(number):
        tokens = (rng.choice([10, 20]), *(rng.randrange(30, 60) for _ in range(5)))
        return TrainingSequence(
            group=f"g{number}",
            prompt_tokens=(5, 6),
            tokens=tokens,
            logprobs=(-3.0,) * 6,
            versions=(0,) * 6,
            loss_mask=(True,) * 6,
            reward=float(tokens[0] == 10),
        )

    return [[sequence(number)] for number in range(sequences)]


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_the_critic_learns_to_foretell(qwen, coefficient):
    """Sequences it has never seen, and a policy that learns beside it."""
    rng = random.Random(5)
    critic = {"lr": 0.02, "trunk_coefficient": coefficient, "warmup_steps": 5}
    trainer = trainer_of(qwen, critic=critic, lr=1e-4)
    explained = [trainer.step(foretold_groups(rng))["explained_variance"] for _ in range(80)]
    assert explained[0] == 0.0
    assert np.mean(explained[-10:]) > 0.25


def test_a_model_without_an_output_layer_is_refused():
    model = SimpleNamespace(get_output_embeddings=lambda: None)
    with pytest.raises(ModelError, match="does not say what its output layer is"):
        add_critic(model, resolve_settings({"preset": "ppo"}), OneProcess("cpu"))


def test_explained_variance_is_one_for_the_truth_and_none_for_a_constant():
    returns = np.array([0.0, 1.0, 1.0, 3.0])
    assert explained_variance(returns + 5.0, returns) == 1.0
    assert explained_variance(np.full(4, 0.7), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4)) == 0.0
