"""Recorded log-probabilities against those of the trainer: what its own forward pass has to say
about the agents' honesty.

For every trained token t of a sequence, with both log-probabilities in nats,

    d_t        = log p_trainer(t) - log p_recorded(t)         bounded to +-MAX_DIFFERENCE
    difference = mean of |d_t|
    kl         = mean of exp(d_t) - 1 - d_t                   KL(recorded || trainer), unbiased
                                                              (Schulman 2020, as in ``losses``)

Weights older than those of the forward pass give other log-probabilities without anybody's fault.
How far the policy has come since is known step by step: ``moved`` is the mean of
|log p_after(t) - log p_before(t)| over a sample of the tokens that a step trained on, and for
tokens of a version v, by the triangle inequality,

    mean |log p_recorded - log p_v|  >=  mean |d|  -  sum of ``moved`` over the steps since v

The right side is what the scheduler makes its judgement from (``scheduler.core.honesty``;
``core.reports`` has the sums). The sample's tokens stand for those of the group, and move rather
more, because the step was to move them: an honest agent is below zero on average, by half of the
sum in ``tests/integration/test_honest_log_probabilities.py``.

What always holds: a sequence counts under the oldest version that drew any of its trained tokens.
Sequences without a place in the batch's forward pass (advantage 0) are not compared. The bound on
a token keeps one odd token from speaking for a thousand others. Sums that are not finite are left
out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloud_trainer.batching import MicroBatch
from cloud_trainer.trainer import TrainingSequence
from transport.messages import GroupDrift

MAX_DIFFERENCE = 5.0
"""Nats that one token counts for at most."""

SAMPLE = 8
"""Of so many rows one is computed again after the step: about 4 % of a step's work,"""

LEAST_ROWS = 32
"""but as far as there are that many, no fewer than these."""

_TOKENS, _DIFFERENCE, _KL = range(3)


class Comparison:
    """Sums over the trained tokens of each sequence: ``sums`` [sequences, (tokens, |d|, kl)]."""

    def __init__(self, sequences: int) -> None:
        self.sums: NDArray[np.float64] = np.zeros((sequences, 3), np.float64)
        self.sample: MicroBatch | None = None
        self.before: NDArray[np.float64] = np.zeros(0)

    def add(self, micro: MicroBatch, now: NDArray[np.float64]) -> None:
        """The trainer's log-probabilities ``now`` [trained] of a micro batch."""
        d = np.clip(now - micro.behaviour, -MAX_DIFFERENCE, MAX_DIFFERENCE)
        of = np.repeat(micro.sibling, micro.lengths)
        for column, values in (
            (_TOKENS, np.ones(len(d))),
            (_DIFFERENCE, np.abs(d)),
            (_KL, np.exp(d) - 1.0 - d),
        ):
            self.sums[:, column] += np.bincount(of, values, len(self.sums))

    def keep_sample(self, micro: MicroBatch, now: NDArray[np.float64], micro_batches: int) -> None:
        """Remember a part of a micro batch, one of ``micro_batches`` of its kind, with the
        log-probabilities ``now`` [trained] of its tokens before the step."""
        most = max(1, len(micro.tokens) // LEAST_ROWS)
        self.sample, chosen = micro.every(min(most, -(-SAMPLE // micro_batches)))
        self.before = now[chosen]

    def moved(self, after: NDArray[np.float64]) -> tuple[float, int]:
        """The sum of absolute changes of the sample's log-probabilities [trained], and of how many
        tokens."""
        changes = np.abs(np.clip(after - self.before, -MAX_DIFFERENCE, MAX_DIFFERENCE))
        return float(changes.sum()), len(changes)

    def drifts(self, siblings: Sequence[TrainingSequence]) -> tuple[GroupDrift, ...]:
        """By group and oldest version, in the order of ``siblings`` [sequences]."""
        by_group: dict[tuple[str, int], NDArray[np.float64]] = {}
        for sibling, sums in zip(siblings, self.sums, strict=True):
            if sums[_TOKENS] and np.isfinite(sums).all():
                drawn = zip(sibling.versions, sibling.loss_mask, strict=True)
                key = (sibling.group, min(version for version, own in drawn if own))
                by_group[key] = by_group.get(key, 0.0) + sums
        return tuple(
            GroupDrift(
                job=job,
                version=version,
                tokens=int(sums[_TOKENS]),
                difference=float(sums[_DIFFERENCE] / sums[_TOKENS]),
                kl=float(sums[_KL] / sums[_TOKENS]),
            )
            for (job, version), sums in by_group.items()
        )
