"""Forward and backward passes in bfloat16: near float32's, with float32 masters, exact to resume,
with adapters, a critic and a reference.

How near: a number of bfloat16 has 8 bits, so rounding takes up to 2^-9 of it. Logits of these
models are below 8: their own rounding is up to 1/64, and what the layers before add (some ten
roundings one after another, which partly cancel) was measured to be about as much: a
log-probability is off by 0.01 nats on average and 0.08 at most. A gradient goes through about twice
as many roundings: 1.4 to 3.5 % of its norm were measured, 5 % are allowed. The loss has no bounds
here: a token on another side of one has another gradient altogether.
"""

import itertools

import msgspec
import numpy as np
import pytest
from torch_models import random_gpt2, random_qwen3
from training_groups import groups_of

from cloud_trainer.batching import make_batch
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_trainer import TorchTrainer
from transport.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LORA = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
CRITIC = {"preset": "ppo", "critic": {"lr": 1e-2, "trunk_coefficient": 0.5}}
KINDS = {
    "full": {},
    "lora": LORA,
    "critic": CRITIC,
    "critic-lora": {**CRITIC, **LORA},
    "reference": {"kl_coefficient": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"qwen": random_qwen3(folder / "qwen"), "gpt2": random_gpt2(folder / "gpt2")}


def trainer_of(folder, precision="bfloat16", **settings):
    trainer = TorchTrainer({"lr": 1e-3, "warmup_steps": 0, "precision": precision, **settings})
    trainer.load(folder)
    return trainer


def gradient_of(folder, precision, settings, **more):
    """All numbers of the gradient of a batch, one after another, and the means; after a step in
    float32, since without one adapters and critics have little to say."""
    smooth = {**settings, **more, "clip": "none", "ratio_max": 0.0}
    begun, trainer = (trainer_of(folder, kind, **smooth) for kind in ("float32", precision))
    begun.step(groups_of(8))
    trainer.load_state_dict(*begun.state_dict())
    learner = trainer._loaded()
    batch = make_batch(groups_of(1, groups=6), trainer.settings, vocabulary=learner.vocabulary)
    facts = accumulate(learner, batch, trainer.settings, device="cpu")
    grads = [parameter.grad for parameter in learner.trained.values()]
    if learner.critic is not None:
        grads += [parameter.grad for parameter in learner.critic.head.parameters()]
    assert {str(grad.dtype) for grad in grads if grad is not None} == {"torch.float32"}
    return np.concatenate([grad.numpy().ravel() for grad in grads if grad is not None]), facts


@pytest.mark.parametrize(
    ("model", "kind"), [*itertools.product(["qwen"], KINDS), ("gpt2", "full"), ("gpt2", "critic")]
)
def test_a_gradient_in_bfloat16_is_near_the_one_in_float32(model, kind, folders):
    whole, facts = gradient_of(folders[model], "float32", KINDS[kind])
    rough, rough_facts = gradient_of(folders[model], "bfloat16", KINDS[kind])
    assert not np.array_equal(rough, whole)
    error = np.linalg.norm(rough - whole) / np.linalg.norm(whole)
    assert error < 0.05
    for name in ("entropy", "kl_behaviour", "ratio_mean"):
        assert rough_facts[name] == pytest.approx(facts[name], rel=0.05, abs=0.02), name


def test_activations_that_are_computed_again_give_the_same_gradient(folders):
    plain, facts = gradient_of(folders["qwen"], "bfloat16", {})
    again, same = gradient_of(folders["qwen"], "bfloat16", {}, gradient_checkpointing=True)
    assert np.array_equal(plain, again)
    assert facts == same


@pytest.mark.parametrize("kind", KINDS)
def test_three_and_three_steps_are_six_bit_for_bit(kind, folders):
    folder, settings = folders["qwen"], KINDS[kind]
    whole = trainer_of(folder, **settings)
    curve = [whole.step(groups_of(seed)) for seed in range(6)]
    first = trainer_of(folder, **settings)
    for seed in range(3):
        first.step(groups_of(seed))
    arrays, meta = first.state_dict()
    second = trainer_of(folder, **settings)
    second.load_state_dict(arrays, msgspec.msgpack.decode(msgspec.msgpack.encode(meta)))
    assert [second.step(groups_of(seed)) for seed in range(3, 6)] == curve[3:]
    ours, theirs = second.state_dict()[0], whole.state_dict()[0]
    assert ours.keys() == theirs.keys()
    assert {array.dtype for array in ours.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert second.published_state() == whole.published_state()


def test_masters_move_by_less_than_the_type_of_the_passes_can_say(folders):
    """Weights whose step is below half an ulp of bfloat16 stay where they are for the agents, and
    for the next pass, until enough steps have added up."""
    trainer = trainer_of(folders["qwen"], lr=1e-6)
    start, masters = trainer.published_state(), trainer.state_dict()[0]
    trainer.step(groups_of(1))
    name = "model.norm.weight"  # ones: half an ulp is 2e-3 below and 4e-3 above
    assert trainer.published_state()[name] == start[name]
    for steps, least in ((1, 0.0), (10, 5e-6)):
        while trainer.step_count < steps:
            trainer.step(groups_of(1))
        after = trainer.state_dict()[0][f"master.{name}"]
        assert after.dtype == np.float32
        moved = np.abs(after - masters[f"master.{name}"]).max()
        assert least < moved < 2e-6 * steps


def test_a_kl_to_the_reference_is_zero_where_it_started(folders):
    trainer = trainer_of(folders["qwen"], kl_coefficient=0.1)
    assert trainer.step(groups_of(1))["kl_reference"] == 0.0
    assert trainer.step(groups_of(2))["kl_reference"] > 0.0


def test_a_state_goes_from_one_precision_to_the_other(folders):
    rough = trainer_of(folders["qwen"])
    rough.step(groups_of(1))
    whole = trainer_of(folders["qwen"], "float32")
    whole.load_state_dict(*rough.state_dict())
    assert whole.published_state() == rough.published_state()
    facts, near = whole.step(groups_of(2)), rough.step(groups_of(2))
    assert near["grad_norm"] == pytest.approx(facts["grad_norm"], rel=0.05)


def test_nothing_of_it_stays_behind_in_the_thread(folders):
    import torch

    trainer_of(folders["qwen"]).step(groups_of(1))
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_what_cannot_be_is_refused_with_the_name_of_the_key(monkeypatch):
    import torch

    with pytest.raises(ConfigError, match=r"policies\.p\.settings\.precision"):
        TorchTrainer({"precision": "float16"}, where="policies.p.settings")

    def refuses(*_, **__):
        raise RuntimeError("Current CUDA Device does not support bfloat16")

    monkeypatch.setattr(torch, "autocast", refuses)
    TorchTrainer({}, device="cuda:0")
    with pytest.raises(
        ConfigError, match=r"^p\.precision: .*'cuda:0'.*set precision = \"float32\""
    ):
        TorchTrainer({"precision": "bfloat16"}, where="p", device="cuda:0")
