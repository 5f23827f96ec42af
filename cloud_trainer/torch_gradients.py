"""The gradient of a batch: forward and backward over its micro batches.

What always holds:

1. The gradient of the batch is the sum over its micro batches, so ``micro_batch_tokens`` bounds the
   memory and changes nothing else but rounding. They are dealt out to the ranks, each of which
   makes as many forward and backward passes as every other.
2. What depends on the whole batch (which tokens fit the budget of the second moment, advantages of
   rewards with a KL in them or of a critic) is decided in a first pass without gradient, before any
   gradient is taken. Settings that need no such decision cost no such pass.
3. Where a KL in the reward meets a critic, each token has its own part of it as a reward.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloud_trainer.advantages import Values
from cloud_trainer.batching import Batch, Ints, MicroBatch
from cloud_trainer.critic import Critic, estimated, estimates, token_rewards
from cloud_trainer.honesty import Comparison
from cloud_trainer.losses import (
    TokenLosses,
    fact_names,
    kl_terms,
    policy_losses,
)
from cloud_trainer.precision import computing
from cloud_trainer.second_moment import within_budget
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_settings import TorchSettings

if TYPE_CHECKING:
    import torch


def accumulate(
    learner: Learner,
    batch: Batch,
    settings: TorchSettings,
    *,
    device: str,
    comparison: Comparison | None = None,
) -> dict[str, float]:
    """Leave the gradient of this rank's part of the batch in the parameters; returns the means of
    the whole batch. Every rank calls it with the same batch; ``comparison`` is filled in."""
    import torch

    critic = learner.critic
    totals = dict.fromkeys(("loss", *fact_names(settings), "entropy"), 0.0)
    if critic is not None:
        totals["value_loss"] = 0.0
    mine = learner.spread.share(batch.micro_batches, MicroBatch.without_trained)
    batch = replace(batch, micro_batches=tuple(mine))
    batch, decided = _decided(learner, batch, settings, device)
    divisor = _divisor(batch, settings)
    count = len(batch.micro_batches)
    for number, micro in enumerate(batch.micro_batches):
        with torch.set_grad_enabled(critic is None or not critic.warms_up):
            now, entropy = _forward(learner.model, learner, micro, settings, device)
            losses = _policy_losses(learner, micro, now, settings, device)
        if comparison is not None:
            before = now.detach().double().cpu().numpy()
            comparison.add(micro, before)
            if number == count // 2:  # the rows are sorted by length
                comparison.keep_sample(micro, before, count)
        loss = whole = losses.loss / divisor
        if critic is not None and micro.returns is not None:
            values = _values(critic, micro, device)
            value_loss = critic.losses(values, _tensor(micro.returns, device)) / batch.trained
            totals["value_loss"] += value_loss.item()
            whole = loss + value_loss
        whole.backward()  # type: ignore[no-untyped-call]
        totals["loss"] += loss.item()
        for name, value in losses.facts.items():
            totals[name] += value / batch.trained
        totals["entropy"] += entropy / batch.trained
    if comparison is not None:
        comparison.sums = _total(learner, comparison.sums)
    return {**learner.spread.total(totals), **decided}


def movement(
    learner: Learner, comparison: Comparison, settings: TorchSettings, *, device: str
) -> float:
    """How far the update after ``accumulate`` moved the log-probabilities of a sample of its
    tokens: the mean absolute change in nats, 0 where there was nothing to learn from. Every rank
    calls it."""
    import torch

    if comparison.sample is None:
        return 0.0
    with torch.no_grad():
        after, _ = _forward(learner.model, learner, comparison.sample, settings, device)
    change, tokens = comparison.moved(after.double().cpu().numpy())
    whole = learner.spread.total({"change": change, "tokens": float(tokens)})
    return whole["change"] / max(1.0, whole["tokens"])


def _policy_losses(
    learner: Learner,
    micro: MicroBatch,
    now: "torch.Tensor",
    settings: TorchSettings,
    device: str,
) -> TokenLosses:
    in_loss = settings.kl_coefficient > 0 and settings.kl_in == "loss"
    return policy_losses(
        now,
        _tensor(micro.behaviour, device),
        _tensor(micro.advantage, device),
        settings,
        lengths=_tensor(micro.lengths, device),
        kept=None if micro.takes_part is None else _tensor(micro.takes_part, device),
        reference=_reference(learner, micro, settings, device) if in_loss else None,
    )


def _divisor(batch: Batch, settings: TorchSettings) -> int:
    """What the summed loss is divided by; constant weights per token are in ``policy_losses``."""
    if settings.aggregation == "token":
        return batch.tokens
    if settings.aggregation == "sequence":
        return batch.sequences
    return batch.sequences * settings.max_tokens


def _decided(
    learner: Learner, batch: Batch, settings: TorchSettings, device: str
) -> tuple[Batch, dict[str, float]]:
    """The batch after what its first pass decided, and the means of all ranks from there."""
    import torch

    critic = learner.critic
    in_reward = settings.kl_coefficient > 0 and settings.kl_in == "reward"
    if not (in_reward or settings.second_moment_budget or critic):
        return batch, {}
    log_ratios, kl, values, advantages, returns = np.zeros((5, batch.trained))
    of_sequence = np.zeros(batch.sequences)
    with torch.no_grad():
        for micro in batch.micro_batches:
            now, _ = _forward(learner.model, learner, micro, settings, device)
            own = slice(micro.offset, micro.offset + len(micro.row))
            log_ratios[own] = now.double().cpu().numpy() - micro.behaviour
            if in_reward:
                reference = _reference(learner, micro, settings, device)
                kl[own] = kl_terms(now, reference, settings.kl_estimator).double().cpu().numpy()
                siblings = np.repeat(micro.sibling, micro.lengths)
                of_sequence += np.bincount(siblings, kl[own], minlength=len(of_sequence))
            if critic is not None:
                values[own] = _values(critic, micro, device).double().cpu().numpy()
                rewards = token_rewards(micro, batch.rewards) - settings.kl_coefficient * kl[own]
                advantages[own], returns[own] = estimates(micro, rewards, values[own], critic.table)
    facts: dict[str, float] = {}
    if in_reward:
        facts["kl_reference"] = float(_total(learner, kl).sum()) / max(1, batch.trained)
    if critic is not None:
        batch, facts["explained_variance"] = estimated(
            batch, settings, *(_total(learner, part) for part in (values, advantages, returns))
        )
    elif in_reward:
        penalties = settings.kl_coefficient * _total(learner, of_sequence)
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
    return batch, facts


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
    from cloud_trainer.log_probabilities import token_log_probabilities  # needs torch at once

    arguments = {"input_ids": _tensor(micro.tokens, device), "use_cache": False}
    # One more than is used: the last column predicts what comes behind the sequences.
    wanted = micro.kept + 1
    if learner.keeps_logits:
        arguments["logits_to_keep"] = wanted
    places, which = _places(micro)
    row, column = np.divmod(places, micro.kept)
    needed = _Places(_tensor(row, device), _tensor(column, device), wanted, micro.tokens.shape)
    with needed.alone(model), computing(settings.precision, device):
        logits = model(**arguments).logits
    chosen, entropy = token_log_probabilities(
        needed.of_logits(logits),
        _tensor(micro.targets[row, column][None], device),
        temperature=settings.temperature,
    )
    index = _tensor(which, device)
    return chosen[0, index], float(entropy[0, index].sum())


def _places(micro: MicroBatch) -> tuple[Ints, Ints]:
    """The places in ``targets`` (flat) that have a trained token, and for every trained token
    which of them is its own [trained]. Never none, so that work with nothing to learn from goes
    the same way through the model as any other."""
    places, which = np.unique(micro.row * micro.kept + micro.column, return_inverse=True)
    return (places if len(places) else np.zeros(1, np.int64)), which


class _Places:
    """Where logits are needed: at ``row`` and ``column`` [places] among the ``wanted`` last columns
    of tokens of this ``shape``."""

    def __init__(
        self, row: "torch.Tensor", column: "torch.Tensor", wanted: int, shape: tuple[int, ...]
    ) -> None:
        self._row, self._column, self._wanted = row, column, wanted
        self._shapes = (shape, (shape[0], wanted))

    @contextlib.contextmanager
    def alone(self, model: Any) -> Iterator[None]:
        """Let the model's output layer compute these places only, [1, places] instead of [rows,
        columns], if the model says which layer that is. What a model does with its logits
        afterwards (a bound, a scale) it does to each place by itself."""
        output = model.get_output_embeddings()
        if output is None:
            yield
            return
        hook = output.register_forward_pre_hook(self._cut)
        try:
            yield
        finally:
            hook.remove()

    def of_logits(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Logits of the places [1, places, vocabulary], whether or not the model left out the
        others."""
        # Whole ones have more than one row, or more columns than there are places in a row.
        return self._at(logits) if logits.shape[:2] in self._shapes else logits

    def _cut(self, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not inputs or inputs[0].dim() != 3 or inputs[0].shape[:2] not in self._shapes:
            return None  # not a state per token: the model has its own way, which we let it go
        return (self._at(inputs[0]), *inputs[1:])

    def _at(self, values: "torch.Tensor") -> "torch.Tensor":
        return values[self._row, self._column + (values.shape[1] - self._wanted)][None]


def _values(critic: Critic, micro: MicroBatch, device: str) -> "torch.Tensor":
    """Values of the trained tokens [trained] after a forward pass."""
    return critic.values(_tensor(micro.row, device), _tensor(micro.column, device), micro.kept)


def _tensor(array: "np.ndarray[Any, Any]", device: str) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array).to(device)
