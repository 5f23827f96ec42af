"""Trainers: batches, steps, checkpoints, coming back, going away."""

import pytest
from core_builders import (
    SOLVER,
    Scene,
    grants,
    make_run,
    make_scene,
    make_trainer_hello,
    messages,
    of_type,
    released,
)

from scheduler.core.effects import RecordStep
from scheduler.core.events import FromTrainer
from transport.messages import (
    HelloRequired,
    Ping,
    Pong,
    Refuse,
    Role,
    RunState,
    VersionAccepted,
    Welcome,
)


@pytest.fixture
def scene() -> Scene:
    """Four groups of version 0 in the buffer (two batches), nothing in flight."""
    scene = make_scene()
    scene.joined("a", slots=8)
    for offer in scene.live_offers():
        scene.finished(offer)
    return scene


def trained(scene: Scene, step: int, version: int | None = None) -> None:
    """One whole step: asked for, granted, done, published."""
    head = scene.policy().head_version
    assert grants(scene.requested(step, head=head))
    scene.stepped(step, version)
    scene.version_stored(step if version is None else version, parent=head, step=step)


def generated(scene: Scene, version: int) -> None:
    """Every item becomes a group of ``version``."""
    scene.serving(version)
    scene.produced(scene.effects)
    for offer in scene.live_offers():
        scene.finished(offer, version)


def test_a_trainer_is_told_its_run_and_the_highest_version():
    scene = make_scene()
    scene.version_stored(1)
    [welcome] = messages(scene.trainer_joined(), Welcome, "t")
    assert (welcome.run, welcome.highest_version) == (make_run(), 1)
    assert not welcome.stopping


def test_a_trainer_that_comes_before_its_run_is_asked_to_come_again():
    [refuse] = messages(Scene().trainer_joined(), Refuse)
    assert (refuse.code, refuse.retry_s) == ("run.unknown", 1.0)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"policy": "r/other"}, "policy.unknown"),
        ({"incarnation": 0}, "trainer.superseded"),
        ({"step": -1}, "hello.invalid"),
    ],
)
def test_a_hello_that_can_not_be_right_is_refused_for_good(scene, hello, code):
    [refuse] = messages(scene.trainer_joined(**hello), Refuse)
    assert (refuse.code, refuse.retry_s) == (code, None)
    assert scene.counter(f"refused.{code}") == 1


def test_a_second_trainer_of_a_policy_waits_until_the_first_is_gone(scene):
    [refuse] = messages(scene.trainer_joined("u"), Refuse, "u")
    assert (refuse.code, refuse.retry_s) == ("trainer.busy", 12.0)
    scene.wait(12.5)
    assert messages(scene.trainer_joined("u"), Welcome, "u")


def test_another_protocol_is_refused_with_a_remedy(scene):
    hello = make_trainer_hello()
    other = type(hello)(role=Role.TRAINER, incarnation=2, build="b", protocol=9)
    [refuse] = messages(scene.feed(FromTrainer("t", other)), Refuse)
    assert refuse.code == "protocol.version"
    assert "same farflow" in refuse.message


def test_a_batch_is_granted_as_soon_as_it_is_complete():
    scene = make_scene()
    scene.joined("a")
    assert not grants(scene.requested(1))
    first, second = scene.live_offers()[:2]
    assert not grants(scene.finished(first))
    [grant] = grants(scene.finished(second))
    assert [ref.job for ref in grant.groups] == ["r/t-000000", "r/t-000001"]
    assert [ref.policy_lag for ref in grant.groups] == [0, 0]


def test_asking_again_for_a_step_gives_the_same_groups(scene):
    [first] = grants(scene.requested(1))
    [again] = grants(scene.requested(1))
    assert again == first
    assert scene.books().taken == 2


def test_asking_for_more_than_the_runs_batch_gets_the_runs_batch(scene):
    [grant] = grants(scene.requested(1, groups=99))
    assert len(grant.groups) == 2


def test_a_step_moves_the_head_and_is_recorded_with_its_batch(scene):
    scene.requested(1)
    scene.version_stored(1)
    [record] = of_type(scene.stepped(1), RecordStep)
    step = record.step
    assert (step.step, step.version, step.reward_mean, step.response_tokens) == (1, 1, 1.0, 32)
    assert (step.policy_lag_mean, step.policy_lag_max, step.delta_bytes) == (0.0, 0, 1001)
    assert (scene.policy().step, scene.policy().head_version) == (1, 1)


