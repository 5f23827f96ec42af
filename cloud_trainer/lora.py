"""Low-rank adapters (LoRA, arXiv:2106.09685): a model of which only small additions are trained.

    W' = W + (alpha / rank) B A        B [out, rank], A [rank, in]; B starts at zero

What always holds: W never changes; what is published under W's name is W' rounded to the folder's
type, so engines, deltas, checks and exports need not know of adapters. A and B are found by the
names ``W.lora_A`` and ``W.lora_B`` in checkpoints. Equal settings start from equal adapters,
whatever the number of ranks.

Rounding has a price: an addition below half a unit in the last place of W is not seen by the agents
until it has grown (A and B keep it in float32), as for full training.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloud_trainer.lora_table import LoraTable
from transport.errors import ConfigError, ModelError
from transport.runtime.model_folder import LoadedModel

if TYPE_CHECKING:
    import torch

_ADAPTER = "default"
"""The name that peft gives an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The addition to one weight; ``a`` and ``b`` are the names of its parts among the trained
    parameters. ``transposed``: W is stored [in, out], as GPT-2 does."""

    a: str
    b: str
    scale: float
    transposed: bool


def add_adapters(loaded: LoadedModel, table: LoraTable) -> dict[str, Adapter]:
    """Put adapters into a model in place and freeze the rest; by the name of the weight.

    Raises:
        ConfigError: peft is not installed, or ``targets`` names no linear layer, or one whose
            weight another layer uses too.
        ModelError: an adapter is on something that the model's files do not hold.
    """
    peft = _peft()
    import torch

    everything = table.targets == ("all-linear",)
    if "all-linear" in table.targets and not everything:
        raise ConfigError('lora.targets: "all-linear" stands alone; leave the other names out')
    config = peft.LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if everything else list(table.targets),
        task_type="CAUSAL_LM",
    )
    names = {id(parameter): name for name, parameter in loaded.weights.parameters.items()}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(table.seed)
        # That it found out by itself that a layer is transposed.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        warnings.filterwarnings("ignore", message="Model has `tie_word")  # refused below
        try:
            peft.inject_adapter_in_model(config, loaded.model)
        except ValueError as error:
            raise ConfigError(f"lora.targets: {' '.join(str(error).split())[:300]}") from error
    if not everything:
        _check_targets(loaded, table.targets)
    adapters: dict[str, Adapter] = {}
    for layer in _adapted(loaded):
        weight = layer.get_base_layer().weight
        users = sum(one._parameters.get("weight") is weight for one in loaded.model.modules())
        if users > 1:  # the other layer would compute without what agents get
            raise ConfigError(
                f"lora.targets: {names.get(id(weight))} is shared with another layer (a tied"
                " head); leave its name out"
            )
        name = names.get(id(layer.get_base_layer().weight))
        if name is None:
            raise ModelError("lora: an adapter is on a weight that the model's files do not hold")
        adapters[name] = Adapter(
            a=f"{name}.lora_A",
            b=f"{name}.lora_B",
            scale=layer.scaling[_ADAPTER],
            transposed=layer.fan_in_fan_out,
        )
    return dict(sorted(adapters.items()))


def adapter_parameters(
    loaded: LoadedModel, adapters: Mapping[str, Adapter]
) -> "dict[str, torch.nn.Parameter]":
    """The trained parameters by their names, in canonical order."""
    names = {id(parameter): name for name, parameter in loaded.weights.parameters.items()}
    found: dict[str, torch.nn.Parameter] = {}
    for layer in _adapted(loaded):
        adapter = adapters[names[id(layer.get_base_layer().weight)]]
        found[adapter.a] = layer.lora_A[_ADAPTER].weight
        found[adapter.b] = layer.lora_B[_ADAPTER].weight
    return dict(sorted(found.items()))


def merged(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", adapter: Adapter
) -> "torch.Tensor":
    """W' as a new tensor; all of them whole."""
    addition = adapter.scale * (b.detach() @ a.detach())
    return weight.detach() + (addition.T if adapter.transposed else addition)


def _check_targets(loaded: LoadedModel, targets: Sequence[str]) -> None:
    """Whether every name stands for a layer that has an adapter now; peft drops others silently."""
    adapted = {id(layer) for layer in _adapted(loaded)}
    found = [name for name, module in loaded.model.named_modules() if id(module) in adapted]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            raise ConfigError(
                f"lora.targets: no linear layer is named {target!r}; those with an adapter are"
                f" {', '.join(sorted({name.rpartition('.')[2] for name in found})) or 'none'}"
            )


def _adapted(loaded: LoadedModel) -> list[Any]:
    """The layers that have an adapter."""
    layers: list[Any] = list(loaded.model.modules())
    return [layer for layer in layers if _ADAPTER in getattr(layer, "lora_A", ())]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora: needs peft; run: pip install 'farflow[torch]'") from error
    return peft
