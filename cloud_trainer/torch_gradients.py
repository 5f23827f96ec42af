"""The gradient of a batch: forward and backward over its micro batches.

What always holds:

1. The gradient of the batch is the sum over its micro batches, so ``micro_batch_tokens`` bounds the
   memory and changes nothing else but rounding. They are dealt out to the ranks, each of which
   makes as many forward and backward passes as every other.
2. What depends on the whole batch (which tokens fit the budget of the second moment, advantages of
   rewards with a KL in them) is decided in a first pass without gradient, before any gradient is
   taken. Settings that need no such decision cost no such pass.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloud_trainer.advantages import Values
from cloud_trainer.batching import Batch, MicroBatch
from cloud_trainer.losses import fact_names, kl_terms, policy_losses, token_log_probabilities
from cloud_trainer.second_moment import within_budget
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_settings import TorchSettings

if TYPE_CHECKING:
    import torch


def accumulate(
    learner: Learner, batch: Batch, settings: TorchSettings, *, device: str
) -> dict[str, float]:
    """Leave the gradient of this rank's part of the batch in the parameters; returns the means of
    the whole batch. Every rank calls it with the same batch."""
    totals = dict.fromkeys(("loss", *fact_names(settings), "entropy"), 0.0)
    mine = learner.spread.share(batch.micro_batches, MicroBatch.without_trained)
    batch = replace(batch, micro_batches=tuple(mine))
    batch, in_reward = _decided(learner, batch, settings, device)
    if settings.kl_coefficient and settings.kl_in == "reward":
        totals["kl_reference"] = in_reward / max(1, batch.trained)
    divisor = _divisor(batch, settings)
    for micro in batch.micro_batches:
        now, entropy = _forward(learner.model, learner, micro, settings, device)
        losses = policy_losses(
            now,
            _tensor(micro.behaviour, device),
            _tensor(micro.advantage, device),
            settings,
            lengths=_tensor(micro.lengths, device),
            kept=None if micro.takes_part is None else _tensor(micro.takes_part, device),
            reference=(
                _reference(learner, micro, settings, device)
                if settings.kl_coefficient and settings.kl_in == "loss"
                else None
            ),
        )
        loss = losses.loss / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        totals["loss"] += loss.item()
        for name, value in losses.facts.items():
            totals[name] += value / batch.trained
        totals["entropy"] += entropy / batch.trained
    return learner.spread.total(totals)


def _divisor(batch: Batch, settings: TorchSettings) -> int:
    """What the summed loss is divided by; constant weights per token are in ``policy_losses``."""
    if settings.aggregation == "token":
        return batch.tokens
    if settings.aggregation == "sequence":
        return batch.sequences
    return batch.sequences * settings.max_tokens


def _decided(
    learner: Learner, batch: Batch, settings: TorchSettings, device: str
) -> tuple[Batch, float]:
    """The batch after what its first pass decided, and this rank's sum of KL estimates there."""
    import torch

    in_reward = settings.kl_coefficient > 0 and settings.kl_in == "reward"
    if not (in_reward or settings.second_moment_budget):
        return batch, 0.0
    log_ratios = np.zeros(batch.trained)
    kl = np.zeros(batch.sequences)
    with torch.no_grad():
        for micro in batch.micro_batches:
            now, _ = _forward(learner.model, learner, micro, settings, device)
            own = slice(micro.offset, micro.offset + len(micro.row))
            log_ratios[own] = now.double().cpu().numpy() - micro.behaviour
            if in_reward:
                reference = _reference(learner, micro, settings, device)
                terms = kl_terms(now, reference, settings.kl_estimator).double().cpu().numpy()
                siblings = np.repeat(micro.sibling, micro.lengths)
                kl += np.bincount(siblings, weights=terms, minlength=len(kl))
    if in_reward:
        penalties = settings.kl_coefficient * _total(learner, kl)
        batch = batch.with_rewards(batch.rewards - penalties, settings)
    if settings.second_moment_budget:
        takes_part = within_budget(_total(learner, log_ratios), settings.second_moment_budget)
        batch = replace(
            batch,
            micro_batches=tuple(
                replace(micro, takes_part=takes_part[micro.offset : micro.offset + len(micro.row)])
                for micro in batch.micro_batches
            ),
        )
    return batch, float(kl.sum())


def _total(learner: Learner, own: Values) -> Values:
    """The sum of all ranks' arrays, which have the same shape."""
    import torch
    from torch import distributed

    if learner.spread.ranks == 1:
        return own
    sums = torch.from_numpy(own.copy())
    distributed.all_reduce(sums)
    result: Values = sums.numpy()
    return result


def _reference(
    learner: Learner, micro: MicroBatch, settings: TorchSettings, device: str
) -> "torch.Tensor":
    """Log-probabilities of the trained tokens under the reference [trained]."""
    import torch

    with torch.no_grad():
        return _forward(learner.reference, learner, micro, settings, device)[0]


def _forward(
    model: Any, learner: Learner, micro: MicroBatch, settings: TorchSettings, device: str
) -> tuple["torch.Tensor", float]:
    """Log-probabilities of the trained tokens [trained] and the sum of entropies there."""
    arguments = {"input_ids": _tensor(micro.tokens, device), "use_cache": False}
    # One more than is used: the last column predicts what comes behind the sequences.
    wanted = micro.kept + 1
    if learner.keeps_logits:
        arguments["logits_to_keep"] = wanted
    logits = model(**arguments).logits[:, -wanted:-1]
    chosen, entropy = token_log_probabilities(
        logits, _tensor(micro.targets, device), temperature=settings.temperature
    )
    row, column = _tensor(micro.row, device), _tensor(micro.column, device)
    return chosen[row, column], float(entropy[row, column].sum())


def _tensor(array: "np.ndarray[Any, Any]", device: str) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array).to(device)
