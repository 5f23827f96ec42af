"""Groups of sequences as padded micro batches.

What always holds:

1. A micro batch has at most ``micro_batch_tokens`` cells, padding included, or a single row.
2. Equal sequences (same prompt, same tokens) are one row, whatever group, reward and behaviour
   they come with: they share the forward pass and their gradients add up. Short answers to easy
   questions repeat, so this saves more than half there.
3. Sequences whose advantage is zero are left out: their gradient is zero. They still count in
   ``Batch.tokens``, over which the loss is averaged.
4. Rows are padded on the right. Under causal attention no token sees what comes behind it, so no
   attention mask is needed.
5. The result depends on the groups and their order only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloud_trainer.advantages import AdvantageMethod, group_advantages
from cloud_trainer.trainer import TrainingSequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_MAX_LOGPROB = 1e-3
"""Above zero by more than rounding: not a log-probability."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences side by side, and where in them the trained tokens are.

    ``tokens`` [rows, columns] is padded with 0. Logits are needed from column ``first`` to the last
    but one, ``kept`` columns; ``targets`` [rows, kept] are the tokens that they predict. The rest
    has one entry per sequence and trained token, [trained]: its place (``row``, ``column``) in
    ``targets``, the log-probability it was drawn with (``behaviour``), and its ``advantage``.
    """

    tokens: Ints
    first: int
    targets: Ints
    row: Ints
    column: Ints
    behaviour: Floats
    advantage: Floats

    @property
    def kept(self) -> int:
        return int(self.targets.shape[1])


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step learns from. ``tokens`` counts all tokens of this policy in it,
    ``trained`` those of them in micro batches (advantage not zero)."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    trained: int
    malformed_groups: int
    reward_mean: float


@dataclass(slots=True)
class _Row:
    prompt_tokens: int
    tokens: tuple[int, ...]
    entries: list[tuple[TrainingSequence, float]]


def make_batch(
    groups: Sequence[Sequence[TrainingSequence]],
    *,
    micro_batch_tokens: int,
    advantages: AdvantageMethod,
    vocabulary: int,
) -> Batch:
    """Micro batches of all groups; a group with a malformed sequence is left out and counted."""
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], _Row] = {}
    rewards: list[float] = []
    tokens = trained = malformed = 0
    for group in groups:
        if not all(_well_formed(sequence, vocabulary) for sequence in group):
            malformed += 1
            continue
        rewards += [sequence.reward for sequence in group]
        values = group_advantages([sequence.reward for sequence in group], advantages)
        for sequence, advantage in zip(group, values.tolist(), strict=True):
            own_tokens = sum(sequence.loss_mask)
            tokens += own_tokens
            if advantage == 0 or own_tokens == 0:
                continue
            trained += own_tokens
            whole = sequence.prompt_tokens + sequence.tokens
            row = rows.setdefault(
                (sequence.prompt_tokens, sequence.tokens),
                _Row(len(sequence.prompt_tokens), whole, []),
            )
            row.entries.append((sequence, advantage))
    # Of like length together (sorting keeps the order of equals): least padding.
    ordered = sorted(rows.values(), key=lambda row: (len(row.tokens), row.prompt_tokens))
    return Batch(
        micro_batches=tuple(_micro_batch(part) for part in _cut(ordered, micro_batch_tokens)),
        tokens=tokens,
        trained=trained,
        malformed_groups=malformed,
        reward_mean=float(np.mean(rewards)) if rewards else 0.0,
    )


def _well_formed(sequence: TrainingSequence, vocabulary: int) -> bool:
    """Whether the model can score every token; what an agent sends is not to be trusted."""
    length = len(sequence.tokens)
    return (
        len(sequence.prompt_tokens) > 0
        and len(sequence.logprobs) == length == len(sequence.loss_mask)
        and math.isfinite(sequence.reward)
        and all(math.isfinite(logprob) for logprob in sequence.logprobs)
        and max(sequence.logprobs, default=0.0) <= _MAX_LOGPROB
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


def _micro_batch(rows: Sequence[_Row]) -> MicroBatch:
    columns = max(len(row.tokens) for row in rows)
    first = min(row.prompt_tokens for row in rows) - 1
    tokens = np.zeros((len(rows), columns), np.int64)
    row_index: list[Ints] = []
    column_index: list[Ints] = []
    behaviour: list[Floats] = []
    advantage: list[Floats] = []
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = row.tokens
        for sequence, value in row.entries:
            own = np.flatnonzero(np.asarray(sequence.loss_mask, bool))
            row_index.append(np.full(len(own), number, np.int64))
            column_index.append(own + (row.prompt_tokens - 1 - first))
            behaviour.append(np.asarray(sequence.logprobs, np.float32)[own])
            advantage.append(np.full(len(own), value, np.float32))
    return MicroBatch(
        tokens=tokens,
        first=first,
        targets=tokens[:, first + 1 :],
        row=np.concatenate(row_index),
        column=np.concatenate(column_index),
        behaviour=np.concatenate(behaviour),
        advantage=np.concatenate(advantage),
    )
