"""Models with a LoRA adapter (arXiv:2106.09685) in them, as peft computes one: for engines and
trainers, so that both do the same arithmetic.

    y = W x + scale B (A x)        A [rank, in], B [out, rank], scale = alpha / rank
"""

import copy
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transport.errors import ConfigError, ModelError
from transport.runtime.model_folder import (
    ComputeType,
    LoadedModel,
    ModelWeights,
    torch_tensor,
    torch_type,
)
from transport.weights.adapter import read_adapter, tensor_name
from transport.weights.folder import read_model_folder
from transport.weights.manifest import ADAPTER_NAME

if TYPE_CHECKING:
    import torch

ADAPTER = "default"
"""The name that peft gives an adapter."""


def inject(model: Any, *, rank: int, alpha: float, targets: list[str] | str, seed: int) -> None:
    """Put a new adapter into a model in place and freeze the rest; equal seeds give equal ones.

    Raises:
        ConfigError: peft is not installed.
        ValueError: ``targets`` names no layer that can have one.
    """
    peft = _peft()
    import torch

    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # That it found out by itself that a layer is transposed.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        warnings.filterwarnings("ignore", message="Model has `tie_word")  # the caller's decision
        peft.inject_adapter_in_model(config, model)


def adapted_layers(model: Any) -> dict[str, Any]:
    """The layers that have an adapter, by their names in the model."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if ADAPTER in getattr(layer, "lora_A", ())
    }


def twin(loaded: LoadedModel) -> Any:
    """The same model once more, of which only the modules are new: all parameters and buffers are
    the original's own."""
    model = loaded.model
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def adapt(base: LoadedModel, folder: Path, *, compute: ComputeType) -> LoadedModel:
    """A model that shares the memory of ``base`` and has the adapter in ``folder`` in it; its
    weights are the adapter's tensors, under the names and in the types of the folder's file.

    Raises:
        ConfigError: peft is not installed.
        ModelError: the folder is malformed, or its adapter does not fit the model.
    """
    import torch

    config, _ = read_adapter(folder)
    path = folder / ADAPTER_NAME
    tensors = read_model_folder(folder)
    model = twin(base)
    targets = list(config.target_modules)
    try:
        inject(model, rank=config.r, alpha=config.lora_alpha, targets=targets, seed=0)
    except ValueError as error:
        raise ModelError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    parameters = adapter_tensors(model)
    if parameters.keys() != tensors.keys():
        odd = min(parameters.keys() ^ tensors.keys())
        raise ModelError(f"{path}: tensor {odd!r} is missing, or is not one of this adapter")
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.dtype not in ("BF16", "F16", "F32") or tensor.shape != tuple(parameter.shape):
            raise ModelError(
                f"{path}: tensor {name!r} is {tensor.dtype} {tensor.shape}; the model needs"
                f" BF16, F16 or F32 {tuple(parameter.shape)}"
            )
        dtype = torch.float32 if compute == "float32" else torch_type(tensor.dtype)
        parameter.data = torch_tensor(tensor, dtype=dtype, device=parameter.device)
    model.eval()
    dtypes = {name: tensors[name].dtype for name in parameters}
    return LoadedModel(model, ModelWeights(parameters, dtypes, {}))


def adapter_tensors(model: Any) -> "dict[str, torch.nn.Parameter]":
    """A and B of every adapted layer under peft's names, in canonical order."""
    found: dict[str, torch.nn.Parameter] = {}
    for name, layer in adapted_layers(model).items():
        found[tensor_name(name, "A")] = layer.lora_A[ADAPTER].weight
        found[tensor_name(name, "B")] = layer.lora_B[ADAPTER].weight
    return dict(sorted(found.items()))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora: needs peft; run: pip install 'farflow[torch]'") from error
    return peft