def test_a_record_waits_for_the_size_of_its_version(scene):
    scene.requested(1)
    assert not of_type(scene.stepped(1), RecordStep)
    assert scene.policy().last_step.delta_bytes is None
    [record] = of_type(scene.version_stored(1), RecordStep)
    assert record.step.delta_bytes == 1001
    assert scene.policy().last_step.delta_bytes == 1001


def test_records_do_not_wait_for_ever(scene):
    for step in range(1, 4):
        scene.requested(step)
        effects = scene.stepped(step)
        generated(scene, step)
    [record] = of_type(effects, RecordStep)
    assert (record.step.step, record.step.delta_bytes) == (1, None)
    # What people see is not without a size for so long as the store is behind.
    scene.version_stored(1)
    assert scene.policy().last_step.delta_bytes is None
    assert (scene.policy().delta_bytes, scene.policy().full_bytes) != (None, None)


def test_a_repeated_report_changes_nothing(scene):
    scene.version_stored(1)
    scene.requested(1)
    scene.stepped(1)
    assert not of_type(scene.stepped(1), RecordStep)
    assert scene.policy().step == 1


def test_a_request_tells_the_head_when_the_report_was_lost(scene):
    scene.requested(1)
    scene.requested(2)
    assert (scene.policy().step, scene.policy().head_version) == (1, 1)
    scene.version_stored(1)
    [record] = of_type(scene.stepped(1), RecordStep)
    assert record.step.response_tokens == 32


def test_lag_counts_the_steps_that_a_group_waited(scene):
    trained(scene, 1)
    [grant] = grants(scene.requested(2))
    assert [ref.policy_lag for ref in grant.groups] == [1, 1]


def test_groups_beyond_the_bound_expire_and_are_made_anew(scene):
    trained(scene, 1)
    scene.produced(scene.effects)
    scene.serving(1)
    assert scene.live_offers()
    trained(scene, 2)
    for offer in scene.live_offers():
        scene.finished(offer, 0)  # it began before it had version 1
    row = scene.books()
    assert (row.buffered, row.balance) == (0, 0)
    assert row.expired > 0
    assert scene.counter("expired.lag") == row.expired


def test_the_group_with_the_nearest_deadline_is_trained_on_first():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 2}))
    scene.joined("a", slots=16)
    scene.version_stored(1)
    offers = scene.live_offers()
    for offer in offers[:2]:
        scene.finished(offer, 1)
    for offer in offers[2:4]:
        scene.finished(offer, 0)
    [grant] = grants(scene.requested(1))
    assert [ref.job for ref in grant.groups] == [offers[2].job, offers[3].job]


def test_a_checkpoint_makes_its_groups_trained_and_releases_their_bodies(scene):
    trained(scene, 1)
    trained(scene, 2)
    effects = scene.checkpointed(1)
    assert len(released(effects)) == 2
    assert (scene.books().trained, scene.books().taken) == (2, 2)
    assert not released(scene.checkpointed(1))


def test_a_group_that_the_trainer_can_not_use_is_replaced(scene):
    [grant] = grants(scene.requested(1))
    bad, good = (ref.job for ref in grant.groups)
    [again] = grants(scene.refused_group(1, bad))
    assert good in [ref.job for ref in again.groups]
    assert bad not in [ref.job for ref in again.groups]
    assert (scene.books().rejected, scene.books().taken) == (1, 2)
    assert scene.counter("rejected.body.missing") == 1
    assert not grants(scene.refused_group(1, bad))


def test_a_trainer_back_at_its_checkpoint_gets_the_same_groups_again(scene):
    trained(scene, 1)
    scene.checkpointed(1)
    [lost] = grants(scene.requested(2))
    scene.stepped(2)
    scene.trainer_joined(incarnation=2, step=1, version=1)
    row = scene.books()
    assert (row.taken, row.buffered, row.abandoned) == (0, 2, 2)
    [again] = grants(scene.requested(2, head=1))
    assert [ref.job for ref in again.groups] == [ref.job for ref in lost.groups]
    scene.stepped(2, version=3)
    assert (scene.policy().step, scene.policy().head_version) == (2, 3)


def test_the_same_process_saying_hello_again_goes_on_where_it_is(scene):
    trained(scene, 1)
    scene.requested(2)
    scene.trainer_joined(incarnation=1, step=0)
    assert (scene.policy().step, scene.books().taken, scene.books().abandoned) == (1, 4, 0)


def test_a_checkpoint_whose_report_was_lost_counts_with_the_next_hello(scene):
    trained(scene, 1)
    effects = scene.trainer_joined(incarnation=1, step=1, version=1)
    assert len(released(effects)) == 2


