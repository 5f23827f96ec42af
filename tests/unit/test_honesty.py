"""The trainer's comparison of recorded log-probabilities with its own: sums, bounds, versions."""

import math

import numpy as np
import pytest
from trainer_peers import POLICY, make_ref

from cloud_trainer.batching import make_batch
from cloud_trainer.core import events as on
from cloud_trainer.core.reports import StepReports
from cloud_trainer.honesty import MAX_DIFFERENCE, Comparison
from cloud_trainer.torch_settings import TorchSettings
from cloud_trainer.trainer import TrainingSequence
from transport.messages import MAX_DRIFTS, GroupDrift


def sequence(group: str, logprobs, *, reward=0.0, versions=None, mask=None, first=3):
    count = len(logprobs)
    return TrainingSequence(
        group=group,
        prompt_tokens=(1, 2),
        tokens=tuple(range(first, first + count)),
        logprobs=tuple(logprobs),
        versions=(7,) * count if versions is None else versions,
        loss_mask=(True,) * count if mask is None else mask,
        reward=reward,
    )


def compared(*groups, now=-1.0, micro_batch_tokens=1000) -> dict[tuple[str, int], GroupDrift]:
    """What is found when the trainer gives every token the log-probability ``now``."""
    settings = TorchSettings(micro_batch_tokens=micro_batch_tokens)
    batch = make_batch(groups, settings, vocabulary=100)
    comparison = Comparison(batch.sequences)
    for micro in batch.micro_batches:
        comparison.add(micro, np.full(len(micro.row), now))
    return {(d.job, d.version): d for d in comparison.drifts(batch.siblings)}


@pytest.mark.parametrize("micro_batch_tokens", [1, 1000])
def test_the_means_are_over_the_tokens_of_a_group(micro_batch_tokens):
    group = [
        sequence("g", (-1.1, -1.1), reward=1.0),
        sequence("g", (-0.7, -1.0, -1.5, -1.0), first=9),
    ]
    found = compared(group, micro_batch_tokens=micro_batch_tokens)
    d = [0.1, 0.1, -0.3, 0.0, 0.5, 0.0]
    [drift] = found.values()
    assert (drift.job, drift.version, drift.tokens) == ("g", 7, 6)
    assert drift.difference == pytest.approx(sum(map(abs, d)) / 6, rel=1e-5)
    assert drift.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 6, rel=1e-5)


def test_equal_sequences_are_each_held_to_what_they_recorded():
    group = [sequence("g", (-1.0, -1.0), reward=1.0), sequence("g", (-2.0, -2.0))]
    assert compared(group)["g", 7].difference == pytest.approx(0.5)


def test_a_sequence_of_several_versions_is_not_compared():
    group = [
        sequence("g", (-1.0, -3.0), reward=1.0, versions=(6, 7)),
        sequence("g", (-1.0, -1.0), first=9),
    ]
    found = compared(group)
    assert found.keys() == {("g", 7)}
    assert (found["g", 7].tokens, found["g", 7].difference) == (2, pytest.approx(0.0))


def test_tokens_that_are_not_trained_say_nothing_of_versions_or_differences():
    group = [
        sequence("g", (-1.2, -9.0), reward=1.0, versions=(7, 0), mask=(True, False)),
        sequence("g", (-1.0,), first=9),
    ]
    assert compared(group)["g", 7].difference == pytest.approx(0.1)


def test_a_sequence_without_a_place_in_the_forward_pass_is_not_compared():
    assert compared([sequence("g", (-3.0,)), sequence("g", (-3.0,), first=9)]) == {}


def test_one_odd_token_counts_for_no_more_than_the_bound():
    odd = [sequence("g", (-60.0,) + (-1.0,) * 99, reward=1.0, first=0), sequence("g", (-1.0,))]
    drift = compared(odd)["g", 7]
    assert drift.difference == pytest.approx(MAX_DIFFERENCE / 101)
    assert drift.kl < math.exp(MAX_DIFFERENCE) / 101


def test_groups_of_different_versions_are_told_apart():
    found = compared(
        [sequence("g", (-1.0,), reward=1.0, versions=(6,)), sequence("g", (-1.0,), first=9)],
        [sequence("h", (-1.5,), reward=1.0), sequence("h", (-1.5,), first=9)],
    )
    assert {key: drift.tokens for key, drift in found.items()} == {
        ("g", 6): 1, ("g", 7): 1, ("h", 7): 2,
    }  # fmt: skip


def test_what_is_not_finite_is_left_out():
    group = [sequence("g", (-1.0,), reward=1.0), sequence("g", (-1.0,), first=9)]
    assert compared(group, now=math.nan) == {}


def test_only_what_the_version_before_the_step_drew_is_reported():
    reports = StepReports(POLICY)
    drifts = tuple(
        GroupDrift(job=f"j{version}", version=version, tokens=9, difference=0.1, kl=0.01)
        for version in (3, 4, 5)
    )
    done = on.StepFinished(step=5, drifts=drifts)
    report = reports.add(done, version=5, held=4, groups=(make_ref(1),), now=1.0)
    assert [drift.job for drift in report.drifts] == ["j4"]


def test_a_report_holds_no_more_than_fits_its_message():
    drift = GroupDrift(job="j", version=4, tokens=9, difference=0.1, kl=0.01)
    done = on.StepFinished(step=5, drifts=(drift,) * (MAX_DRIFTS + 1))
    report = StepReports(POLICY).add(done, version=5, held=4, groups=(make_ref(1),), now=1.0)
    assert len(report.drifts) == MAX_DRIFTS
