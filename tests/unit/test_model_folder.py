"""Model folders: what loads keeps its bits and names, what does not is named."""

import json
import shutil

import numpy as np
import pytest
from torch_models import EXAMPLE, random_gpt2, random_qwen3

from transport.errors import ModelError
from transport.runtime.model_folder import (
    describe_folder,
    load_model,
    load_tokenizer,
    published_tensor,
    torch_tensor,
)
from transport.weights.folder import read_model_folder
from transport.weights.tensors import TensorBytes, safetensors_parts

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(EXAMPLE, tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    tensors = read_model_folder(folder)
    change(tensors)
    data = b"".join(safetensors_parts(tensors, {"format": "pt"}))
    (folder / "model.safetensors").write_bytes(data)


def assert_published_is_the_folder(folder):
    published = list(load_model(folder).weights.published())
    assert published == list(read_model_folder(folder).items())


def test_the_description_counts_what_is_there():
    description = describe_folder(EXAMPLE)
    assert description.architecture == "Qwen3ForCausalLM"
    assert description.parameters == sum(
        int(np.prod(tensor.shape)) for tensor in read_model_folder(EXAMPLE).values()
    )
    assert description.size_bytes == 2 * description.parameters


@pytest.mark.parametrize("make", [random_qwen3, random_gpt2])
def test_the_published_weights_of_a_loaded_folder_are_its_tensors_bit_for_bit(tmp_path, make):
    assert_published_is_the_folder(make(tmp_path / "model"))


def test_names_without_the_base_models_prefix_are_kept_and_tables_travel_along(tmp_path):
    folder = random_gpt2(tmp_path / "model")

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        mask = np.tril(np.ones((1, 1, 128, 128), np.bool_))
        tensors["h.0.attn.bias"] = TensorBytes("BOOL", mask.shape, mask.tobytes())

    edit_tensors(folder, strip)
    assert_published_is_the_folder(folder)
    weights = load_model(folder).weights
    assert "wte.weight" in weights.parameters
    assert list(weights.fixed) == ["h.0.attn.bias"]


def test_a_tied_weight_that_the_files_hold_twice_is_published_once(folder):
    def twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_tensors(folder, twice)
    published = dict(load_model(folder).weights.published())
    assert published == read_model_folder(EXAMPLE)


def test_shards_load_like_a_single_file(folder):
    tensors = read_model_folder(folder)
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        data = safetensors_parts({name: tensors[name] for name in part}, {"format": "pt"})
        (folder / file).write_bytes(b"".join(data))
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1_262_976}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert dict(load_model(folder).weights.published()) == tensors


def test_bf16_survives_float32_and_back_for_every_finite_bit_pattern():
    import torch

    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[(patterns & 0x7F80) != 0x7F80]
    tensor = TensorBytes("BF16", finite.shape, finite.astype("<u2").tobytes())
    values = torch_tensor(tensor, dtype=torch.float32, device="cpu")
    assert published_tensor(values, "BF16") == tensor


def test_masters_round_to_the_nearest_even_bf16():
    import torch

    one, ulp = 1.0, 2.0**-7
    values = torch.tensor([one + ulp / 2, one + 3 * ulp / 2, one + 0.51 * ulp, one + 0.49 * ulp])
    cells = published_tensor(values, "BF16").cells()
    assert (cells - 0x3F80).tolist() == [0, 2, 1, 0]


def test_scalars_and_empty_tensors_convert():
    import torch

    for shape in ((), (0, 3)):
        tensor = published_tensor(torch.ones(shape), "F32")
        assert tensor.shape == shape
        assert torch_tensor(tensor, dtype=torch.float32, device="cpu").shape == shape


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: is missing"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json: is malformed",
    ),
    "config without type": (
        lambda f: (f / "config.json").write_text("{}"),
        "missing required field `model_type`",
    ),
    "unknown type": (
        lambda f: edit_config(f, model_type="farflow-numpy"),
        "model_type 'farflow-numpy' is not a causal language model",
    ),
    "another architecture": (
        lambda f: edit_config(f, architectures=["Qwen3ForSequenceClassification"]),
        "architecture 'Qwen3ForSequenceClassification' is not",
    ),
    "impossible configuration": (
        lambda f: edit_config(f, num_hidden_layers=4),
        "the model does not load",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
        "the model is quantised",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-1]
        ),
        "model.safetensors: safetensors file has",
    ),
    "another size": (
        lambda f: edit_config(f, hidden_size=64),
        "tensor 'model.embed_tokens.weight' is BF16 (317, 128); the model needs",
    ),
    "a tensor is missing": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        "no tensor for 1 parameters of Qwen3ForCausalLM, the first is 'model.norm.weight'",
    ),
    "a tensor too many": (
        lambda f: edit_tensors(f, lambda t: t.update({"extra": t["model.norm.weight"]})),
        "has no place for 1 of the tensors in the files, the first is 'extra'",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer; one of"),
    "not a folder": (shutil.rmtree, "is not a folder"),
}


@pytest.mark.parametrize(("breaking", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_folder_that_does_not_load_says_which_file_and_why(folder, breaking, message):
    breaking(folder)
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert str(error.value).startswith(str(folder))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_is_named(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: does not load"):
        load_tokenizer(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused():
    with pytest.raises(ModelError, match=r"tokenizer\.json: has 317 tokens, but the model embeds"):
        load_tokenizer(EXAMPLE, vocabulary=316)
