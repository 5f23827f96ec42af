"""Low-rank adapters (LoRA, arXiv:2106.09685): a model of which only small additions are trained.

    W' = W + (alpha / rank) B A        B [out, rank], A [rank, in]; B starts at zero

What always holds: W never changes. Published is either W', rounded to the folder's type, under W's
name (``merged``: engines, checks and exports need not know of adapters), or A and B alone, under
the names that peft gives them in files (``adapter``: agents have W already). A and B are found by
the names ``W.lora_A`` and ``W.lora_B`` in checkpoints. Equal settings start from equal adapters,
whatever the number of ranks.

Rounding W' has a price: an addition below half a unit in the last place of W is not seen by the
agents until it has grown (A and B keep it in float32), as for full training. A and B alone are
published as they are trained, or rounded each by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloud_trainer.lora_table import LoraTable
from transport.errors import ConfigError, ModelError
from transport.runtime.adapted_model import ADAPTER, adapted_layers, inject
from transport.runtime.model_folder import LoadedModel
from transport.weights.adapter import AdapterConfig, adapter_artefacts, describe_base

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Adapter:
    """The addition to the weight of ``layer``; ``a`` and ``b`` are the names of its parts among the
    trained parameters. ``transposed``: W is stored [in, out], as GPT-2 does."""

    layer: str
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
    everything = table.targets == ("all-linear",)
    if "all-linear" in table.targets and not everything:
        raise ConfigError('lora.targets: "all-linear" stands alone; leave the other names out')
    names = {id(parameter): name for name, parameter in loaded.weights.parameters.items()}
    targets = "all-linear" if everything else list(table.targets)
    try:
        inject(loaded.model, rank=table.rank, alpha=table.alpha, targets=targets, seed=table.seed)
    except ValueError as error:
        raise ConfigError(f"lora.targets: {' '.join(str(error).split())[:300]}") from error
    if not everything:
        _check_targets(loaded, table.targets)
    adapters: dict[str, Adapter] = {}
    for layer_name, layer in adapted_layers(loaded.model).items():
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
            layer=layer_name,
            a=f"{name}.lora_A",
            b=f"{name}.lora_B",
            scale=layer.scaling[ADAPTER],
            transposed=layer.fan_in_fan_out,
        )
    return dict(sorted(adapters.items()))


def adapter_parameters(
    loaded: LoadedModel, adapters: Mapping[str, Adapter]
) -> "dict[str, torch.nn.Parameter]":
    """The trained parameters by their names, in canonical order."""
    names = {id(parameter): name for name, parameter in loaded.weights.parameters.items()}
    found: dict[str, torch.nn.Parameter] = {}
    for layer in adapted_layers(loaded.model).values():
        adapter = adapters[names[id(layer.get_base_layer().weight)]]
        found[adapter.a] = layer.lora_A[ADAPTER].weight
        found[adapter.b] = layer.lora_B[ADAPTER].weight
    return dict(sorted(found.items()))


def merged(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", adapter: Adapter
) -> "torch.Tensor":
    """W' as a new tensor; all of them whole."""
    addition = adapter.scale * (b.detach() @ a.detach())
    return weight.detach() + (addition.T if adapter.transposed else addition)


def published_files(
    folder: Path, table: LoraTable, adapters: Mapping[str, Adapter], *, threads: int
) -> dict[str, bytes]:
    """What travels with A and B where they are published alone: how they belong into the model in
    ``folder``, which is read whole. Raises ModelError when it does not load."""
    layers = [adapter.layer for adapter in adapters.values()]
    config = AdapterConfig(
        base_model_name_or_path=folder.name,
        r=table.rank,
        lora_alpha=table.alpha,
        fan_in_fan_out=any(adapter.transposed for adapter in adapters.values()),
        target_modules=tuple(sorted(layers if table.targets == ("all-linear",) else table.targets)),
    )
    return adapter_artefacts(config, describe_base(folder, threads=threads))


def _check_targets(loaded: LoadedModel, targets: Sequence[str]) -> None:
    """Whether every name stands for a layer that has an adapter now; peft drops others silently."""
    found = list(adapted_layers(loaded.model))
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            raise ConfigError(
                f"lora.targets: no linear layer is named {target!r}; those with an adapter are"
                f" {', '.join(sorted({name.rpartition('.')[2] for name in found})) or 'none'}"
            )
