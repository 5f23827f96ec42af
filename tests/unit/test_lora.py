"""Adapters: only they are trained, and what is published is the model with them in it."""

import copy

import numpy as np
import pytest
from torch_models import random_gpt2, random_qwen3
from training_groups import groups_of

from cloud_trainer.lora import add_adapters
from cloud_trainer.lora_table import LoraTable
from cloud_trainer.torch_trainer import TorchTrainer
from transport.errors import ConfigError, ModelError
from transport.runtime.model_folder import load_model
from transport.weights.folder import read_model_folder

pytestmark = pytest.mark.slow

QKV = {"qwen": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"qwen": random_qwen3(folder / "qwen"), "gpt2": random_gpt2(folder / "gpt2")}


def trainer_of(folder, **lora):
    settings = {"lr": 1e-2, "warmup_steps": 0, "lora": {"rank": 4, **lora}}
    trainer = TorchTrainer(settings)
    trainer.load(folder)
    return trainer


def test_a_new_adapter_changes_nothing_and_a_trained_one_only_its_targets(folders):
    trainer = trainer_of(folders["qwen"], targets=QKV["qwen"])
    before = trainer.published_state()
    assert before == read_model_folder(folders["qwen"])
    for seed in range(3):
        assert trainer.step(groups_of(seed))["grad_norm"] > 0
    after = trainer.published_state()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        f"model.layers.{layer}.self_attn.{target}.weight"
        for layer in (0, 1)
        for target in QKV["qwen"]
    }


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
def test_what_is_published_computes_what_the_adapted_model_computes(kind, folders, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(folders[kind], targets=QKV[kind])
    for seed in range(3):
        trainer.step(groups_of(seed))
    trainer.export(tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.tensor([[5, 60, 70, 201, 9]])
    with torch.no_grad():
        expected = trainer._loaded().model(input_ids=tokens).logits
        found = stock(input_ids=tokens).logits
        base = load_model(folders[kind]).model(input_ids=tokens).logits
    # gpt2 is published in float32; qwen's weights are rounded to bfloat16.
    tolerance = 1e-4 if kind == "gpt2" else 0.15
    assert (found - expected).abs().max() < tolerance < (base - expected).abs().max() / 2


def test_a_state_holds_the_adapters_alone_and_continues_bit_for_bit(folders):
    whole, first = (trainer_of(folders["qwen"]) for _ in range(2))
    for seed in range(4):
        whole.step(groups_of(seed))
    for seed in range(2):
        first.step(groups_of(seed))
    arrays, meta = first.state_dict()
    kinds = {name.partition(".")[0] for name in arrays}
    assert kinds == {"master", "first", "second"}
    assert all(name.endswith((".lora_A", ".lora_B")) for name in arrays)
    second = trainer_of(folders["qwen"])
    second.load_state_dict(copy.deepcopy(arrays), meta)
    for seed in range(2, 4):
        second.step(groups_of(seed))
    assert second.published_state() == whole.published_state()
    ours, theirs = second.state_dict()[0], whole.state_dict()[0]
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_all_linear_takes_every_layer_but_the_head_and_seeds_differ(folders):
    by_seed = [
        add_adapters(load_model(folders["qwen"]), LoraTable(rank=2, seed=seed)) for seed in (0, 1)
    ]
    assert len(by_seed[0]) == 2 * 7
    assert not any("embed" in name or "head" in name for name in by_seed[0])
    starts = [trainer_of(folders["qwen"], seed=seed).state_dict()[0] for seed in (0, 0, 1)]
    name = "master.model.layers.0.mlp.up_proj.weight.lora_A"
    assert np.array_equal(starts[0][name], starts[1][name])
    assert not np.array_equal(starts[0][name], starts[2][name])


def test_targets_that_are_not_there_are_refused(folders):
    with pytest.raises(ConfigError, match=r"lora\.targets: .*query_key"):
        trainer_of(folders["qwen"], targets=["query_key"])
    for targets, words in (
        (["q_proj", "v_porj"], r"no linear layer is named 'v_porj'; .* q_proj"),
        (["q_proj", "embed_tokens"], r"embed_tokens"),
        (["all-linear", "q_proj"], r"stands alone"),
    ):
        with pytest.raises(ConfigError, match=rf"lora\.targets: .*{words}"):
            trainer_of(folders["qwen"], targets=targets)
    with pytest.raises(ConfigError, match=r"lora\.targets: .* shared with another layer"):
        trainer_of(folders["gpt2"], targets=["c_attn", "lm_head"])
    with pytest.raises(ConfigError, match=r"settings\.lora\.rank"):
        TorchTrainer({"lora": {"rank": 0}})


def test_the_state_of_a_fully_trained_model_is_not_an_adapters(folders):
    full = TorchTrainer({})
    full.load(folders["qwen"])
    with pytest.raises(ModelError, match="lora_A"):
        trainer_of(folders["qwen"]).load_state_dict(*full.state_dict())


def test_activations_that_are_computed_again_give_the_same_bits(folders):
    for kind in ("qwen", "gpt2"):
        plain, again = (
            TorchTrainer({"lr": 1e-2, "warmup_steps": 0, "gradient_checkpointing": value})
            for value in (False, True)
        )
        for trainer in (plain, again):
            trainer.load(folders[kind])
        calls = count_forwards(again._loaded().model)
        steps = 2
        for seed in range(steps):
            assert plain.step(groups_of(seed)) == again.step(groups_of(seed))
        assert plain.published_state() == again.published_state()
        # Once more in each backward pass; what is computed without one is not computed again.
        assert calls["attention"] == calls["model"] + steps


def count_forwards(model):
    """How often the model and its first block's attention compute."""
    calls = {"model": 0, "attention": 0}
    block = next(m for n, m in model.named_modules() if n.endswith((".layers.0", ".h.0")))
    attention = getattr(block, "self_attn", None) or block.attn

    def counts(name):
        def hook(*_):
            calls[name] += 1

        return hook

    model.register_forward_pre_hook(counts("model"))
    attention.register_forward_pre_hook(counts("attention"))
    return calls
