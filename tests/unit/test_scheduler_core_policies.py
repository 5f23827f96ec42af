"""Several policies in one run: routing, shared groups, independence of each other's trainers."""

from typing import Any

from core_builders import SOLVER, Scene, grants, make_run, make_scene

from scheduler.core import attempts, jobs
from transport.messages import BatchRequest, CheckpointReport, Ping, StepReport


def two_policies(**changes: Any) -> Scene:
    """judge and solver, both trained, one trainer each, one large agent."""
    scene = make_scene(run=make_run(policies=("judge", "solver"), **changes))
    scene.trainer_joined("u", policy="r/solver")
    scene.joined("a", slots=16, versions={"r/judge": 0, "r/solver": 0})
    return scene


def both(version: int = 0) -> dict[str, tuple[int, int]]:
    return {"r/judge": (version, version), "r/solver": (version, version)}


def test_a_group_is_routed_to_every_policy_that_produced_tokens():
    scene = two_policies()
    first, second = scene.live_offers()[:2]
    scene.finished(first, versions=both())
    scene.finished(second, versions={"r/solver": (0, 0)})
    assert scene.books("r/judge").buffered == 1
    assert scene.books("r/solver").buffered == 2
    assert (scene.books("r/judge").dropped, scene.counter("dropped.not_routed")) == (1, 1)


def test_a_body_lives_until_the_last_policy_is_done_with_it():
    scene = two_policies()
    for offer in scene.live_offers():
        scene.finished(offer, versions=both())
    scene.requested(1, policy="r/judge")
    scene.trainer_says(_report("r/judge"))
    scene.checkpointed(1, policy="r/judge")
    assert scene.books("r/judge").trained == 2
    assert not [key for table, key in scene.rows if table == "release"]
    scene.trainer_says(_request("r/solver"), "u")
    scene.trainer_says(_report("r/solver"), "u")
    scene.trainer_says(_checkpoint("r/solver"), "u")
    assert len([key for table, key in scene.rows if table == "release"]) == 2


def test_a_dead_trainer_does_not_hold_the_other_policy_up():
    scene = two_policies()
    done = 0
    for step in range(1, 6):
        for offer in scene.live_offers():
            scene.finished(offer, versions={"r/judge": (step - 1,) * 2, "r/solver": (0, 0)})
        done += len(grants(scene.requested(step, policy="r/judge")))
        scene.stepped(step, policy="r/judge")
        scene.version_stored(step, policy="r/judge")
        scene.joined("a", 1, slots=16, versions={"r/judge": step, SOLVER: 0})
        scene.produced(scene.effects)
    assert done == 5
    row = scene.books("r/solver")
    assert (row.buffered, row.balance) == (4, 0)
    assert scene.counter("dropped.quota") == row.dropped > 0


def test_policies_of_one_pace_learn_from_the_same_groups():
    scene = two_policies()
    for step in range(1, 6):
        for offer in scene.live_offers():
            scene.finished(offer, versions=both(step - 1))
        scene.requested(step, policy="r/judge")
        scene.trainer_says(_request("r/solver", step), "u")
        scene.wait(1.0)
        scene.stepped(step, policy="r/judge")
        scene.produced(scene.effects)
        scene.wait(0.5)
        scene.trainer_says(_report("r/solver", step), "u")
        for policy in ("r/judge", "r/solver"):
            scene.version_stored(step, policy=policy)
        scene.joined("a", 1, slots=16, versions={"r/judge": step, "r/solver": step})
        scene.produced(scene.effects)
    assert scene.books("r/judge").submitted == scene.books("r/solver").submitted == 10
    assert scene.books("r/judge").dropped == scene.books("r/solver").dropped == 0


def test_a_run_with_two_policies_ends_when_both_are_done():
    scene = two_policies()
    scene.checkpointed(0, final=True, policy="r/judge")
    assert scene.run().state == "running"
    scene.trainer_says(_checkpoint("r/solver", 0, final=True), "u")
    assert scene.run().state == "finished"


def test_a_synchronous_run_meets_at_a_barrier_before_every_step():
    scene = two_policies(mode="sync")
    for step in range(1, 4):
        offers = scene.live_offers()
        assert len(offers) == 2  # a batch and no more, whatever lag is allowed
        assert all(o.pinned == dict.fromkeys(("r/judge", "r/solver"), step - 1) for o in offers)
        for offer in offers:
            scene.finished(offer, versions=both(step - 1))
        scene.requested(step, policy="r/judge")
        scene.stepped(step, policy="r/judge")
        scene.version_stored(step, policy="r/judge")
        scene.produced(scene.effects)
        scene.wait(60.0)
        assert not scene.live_offers()  # the other policy has not trained
        scene.trainer_says(_request("r/solver", step), "u")
        scene.trainer_says(_report("r/solver", step), "u")
        scene.produced(scene.effects)
        assert not scene.live_offers()  # nor is its version there
        scene.version_stored(step, policy="r/solver")
        scene.joined("a", 1, slots=16, versions={"r/judge": step, "r/solver": step})
        scene.produced(scene.effects)
    for policy in ("r/judge", "r/solver"):
        assert (scene.books(policy).expired, scene.books(policy).dropped) == (0, 0)


