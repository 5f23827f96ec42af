"""A loaded model with its optimizer: what a torch trainer steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transport.runtime.model_folder import ModelWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Learner:
    """What belongs to the loaded folder. ``keeps_logits``: the model can leave out logits that
    nobody needs."""

    model: Any
    weights: ModelWeights
    optimizer: "torch.optim.AdamW"
    vocabulary: int
    keeps_logits: bool
    artefacts: dict[str, bytes]
