"""What runs inside the workers of vLLM, in its processes: nothing of the agent imports it.

vLLM finds it by name (``worker_extension_cls``), which registers the weight-transfer backend, too.
``FarflowTransfer`` writes new weights through vLLM's own life cycle of an update; the extension
adds what that has no room for: the map, reading back, and how far staging is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from edge_agent.engines.vllm_writer import WeightWriter

BACKEND = "farflow"


@dataclass
class FarflowInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed for mypy
    """Nothing to agree on: values come in files."""


@dataclass
class FarflowUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``do``: stage ``entries[rank]`` of ``path``, commit what is staged, or drop it."""

    do: str
    path: str = ""
    entries: Sequence[Sequence[Mapping[str, Any]]] = field(default_factory=list)


class FarflowTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Changes of cells, in place."""

    init_info_cls = FarflowInit
    update_info_cls = FarflowUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writer = WeightWriter(self.model, self.device)

    def init_transfer_engine(self, init_info: FarflowInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """What an earlier update left staged is of no use."""
        self.writer.drop()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without waiting for the device, which the inherited one does: staging is to go on beside
        the model's work, and whoever commits has paused the engine, whose work is over then."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FarflowUpdate) -> None:
        """Raises RuntimeError when a commit fails, see ``WeightWriter.commit``."""
        if update_info.do == "stage":
            rank = self.parallel_config.rank
            self.writer.stage(update_info.path, update_info.entries[rank])
        elif update_info.do == "commit":
            self.writer.commit()
        else:
            self.writer.drop()

    def finish_weight_update(self) -> None:
        """All is written."""

    def shutdown(self) -> None:
        self.writer.drop()


class FarflowExtension:
    """Calls that an agent makes on every worker."""

    weight_transfer_engine: FarflowTransfer

    def farflow_record(self, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> bytes:
        """The worker's ``WorkerMap``, as MessagePack."""
        transfer = self.weight_transfer_engine
        found = transfer.writer.record(tensors, transfer.model.load_weights)
        return msgspec.msgpack.encode(found)

    def farflow_staged(self) -> tuple[bool, str]:
        """See ``WeightWriter.staged``."""
        return self.weight_transfer_engine.writer.staged()

    def farflow_read(self, path: str, boxes: Sequence[Sequence[Any]]) -> None:
        """See ``WeightWriter.read``; ``boxes`` of each rank."""
        transfer = self.weight_transfer_engine
        transfer.writer.read(path, boxes[transfer.parallel_config.rank])

    def farflow_read_cells(self, asked: Sequence[Sequence[tuple[int, bytes]]]) -> list[bytes]:
        """See ``WeightWriter.read_cells``; storages and positions asked of each rank."""
        transfer = self.weight_transfer_engine
        mine = asked[transfer.parallel_config.rank]
        return [transfer.writer.read_cells(storage, positions) for storage, positions in mine]


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """Instead of packing a layer's weights on a CPU: the packed copy could not be changed."""
    layer.cpu_linear = torch.nn.functional.linear


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FarflowTransfer)
if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
