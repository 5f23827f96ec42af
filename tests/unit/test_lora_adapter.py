"""Adapters that are published alone: peft's folders out of the trainer, and into the engine."""

import json

import numpy as np
import pytest
import pytest_asyncio
from torch_models import random_gpt2, random_qwen3
from training_groups import groups_of

from cloud_trainer.torch_trainer import TorchTrainer
from edge_agent.bases import base_of
from edge_agent.changed_cells import difference
from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.fake import FakeEngine
from edge_agent.engines.torch_engine import TorchEngine
from transport.errors import ConfigError, ModelError
from transport.weights.digest import state_digest
from transport.weights.folder import (
    is_adapter_state,
    read_artefacts,
    read_model_folder,
    write_model_folder,
)
from transport.weights.patch import whole
from transport.weights.publication import build_version0

pytestmark = pytest.mark.slow

TARGETS = {"qwen": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
ALPHA, RANK = 32.0, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"qwen": random_qwen3(folder / "qwen"), "gpt2": random_gpt2(folder / "gpt2")}


def trainer_of(folder, steps=0, *, lr=1e-2, **lora):
    table = {"rank": RANK, "alpha": ALPHA, "publish": "adapter", **lora}
    trainer = TorchTrainer({"lr": lr, "warmup_steps": 0, "lora": table})
    trainer.load(folder)
    for seed in range(steps):
        assert trainer.step(groups_of(seed))["grad_norm"] > 0
    return trainer


@pytest_asyncio.fixture
async def engine():
    made = TorchEngine(8)
    await made.start()
    yield made
    await made.close()


def logits_of(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 60, 70, 201, 9]])).logits


def written(trainer, folder):
    trainer.export(folder)
    return folder


def test_version_0_is_the_fresh_adapter_with_a_b_of_zeros(folders):
    trainer = trainer_of(folders["qwen"], targets=TARGETS["qwen"])
    state = trainer.published_state()
    assert list(state) == sorted(
        f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{part}.weight"
        for layer in (0, 1)
        for target in TARGETS["qwen"]
        for part in "AB"
    )
    for name, tensor in state.items():
        assert tensor.dtype == "F32"
        assert tensor.cells().any() == name.endswith("lora_A.weight")
        assert RANK in tensor.shape


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
@pytest.mark.parametrize("targets", ["some", "all-linear"])
def test_peft_loads_an_exported_folder_and_computes_what_the_trainer_does(
    kind, targets, folders, tmp_path
):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    names = TARGETS[kind] if targets == "some" else ["all-linear"]
    trainer = trainer_of(folders[kind], steps=3, targets=names)
    folder = written(trainer, tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_model.json",
    ]
    base = AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    before = logits_of(base)
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    assert torch.equal(logits_of(adapted), logits_of(trainer._loaded().model))
    assert (logits_of(adapted) - before).abs().max() > 0.1


@pytest.mark.asyncio
async def test_the_engine_draws_with_the_trainers_very_probabilities(engine, folders, tmp_path):
    for kind in ("qwen", "gpt2"):
        trainer = trainer_of(folders[kind], targets=TARGETS[kind])
        await engine.load_policy(kind, written(trainer, tmp_path / kind), 0, folders[kind])
        for version in range(1, 4):
            before = trainer.published_state()
            trainer.step(groups_of(version))
            now = trainer.published_state()
            await engine.apply(kind, version, difference(now, before))
            assert dict(engine.read_weights(kind)) == now
            (drawn,) = await engine.generate(request(kind))
            assert drawn.logprobs == pytest.approx(recomputed(trainer, drawn), abs=2e-5)
            assert set(drawn.versions) == {version}


def request(policy, name="r"):
    return GenerationRequest(
        request_id=name,
        policy=policy,
        prompt_tokens=(3, 7, 9),
        n=1,
        sampling=SamplingParams(max_new_tokens=12),
    )


def recomputed(trainer, completion):
    import torch

    tokens = torch.tensor([(3, 7, 9, *completion.tokens)])
    with torch.no_grad():
        logits = trainer._loaded().model(input_ids=tokens).logits[0, 2:-1]
    return logits.log_softmax(-1)[range(len(completion.tokens)), list(completion.tokens)].tolist()


