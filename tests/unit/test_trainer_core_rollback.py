"""What a trainer core does after a rollback, and with links that take nothing, told as stories."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from trainer_peers import POLICY, make_ref, make_run
from trainer_world import TrainerWorld, make_offer

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core.effects import Effect, LineageStep
from cloud_trainer.core.machine import TrainerCore
from cloud_trainer.core.phase import Phase
from cloud_trainer.core.settings import CoreSettings, PendingVersion, StartPosition
from transport import messages as wire
from transport.messages import Message

M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Effect)


def feed(core: TrainerCore, now: float, *events: on.Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects += core.handle(event, now)
        core.check()
    return effects


def said(effects: Sequence[Effect], kind: type[M]) -> list[M]:
    sent = (do.ToScheduler, do.ToTrajectoryLog, do.ToWeightStore)
    messages = [effect.message for effect in effects if isinstance(effect, sent)]
    return [message for message in messages if isinstance(message, kind)]


def of(effects: Sequence[Effect], kind: type[F]) -> list[F]:
    return [effect for effect in effects if isinstance(effect, kind)]


def started(position: StartPosition, highest: int = 0, **settings: Any) -> tuple[Any, list[Effect]]:
    """A core with its model loaded, and what it wanted done then."""
    core = TrainerCore(
        CoreSettings(policy=POLICY, incarnation=3, build="test", **settings), position
    )
    welcome = wire.Welcome(
        term=1, heartbeat_s=1.0, lost_after_s=500.0, run=make_run(steps=50), highest_version=highest
    )
    feed(core, 0.0, on.Tick(), on.FromScheduler(message=welcome))
    return core, feed(core, 0.0, on.ModelReady())


def grant(step: int, *numbers: int) -> on.FromScheduler:
    refs = tuple(make_ref(number) for number in numbers)
    return on.FromScheduler(message=wire.BatchGrant(policy=POLICY, step=step, groups=refs))


def body(number: int) -> list[on.Event]:
    ref = make_ref(number)
    arrived = on.FromTrajectoryLog(message=wire.Body(digest=ref.digest, found=True))
    good = on.BodyChecked(digest=ref.digest, job=ref.job, size_bytes=100, trainable_tokens=9)
    return [arrived, good]


# ---- after a rollback ----------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs", "again"), [(27, 25, 28), (24, 30, 31), (23, 24, 25)])
def test_the_checkpoints_weights_get_a_number_above_all_that_were_given(
    ours: int, theirs: int, again: int
) -> None:
    position = StartPosition(step=20, version=23, highest_version=ours)
    core, effects = started(position, highest=theirs)
    assert of(effects, do.BuildVersion) == [
        do.BuildVersion(version=again, parent=23, step=20, again=True)
    ]
    assert said(effects, wire.BatchRequest) == [
        wire.BatchRequest(policy=POLICY, step=21, groups=2, head_version=again)
    ]
    assert core.story("again") == [f"0.000 version 23 published again as version {again}"]
    assert core.checkpoints.inventory().checkpoint_version == 23
    effects = feed(core, 0.1, on.VersionReady(version=again, offer=make_offer(again)))
    assert said(effects, wire.VersionOffer) == [make_offer(again)]
    assert core.checkpoints.inventory() == wire.TrainerInventory(
        policy=POLICY, checkpoint_step=20, checkpoint_version=again
    )


@pytest.mark.parametrize("highest", [0, 23])
def test_a_head_that_has_the_highest_number_is_not_published_again(highest: int) -> None:
    position = StartPosition(step=20, version=23, highest_version=23)
    _, effects = started(position, highest=highest)
    assert of(effects, do.BuildVersion) == []
    assert said(effects, wire.BatchRequest)[0].head_version == 23


def test_what_is_on_its_way_to_the_store_is_offered_before_the_weights_come_again() -> None:
    pending = (
        PendingVersion(version=22, parent=21, step=19),
        PendingVersion(version=23, parent=22, step=20),
    )
    position = StartPosition(step=20, version=23, highest_version=24, pending=pending)
    core, effects = started(position)
    assert [(b.version, b.again) for b in of(effects, do.BuildVersion)] == [
        (22, False), (23, False), (25, True),
    ]  # fmt: skip
    ready = [on.VersionReady(version=v, offer=make_offer(v)) for v in (22, 23, 25)]
    effects = feed(core, 1.0, *ready)
    for version in (22, 23, 25):
        done = wire.VersionDurable(policy=POLICY, version=version)
        effects += feed(core, 2.0, on.FromWeightStore(message=done))
    assert said(effects, wire.VersionOffer) == [make_offer(v) for v in (22, 23, 25)]


def test_steps_reports_and_the_lineage_are_as_without_the_new_number() -> None:
    steps = []
    for highest in (23, 27):
        core, _ = started(StartPosition(step=20, version=23, highest_version=highest))
        if core.head_version != 23:
            feed(core, 0.5, on.VersionReady(version=28, offer=make_offer(28)))
            done = wire.VersionDurable(policy=POLICY, version=28)
            feed(core, 0.5, on.FromWeightStore(message=done))
        effects = feed(core, 1.0, grant(21, 1, 2), *body(1), *body(2))
        assert [run.groups for run in of(effects, do.RunStep)] == [(make_ref(1), make_ref(2))]
        effects = feed(core, 2.0, on.StepFinished(step=21, metrics={"loss": 0.5}))
        (build,) = of(effects, do.BuildVersion)
        (report,) = said(effects, wire.StepReport)
        (record,) = of(effects, do.RecordStep)
        assert record.report == report
        assert (build.version, build.parent, build.again) == (highest + 1 + (highest > 23),
            23 if highest == 23 else 28, False)  # fmt: skip
        assert report.version == build.version
        assert core.checkpoints.trained == [LineageStep(21, (make_ref(1).job, make_ref(2).job))]
        steps.append((report.step, report.busy_s, report.waiting_s, report.metrics))
    assert steps[0] == steps[1]
    assert steps[0][3] == {
        "loss": 0.5, "groups": 2.0, "policy_lag_mean": 0.0, "policy_lag_max": 0.0,
    }  # fmt: skip


def test_a_run_that_is_over_still_leads_the_agents_to_its_last_weights() -> None:
    core, effects = started(StartPosition(step=50, version=60, highest_version=63))
    assert [b.version for b in of(effects, do.BuildVersion)] == [64]
    effects = feed(core, 1.0, on.ModelExported())
    assert said(effects, wire.CheckpointReport) == []
    done = wire.VersionDurable(policy=POLICY, version=64)
    effects = feed(
        core, 2.0,
        on.VersionReady(version=64, offer=make_offer(64)), on.FromWeightStore(message=done),
    )  # fmt: skip
    assert said(effects, wire.CheckpointReport) == [
        wire.CheckpointReport(policy=POLICY, step=50, version=64, final=True)
    ]


def rolled_back(world: TrainerWorld) -> None:
    """A new incarnation, as far as asking for its first batch."""
    world.start()
    while world.core.phase in (Phase.JOINING, Phase.LOADING):
        world.turn()


def test_one_rollback_makes_one_version_however_often_the_trainer_restarts() -> None:
    world = TrainerWorld(make_run(steps=6, checkpoint_every=4))
    while 6 not in world.given:
        world.turn()
    assert world.disk[-1].version == 4
    rolled_back(world)
    again = world.core.head_version
    while again not in world.store.versions:
        world.turn(without="from_scheduler")
    assert (again, world.store.versions[again]) == (max(world.given), 4)
    for _ in range(3):
        rolled_back(world)
        assert world.core.head_version == again
        assert world.core.checkpoints.inventory().checkpoint_version == again
    assert max(world.given) == again
    while world.core.step < 5:
        world.turn()
    rolled_back(world)
    assert world.core.head_version == again + 2
    world.settle()
    assert world.store.versions[again + 2] == again
    assert world.scheduler.final == (6, again + 4)


def test_a_restart_before_the_first_checkpoint_leads_the_agents_back_to_the_initial_model() -> None:
    world = TrainerWorld(make_run(steps=4, checkpoint_every=4))
    while 2 not in world.store.versions:
        world.turn()
    rolled_back(world)
    again = world.core.head_version
    assert (world.core.step, again) == (0, max(world.given))
    world.settle()
    assert world.store.versions[again] == 0
    assert world.exit is not None
    assert world.exit.code == "run.finished"


# ---- links that take nothing ---------------------------------------------------------------------


def asked(core: TrainerCore, now: float) -> on.NotSent | None:
    """Time passes; the request for bodies that is made now and not taken."""
    requests = said(feed(core, now, on.Tick()), wire.BodyRequest)
    return on.NotSent(message=requests[0]) if requests else None


def test_bodies_that_could_not_be_asked_for_are_asked_for_again_soon_but_less_and_less() -> None:
    core, _ = started(StartPosition(step=20, version=23, highest_version=23), fetch_timeout_s=60.0)
    (request,) = said(feed(core, 10.0, grant(21, *range(20))), wire.BodyRequest)
    assert len(request.digests) == 12
    assert said(feed(core, 10.0, on.NotSent(message=request)), wire.BodyRequest) == []
    moments = []
    now = 10.0
    while now < 16.0:
        now = round(now + 0.05, 2)
        refused = asked(core, now)
        if refused is not None:
            moments.append(now)
            feed(core, now, refused)
    waits = [later - sooner for sooner, later in pairwise(moments)]
    assert moments[0] == pytest.approx(10.1)
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(1.0, abs=0.06)
    assert core.next_deadline() <= now + 1.0
    (request,) = said(feed(core, 17.0, on.Tick()), wire.BodyRequest)
    assert request.digests == tuple(make_ref(number).digest for number in range(12))
    effects = feed(core, 17.1, *body(0))
    assert [r.digests for r in said(effects, wire.BodyRequest)] == [(make_ref(12).digest,)]
    again = feed(core, 17.1, on.NotSent(message=said(effects, wire.BodyRequest)[0]))
    assert said(again, wire.BodyRequest) == []
    (request,) = said(feed(core, 17.25, on.Tick()), wire.BodyRequest)
    assert request.digests == (make_ref(12).digest,)


def test_a_log_that_was_never_asked_is_not_silent() -> None:
    core, _ = started(StartPosition(step=20, version=23, highest_version=23), fetch_timeout_s=1.0)
    (request,) = said(feed(core, 1.0, grant(21, 1)), wire.BodyRequest)
    effects = feed(core, 1.0, on.NotSent(message=request))
    for tenth in range(11, 100):
        refused = asked(core, tenth / 10)
        effects += feed(core, tenth / 10, refused) if refused else []
    effects += feed(core, 11.0, on.Tick())
    assert len(said(effects, wire.BodyRequest)) == 1
    effects += feed(core, 12.9, on.Tick())
    assert of(effects, do.RenewLink) == []


def test_a_batch_that_could_not_be_asked_for_is_asked_for_again_soon() -> None:
    core, effects = started(StartPosition(step=20, version=23, highest_version=23))
    moments = [0.0]
    for _ in range(8):
        (request,) = said(effects, wire.BatchRequest)
        feed(core, moments[-1], on.NotSent(message=request))
        effects = []
        while not said(effects, wire.BatchRequest):
            now = core.next_deadline()
            effects = feed(core, now, on.Tick())
        moments.append(now)
    waits = [later - sooner for sooner, later in pairwise(moments)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
    feed(core, moments[-1], grant(21, 1))
    assert core._resend.next_s() == 0.1


def test_what_is_repeated_anyway_needs_no_special_care() -> None:
    core, _ = started(StartPosition(step=20, version=23, highest_version=23))
    unsent = [wire.Ping(sequence=1, sent_s=0.0), wire.BodyRequest(digests=("x",))]
    assert feed(core, 0.5, *(on.NotSent(message=message) for message in unsent)) == []
