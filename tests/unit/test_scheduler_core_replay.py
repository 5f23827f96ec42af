"""Groups that are trained on again: when they enter the pool, which are chosen, and what a rollback
or a restart makes of it."""

from collections import Counter
from itertools import pairwise

import pytest
from core_builders import (
    SOLVER,
    Scene,
    grants,
    make_run,
    make_scene,
    released,
)

from transport.messages import ExplainRequest, GroupRef, StepReport
from transport.runs import AlgorithmSpec, DataSpec, ReplaySpec


def make(lag: int = 3, **replay) -> Scene:
    """A run whose batches of four take half of their groups from the pool."""
    select, mode = replay.pop("select", "latest"), replay.pop("mode", "async")
    spec = ReplaySpec(**{"ratio": 0.5, "select": AlgorithmSpec(name=select), **replay})
    policy = {
        "steps": 50,
        "batch_groups": 4,
        "max_policy_lag": lag,
        "data": DataSpec(replay=spec),
    }
    scene = make_scene(run=make_run(policy=policy, mode=mode), modules=("data_functions",))
    scene.joined("a", slots=64)
    return scene


def batch(scene: Scene, step: int, version: int | None = None, **result) -> tuple[GroupRef, ...]:
    """The trainer asks; what is made is what the newest weights give. Returns the grant."""
    head = step - 1 if version is None else version
    before = len(grants(scene.effects))
    scene.produced(scene.requested(step, head=head, groups=4))
    while len(grants(scene.effects)) == before:
        offer = scene.live_offers()[0]
        scene.produced(scene.finished(offer, version=head, **result))
    return grants(scene.effects)[-1].groups


def step(scene: Scene, number: int, version: int | None = None, **result) -> tuple[GroupRef, ...]:
    """A whole step, not checkpointed; its weights get to the agent."""
    made = number if version is None else version
    groups = batch(scene, number, **result)
    for effects in (
        scene.stepped(number, made),
        scene.version_stored(made, step=number),
        scene.serving(made),
    ):
        scene.produced(effects)
    return groups


def again(groups: tuple[GroupRef, ...]) -> list[str]:
    return [ref.job for ref in groups if ref.replay]


def fresh(groups: tuple[GroupRef, ...]) -> list[str]:
    return [ref.job for ref in groups if not ref.replay]


def test_the_story_of_a_group_that_is_trained_on_twice():
    scene = make()
    first = step(scene, 1)
    assert again(first) == []  # there is nothing yet
    assert scene.policy().replay_groups == 4
    second = step(scene, 2)
    assert (len(again(second)), len(fresh(second))) == (2, 2)
    assert set(again(second)) < set(fresh(first))
    assert [ref.policy_lag for ref in second if ref.replay] == [1, 1]
    assert scene.policy().last_step.policy_lag_mean == pytest.approx(0.5)
    assert released(scene.effects) == []
    effects = scene.checkpointed(2)
    # Each was to be used once more, and a checkpoint covers that.
    assert set(released(effects)) == {ref.digest for ref in second if ref.replay}
    row = scene.books()
    assert (row.trained, row.replayed, row.balance) == (6, 2, 0)
    story = [line.split(" ", 2)[2] for line in scene.core.story(again(second)[0])]
    assert story[-3:] == [
        "taken again policy=r/solver step=2",
        "trained policy=r/solver",
        "left the replay pool policy=r/solver why=used up",
    ]


def test_no_body_is_released_while_the_pool_has_it():
    scene = make()
    groups = step(scene, 1)
    scene.checkpointed(1)
    assert scene.books().trained == 4
    assert not {ref.digest for ref in groups} & set(released(scene.effects))
    assert not scene.core._ctx.tables.jobs.keys() & {ref.job for ref in groups}


def test_asking_again_gives_the_same_groups():
    scene = make(select="uniform")
    step(scene, 1)
    second = batch(scene, 2)
    scene.requested(2, head=1, groups=4)
    assert grants(scene.effects)[-1].groups == second


