"""Groups of sequences as padded micro batches.

What always holds:

1. A micro batch has at most ``micro_batch_tokens`` cells, padding included, or a single row.
2. Equal sequences (same prompt, same tokens) are one row, whatever group, reward and behaviour
   they come with: they share the forward pass and their gradients add up. Short answers to easy
   questions repeat, so this saves more than half there.
3. Siblings without a token of this policy are not there at all. Sequences whose advantage is zero
   are left out of the micro batches, unless a KL to the reference or a critic gives them a
   gradient. They still count in ``Batch.tokens`` and ``Batch.sequences``, over which the loss is
   averaged.
4. Rows are padded on the right. Under causal attention no token sees what comes behind it, so no
   attention mask is needed.
5. The trained tokens of a sequence stand together, and have one advantage; with a critic it is 0
   until there are values, and then each token's own.
6. The result depends on the groups and their order only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cloud_trainer.advantages import Values, batch_advantages, overlong_reward
from cloud_trainer.torch_settings import TorchSettings
from cloud_trainer.trainer import TrainingSequence
from transport.summaries import MAX_LOGPROB

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences side by side, and where in them the trained tokens are.

    ``tokens`` [rows, columns] is padded with 0. Logits are needed from column ``first`` to the last
    but one, ``kept`` columns; ``targets`` [rows, kept] are the tokens that they predict.

    [sequences] has one entry per sequence: its place ``sibling`` in ``Batch.rewards``, and its
    number of trained tokens ``lengths``. [trained] has one entry per sequence and trained token,
    sequence after sequence: its place (``row``, ``column``) in ``targets``, the log-probability it
    was drawn with (``behaviour``), and its ``advantage``. ``takes_part`` [trained] is there once it
    was decided which tokens do, ``returns`` [trained], what a critic is to predict, once there are
    values. ``offset`` is the place of the first trained token among those of the batch.
    """

    tokens: Ints
    first: int
    targets: Ints
    sibling: Ints
    lengths: Ints
    row: Ints
    column: Ints
    behaviour: Floats
    advantage: Floats
    offset: int
    takes_part: NDArray[np.bool_] | None = None
    returns: Floats | None = None

    @property
    def kept(self) -> int:
        return int(self.targets.shape[1])

    def without_trained(self) -> "MicroBatch":
        """The same forward pass with nothing to learn from: what a rank computes that has no work
        left while others have."""
        return replace(
            self,
            sibling=self.sibling[:0],
            lengths=self.lengths[:0],
            row=self.row[:0],
            column=self.column[:0],
            behaviour=self.behaviour[:0],
            advantage=self.advantage[:0],
        )

    def every(self, step: int) -> tuple["MicroBatch", NDArray[np.intp]]:
        """Every ``step``-th row, and the places of its tokens among [trained]."""
        chosen = np.flatnonzero(self.row % step == 0)
        sequences = self.row[np.cumsum(self.lengths) - 1] % step == 0
        part = replace(
            self,
            tokens=self.tokens[::step],
            targets=self.targets[::step],
            sibling=self.sibling[sequences],
            lengths=self.lengths[sequences],
            row=self.row[chosen] // step,
            column=self.column[chosen],
            behaviour=self.behaviour[chosen],
            advantage=self.advantage[chosen],
            takes_part=None,
            returns=None,
        )
        return part, chosen


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step learns from. ``tokens`` and ``sequences`` count all that this policy
    has in it, ``trained`` those of the tokens in micro batches. ``rewards`` [sequences] are what
    advantages are taken of, group after group, ``group_sizes`` [groups] siblings each;
    ``reward_mean`` is without the penalty for length; ``siblings`` are the [sequences]."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    sequences: int
    trained: int
    malformed_groups: int
    reward_mean: float
    rewards: Values
    group_sizes: tuple[int, ...]
    siblings: tuple[TrainingSequence, ...]

    def with_rewards(self, rewards: Values, settings: TorchSettings) -> "Batch":
        """The same with advantages of other rewards [sequences]."""
        advantages = _advantages(rewards, self.group_sizes, settings)
        micro_batches = tuple(
            replace(
                micro,
                advantage=np.repeat(advantages[micro.sibling], micro.lengths).astype(np.float32),
            )
            for micro in self.micro_batches
        )
        return replace(self, micro_batches=micro_batches, rewards=rewards)


@dataclass(slots=True)
class _Row:
    prompt_tokens: int
    tokens: tuple[int, ...]
    entries: list[tuple[int, TrainingSequence, float]]


