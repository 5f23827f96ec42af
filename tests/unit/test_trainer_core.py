"""The trainer core, told as stories. Rules that only show over many interleavings are in
``tests/property/test_trainer_core_machine.py``."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from trainer_peers import POLICY, make_ref, make_run
from trainer_world import TrainerWorld, make_offer

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.effects import Effect
from cloud_trainer.core.machine import NON_FINITE, TrainerCore
from cloud_trainer.core.phase import Phase
from cloud_trainer.core.settings import CoreSettings, PendingVersion, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from transport import messages as wire
from transport.errors import InvariantViolation
from transport.messages import GroupRef, Message, Plane

VERSION_0 = PendingVersion(version=0, parent=None, step=0, whole=True)

M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Effect)


def make_core(position: StartPosition | None = None, **settings: Any) -> TrainerCore:
    return TrainerCore(
        CoreSettings(policy=POLICY, incarnation=3, build="test", **settings),
        position or StartPosition(pending=(VERSION_0,)),
    )


def feed(core: TrainerCore, now: float, *events: on.Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += core.handle(event, now)
        core.check()
    return effects


def said(effects: Sequence[Effect], kind: type[M]) -> list[M]:
    """Messages of one kind, to whomever."""
    sent = (do.ToScheduler, do.ToTrajectoryLog, do.ToWeightStore)
    messages = [effect.message for effect in effects if isinstance(effect, sent)]
    return [message for message in messages if isinstance(message, kind)]


def of(effects: Sequence[Effect], kind: type[F]) -> list[F]:
    return [effect for effect in effects if isinstance(effect, kind)]


def welcome(**fields: Any) -> on.FromScheduler:
    values = {"run": make_run(), "term": 1, "heartbeat_s": 1.0, "lost_after_s": 5.0, **fields}
    return on.FromScheduler(message=wire.Welcome(**values))


def grant(step: int, *groups: GroupRef) -> on.FromScheduler:
    return on.FromScheduler(message=wire.BatchGrant(policy=POLICY, step=step, groups=groups))


def body(ref: GroupRef, found: bool = True) -> on.FromTrajectoryLog:
    return on.FromTrajectoryLog(message=wire.Body(digest=ref.digest, found=found))


def good(ref: GroupRef) -> on.BodyChecked:
    return on.BodyChecked(digest=ref.digest, job=ref.job, size_bytes=100, trainable_tokens=9)


def durable(version: int) -> on.FromWeightStore:
    return on.FromWeightStore(message=wire.VersionDurable(policy=POLICY, version=version))


def ready(version: int) -> on.VersionReady:
    return on.VersionReady(version=version, offer=make_offer(version))


def joined(now: float = 0.0, **settings: Any) -> TrainerCore:
    """A core that has published version 0 and asked for its first batch."""
    core = make_core(**settings)
    feed(core, now, on.Tick(), welcome(), on.ModelReady(), ready(0), durable(0))
    return core


def train(core: TrainerCore, step: int, now: float, *numbers: int) -> list[Effect]:
    """Grant a step on good bodies and finish it."""
    refs = [make_ref(number) for number in numbers]
    feed(core, now, grant(step, *refs))
    for ref in refs:
        feed(core, now, body(ref), good(ref))
    return feed(core, now, on.StepFinished(step=step, metrics={"loss": 0.5}))


# ---- joining ---------------------------------------------------------------------------------


def test_a_trainer_says_hello_with_its_last_checkpoint_until_it_is_answered() -> None:
    core = make_core(StartPosition(step=20, version=23, highest_version=27))
    (hello,) = said(feed(core, 0.0, on.Tick()), wire.Hello)
    assert hello.role is wire.Role.TRAINER
    assert hello.incarnation == 3
    assert hello.trainer == wire.TrainerInventory(
        policy=POLICY, checkpoint_step=20, checkpoint_version=23
    )
    assert said(feed(core, 0.9, on.Tick()), wire.Hello) == []
    assert core.next_deadline() == 1.0
    assert len(said(feed(core, 1.0, on.Tick()), wire.Hello)) == 1


def test_the_first_start_publishes_the_initial_model_whole_before_it_asks_for_a_batch() -> None:
    core = make_core()
    effects = feed(core, 0.0, on.Tick(), welcome())
    assert of(effects, do.LoadModel) == [do.LoadModel(run=make_run())]
    effects = feed(core, 1.0, on.ModelReady())
    assert of(effects, do.BuildVersion) == [
        do.BuildVersion(version=0, parent=None, step=0, whole=True)
    ]
    assert said(effects, wire.BatchRequest) == [
        wire.BatchRequest(policy=POLICY, step=1, groups=2, head_version=0)
    ]
    assert said(feed(core, 1.1, ready(0)), wire.VersionOffer) == [make_offer(0)]


def test_a_run_that_is_not_submitted_yet_is_asked_for_again_when_told() -> None:
    core = make_core()
    feed(core, 0.0, on.Tick())
    refusal = wire.Refuse(code="run.unknown", message="no such run", retry_s=1.0)
    assert feed(core, 0.1, on.FromScheduler(message=refusal)) == []
    assert core.next_deadline() == pytest.approx(1.1)
    assert len(said(feed(core, 1.1, on.Tick()), wire.Hello)) == 1
    assert core.counters == {"refused.run.unknown": 1}


def test_a_refusal_for_good_ends_the_trainer_with_its_code() -> None:
    core = make_core()
    refusal = wire.Refuse(code="policy.foreign", message="this key trains another policy")
    effects = feed(core, 0.0, on.FromScheduler(message=refusal))
    assert of(effects, do.Exit) == [
        do.Exit(status=1, code="policy.foreign", message="this key trains another policy")
    ]
    assert core.next_deadline() is None
    assert feed(core, 9.0, on.Tick(), welcome()) == []


def test_a_run_that_is_over_leaves_nothing_to_do() -> None:
    core = make_core()
    refusal = wire.Refuse(code="run.finished", message="run run is finished: completed")
    assert of(feed(core, 0.0, on.FromScheduler(message=refusal)), do.Exit)[0].status == 0


def test_a_run_without_this_policy_ends_the_trainer() -> None:
    core = make_core()
    (ended,) = of(feed(core, 0.0, welcome(run=None)), do.Exit)
    assert ended.code == "run.unknown"
    assert POLICY in ended.message


def test_another_run_under_the_same_name_ends_a_live_trainer() -> None:
    core = joined()
    (ended,) = of(feed(core, 1.0, welcome(run=make_run(steps=99))), do.Exit)
    assert ended.code == "run.changed"


def test_a_silent_scheduler_gets_a_new_link_and_a_new_hello() -> None:
    core = joined()
    effects = feed(core, 5.0, on.Tick())
    assert of(effects, do.RenewLink) == [do.RenewLink(plane=Plane.CONTROL)]
    assert len(said(effects, wire.Hello)) == 1
    assert said(effects, wire.Ping) == []


def test_pings_follow_the_assigned_heartbeat() -> None:
    core = joined()
    assert said(feed(core, 0.9, on.Tick()), wire.Ping) == []
    assert said(feed(core, 1.0, on.Tick()), wire.Ping) == [wire.Ping(sequence=1, sent_s=1.0)]


def test_a_restarted_scheduler_hears_a_live_trainer_go_on_where_it_is() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    (hello,) = said(feed(core, 2.0, on.FromScheduler(message=wire.HelloRequired())), wire.Hello)
    assert hello.incarnation == 3
    assert hello.trainer is not None
    assert hello.trainer.checkpoint_step == 0
    effects = feed(core, 2.1, welcome(term=2))
    assert [report.step for report in said(effects, wire.StepReport)] == [1]
    assert said(effects, wire.BatchRequest) == [
        wire.BatchRequest(policy=POLICY, step=2, groups=2, head_version=1)
    ]


# ---- batches -----------------------------------------------------------------------------------


def test_a_batch_is_asked_for_until_it_is_granted() -> None:
    core = joined()
    assert said(feed(core, 1.9, on.Tick()), wire.BatchRequest) == []
    assert len(said(feed(core, 2.0, on.Tick()), wire.BatchRequest)) == 1
    feed(core, 2.5, grant(1, make_ref(1), make_ref(2)))
    assert said(feed(core, 4.4, on.Tick()), wire.BatchRequest) == []


def test_a_granted_batch_is_fetched_checked_and_trained_on_in_its_order() -> None:
    core = joined()
    refs = make_ref(2), make_ref(1)
    effects = feed(core, 1.0, grant(1, *refs))
    (request,) = said(effects, wire.BodyRequest)
    assert request.digests == ("digest-2", "digest-1")
    effects = feed(core, 1.1, body(refs[1]), body(refs[0]))
    assert [check.digest for check in of(effects, do.CheckBody)] == ["digest-1", "digest-2"]
    effects = feed(core, 1.2, good(refs[1]), good(refs[0]))
    assert of(effects, do.RunStep) == [do.RunStep(step=1, groups=refs)]
    assert core.story("started") == ["1.200 step 1 started"]


def test_the_window_bounds_what_is_on_the_way() -> None:
    core = joined(fetch_window_bytes=250)
    refs = [make_ref(number) for number in range(5)]
    (request,) = said(feed(core, 1.0, grant(1, *refs)), wire.BodyRequest)
    assert request.digests == ("digest-0", "digest-1")
    assert said(feed(core, 1.1, body(refs[0])), wire.BodyRequest) == []
    (request,) = said(feed(core, 1.2, good(refs[0])), wire.BodyRequest)
    assert request.digests == ("digest-2",)


def test_a_body_larger_than_the_window_is_fetched_alone() -> None:
    core = joined(fetch_window_bytes=10)
    (request,) = said(feed(core, 1.0, grant(1, make_ref(1), make_ref(2))), wire.BodyRequest)
    assert request.digests == ("digest-1",)


def test_no_more_bodies_are_open_than_a_link_holds() -> None:
    core = joined(max_open_bodies=3)
    refs = [make_ref(number) for number in range(5)]
    (request,) = said(feed(core, 1.0, grant(1, *refs)), wire.BodyRequest)
    assert len(request.digests) == 3


def test_a_lost_body_is_asked_for_again_after_its_timeout() -> None:
    core = joined(fetch_timeout_s=4.0)
    feed(core, 1.0, grant(1, make_ref(1), make_ref(2)))
    feed(core, 1.5, body(make_ref(1)), good(make_ref(1)))
    feed(core, 4.9, on.FromScheduler(message=wire.Pong(sequence=1, sent_s=0.0)))
    (request,) = said(feed(core, 5.0, on.Tick()), wire.BodyRequest)
    assert request.digests == ("digest-2",)


def test_a_silent_trajectory_log_gets_a_new_link_and_costs_no_group() -> None:
    core = joined(fetch_timeout_s=1.0)
    feed(core, 1.0, grant(1, make_ref(1)))
    effects: list[Effect] = []
    for tenth in range(11, 200):
        pong = on.FromScheduler(message=wire.Pong(sequence=1, sent_s=0.0))
        effects += feed(core, tenth / 10, pong)
    renewed = of(effects, do.RenewLink)
    assert renewed
    assert {effect.plane for effect in renewed} == {Plane.TRAJECTORIES}
    assert said(effects, wire.GroupUnusable) == []


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([body(make_ref(1), found=False)] * 3, "body.missing"),
        (
            [body(make_ref(1)), on.BodyChecked(digest="digest-1", code="body.damaged")] * 3,
            "body.damaged",
        ),
        (
            [
                body(make_ref(1)),
                on.BodyChecked(
                    digest="digest-1", job="run/t-000077", size_bytes=100, trainable_tokens=9
                ),
            ],
            "body.other",
        ),
        (
            [
                body(make_ref(1)),
                on.BodyChecked(
                    digest="digest-1", job=make_ref(1).job, size_bytes=99, trainable_tokens=9
                ),
            ],
            "body.other",
        ),
        (
            [
                body(make_ref(1)),
                on.BodyChecked(digest="digest-1", job=make_ref(1).job, size_bytes=100),
            ],
            "body.untrainable",
        ),
    ],
)
def test_a_group_without_a_usable_body_is_refused_and_the_step_granted_again(
    answers: list[on.Event], code: str
) -> None:
    core = joined(missing_retry_s=0.4)
    feed(core, 1.0, grant(1, make_ref(1), make_ref(2)))
    effects: list[Effect] = []
    for number, answer in enumerate(answers):
        effects += feed(core, 1.5 + 0.5 * number, on.Tick(), answer)
    assert said(effects, wire.GroupUnusable) == [
        wire.GroupUnusable(policy=POLICY, step=1, job=make_ref(1).job, code=code)
    ]
    assert len(said(effects, wire.BatchRequest)) == 1
    assert core.counters[code] >= 1
    effects = feed(core, 6.0, body(make_ref(2)), good(make_ref(2)))
    assert of(effects, do.RunStep) == []
    effects = feed(core, 6.1, grant(1, make_ref(2), make_ref(3)))
    assert of(effects, do.ForgetBodies) == [do.ForgetBodies(digests=("digest-1",))]
    assert [request.digests for request in said(effects, wire.BodyRequest)] == [("digest-3",)]
    effects = feed(core, 6.2, body(make_ref(3)), good(make_ref(3)))
    assert of(effects, do.RunStep) == [do.RunStep(step=1, groups=(make_ref(2), make_ref(3)))]


def test_a_refusal_is_repeated_as_often_as_the_group_is_granted() -> None:
    core = joined()
    feed(core, 1.0, grant(1, make_ref(1)))
    for second in range(3):
        feed(core, 2.0 + 1.5 * second, on.Tick(), body(make_ref(1), found=False))
    (refusal,) = said(feed(core, 7.0, grant(1, make_ref(1))), wire.GroupUnusable)
    assert refusal.code == "body.missing"
    assert said(feed(core, 9.0, on.Tick()), wire.GroupUnusable) == [refusal]


def test_a_job_of_the_lineage_is_trained_on_again_only_as_a_replay() -> None:
    core = TrainerCore(
        CoreSettings(policy=POLICY, incarnation=3, build="test"),
        StartPosition(step=1, version=1),
        trained=TrainedJobs([make_ref(1).job]),
    )
    feed(core, 0.0, on.Tick(), welcome(), on.ModelReady())
    known, unknown = make_ref(1, replay=True), make_ref(3, replay=True)
    effects = feed(core, 0.0, grant(2, make_ref(2), known, unknown))
    refused = said(effects, wire.GroupUnusable)
    assert [(r.job, r.code) for r in refused] == [(unknown.job, "group.not_trained")]
    assert [r.digests for r in said(effects, wire.BodyRequest)] == [("digest-2", "digest-1")]

    feed(core, 0.0, grant(2, make_ref(2), known))
    for ref in (make_ref(2), known):
        body = wire.Body(digest=ref.digest, found=True)
        checked = on.BodyChecked(digest=ref.digest, job=ref.job, size_bytes=100, trainable_tokens=5)
        feed(core, 0.0, on.FromTrajectoryLog(message=body), checked)
    feed(core, 0.0, on.StepFinished(step=2))
    # The lineage counts what is trained on for the first time.
    assert [entry.jobs for entry in core.checkpoints.trained] == [(make_ref(2).job,)]


def test_a_job_of_the_lineage_is_never_trained_on_again() -> None:
    core = TrainerCore(
        CoreSettings(policy=POLICY, incarnation=1, build="test"),
        StartPosition(step=4, version=4),
        trained=TrainedJobs([make_ref(1).job]),
    )
    feed(core, 0.0, on.Tick(), welcome(), on.ModelReady())
    effects = feed(core, 1.0, grant(5, make_ref(1), make_ref(2)))
    assert [(r.job, r.code) for r in said(effects, wire.GroupUnusable)] == [
        (make_ref(1).job, "group.trained")
    ]
    assert [request.digests for request in said(effects, wire.BodyRequest)] == [("digest-2",)]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_grants_of_other_steps_are_ignored(step: int) -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    assert feed(core, 1.5, grant(step, make_ref(5))) == []
    assert core.counters["grant.ignored"] == 1


def test_a_repeated_grant_of_a_running_step_changes_nothing() -> None:
    core = joined()
    refs = make_ref(1), make_ref(2)
    feed(core, 1.0, grant(1, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    assert core.phase is Phase.STEPPING
    assert feed(core, 1.1, grant(1, make_ref(8)), body(refs[0]), good(refs[0])) == []
    (build,) = of(feed(core, 1.2, on.StepFinished(step=1)), do.BuildVersion)
    assert build.version == 1


def test_a_paused_run_neither_asks_nor_steps_until_it_is_resumed() -> None:
    core = joined()
    refs = make_ref(1), make_ref(2)
    paused = on.FromScheduler(message=wire.RunState(run="run", state="paused"))
    running = on.FromScheduler(message=wire.RunState(run="run", state="running"))
    feed(core, 0.5, paused)
    assert said(feed(core, 3.0, on.Tick()), wire.BatchRequest) == []
    feed(core, 3.1, grant(1, *refs))
    effects = feed(core, 3.2, body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    assert of(effects, do.RunStep) == []
    assert len(of(feed(core, 4.0, running), do.RunStep)) == 1


# ---- steps and versions --------------------------------------------------------------------------


def test_a_finished_step_is_published_and_reported_with_busy_and_waiting_time_apart() -> None:
    core = joined()
    refs = make_ref(1, lag=1), make_ref(2, lag=4)
    feed(core, 3.0, grant(1, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    effects = feed(core, 3.7, on.StepFinished(step=1, metrics={"loss": 0.5}))
    assert of(effects, do.BuildVersion) == [do.BuildVersion(version=1, parent=0, step=1)]
    (report,) = said(effects, wire.StepReport)
    assert (report.step, report.version) == (1, 1)
    assert report.busy_s == pytest.approx(0.7)
    assert report.waiting_s == pytest.approx(3.0)
    assert report.metrics == {
        "loss": 0.5, "groups": 2.0, "policy_lag_mean": 2.5, "policy_lag_max": 4.0,
    }  # fmt: skip
    assert of(effects, do.RecordStep) == [do.RecordStep(report=report)]
    assert [request.step for request in said(effects, wire.BatchRequest)] == [2]


def test_a_version_number_is_one_above_the_highest_that_anybody_knows_of() -> None:
    core = make_core(StartPosition(step=20, version=27, highest_version=27))
    feed(core, 0.0, on.Tick(), welcome(run=make_run(steps=50), highest_version=25))
    feed(core, 0.0, on.ModelReady())
    (build,) = of(train(core, 21, 1.0, 1, 2), do.BuildVersion)
    assert (build.version, build.parent) == (28, 27)
    feed(core, 1.5, welcome(run=make_run(steps=50), highest_version=40))
    (build,) = of(train(core, 22, 2.0, 3, 4), do.BuildVersion)
    assert (build.version, build.parent) == (41, 28)


def test_versions_are_offered_one_at_a_time_and_again_while_the_store_is_silent() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    assert said(feed(core, 1.1, ready(1)), wire.VersionOffer) == [make_offer(1)]
    train(core, 2, 1.2, 3, 4)
    assert said(feed(core, 1.3, ready(2)), wire.VersionOffer) == []
    assert said(feed(core, 3.1, on.Tick()), wire.VersionOffer) == [make_offer(1)]
    fetching = on.FromWeightStore(message=wire.ChunkRequest(digest="d", indices=(0,)))
    feed(core, 4.0, fetching)
    assert said(feed(core, 5.9, on.Tick()), wire.VersionOffer) == []
    effects = feed(core, 5.9, durable(1))
    assert of(effects, do.ForgetVersion) == [do.ForgetVersion(version=1)]
    assert said(effects, wire.VersionOffer) == [make_offer(2)]
    assert of(feed(core, 5.9, durable(1)), do.ForgetVersion) == []


def test_a_store_that_stays_silent_gets_a_new_link() -> None:
    core = joined(publish_timeout_s=6.0)
    train(core, 1, 1.0, 1, 2)
    feed(core, 1.0, ready(1))
    effects: list[Effect] = []
    for second in range(2, 9):
        pong = on.FromScheduler(message=wire.Pong(sequence=1, sent_s=0.0))
        effects += feed(core, float(second), pong)
    assert of(effects, do.RenewLink) == [do.RenewLink(plane=Plane.WEIGHTS)]
    assert said(effects, wire.VersionOffer) == [make_offer(1)] * 3


def test_training_waits_when_two_versions_are_not_durable() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    train(core, 2, 2.0, 3, 4)
    refs = make_ref(5), make_ref(6)
    feed(core, 3.0, ready(1), ready(2), grant(3, *refs))
    effects = feed(core, 3.0, body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    assert of(effects, do.RunStep) == []
    assert [run.step for run in of(feed(core, 3.5, durable(1)), do.RunStep)] == [3]


def test_weights_that_are_not_finite_are_never_published_and_their_groups_given_back() -> None:
    core = joined()
    refs = make_ref(1), make_ref(2)
    feed(core, 1.0, grant(1, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    effects = feed(core, 2.0, on.StepFinished(step=1, finite=False))
    assert of(effects, do.BuildVersion) == []
    assert [(r.job, r.code) for r in said(effects, wire.GroupUnusable)] == [
        (ref.job, NON_FINITE) for ref in refs
    ]
    (rollback,) = of(effects, do.Rollback)
    assert (rollback.code, rollback.republish) == (NON_FINITE, False)
    assert core.counters[NON_FINITE] == 1
    assert feed(core, 3.0, on.Tick()) == []


def test_a_rejected_delta_rolls_back_and_republishes_the_checkpoint_whole() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    feed(core, 1.1, ready(1))
    rejected = wire.VersionRejected(
        policy=POLICY, version=1, code="weights.parent", message="parent 0 is unknown"
    )
    (rollback,) = of(feed(core, 1.2, on.FromWeightStore(message=rejected)), do.Rollback)
    assert rollback.republish
    assert "parent 0 is unknown" in rollback.message


def test_a_rejected_whole_version_ends_the_trainer() -> None:
    core = make_core()
    feed(core, 0.0, on.Tick(), welcome(), on.ModelReady(), ready(0))
    rejected = wire.VersionRejected(policy=POLICY, version=0, code="weights.used", message="used")
    (ended,) = of(feed(core, 1.0, on.FromWeightStore(message=rejected)), do.Exit)
    assert (ended.status, ended.code) == (1, "weights.used")


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_counts_after_its_versions_files_and_is_reported_after_the_store() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    effects = train(core, 2, 2.0, 3, 4)
    (write,) = of(effects, do.WriteCheckpoint)
    assert (write.step, write.version) == (2, 2)
    assert [(entry.step, len(entry.jobs)) for entry in write.trained] == [(1, 2), (2, 2)]
    assert of(feed(core, 2.1, on.CheckpointWritten(step=2)), do.CommitCheckpoint) == []
    feed(core, 2.2, ready(1), durable(1))
    effects = feed(core, 2.3, ready(2))
    assert of(effects, do.CommitCheckpoint) == [do.CommitCheckpoint(step=2)]
    effects = feed(core, 2.4, on.CheckpointCommitted(step=2))
    assert said(effects, wire.CheckpointReport) == []
    assert said(feed(core, 2.5, durable(2)), wire.CheckpointReport) == [
        wire.CheckpointReport(policy=POLICY, step=2, version=2)
    ]


def test_steps_that_finish_while_a_checkpoint_is_written_belong_to_the_next() -> None:
    core = joined(max_undurable=9)
    train(core, 1, 1.0, 1, 2)
    train(core, 2, 2.0, 3, 4)
    train(core, 3, 3.0, 5, 6)
    feed(core, 3.1, ready(1), ready(2), on.CheckpointWritten(step=2))
    feed(core, 3.2, on.CheckpointCommitted(step=2))
    (write,) = of(train(core, 4, 4.0, 7, 8), do.WriteCheckpoint)
    assert [entry.step for entry in write.trained] == [3, 4]


def test_a_step_that_is_due_for_a_checkpoint_waits_for_the_one_being_written() -> None:
    core = joined(max_undurable=9)
    for step in (1, 2, 3):
        train(core, step, float(step), 2 * step, 2 * step + 1)
    refs = make_ref(20), make_ref(21)
    feed(core, 4.0, grant(4, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    assert core.phase is Phase.FETCHING
    feed(core, 4.1, ready(1), ready(2), on.CheckpointWritten(step=2))
    (run,) = of(feed(core, 4.2, on.CheckpointCommitted(step=2)), do.RunStep)
    assert run.step == 4


def test_a_checkpoint_that_could_not_be_reported_is_told_with_the_next_hello() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    train(core, 2, 2.0, 3, 4)
    feed(core, 2.1, ready(1), ready(2), durable(1), on.CheckpointWritten(step=2))
    feed(core, 2.2, on.CheckpointCommitted(step=2))
    effects = feed(core, 2.3, on.FromScheduler(message=wire.HelloRequired()), durable(2))
    assert said(effects, wire.CheckpointReport) == []
    (hello,) = said(effects, wire.Hello)
    assert hello.trainer is not None
    assert hello.trainer.checkpoint_step == 2
    assert [r.step for r in said(feed(core, 2.4, welcome()), wire.CheckpointReport)] == [2]


# ---- ends ----------------------------------------------------------------------------------------


def test_the_last_step_is_checkpointed_exported_and_reported_until_the_run_is_over() -> None:
    world = TrainerWorld(make_run(steps=3))
    world.settle(waits=1)
    assert world.exported == 1
    assert world.scheduler.final == (3, 3)
    assert world.exit == do.Exit(status=0, code="run.finished", message="the run is finished")
    assert [checkpoint.step for checkpoint in world.disk] == [2, 3]


def test_the_final_report_is_repeated_until_the_run_is_over() -> None:
    core = make_core(StartPosition(step=6, version=6))
    feed(core, 0.0, on.Tick(), welcome())
    effects = feed(core, 0.5, on.ModelReady())
    assert len(of(effects, do.ExportModel)) == 1
    assert said(effects, wire.BatchRequest) == []
    final = wire.CheckpointReport(policy=POLICY, step=6, version=6, final=True)
    assert said(feed(core, 0.6, on.ModelExported()), wire.CheckpointReport) == [final]
    assert said(feed(core, 2.7, on.Tick()), wire.CheckpointReport) == [final]
    over = on.FromScheduler(message=wire.RunState(run="run", state="finished"))
    assert of(feed(core, 2.8, over), do.Exit)[0].status == 0


def test_a_stopped_run_finishes_its_step_then_checkpoints_and_exports() -> None:
    core = joined()
    refs = make_ref(1), make_ref(2)
    feed(core, 1.0, grant(1, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    stopping = on.FromScheduler(message=wire.RunState(run="run", state="stopping"))
    assert feed(core, 1.1, stopping) == []
    effects = feed(core, 2.0, on.StepFinished(step=1))
    assert [write.step for write in of(effects, do.WriteCheckpoint)] == [1]
    assert len(of(effects, do.ExportModel)) == 1
    assert said(effects, wire.BatchRequest) == []
    effects = feed(
        core, 3.0,
        on.ModelExported(), on.CheckpointWritten(step=1), ready(1),
        on.CheckpointCommitted(step=1), durable(1),
    )  # fmt: skip
    assert [(r.step, r.final) for r in said(effects, wire.CheckpointReport)] == [
        (1, False), (1, True),
    ]  # fmt: skip


def test_a_run_stopped_while_a_batch_is_fetched_drops_the_batch() -> None:
    core = joined()
    feed(core, 1.0, grant(1, make_ref(1), make_ref(2)))
    stopping = on.FromScheduler(message=wire.RunState(run="run", state="stopping"))
    effects = feed(core, 1.1, stopping)
    assert of(effects, do.ForgetBodies) == [do.ForgetBodies(digests=("digest-1", "digest-2"))]
    assert of(effects, do.ExportModel)


def test_a_trainer_asked_to_leave_keeps_its_progress_and_says_goodbye() -> None:
    core = joined()
    refs = make_ref(1), make_ref(2)
    feed(core, 1.0, grant(1, *refs), body(refs[0]), body(refs[1]), good(refs[0]), good(refs[1]))
    assert feed(core, 1.1, on.StopRequested()) == []
    effects = feed(core, 2.0, on.StepFinished(step=1))
    assert [write.step for write in of(effects, do.WriteCheckpoint)] == [1]
    assert of(effects, do.ExportModel) == []
    feed(core, 2.1, ready(1), on.CheckpointWritten(step=1))
    assert of(feed(core, 2.2, on.CheckpointCommitted(step=1)), do.Exit) == []
    effects = feed(core, 2.5, durable(1))
    assert [r.step for r in said(effects, wire.CheckpointReport)] == [1]
    assert said(effects, wire.Goodbye) == [wire.Goodbye(reason="stopped")]
    assert [(e.status, e.code) for e in of(effects, do.Exit)] == [(0, "stopped")]


def test_leaving_does_not_wait_for_a_dead_weight_store_for_ever() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    feed(core, 1.5, on.StopRequested(), ready(1), on.CheckpointWritten(step=1))
    feed(core, 2.0, on.CheckpointCommitted(step=1))
    assert of(feed(core, 6.9, on.Tick()), do.Exit) == []
    assert len(of(feed(core, 7.0, on.Tick()), do.Exit)) == 1


def test_a_trainer_without_a_model_leaves_at_once() -> None:
    core = make_core()
    feed(core, 0.0, on.Tick(), welcome())
    assert len(of(feed(core, 0.1, on.StopRequested()), do.Exit)) == 1


def test_a_crash_before_the_store_has_a_version_publishes_it_again_from_the_disk() -> None:
    world = TrainerWorld(make_run(steps=4, checkpoint_every=1))
    while not world.disk:
        world.turn(without="to_store")
    assert world.store.versions == {}
    world.start()
    assert [p.version for p in world.core._pending] == [0, 1]
    world.settle()
    assert world.store.versions == {0: None, 1: 0, 2: 1, 3: 2, 4: 3}
    assert world.exit is not None
    assert world.exit.code == "run.finished"


def test_after_a_rollback_numbers_go_on_and_the_tree_forks() -> None:
    world = TrainerWorld(make_run(steps=4, checkpoint_every=2))
    while world.core.step < 3 or 3 not in world.store.versions:
        world.turn()
    world.start()
    assert world.core.step == 2
    world.settle()
    assert world.store.versions == {0: None, 1: 0, 2: 1, 3: 2, 4: 2, 5: 4, 6: 5}


def test_a_broken_invariant_is_raised_with_the_story() -> None:
    core = joined()
    train(core, 1, 1.0, 1, 2)
    core.head_version = 9
    with pytest.raises(InvariantViolation, match=r"(?s)the head is not above.*step 1 done"):
        core.check()


def test_trained_jobs_are_exact_for_any_kind_of_id() -> None:
    ids = ["run/t-000041", "run/t-0000041", "run/x-1023", "run/x-1024", "plain", "a-b", "a-٣"]
    jobs = TrainedJobs(ids[:3] + ids[:3] + ids[4:])
    assert len(jobs) == 6
    assert [job in jobs for job in ids] == [True, True, True, False, True, True, True]
    assert "run/t-41" not in jobs
