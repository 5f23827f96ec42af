"""Recorded log-probabilities against those of the trainer: what its own forward pass has to say
about the agents' honesty.

For every trained token t of a sequence, with both log-probabilities in nats,

    d_t        = log p_trainer(t) - log p_recorded(t)         bounded to +-MAX_DIFFERENCE
    difference = mean of |d_t|
    kl         = mean of exp(d_t) - 1 - d_t                   KL(recorded || trainer), unbiased
                                                              (Schulman 2020, as in ``losses``)

What always holds: a sequence counts when one version drew all of its trained tokens, under that
version; whoever knows which version the weights of the forward pass are (the trainer's core) keeps
those and drops the rest. Nothing is computed twice, so sequences without a place in the batch's
forward pass (advantage 0) are not compared. The bound on a token keeps one odd token from speaking
for a thousand others. Sums that are not finite are left out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloud_trainer.batching import MicroBatch
from cloud_trainer.trainer import TrainingSequence
from transport.messages import GroupDrift

MAX_DIFFERENCE = 5.0
"""Nats that one token counts for at most."""

_TOKENS, _DIFFERENCE, _KL = range(3)


class Comparison:
    """Sums over the trained tokens of each sequence: ``sums`` [sequences, (tokens, |d|, kl)]."""

    def __init__(self, sequences: int) -> None:
        self.sums: NDArray[np.float64] = np.zeros((sequences, 3), np.float64)

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

    def drifts(self, siblings: Sequence[TrainingSequence]) -> tuple[GroupDrift, ...]:
        """By group and version, in the order of ``siblings`` [sequences]."""
        by_group: dict[tuple[str, int], NDArray[np.float64]] = {}
        for sibling, sums in zip(siblings, self.sums, strict=True):
            drawn = {
                version
                for version, own in zip(sibling.versions, sibling.loss_mask, strict=True)
                if own
            }
            if len(drawn) == 1 and sums[_TOKENS] and np.isfinite(sums).all():
                key = (sibling.group, drawn.pop())
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
