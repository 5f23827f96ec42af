"""Micro batches hold every trained token once, in the place where its logits will be."""

import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from cloud_trainer.advantages import group_advantages
from cloud_trainer.batching import make_batch
from cloud_trainer.presets import resolve_settings
from cloud_trainer.torch_settings import TorchSettings
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


def batch_of(groups, *, vocabulary=100, **settings):
    settings = TorchSettings(**{"micro_batch_tokens": 1000, **settings})
    return make_batch(groups, settings, vocabulary=vocabulary)


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
        own = [s for s in group if any(s.loss_mask)]
        values = group_advantages([s.reward for s in own], "group_std")
        for s, advantage in zip(own, values, strict=True):
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


def test_siblings_without_a_token_of_this_policy_are_no_siblings():
    """A workflow of several policies returns sequences of each; their rewards differ in kind."""
    others = sequence([1], [8, 9], reward=-40.0, mask=[False, False])
    own = [sequence([1], [2], reward=1.0), sequence([1], [3], reward=0.0)]
    batch = batch_of([[own[0], others, own[1]]])
    assert entries_of(batch) == entries_of(batch_of([own]))
    assert (batch.sequences, batch.tokens, batch.reward_mean) == (2, 2, 0.5)
    assert batch.group_sizes == (2,)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_a_sequence_stand_together_and_know_their_place_in_the_batch(seed):
    groups = random_groups(seed)
    batch = batch_of(groups, micro_batch_tokens=30, kl_coefficient=0.1)
    siblings = [s for group in groups for s in group if any(s.loss_mask)]
    assert batch.rewards.tolist() == [s.reward for s in siblings]
    assert sum(batch.group_sizes) == batch.sequences == len(siblings)
    offset, seen = 0, []
    for micro in batch.micro_batches:
        assert micro.offset == offset
        offset += len(micro.row)
        ends = np.cumsum(micro.lengths)
        assert ends[-1] == len(micro.row)
        for place, end, length in zip(micro.sibling, ends, micro.lengths, strict=True):
            part = slice(end - length, end)
            own = siblings[place]
            drawn = [
                token for token, is_own in zip(own.tokens, own.loss_mask, strict=True) if is_own
            ]
            assert micro.targets[micro.row[part], micro.column[part]].tolist() == drawn
            assert len(set(micro.advantage[part].tolist())) == 1
            seen.append(int(place))
    assert sorted(seen) == list(range(len(siblings)))
    assert offset == batch.trained == batch.tokens


def test_with_a_kl_sequences_without_advantage_are_computed_too():
    dull = [sequence([1], [2, 3], reward=1.0), sequence([1], [4, 3], reward=1.0)]
    batch = batch_of([dull], kl_coefficient=0.01)
    (micro,) = batch.micro_batches
    assert micro.advantage.tolist() == [0.0] * 4
    assert batch.trained == 4


def test_with_a_critic_every_sequence_is_computed_and_a_single_sibling_is_enough():
    alone = [sequence([1], [2, 3], reward=1.0)]
    settings = resolve_settings({"preset": "ppo"})
    batch = make_batch([alone], settings, vocabulary=100)
    (micro,) = batch.micro_batches
    assert (micro.advantage.tolist(), micro.returns) == ([0.0, 0.0], None)
    assert batch.trained == 2


def test_advantages_of_other_rewards_replace_those_of_the_first():
    groups = random_groups(3)
    batch = batch_of(groups, kl_coefficient=0.1, micro_batch_tokens=30)
    rewards = np.random.default_rng(0).normal(size=batch.sequences)
    changed = iter(rewards.tolist())
    other = [
        [msgspec.structs.replace(s, reward=next(changed)) if any(s.loss_mask) else s for s in group]
        for group in groups
    ]
    settings = TorchSettings(kl_coefficient=0.1)
    expected = batch_of(other, kl_coefficient=0.1, micro_batch_tokens=30)
    assert entries_of(batch.with_rewards(rewards, settings)) == entries_of(expected)


def test_what_a_rank_computes_without_work_has_the_shape_and_no_trained_tokens():
    (micro,) = batch_of([[sequence([1], [2], reward=1.0), sequence([1], [3])]]).micro_batches
    blank = micro.without_trained()
    assert blank.tokens is micro.tokens
    assert {len(a) for a in (blank.row, blank.column, blank.behaviour, blank.lengths)} == {0}


def test_long_sequences_lose_reward_before_advantages_are_taken():
    group = [sequence([1], [2] * 10, reward=1.0), sequence([1], [3] * 8, reward=1.0)]
    batch = batch_of(
        [group], overlong_penalty=0.5, overlong_share=0.5, max_tokens=10, normalisation="none"
    )
    assert batch.rewards.tolist() == pytest.approx([0.5, 0.7])
    assert batch.reward_mean == 1.0
    (micro,) = batch.micro_batches
    assert set(np.round(micro.advantage, 6).tolist()) == {np.float32(0.1), np.float32(-0.1)}


def test_the_penalty_counts_what_the_policy_wrote_and_not_what_a_tool_said():
    mask = [True] + [False] * 9
    group = [sequence([1], [2] * 10, reward=1.0, mask=mask), sequence([1], [3], reward=0.0)]
    batch = batch_of([group], overlong_penalty=1.0, max_tokens=5)
    assert batch.rewards.tolist() == [1.0, 0.0]


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