@pytest.mark.parametrize("select", ["latest", "uniform", "prioritised"])
def test_a_restart_makes_the_same_choice(select):
    chosen = []
    for restart in (False, True):
        scene = make(select=select, keep=64, max_uses=2)
        step(scene, 1, rewards=(1.0, 0.0))
        step(scene, 2, rewards=(1.0, 0.5))
        scene.checkpointed(1)
        if restart:
            scene.restart()
            scene.trainer_joined()
            scene.joined("a", slots=64, versions={SOLVER: 2})
            scene.produced(scene.effects[-20:])
        chosen.append(again(batch(scene, 3, rewards=(1.0, 0.0))))
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 2


def test_a_restart_in_the_middle_of_a_batch_grants_it_again():
    scene = make()
    step(scene, 1)
    second = batch(scene, 2)
    scene.restart()
    scene.trainer_joined()
    scene.requested(2, head=1, groups=4)
    assert grants(scene.effects)[-1].groups == second


def test_latest_takes_those_trained_on_last_and_each_once():
    scene = make(keep=64, lag=9)
    steps = [step(scene, number) for number in range(1, 5)]
    counts = Counter(job for groups in steps for job in again(groups))
    assert max(counts.values()) == 1
    for before, groups in pairwise(steps[1:]):
        assert set(again(groups)) == set(fresh(before))


def test_a_group_is_used_at_most_max_uses_times():
    scene = make(max_uses=3, lag=9, select="uniform")
    steps = [step(scene, number) for number in range(1, 9)]
    counts = Counter(job for groups in steps for job in again(groups))
    assert 1 < max(counts.values()) <= 3


def test_a_group_that_was_used_up_is_not_taken_before_a_checkpoint_covers_that_either():
    scene = make(select="data_functions:lowest_index", lag=9)
    steps = [step(scene, number) for number in range(1, 5)]
    counts = Counter(job for groups in steps for job in again(groups))
    assert set(counts.values()) == {1}


def test_what_was_pushed_out_does_not_come_back():
    scene = make(ratio=0.9, keep=3, lag=9)
    steps = [step(scene, number) for number in range(1, 7)]  # no checkpoint: all are still taken
    counts = Counter(job for groups in steps for job in again(groups))
    assert set(counts.values()) == {1}


def test_the_pool_keeps_the_newest():
    scene = make(keep=3)
    first = step(scene, 1)
    assert scene.policy().replay_groups == 3
    scene.checkpointed(1)
    gone = {ref.digest for ref in first} & set(released(scene.effects))
    assert len(gone) == 1


def test_what_is_too_old_leaves_and_is_never_used_again():
    scene = make(lag=1, max_uses=100)
    steps = [step(scene, number) for number in range(1, 6)]
    lags = [ref.policy_lag for groups in steps for ref in groups]
    assert max(lags) == 1
    assert scene.policy().replay_groups <= 4


def test_with_a_bound_of_zero_nothing_can_be_used_again_and_nothing_stalls():
    scene = make(lag=0)
    assert [again(step(scene, number)) for number in range(1, 4)] == [[], [], []]


def test_a_rollback_takes_back_first_and_further_uses():
    scene = make(max_uses=2, keep=64)
    first = step(scene, 1)
    scene.checkpointed(1)
    second = step(scene, 2)
    used = again(second)
    assert scene.policy().replay_groups == 6

    scene.trainer_joined(incarnation=2, step=1, version=1)  # step 2 never was

    assert scene.policy().replay_groups == 4  # what it trained on first is in the buffer again
    assert (scene.books().buffered, scene.books().abandoned) == (2, 2)
    assert scene.books().replayed == 0
    kept = scene.core._ctx.policies[SOLVER].pool.entries
    assert sorted(kept) == sorted(fresh(first))
    assert all(kept[job].uses == [] for job in used)
    redone = batch(scene, 2, version=1)
    assert len(again(redone)) == 2
    assert set(fresh(redone)) == set(fresh(second))


