"""Adapters as a trainer publishes them, made without peft."""

import json
import re

import numpy as np

from transport.weights.adapter import AdapterConfig, adapter_artefacts, describe_base, tensor_name
from transport.weights.folder import read_model_folder, write_model_folder
from transport.weights.tensors import TensorBytes

RANK, ALPHA = 4, 8.0
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model, folder, *, targets=ALL, rank=RANK, alpha=ALPHA, dtype="F32", seed=0):
    """An adapter folder on the layers of a model folder whose names end in ``targets``, with
    random A and B that change what the model says."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, weight in read_model_folder(model).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            out, width = weight.shape
            for part, shape in (("A", (rank, width)), ("B", (out, rank))):
                values = rng.normal(0, 0.15, shape).astype(np.float32)
                tensors[tensor_name(layer, part)] = published(values, dtype)
    config = AdapterConfig(
        base_model_name_or_path=model.name, r=rank, lora_alpha=alpha, target_modules=tuple(targets)
    )
    artefacts = adapter_artefacts(config, describe_base(model))
    write_model_folder(folder, dict(sorted(tensors.items())), artefacts)
    return folder


def published(values, dtype):
    """A tensor of these float32 values, cut to a type."""
    bits = values.astype(np.float16).view(np.uint16) if dtype == "F16" else values.view(np.uint32)
    cells = (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits
    return TensorBytes(dtype, values.shape, cells.tobytes())


def floats(tensor):
    """The values of a tensor, exactly, as float64."""
    cells = tensor.cells()
    if tensor.dtype == "BF16":
        values = (cells.astype(np.uint32) << 16).view(np.float32)
    else:
        values = cells.view(np.float32 if tensor.dtype == "F32" else np.float16)
    return values.astype(np.float64).reshape(tensor.shape)


def write_merged(model, adapter, tensors, folder):
    """A float32 model folder with ``W + alpha / rank B A``; ``tensors`` are the A and B."""
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    scale = config["lora_alpha"] / config["r"]
    made = {}
    for name, weight in read_model_folder(model).items():
        values, layer = floats(weight), name.removesuffix(".weight")
        if (a := tensors.get(tensor_name(layer, "A"))) is not None:
            values = values + scale * floats(tensors[tensor_name(layer, "B")]) @ floats(a)
        made[name] = published(np.ascontiguousarray(values.astype(np.float32)), "F32")
    artefacts = {
        path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".txt")
    }
    dtype = re.compile(rb'"(torch_)?dtype": "bfloat16"')
    artefacts["config.json"] = dtype.sub(rb'"dtype": "float32"', artefacts["config.json"])
    write_model_folder(folder, made, artefacts)
    return folder
