"""What runs inside the workers of vLLM, in its processes: nothing of the agent imports it.

What always holds: vLLM finds it by name (``worker_extension_cls``); an agent makes one call,
``farflow_call``, of which question and answer are MessagePack; a call never raises, but answers
what went wrong: of several workers vLLM would take the first one's exception and leave the
others' answers to whoever calls next.

When it is imported it watches over the agent that the process belongs to (``vllm_owner``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from edge_agent.engines.vllm_adapter import ADAPTER_ID
from edge_agent.engines.vllm_owner import watch_owner
from edge_agent.engines.vllm_writer import WeightWriter

_CALLS: Final = frozenset(
    {"record", "record_adapter", "stage", "staged", "drop", "commit", "read", "read_cells"}
)


class FarflowExtension:
    """The call that an agent makes on every worker; ``vllm_weights`` is the other side."""

    def farflow_call(self, question: bytes) -> bytes:
        """``[name, arguments]`` to ``[what went wrong, answer]``, both as MessagePack."""
        try:
            name, arguments = msgspec.msgpack.decode(question)
            if name not in _CALLS:
                raise ValueError(f"no call {name!r}")
            answer = ("", getattr(_calls(self), name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the agent is told, see above
            answer = (f"{type(error).__name__}: {error}", None)
        return msgspec.msgpack.encode(answer)


class _Calls:
    """Of one worker; ``rank`` is its place among those that are asked."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._rank: int = worker.rank
        self._writer = WeightWriter(worker.device)

    def record(self, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> Any:
        """The worker's ``WorkerMap`` of a model."""
        model = self._worker.get_model()
        places = (*model.named_parameters(), *model.named_buffers())
        return self._writer.record(
            tensors, places, lambda probes: model.load_weights(iter(probes.items()))
        )

    def record_adapter(self, rank: int, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> Any:
        """The ``WorkerMap`` of an adapter of ``rank``. From now on vLLM has one, of zeros, and
        never looks for a file of it; if it forgot it, the next step would fail."""
        manager = self._worker.model_runner.lora_manager._adapter_manager
        manager.remove_all_adapters()
        manager._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, rank, {})
        manager.activate_adapter(ADAPTER_ID)
        manager.pin_adapter(ADAPTER_ID)
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        places = [
            (f"{name}.{part}.{number}", stack)
            for name, module in manager.modules.items()
            for part in ("lora_a_stacked", "lora_b_stacked")
            for number, stack in enumerate(_stacks(module, part))
        ]
        return self._writer.record(
            tensors, places, lambda probes: _put_adapter(manager, slot, probes)
        )

    def stage(self, path: str, entries: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """See ``WeightWriter.stage``; ``entries`` of each rank."""
        self._writer.stage(path, entries[self._rank])

    def staged(self) -> tuple[bool, str]:
        """See ``WeightWriter.staged``."""
        return self._writer.staged()

    def drop(self) -> None:
        """See ``WeightWriter.drop``."""
        self._writer.drop()

    def commit(self) -> None:
        """See ``WeightWriter.commit``."""
        self._writer.commit()

    def read(self, path: str, boxes: Sequence[Sequence[Any]]) -> None:
        """See ``WeightWriter.read``; ``boxes`` of each rank."""
        self._writer.read(path, boxes[self._rank])

    def read_cells(self, asked: Sequence[Sequence[tuple[int, bytes]]]) -> list[bytes]:
        """See ``WeightWriter.read_cells``; storages and positions asked of each rank."""
        mine = asked[self._rank]
        return [self._writer.read_cells(storage, positions) for storage, positions in mine]


def _calls(worker: Any) -> _Calls:
    found: _Calls | None = getattr(worker, "_farflow_calls", None)
    if found is None:  # the device is not known before the worker is set up
        found = worker._farflow_calls = _Calls(worker)
    return found


def _stacks(module: Any, part: str) -> Sequence[torch.Tensor]:
    stacks = getattr(module, part, ())
    return (stacks,) if isinstance(stacks, torch.Tensor) else stacks


def _put_adapter(manager: Any, slot: int, probes: Mapping[str, torch.Tensor]) -> None:
    """Put an adapter's tensors where vLLM does, without its scaling: the agent has that in B."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    parts: dict[str, dict[bool, torch.Tensor]] = {}
    for name, probe in probes.items():
        layer, is_a = parse_fine_tuned_lora_name(name, renames)
        parts.setdefault(layer, {})[is_a] = probe
    for name, module in manager.modules.items():
        fused = manager.packed_modules.get(name)
        found = [parts.get(layer, {}) for layer in fused or (name,)]
        if not any(found):
            continue
        a, b = ([each.get(is_a) for each in found] for is_a in (True, False))
        module.set_lora(slot, a if fused else a[0], b if fused else b[0])


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """Instead of packing a layer's weights on a CPU: the packed copy could not be changed."""
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
watch_owner()
