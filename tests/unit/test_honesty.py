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


def test_a_sequence_of_several_versions_counts_under_the_oldest():
    group = [
        sequence("g", (-1.0, -3.0), reward=1.0, versions=(7, 6)),
        sequence("g", (-1.0, -1.0), first=9),
    ]
    found = compared(group)
    assert (found["g", 6].tokens, found["g", 6].difference) == (2, pytest.approx(1.0))
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


def drift_of(version: int, difference: float = 0.1) -> GroupDrift:
    return GroupDrift(job=f"j{version}", version=version, tokens=9, difference=difference, kl=0.01)


def reported(
    reports: StepReports, step: int, *versions: int, moved: float | None = None, held=None
):
    """The report of the step that leads to the version of its number."""
    done = on.StepFinished(step=step, drifts=tuple(map(drift_of, versions)), moved=moved)
    held = step - 1 if held is None else held
    return reports.add(done, version=step, held=held, groups=(make_ref(1),), now=1.0)


def older(report) -> dict[str, float]:
    return {drift.job: drift.moved for drift in report.older}


def test_what_the_version_before_the_step_drew_is_reported_apart():
    report = reported(StepReports(POLICY), 5, 3, 4, 5)
    assert [(drift.job, drift.moved) for drift in report.drifts] == [("j4", 0.0)]


def test_older_groups_are_reported_with_the_way_since_their_version():
    reports = StepReports(POLICY)
    for step, moved in ((1, 0.1), (2, 0.2), (3, 0.4)):
        reported(reports, step, moved=moved)
    report = reported(reports, 4, 0, 1, 2, 3, 4, moved=0.8)
    assert [drift.job for drift in report.drifts] == ["j3"]
    assert older(report) == pytest.approx({"j0": 0.7, "j1": 0.6, "j2": 0.4})
    assert older(reported(reports, 5, 3)) == pytest.approx({"j3": 0.8})


def test_the_way_to_versions_of_an_earlier_life_is_not_known():
    reports = StepReports(POLICY)
    reported(reports, 5, moved=0.1)
    assert older(reported(reports, 6, 3, 4, moved=0.1)) == pytest.approx({"j4": 0.1})


def test_a_lineage_that_was_left_is_not_compared():
    reports = StepReports(POLICY)
    for step in (1, 2, 3):
        reported(reports, step, moved=0.1)
    reported(reports, 7, moved=0.1, held=6)  # published again as version 6
    assert older(reported(reports, 8, 2, 3, 6, moved=0.1)) == pytest.approx({"j6": 0.1})


@pytest.mark.parametrize("moved", [None, math.nan, math.inf])
def test_a_step_of_unknown_length_ends_the_way(moved):
    reports = StepReports(POLICY)
    reported(reports, 1, moved=0.1)
    reported(reports, 2, moved=moved)
    assert older(reported(reports, 3, 0, 1, moved=0.1)) == {}
    assert older(reported(reports, 4, 1, 2, moved=0.1)) == pytest.approx({"j2": 0.1})


def test_the_way_is_remembered_of_so_many_versions_only():
    reports = StepReports(POLICY)
    for step in range(1, 1001):
        reported(reports, step, moved=0.125)
    assert len(reports._way) <= 256
    assert older(reported(reports, 1001, 1, 990)) == {"j990": 1.25}


def test_a_report_holds_no_more_than_fits_its_message():
    reports = StepReports(POLICY)
    reported(reports, 4, moved=0.1)
    report = reported(reports, 5, *(3, 4) * (MAX_DRIFTS + 1))
    assert len(report.drifts) == len(report.older) == MAX_DRIFTS


@pytest.mark.parametrize(("every", "rows"), [(1, 5), (2, 3), (8, 1)])
def test_a_sample_of_a_micro_batch_is_every_so_manieth_row(every, rows):
    """Equal sequences are one row; here two of each, of different lengths."""
    group = [
        sequence("g", (-float(n + 1), -2.0, *(-3.0,) * n), reward=float(n % 2), first=10 * n)
        for n in range(5)
    ]
    batch = make_batch([group, group], TorchSettings(micro_batch_tokens=1000), vocabulary=100)
    [micro] = batch.micro_batches
    part, chosen = micro.every(every)
    assert len(part.tokens) == len(part.targets) == rows
    assert part.lengths.sum() == len(part.row) == len(chosen)
    assert len(part.sibling) == 2 * rows
    assert (part.behaviour == micro.behaviour[chosen]).all()
    before = micro.targets[micro.row, micro.column][chosen]
    assert (part.targets[part.row, part.column] == before).all()


def test_the_movement_is_the_mean_change_of_the_samples_tokens():
    group = [sequence("g", (-1.0, -1.0), reward=1.0), sequence("g", (-1.0, -1.0), first=9)]
    batch = make_batch([group], TorchSettings(), vocabulary=100)
    [micro] = batch.micro_batches
    comparison = Comparison(batch.sequences)
    comparison.keep_sample(micro, np.array([-1.0, -2.0, -3.0, -4.0]), 8)
    assert comparison.moved(np.array([-1.5, -2.0, -2.0, -90.0])) == (
        pytest.approx(0.5 + 0.0 + 1.0 + MAX_DIFFERENCE),
        4,
    )