def make_batch(
    groups: Sequence[Sequence[TrainingSequence]], settings: TorchSettings, *, vocabulary: int
) -> Batch:
    """Micro batches of all groups; a group with a malformed sequence is left out and counted."""
    siblings: list[TrainingSequence] = []
    group_sizes: list[int] = []
    malformed = 0
    for group in groups:
        if not all(_well_formed(sequence, vocabulary) for sequence in group):
            malformed += 1
            continue
        own = [sequence for sequence in group if any(sequence.loss_mask)]
        siblings += own
        group_sizes.append(len(own))
    counts = [sum(sequence.loss_mask) for sequence in siblings]
    rewards = np.array(
        [
            _reward(sequence, count, settings)
            for sequence, count in zip(siblings, counts, strict=True)
        ],
        np.float64,
    )
    advantages = _advantages(rewards, group_sizes, settings)
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], _Row] = {}
    trained = 0
    for number, (sequence, advantage) in enumerate(zip(siblings, advantages.tolist(), strict=True)):
        if advantage == 0 and not (settings.kl_coefficient or settings.critic):
            continue
        trained += counts[number]
        whole = sequence.prompt_tokens + sequence.tokens
        row = rows.setdefault(
            (sequence.prompt_tokens, sequence.tokens),
            _Row(len(sequence.prompt_tokens), whole, []),
        )
        row.entries.append((number, sequence, advantage))
    # Of like length together (sorting keeps the order of equals): least padding.
    ordered = sorted(rows.values(), key=lambda row: (len(row.tokens), row.prompt_tokens))
    micro_batches: list[MicroBatch] = []
    offset = 0
    for part in _cut(ordered, settings.micro_batch_tokens):
        micro_batches.append(_micro_batch(part, offset))
        offset += len(micro_batches[-1].row)
    return Batch(
        micro_batches=tuple(micro_batches),
        tokens=sum(counts),
        sequences=len(siblings),
        trained=trained,
        malformed_groups=malformed,
        reward_mean=float(np.mean([s.reward for s in siblings])) if siblings else 0.0,
        rewards=rewards,
        group_sizes=tuple(group_sizes),
        siblings=tuple(siblings),
    )


def _reward(sequence: TrainingSequence, own_tokens: int, settings: TorchSettings) -> float:
    if not settings.overlong_penalty:
        return sequence.reward
    return sequence.reward + settings.overlong_penalty * overlong_reward(
        own_tokens, max_tokens=settings.max_tokens, share=settings.overlong_share
    )


def _advantages(rewards: Values, group_sizes: Sequence[int], settings: TorchSettings) -> Values:
    if settings.critic is not None:
        return np.zeros_like(rewards)
    ends = np.cumsum(group_sizes, dtype=np.int64)
    groups = np.split(rewards, ends[:-1])
    return batch_advantages(groups, settings.normalisation, settings.baseline)


def _well_formed(sequence: TrainingSequence, vocabulary: int) -> bool:
    """Whether the model can score every token; what an agent sends is not to be trusted."""
    length = len(sequence.tokens)
    return (
        len(sequence.prompt_tokens) > 0
        and len(sequence.logprobs) == length == len(sequence.loss_mask)
        and math.isfinite(sequence.reward)
        and all(math.isfinite(logprob) for logprob in sequence.logprobs)
        and max(sequence.logprobs, default=0.0) <= MAX_LOGPROB
        and min(min(sequence.prompt_tokens), min(sequence.tokens, default=0)) >= 0
        and max(max(sequence.prompt_tokens), max(sequence.tokens, default=0)) < vocabulary
    )


def _cut(rows: Sequence[_Row], micro_batch_tokens: int) -> list[list[_Row]]:
    """Consecutive parts; ``rows`` are sorted by length, so the last row of a part is its width."""
    parts: list[list[_Row]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * len(row.tokens) <= micro_batch_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _micro_batch(rows: Sequence[_Row], offset: int) -> MicroBatch:
    columns = max(len(row.tokens) for row in rows)
    first = min(row.prompt_tokens for row in rows) - 1
    tokens = np.zeros((len(rows), columns), np.int64)
    sibling: list[int] = []
    row_index: list[Ints] = []
    column_index: list[Ints] = []
    behaviour: list[Floats] = []
    advantage: list[Floats] = []
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = row.tokens
        for place, sequence, value in row.entries:
            own = np.flatnonzero(np.asarray(sequence.loss_mask, bool))
            sibling.append(place)
            row_index.append(np.full(len(own), number, np.int64))
            column_index.append(own + (row.prompt_tokens - 1 - first))
            behaviour.append(np.asarray(sequence.logprobs, np.float32)[own])
            advantage.append(np.full(len(own), value, np.float32))
    return MicroBatch(
        tokens=tokens,
        first=first,
        targets=tokens[:, first + 1 :],
        sibling=np.array(sibling, np.int64),
        lengths=np.array([len(part) for part in row_index], np.int64),
        row=np.concatenate(row_index),
        column=np.concatenate(column_index),
        behaviour=np.concatenate(behaviour),
        advantage=np.concatenate(advantage),
        offset=offset,
    )