def test_what_was_said_before_a_rollback_is_ignored_after_it(scene):
    trained(scene, 1)
    scene.trainer_joined(incarnation=2)
    assert scene.policy().head_version == 0
    scene.requested(2, head=1)
    scene.stepped(1, version=1)
    scene.checkpointed(1, version=1)
    assert (scene.policy().step, scene.policy().head_version) == (0, 0)
    assert scene.books().trained == 0


def test_tokens_of_a_lineage_that_was_left_count_the_way_back(scene):
    trained(scene, 1)
    scene.trainer_joined(incarnation=2)
    trained(scene, 1, version=2)
    scene.produced(scene.effects)
    scene.serving(2)
    offer = scene.live_offers()[0]
    scene.finished(offer, 1)  # it began before it had version 2
    assert "lag=2" in "\n".join(scene.core.story(offer.job))
    assert scene.books().expired == 1


def test_a_group_of_an_unannounced_version_waits_for_its_place_in_the_tree(scene):
    trained(scene, 1)
    scene.requested(2)
    scene.stepped(2)
    scene.produced(scene.effects)
    scene.serving(1)
    offers = scene.live_offers()
    scene.finished(offers[0], 3)
    scene.finished(offers[1], 3)
    assert scene.policy().buffered_groups == 2
    assert not grants(scene.requested(3))
    assert grants(scene.version_stored(3, parent=2, step=3))


def test_a_version_that_nobody_announces_gives_its_place_back(scene):
    trained(scene, 1)
    scene.produced(scene.effects)
    scene.serving(1)
    scene.finished(scene.live_offers()[0], 40)
    for _ in range(35):
        scene.beats("a", versions={SOLVER: 1})
        scene.trainer_says(Ping(sequence=1, sent_s=0.0))
        scene.wait(2.0)
    assert scene.counter("expired.unknown_version") == 1


def test_the_store_hears_that_its_version_was_accepted_however_often_it_says_so(scene):
    for _ in range(2):
        assert messages(scene.version_stored(1), VersionAccepted, "weight-store")
    effects = scene.version_stored(1, policy="gone/solver")
    assert messages(effects, VersionAccepted)
    assert scene.counter("versions.unknown_policy") == 1


def test_versions_of_a_finished_run_that_the_store_announces_again_are_nobody_elses_fault(scene):
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    assert scene.run().state == "finished"
    assert messages(scene.version_stored(1), VersionAccepted)
    assert scene.counter("versions.unknown_policy") == 0
    assert scene.counter("versions.run_over") == 1


def test_a_live_trainer_is_pinged_back_and_a_silent_one_is_absent(scene):
    [pong] = messages(scene.trainer_says(Ping(sequence=4, sent_s=1.5)), Pong, "t")
    assert (pong.sequence, pong.sent_s) == (4, 1.5)
    assert scene.policy().trainer == "waiting"
    scene.requested(1)
    assert scene.policy().trainer == "training"
    scene.wait(12.5)
    assert scene.policy().trainer == "absent"
    effects = scene.trainer_says(Ping(sequence=5, sent_s=1.5))
    assert messages(effects, HelloRequired, "t")


def test_a_dead_trainers_copies_wait_and_are_dropped_after_the_grace(scene):
    scene.wait(590.0)
    assert scene.books().buffered == 4
    scene.wait(20.0)
    row = scene.books()
    assert (row.buffered, row.dropped, row.balance) == (0, 4, 0)
    assert scene.counter("dropped.trainer_gone") == 4
    scene.joined("a", incarnation=2, slots=8)
    assert not scene.live_offers()
    scene.trainer_joined(incarnation=2)
    scene.produced(scene.effects)
    assert scene.books().submitted == 8


def test_a_stranger_is_asked_who_it_is(scene):
    effects = scene.trainer_says(Ping(sequence=1, sent_s=0.0), name="stranger")
    assert messages(effects, HelloRequired, "stranger")


def test_a_trainer_of_a_finished_run_hears_that_it_is_over(scene):
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    effects = scene.checkpointed(0, final=True)
    assert [m.state for m in messages(effects, RunState, "t")] == ["finished"]
    [refuse] = messages(scene.trainer_joined(incarnation=2), Refuse)
    assert refuse.code == "run.finished"


def test_versions_that_nobody_can_need_are_forgotten(scene):
    scene = make_scene(run=make_run(policy={"steps": 40}))
    scene.feed(FromTrainer("t", make_trainer_hello()))
    scene.joined("a", slots=8)
    for step in range(1, 21):
        generated(scene, step - 1)
        trained(scene, step)
        scene.checkpointed(step)
    versions = [key for table, key in scene.rows if table == "version"]
    assert len(versions) <= 4
