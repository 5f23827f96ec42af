"""Adapters beside the model that they belong to: what their folders say, and checks of that model.

    adapter_model.safetensors   A and B of every adapted layer, under peft's names
    adapter_config.json         peft's description (``AdapterConfig``)
    base_model.json             digests of the model below (``BaseModel``)

What always holds: an adapter that was published names its model by SHA-256 of all weights and of
every configuration and tokenizer file, so agents that compute with one compute with the trainer's
model; no name or path decides that.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from transport.errors import ModelError
from transport.weights.digest import full_digest
from transport.weights.folder import read_artefacts, read_model_folder
from transport.weights.manifest import ADAPTER_CONFIG_NAME, BASE_NAME


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of peft's ``LoraConfig`` that we publish, under peft's names; what peft knows beyond
    it (other initial values, DoRA, trained biases) has no place in it. ``target_modules`` are last
    parts of the names of layers, ``fan_in_fan_out`` that they are stored [in, out] (GPT-2)."""

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: str
    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    bias: Literal["none"] = "none"
    fan_in_fan_out: bool = False
    inference_mode: bool = True
    target_modules: tuple[str, ...]


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model below an adapter: SHA-256 of all weights (``full_digest``) and of each artefact, by
    its name."""

    full_digest: str
    artefacts: dict[str, str]


def tensor_name(layer: str, part: Literal["A", "B"]) -> str:
    """How peft's files call a part of the adapter of the layer with this name in the model."""
    return f"base_model.model.{layer}.lora_{part}.weight"


def describe_base(folder: Path, *, threads: int = 1) -> BaseModel:
    """What an adapter of the model in ``folder`` says about it; reads all of it.

    Raises:
        ModelError: the folder does not load; names the file.
    """
    artefacts = read_artefacts(folder)
    weights = read_model_folder(folder, mapped=True)
    return BaseModel(
        full_digest=full_digest(weights, threads=threads),
        artefacts={name: hashlib.sha256(data).hexdigest() for name, data in artefacts.items()},
    )


def check_base(folder: Path, base: BaseModel, *, threads: int = 1) -> None:
    """Whether ``folder`` has exactly the model that an adapter belongs to; reads all of it. Files
    that the trainer's folder did not have may be there.

    Raises:
        ModelError: another model; names what differs.
    """
    found = describe_base(folder, threads=threads)
    for name, digest in base.artefacts.items():
        if found.artefacts.get(name) != digest:
            raise ModelError(f"{folder / name} is missing or not that of the adapter's model")
    if found.full_digest != base.full_digest:
        raise ModelError(
            f"{folder}: the weights have full digest {found.full_digest[:12]}, those of the"
            f" adapter's model {base.full_digest[:12]}"
        )


def adapter_artefacts(config: AdapterConfig, base: BaseModel) -> dict[str, bytes]:
    """The files that travel with an adapter's tensors, by name."""
    return {ADAPTER_CONFIG_NAME: _json(config), BASE_NAME: _json(base)}


def read_adapter(folder: Path) -> tuple[AdapterConfig, BaseModel]:
    """What an adapter's folder says about itself and about the model below it.

    Raises:
        ModelError: a file is missing or malformed, or describes what is no plain LoRA adapter.
    """
    found: list[Any] = []
    for name, kind in ((ADAPTER_CONFIG_NAME, AdapterConfig), (BASE_NAME, BaseModel)):
        try:
            found.append(msgspec.json.decode((folder / name).read_bytes(), type=kind))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(f"{folder / name}: {error}") from error
    config, base = found
    return config, base


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