def test_agents_see_updates_that_merged_weights_would_round_away(folders):
    changed = {}
    for publish in ("merged", "adapter"):
        trainer = trainer_of(folders["qwen"], lr=1e-6, targets=["q_proj"], publish=publish)
        before = trainer.published_state()
        trainer.step(groups_of(0))
        after = trainer.published_state()
        cells = {n: (before[n].cells() != after[n].cells()).mean() for n in before if "q_proj" in n}
        changed[publish] = max(cells.values())
    assert changed["merged"] < 0.01
    assert changed["adapter"] > 0.5  # all of B


@pytest.mark.asyncio
async def test_policies_on_one_model_share_its_memory_and_nothing_else(engine, folders, tmp_path):
    base, names = folders["qwen"], ("a", "b")
    for seed, name in enumerate(names):
        trainer = trainer_of(base, steps=seed + 1, seed=seed)
        await engine.load_policy(name, written(trainer, tmp_path / name), 1, base)
    models = [engine._policies[name].forward._model for name in names]
    places = [
        {
            parameter.data_ptr()
            for path, parameter in model.named_parameters()
            if "lora_" not in path
        }
        for model in models
    ]
    assert places[0] == places[1]
    assert len(places[0]) > 10
    drawn = [(await engine.generate(request(name)))[0].tokens for name in names]
    assert drawn[0] != drawn[1]
    await engine.unload_policy("a")
    assert (await engine.generate(request("b")))[0].tokens == drawn[1]
    await engine.unload_policy("b")
    del models
    engine._free()
    assert not engine._bases._loaded


@pytest.mark.asyncio
async def test_a_half_precision_adapter_is_published_and_read_back_in_its_type(
    engine, folders, tmp_path
):
    trainer = trainer_of(folders["qwen"], steps=2, dtype="model")
    state = trainer.published_state()
    assert {tensor.dtype for tensor in state.values()} == {"BF16"}
    await engine.load_policy("p", written(trainer, tmp_path / "p"), 2, folders["qwen"])
    assert dict(engine.read_weights("p")) == state
    (drawn,) = await engine.generate(request("p"))
    assert drawn.logprobs == pytest.approx(recomputed(trainer, drawn), abs=0.1)


@pytest.mark.asyncio
async def test_a_model_in_its_published_type_takes_an_adapter_of_another(folders, tmp_path):
    engine = TorchEngine(8, swap="in_place")
    engine._compute, engine._bases._compute = "published", "published"  # as on a GPU
    await engine.start()
    try:
        trainer = trainer_of(folders["qwen"], steps=2)
        await engine.load_policy("p", written(trainer, tmp_path / "p"), 2, folders["qwen"])
        before = trainer.published_state()
        trainer.step(groups_of(9))
        await engine.apply("p", 3, difference(trainer.published_state(), before))
        assert dict(engine.read_weights("p")) == trainer.published_state()
        (drawn,) = await engine.generate(request("p"))
        assert drawn.logprobs == pytest.approx(recomputed(trainer, drawn), abs=0.1)
    finally:
        await engine.close()


def test_a_checkpoint_goes_on_bit_for_bit(folders):
    straight = trainer_of(folders["qwen"], steps=4)
    resumed = trainer_of(folders["qwen"])
    resumed.load_state_dict(*trainer_of(folders["qwen"], steps=2).state_dict())
    for seed in (2, 3):
        resumed.step(groups_of(seed))
    assert resumed.published_state() == straight.published_state()
    assert resumed.artefacts() == straight.artefacts()


def test_a_version_describes_its_model_by_hashes(folders):
    trainer = trainer_of(folders["qwen"], targets=TARGETS["qwen"])
    made = build_version0(
        folders["qwen"],
        tensors=trainer.published_state(),
        artefacts=trainer.artefacts(),
        run="r",
        policy="r/p",
        created_wall_s=0.0,
    )
    assert made.manifest.is_adapter
    assert {entry.name: entry.kind for entry in made.manifest.files} == {
        "adapter_config.json": "artefact",
        "base_model.json": "artefact",
        "adapter_model.safetensors": "snapshot",
    }
    assert made.manifest.digest == state_digest(trainer.published_state())
    base = json.loads(made.files["base_model.json"])
    assert base["artefacts"].keys() == read_artefacts(folders["qwen"]).keys()
    config = json.loads(made.files["adapter_config.json"])
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["base_model_name_or_path"] == "qwen"  # no path of the trainer's machine