def test_a_synchronous_run_makes_up_for_groups_that_are_lost_to_one_policy():
    scene = two_policies(mode="sync")
    first, second = scene.live_offers()
    scene.finished(first, versions=both())
    scene.finished(second, versions={"r/judge": (0, 0)})
    scene.requested(1, policy="r/judge")
    scene.produced(scene.effects)
    [third] = scene.live_offers()
    scene.finished(third, versions=both())
    assert len(grants(scene.trainer_says(_request("r/solver"), "u"))) == 1


def test_a_synchronous_run_goes_on_after_a_restart_and_without_a_trainer_that_is_gone():
    scene = two_policies(mode="sync")
    held = scene.live_offers()
    scene.restart()
    scene.joined("a", 2, slots=16, versions={"r/judge": 0, "r/solver": 0})
    scene.produced(scene.effects)
    again = [offer for offer in scene.live_offers() if offer not in held]
    assert all(offer.pinned == {"r/judge": 0, "r/solver": 0} for offer in again)
    for offer in scene.live_offers():
        scene.finished(offer, versions=both())
    scene.trainer_joined("t", policy="r/judge", incarnation=2)
    scene.requested(1, policy="r/judge")
    scene.stepped(1, policy="r/judge")
    scene.version_stored(1, policy="r/judge")
    for _ in range(70):
        scene.wait(10.0)
        scene.trainer_says(Ping(sequence=1, sent_s=scene.now))
        scene.joined("a", 2, slots=16, versions={"r/judge": 1, "r/solver": 0})
        scene.produced(scene.effects)
    assert scene.live_offers()  # nobody has heard of the solver's trainer for work_grace_s


def test_a_synchronous_run_goes_on_without_a_trainer_that_died_before_its_version_was_stored():
    scene = two_policies(mode="sync")
    for offer in scene.live_offers():
        scene.finished(offer, versions=both())
    scene.trainer_says(_request("r/solver"), "u")
    scene.trainer_says(_report("r/solver"), "u")  # and is never heard of again
    scene.requested(1, policy="r/judge")
    scene.stepped(1, policy="r/judge")
    scene.version_stored(1, policy="r/judge")
    for _ in range(70):
        scene.wait(10.0)
        scene.trainer_says(Ping(sequence=1, sent_s=scene.now))
        scene.joined("a", 1, slots=16, versions={"r/judge": 1, "r/solver": 0})
        scene.produced(scene.effects)
    assert [offer.pinned for offer in scene.live_offers()] == [{"r/judge": 1}] * 2


def test_a_policy_that_has_given_groups_up_does_not_count_on_them():
    scene = two_policies()
    ctx = scene.core._ctx
    live = ctx.policies["r/judge"]
    assert sum(live.flying_by_deadline.values()) == len(scene.live_offers())
    for id in tuple(ctx.runs["r"].flying):
        jobs.close_copy(ctx, ctx.tables.jobs[id], "r/judge", "expired", "overtaken")
    assert live.flying_by_deadline == {}
    assert len(scene.live_offers()) > 0  # the other one still wants them


def test_what_only_a_dead_trainer_wants_hides_no_work_of_the_others():
    """It is refused as long as that policy's buffer is full, at the head of its queue."""
    scene = make_scene(run=make_run(policies=("judge", "solver")))
    scene.trainer_joined("u", policy="r/solver")
    ctx = scene.core._ctx
    first, *_, last = (ctx.tables.jobs[id] for id in ctx.runs["r"].jobs)
    queue = ctx.queue(first.queue)
    for job, policy in ((first, "r/judge"), (last, "r/solver")):
        job.copies[policy].state = "dropped"
        queue.discard(job.id)
        attempts.settle(ctx, job)
    assert {first.id, last.id} <= set(queue.heads(8))


def _request(policy: str, step: int = 1) -> BatchRequest:
    return BatchRequest(policy=policy, step=step, groups=2, head_version=step - 1)


def _report(policy: str, step: int = 1) -> StepReport:
    return StepReport(policy=policy, step=step, version=step, busy_s=1.0, waiting_s=0.0)


def _checkpoint(policy: str, step: int = 1, *, final: bool = False) -> CheckpointReport:
    return CheckpointReport(policy=policy, step=step, version=step, final=final)
