"""A loaded model with its optimizer: what a torch trainer steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloud_trainer.lora import Adapter, merged
from cloud_trainer.spread import Spread
from transport.runtime.model_folder import ModelWeights, published_tensor
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Learner:
    """What belongs to the loaded folder. ``trained`` are the parameters that the optimizer moves,
    by their names in a checkpoint: the model's own, or those of ``adapters``. ``keeps_logits``: the
    model can leave out logits that nobody needs. ``reference`` is the frozen model that a KL term
    compares with."""

    model: Any
    weights: ModelWeights
    trained: "dict[str, torch.nn.Parameter]"
    optimizer: "torch.optim.AdamW"
    vocabulary: int
    keeps_logits: bool
    artefacts: dict[str, bytes]
    spread: Spread
    adapters: dict[str, Adapter] = field(default_factory=dict)
    reference: Any | None = None

    def published(self) -> Iterator[tuple[str, TensorBytes]]:
        """All published tensors in canonical order, adapters merged; copies. Every rank calls it,
        what comes out is rank 0's."""
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
