"""Micro batches hold every trained token once, in the place where its logits will be."""

import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from cloud_trainer.advantages import group_advantages
from cloud_trainer.batching import make_batch
from cloud_trainer.trainer import TrainingSequence


def sequence(prompt, tokens, *, reward=0.0, group="g", mask=None, logprobs=None):
    return TrainingSequence(
        group=group,
        prompt_tokens=tuple(prompt),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs or [-0.5] * len(tokens)),
        versions=(0,) * len(tokens),
        loss_mask=tuple(mask or [True] * len(tokens)),
        reward=reward,
    )


def batch_of(groups, *, micro_batch_tokens=1000, vocabulary=100):
    return make_batch(
        groups,
        micro_batch_tokens=micro_batch_tokens,
        advantages="group_std",
        vocabulary=vocabulary,
    )


def random_groups(seed, groups=6, siblings=4):
    rng = random.Random(seed)
    made = []
    for number in range(groups):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        made.append(
            [
                sequence(
                    prompt,
                    tokens := [rng.randrange(3) for _ in range(rng.randint(1, 5))],
                    reward=rng.choice([0.0, 0.5, 1.0]),
                    group=f"g{number}",
                    mask=[rng.random() < 0.8 for _ in tokens],
                    logprobs=[-rng.random() for _ in tokens],
                )
                for _ in range(siblings)
            ]
        )
    return made


def entries_of(batch):
    """(all tokens before, token, behaviour, advantage) of each trained token, out of the arrays."""
    found = Counter()
    for micro in batch.micro_batches:
        for row, column, behaviour, advantage in zip(
            micro.row, micro.column, micro.behaviour, micro.advantage, strict=True
        ):
            before = tuple(micro.tokens[row, : micro.first + column + 1].tolist())
            token = int(micro.targets[row, column])
            assert token == micro.tokens[row, micro.first + column + 1]
            found[before, token, float(behaviour), float(advantage)] += 1
    return found


def entries_expected(groups):
    found = Counter()
    for group in groups:
        values = group_advantages([s.reward for s in group], "group_std")
        for s, advantage in zip(group, values, strict=True):
            for position, own in enumerate(s.loss_mask):
                if own and advantage:
                    before = s.prompt_tokens + s.tokens[:position]
                    numbers = np.float32([s.logprobs[position], advantage]).tolist()
                    found[before, s.tokens[position], *numbers] += 1
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 100_000])
def test_every_trained_token_is_there_once_behind_its_own_past(seed, micro_batch_tokens):
    groups = random_groups(seed)
    batch = batch_of(groups, micro_batch_tokens=micro_batch_tokens)
    expected = entries_expected(groups)
    assert entries_of(batch) == expected
    assert batch.trained == expected.total()
    assert batch.tokens == sum(sum(s.loss_mask) for group in groups for s in group)


@pytest.mark.parametrize("seed", range(8))
def test_no_micro_batch_has_more_cells_than_allowed_unless_it_is_one_row(seed):
    batch = batch_of(random_groups(seed, groups=20), micro_batch_tokens=40)
    assert len(batch.micro_batches) > 1
    for micro in batch.micro_batches:
        assert micro.tokens.size <= 40 or len(micro.tokens) == 1


def test_equal_sequences_share_a_row_and_keep_their_own_numbers():
    group = [
        sequence([5, 6], [7, 1], reward=1.0, logprobs=[-0.1, -0.2]),
        sequence([5, 6], [7, 1], reward=1.0, logprobs=[-0.3, -0.4]),
        sequence([5, 6], [8, 1], reward=0.0, logprobs=[-0.5, -0.6]),
    ]
    (micro,) = batch_of([group]).micro_batches
    assert len(micro.tokens) == 2
    assert len(micro.row) == 6
    assert sorted(micro.behaviour.tolist()) == sorted(np.float32([-i / 10 for i in range(1, 7)]))


def test_groups_without_signal_are_counted_but_not_computed():
    dull = [sequence([1], [2, 3], reward=1.0), sequence([1], [4, 3], reward=1.0)]
    batch = batch_of([dull])
    assert batch.micro_batches == ()
    assert (batch.tokens, batch.trained, batch.reward_mean) == (4, 0, 1.0)


def test_tokens_of_others_are_context_and_not_trained():
    tool = [
        sequence([1], [2, 50, 51, 3], reward=1.0, mask=[True, False, False, True]),
        sequence([1], [4, 50, 51, 3], reward=0.0, mask=[True, False, False, True]),
    ]
    batch = batch_of([tool])
    assert batch.tokens == batch.trained == 4
    (micro,) = batch.micro_batches
    assert {int(micro.targets[r, c]) for r, c in zip(micro.row, micro.column, strict=True)} == {
        2,
        3,
        4,
    }


GOOD = sequence([1, 2], [3, 4], reward=1.0)
BAD = {
    "no prompt": {"prompt_tokens": ()},
    "unknown token": {"tokens": (3, 100)},
    "negative token": {"prompt_tokens": (-1,)},
    "reward is not a number": {"reward": float("nan")},
    "log-probability is infinite": {"logprobs": (-1.0, float("-inf"))},
    "log-probability above zero": {"logprobs": (-1.0, 0.5)},
    "too few log-probabilities": {"logprobs": (-1.0,)},
    "too short a mask": {"loss_mask": (True,)},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_a_group_with_a_malformed_sequence_is_left_out_whole_and_counted(change):
    bad = [GOOD, msgspec.structs.replace(GOOD, **{"reward": 0.0, **change})]
    good = [GOOD, msgspec.structs.replace(GOOD, reward=0.0)]
    batch = batch_of([bad, good])
    assert batch.malformed_groups == 1
    assert entries_of(batch) == entries_expected([good])
    assert batch.reward_mean == 0.5


def test_nothing_to_learn_from_is_an_empty_batch():
    assert batch_of([]).micro_batches == ()
    assert (
        batch_of([[], [sequence([1], [], reward=1.0), sequence([1], [], reward=0.0)]]).tokens == 0
    )
