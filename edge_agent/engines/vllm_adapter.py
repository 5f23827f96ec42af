"""A policy's adapter (LoRA) in a vLLM: what of its published cells lies there.

vLLM knows no scale: it computes ``W x + B' (A' x)``. So it gets

    A' = r(A)    B' = r(s B)    s = alpha / rank

where ``s B`` is multiplied in float32 and ``r`` rounds to the type of vLLM's adapters, to the
nearest and to even, which vLLM makes that of the model unless told otherwise. From a type that is
no wider, with an ``s`` that is a power of two, nothing is lost.

What always holds: the published cells are kept here, and vLLM's are a function of them; what is
read back counts as published where vLLM has the very bits that this function gives, and is
something else where not; a change that the type could not hold is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from edge_agent.engine import Positions
from edge_agent.engines.vllm_map import TensorForm, WorkerMap
from transport.errors import IntegrityError, ModelError
from transport.weights.adapter import read_adapter
from transport.weights.digest import finite_cells
from transport.weights.folder import read_model_folder
from transport.weights.patch import Patch, write_change
from transport.weights.tensors import Cells

ADAPTER_ID: Final = 1000
"""Of the one adapter in a vLLM; what vLLM itself makes while it starts counts from 1."""

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NOWHERE: Final = "/nowhere/farflow"
"""In place of an adapter's folder: vLLM is to fail rather than to read one."""


def adapter_arguments(folder: Path) -> dict[str, Any]:
    """What vLLM is started with for the adapter in ``folder``, by the names of its arguments.

    Raises:
        ModelError: the folder does not load, or its rank is too large.
    """
    config, _ = read_adapter(folder)
    room = next((rank for rank in _RANKS if rank >= config.r), 0)
    if not room:
        raise ModelError(
            f"{folder}: an adapter of rank {config.r}; vLLM has room for {_RANKS[-1]}: set a"
            " smaller lora.rank"
        )
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


def check_takes_adapters(model: Path) -> None:
    """Raises ModelError when vLLM has no adapters for the model in a folder; for processes that
    have vLLM."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_Architectures)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{model}/config.json: {error}") from error
    for name in config.architectures:
        known = ModelRegistry.models.get(name)
        if known is not None and not supports_lora(known.load_model_cls()):
            raise ModelError(
                f'{model}: vLLM takes no adapters on {name}; set lora.publish = "merged" for the'
                ' policy, or agent.engine = "torch"'
            )


def adapter_request(policy: str) -> Any:
    """What goes with each sequence, so that it is drawn with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(policy, ADAPTER_ID, _NOWHERE)


class _Architectures(msgspec.Struct):
    architectures: tuple[str, ...] = ()


class AdapterBits:
    """``Bits`` of the adapter in ``folder``.

    Raises:
        ModelError: the folder does not load.
    """

    def __init__(self, folder: Path) -> None:
        config, _ = read_adapter(folder)
        self._rank = config.r
        self._scale = np.float32(config.lora_alpha / config.r)
        self._published: dict[str, Cells] = {
            name: tensor.cells().copy() for name, tensor in read_model_folder(folder).items()
        }

    def record(self, ask: Any, tensors: Sequence[Any]) -> list[Any]:
        """See ``Bits.record``; from then on vLLM has an adapter of zeros."""
        found: list[Any] = ask("record_adapter", self._rank, tensors)
        return found

    def check(self, forms: Mapping[str, TensorForm], maps: Sequence[WorkerMap]) -> None:
        """Raises ModelError when vLLM puts no adapter there."""
        for name, form in forms.items():
            boxes = [each for found in maps for each in found.boxes.get(name, ())]
            strange = [found.strange[name] for found in maps if name in found.strange]
            if strange or sum(each.cells for each in boxes) < form.cells:
                raise ModelError(
                    f"vLLM has no place for tensor {name!r} of an adapter"
                    f"{''.join(f': {what}' for what in strange[:1])}; take its layer out of"
                    ' lora.targets, or set lora.publish = "merged"'
                )

    def stored(self, name: str, cells: Cells, form: TensorForm, kept: str) -> Cells:
        """``A'`` or ``B'`` as bit patterns of the type ``kept``.

        Raises:
            IntegrityError: a value is too large for it.
        """
        if kept == form.dtype and (self._scale == 1 or not _is_b(name)):
            return cells
        with np.errstate(over="ignore", under="ignore"):
            values = _floats(cells, form.dtype)
            if _is_b(name):
                values = values * self._scale
            made = _bits(values, kept)
        if not finite_cells(kept, made):
            raise IntegrityError(
                f"a value is too large for {kept}, the type of vLLM's adapters (with alpha / rank"
                f" = {self._scale:g} in B); see lora_dtype in [agent.vllm.extra]"
            )
        return made

    def published(
        self, name: str, cells: Cells, form: TensorForm, kept: str, at: Positions | None
    ) -> Cells:
        """The published cells, and their complements where vLLM has something else."""
        ours = self._published[name]
        if at is not None:
            ours = ours[at]
        same = self.stored(name, ours, form, kept) == cells
        return np.where(same, ours, ~ours)

    def written(self, patch: Patch) -> None:
        """Keep what is published now."""
        for name, changes in patch.items():
            for change in changes:
                write_change(self._published[name], change)


def _is_b(name: str) -> bool:
    return name.endswith(".lora_B.weight")


def _floats(cells: Cells, dtype: str) -> npt.NDArray[np.float32]:
    """Values of bit patterns; exact."""
    if dtype == "BF16":
        return (cells.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(cells).view(f"<f{cells.itemsize}").astype(np.float32)


def _bits(values: npt.NDArray[np.float32], dtype: str) -> Cells:
    """Bit patterns of the nearest values of a type, of two that are as near the even one."""
    if dtype == "F16":
        half: Cells = values.astype(np.float16).view(np.uint16)
        return half
    bits: Cells = values.view(np.uint32)
    if dtype == "F32":
        return bits
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + up) >> np.uint32(16)).astype(np.uint16)