def test_a_rollback_does_not_take_back_what_a_checkpoint_covers():
    scene = make(max_uses=1)
    step(scene, 1)
    second = step(scene, 2)
    scene.checkpointed(2)
    scene.trainer_joined(incarnation=2, step=2, version=2)
    assert scene.books().replayed == 2
    third = batch(scene, 3, version=2)
    assert not set(again(third)) & set(again(second))


def test_a_checkpoint_that_only_the_hello_tells_of_counts_uses():
    scene = make()
    step(scene, 1)
    batch(scene, 2)
    scene.version_stored(2)
    scene.trainer_joined(incarnation=2, step=2, version=2)
    row = scene.books()
    assert (row.trained, row.replayed, row.abandoned, row.balance) == (6, 2, 0, 0)


def test_a_group_of_the_pool_that_cannot_be_used_is_replaced():
    scene = make()
    step(scene, 1)
    second = batch(scene, 2)
    [bad, other] = again(second)
    scene.refused_group(2, bad)
    third = grants(scene.effects)[-1].groups
    assert bad not in {ref.job for ref in third}
    assert other in again(third)
    assert len(third) == 4
    assert scene.counter("replay.rejected.body.missing") == 1
    assert scene.books().rejected == 0
    assert scene.books().balance == 0


def test_the_pool_is_given_back_with_the_last_step():
    scene = make()
    first = step(scene, 1)
    scene.checkpointed(1, final=True)
    assert scene.policy().replay_groups == 0
    assert {ref.digest for ref in first} <= set(released(scene.effects))


def test_a_run_that_is_abandoned_gives_the_pool_back():
    scene = make()
    first = step(scene, 1)
    scene.checkpointed(1)
    scene.commanded("abandon")
    assert {ref.digest for ref in first} <= set(released(scene.effects))
    assert not scene.core._ctx.tables.kept


def test_fewer_new_groups_are_made_for_the_same_steps():
    made = []
    for ratio in (0.0, 0.5):
        scene = make(ratio=ratio, keep=64, max_uses=2)
        for number in range(1, 9):
            step(scene, number)
        made.append(scene.books().submitted)
    assert made[1] < 0.7 * made[0]


def test_a_synchronous_run_replays_too():
    scene = make(mode="sync", keep=64)
    steps = [step(scene, number) for number in range(1, 5)]
    assert [len(again(groups)) for groups in steps] == [0, 2, 2, 2]
    assert scene.books().submitted <= 4 + 3 * 2 + 2


def test_prioritised_prefers_groups_with_spread_rewards_and_never_takes_those_without():
    scene = make(select="prioritised", keep=64, lag=9)
    flat = set(fresh(step(scene, 1, rewards=(1.0, 1.0))))
    wide = set(fresh(step(scene, 2, rewards=(1.0, 0.0))))
    third = again(step(scene, 3, rewards=(1.0, 1.0)))
    assert len(third) == 2
    assert set(third) <= wide - flat


def test_a_selector_of_ones_own_orders_the_pool():
    scene = make(select="data_functions:lowest_index", lag=9)
    first = step(scene, 1)
    second = step(scene, 2)
    assert again(second) == sorted(fresh(first))[:2]


def test_a_selector_that_gives_nonsense_is_counted_and_the_newest_go_first():
    scene = make(select="data_functions:hopeless")
    step(scene, 1)
    assert scene.counter("data.failed.data_functions:hopeless") >= 4
    assert len(again(step(scene, 2))) == 2


def test_the_policy_says_how_many_it_keeps():
    scene = make()
    step(scene, 1)
    told = scene.asked(ExplainRequest(subject=SOLVER))
    assert "4 groups are kept to be trained on again" in told.reasons


def test_the_trainers_own_mean_reward_is_shown():
    scene = make()
    batch(scene, 1)
    report = StepReport(
        policy=SOLVER, step=1, version=1, busy_s=1.0, waiting_s=0.0, metrics={"reward_mean": 0.25}
    )
    scene.trainer_says(report)
    assert scene.policy().last_step.reward_mean == 0.25