def test_a_model_folder_that_holds_an_adapter_as_well_is_a_model(folders, tmp_path):
    model, adapter = folders["qwen"], trainer_of(folders["qwen"])
    both = tmp_path / "both"
    write_model_folder(both, read_model_folder(model), read_artefacts(model))
    for path in written(adapter, tmp_path / "adapter").iterdir():
        (both / path.name).write_bytes(path.read_bytes())
    assert read_artefacts(both) == read_artefacts(model)
    assert not is_adapter_state(read_model_folder(both))
    assert is_adapter_state(read_model_folder(tmp_path / "adapter"))
    assert not is_adapter_state([])


def test_an_agent_without_the_adapters_model_says_which_key_is_missing(folders, tmp_path):
    folder = written(trainer_of(folders["qwen"]), tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"agent\.local_models"):
        base_of({"other": "x"}, "run/solver", folder)
    for key in ("solver", "run/solver"):
        assert base_of({key: str(folders["qwen"])}, "run/solver", folder) == folders["qwen"]
    assert base_of({}, "run/solver", folders["qwen"]) is None


def test_another_model_below_an_adapter_is_refused(folders, tmp_path):
    folder = written(trainer_of(folders["qwen"]), tmp_path / "adapter")
    other = random_qwen3(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match=r"other: the weights have full digest"):
        base_of({"p": str(other)}, "r/p", folder)
    tokenizer = folders["qwen"] / "tokenizer.json"
    same = tmp_path / "same"
    write_model_folder(same, read_model_folder(folders["qwen"]), read_artefacts(folders["qwen"]))
    (same / "tokenizer.json").write_bytes(tokenizer.read_bytes() + b" ")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing or not that of the adapter"):
        base_of({"p": str(same)}, "r/p", folder)
    (folder / "base_model.json").write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"base_model\.json: .*full_digest"):
        base_of({"p": str(folders["qwen"])}, "r/p", folder)


@pytest.mark.asyncio
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(
    engine, folders, tmp_path
):
    base = folders["qwen"]
    trainer = trainer_of(base, steps=1)
    good = written(trainer, tmp_path / "good")
    await engine.load_policy("p", good, 1, base)
    artefacts, state = trainer.artefacts(), trainer.published_state()
    name = min(state)
    for number, (words, bad) in enumerate(
        (
            ("is missing, or is not one", {n: t for n, t in state.items() if n != name}),
            ("the model needs", trainer_of(base, rank=2).published_state()),
            ("base_model", trainer_of(base, targets=["q_proj"]).published_state()),
        )
    ):
        folder = tmp_path / str(number)
        write_model_folder(folder, bad, artefacts)
        with pytest.raises(ModelError, match=words):
            await engine.load_policy("p", folder, 2, base)
    config = json.loads((good / "adapter_config.json").read_bytes())
    for key, value in (("bias", "all"), ("peft_type", "LOHA"), ("target_modules", ["nothing"])):
        folder = tmp_path / key
        changed = json.dumps({**config, key: value}).encode()
        write_model_folder(folder, state, {**artefacts, "adapter_config.json": changed})
        with pytest.raises(ModelError):
            await engine.load_policy("p", folder, 2, base)
    assert dict(engine.read_weights("p")) == state


@pytest.mark.asyncio
async def test_the_fake_engine_takes_no_adapters(folders, tmp_path):
    fake = FakeEngine(4)
    folder = written(trainer_of(folders["qwen"]), tmp_path / "adapter")
    assert not fake.takes_adapters
    with pytest.raises(ModelError, match=r"agent\.engine = \"torch\""):
        await fake.load_policy("r/p", folder, 0, folders["qwen"])
    assert fake.version("r/p") is None


def test_only_the_two_ways_of_publishing_are_known():
    with pytest.raises(ConfigError, match=r"settings\.lora\.publish"):
        TorchTrainer({"lora": {"publish": "both"}})


@pytest.mark.asyncio
async def test_a_whole_patch_and_single_cells_are_read_back(engine, folders, tmp_path):
    trainer = trainer_of(folders["qwen"], steps=1)
    await engine.load_policy("p", written(trainer, tmp_path / "p"), 1, folders["qwen"])
    trainer.step(groups_of(5))
    state = trainer.published_state()
    await engine.apply("p", 2, whole(state))
    for name, tensor in state.items():
        positions = np.arange(0, tensor.cells().size, 7)
        cells = engine.read_cells("p", name, positions)
        assert np.array_equal(cells, tensor.cells()[positions])
