"""The gradient of a batch: forward and backward over its micro batches.

The gradient of the batch is the sum over its micro batches, so ``micro_batch_tokens`` bounds the
memory and changes nothing else but rounding.
"""

from typing import TYPE_CHECKING, Any

from cloud_trainer.batching import Batch, MicroBatch
from cloud_trainer.losses import clipped_token_losses, token_log_probabilities
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_settings import TorchSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

_MEANS = ("loss", "kl_behaviour", "clip_fraction", "ratio_mean", "entropy")


def accumulate(
    learner: Learner, batch: Batch, settings: TorchSettings, *, device: str
) -> dict[str, float]:
    """Leave the gradient of the batch in the parameters; returns means."""
    totals = dict.fromkeys(_MEANS, 0.0)
    for micro in batch.micro_batches:
        now, entropy = _forward(learner, micro, settings, device)
        losses = clipped_token_losses(
            now,
            _tensor(micro.behaviour, device),
            _tensor(micro.advantage, device),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            ratio_max=settings.ratio_max,
        )
        loss = losses.loss / batch.tokens
        loss.backward()  # type: ignore[no-untyped-call]
        totals["loss"] += loss.item()
        totals["kl_behaviour"] += losses.kl / batch.trained
        totals["clip_fraction"] += losses.clipped / batch.trained
        totals["ratio_mean"] += losses.ratio / batch.trained
        totals["entropy"] += entropy / batch.trained
    return totals


def _forward(
    learner: Learner, micro: MicroBatch, settings: TorchSettings, device: str
) -> tuple["torch.Tensor", float]:
    """Log-probabilities of the trained tokens [trained] and the sum of entropies there."""
    arguments = {"input_ids": _tensor(micro.tokens, device), "use_cache": False}
    # One more than is used: the last column predicts what comes behind the sequences.
    wanted = micro.kept + 1
    if learner.keeps_logits:
        arguments["logits_to_keep"] = wanted
    logits = learner.model(**arguments).logits[:, -wanted:-1]
    chosen, entropy = token_log_probabilities(
        logits, _tensor(micro.targets, device), temperature=settings.temperature
    )
    row, column = _tensor(micro.row, device), _tensor(micro.column, device)
    return chosen[row, column], float(entropy[row, column].sum())


def _tensor(array: "np.ndarray[Any, Any]", device: str) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array).to(device)
