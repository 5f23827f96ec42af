"""A loaded model with its optimizer: what a torch trainer steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloud_trainer.critic import Critic
from cloud_trainer.lora import Adapter, merged
from cloud_trainer.lora_table import LoraTable
from cloud_trainer.spread import Spread
from transport.runtime.model_folder import ModelWeights, published_tensor
from transport.weights.adapter import tensor_name
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Learner:
    """What belongs to the loaded folder. ``trained`` are the parameters that the optimizer moves,
    by their names in a checkpoint: the model's own, or those of ``adapters``. ``keeps_logits``: the
    model can leave out logits that nobody needs. ``reference`` is the frozen model that a KL term
    compares with, ``critic`` what else listens to the model, with an optimizer of its own."""

    model: Any
    weights: ModelWeights
    trained: "dict[str, torch.nn.Parameter]"
    optimizer: "torch.optim.AdamW"
    vocabulary: int
    keeps_logits: bool
    artefacts: dict[str, bytes]
    spread: Spread
    adapters: dict[str, Adapter] = field(default_factory=dict)
    lora: LoraTable | None = None
    reference: Any | None = None
    critic: Critic | None = None

    def published(self) -> Iterator[tuple[str, TensorBytes]]:
        """All published tensors in canonical order, adapters merged or alone; copies. Every rank
        calls it, what comes out is rank 0's."""
        if self.lora is not None and self.lora.publish == "adapter":
            yield from self._adapters_alone(self.lora)
            return
        weights, whole = self.weights, self.spread.whole
        for name in sorted(weights.parameters.keys() | weights.fixed.keys()):
            if name in weights.fixed:
                yield name, weights.fixed[name]
                continue
            dtype, adapter = weights.dtypes[name], self.adapters.get(name)
            if adapter is None:
                values = whole(weights.parameters[name], dtype)
            else:
                values = whole(weights.parameters[name])
                a, b = whole(self.trained[adapter.a]), whole(self.trained[adapter.b])
                if self.spread.rank == 0:
                    values = merged(values, a, b, adapter)
            if self.spread.rank == 0:
                yield name, published_tensor(values, dtype)

    def _adapters_alone(self, lora: LoraTable) -> Iterator[tuple[str, TensorBytes]]:
        """A and B of every adapted weight, under peft's names."""
        parts: dict[str, tuple[str, str]] = {}
        for weight, adapter in self.adapters.items():
            dtype = "F32" if lora.dtype == "float32" else self.weights.dtypes[weight]
            parts[tensor_name(adapter.layer, "A")] = (adapter.a, dtype)
            parts[tensor_name(adapter.layer, "B")] = (adapter.b, dtype)
        for name, (trained, dtype) in sorted(parts.items()):
            values = self.spread.whole(self.trained[trained], dtype)
            if self.spread.rank == 0:
                yield name, published_tensor(values, dtype)
