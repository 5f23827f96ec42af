"""Evidence against agents and their automatic quarantine; whose fault a failure is."""

import pytest
from core_builders import Scene, make_run, make_scene

from scheduler.core import quarantine
from scheduler.core.events import FromAgent
from scheduler.core.failures import class_of
from transport.messages import AgentOrder, Goodbye, LeaseOffer


@pytest.fixture
def scene() -> Scene:
    scene = make_scene()
    scene.joined("a", slots=2)
    return scene


def invalid(scene: Scene, offer: LeaseOffer) -> None:
    """A result with a reward too few."""
    scene.accepted(offer)
    scene.finished(offer, rewards=(1.0,))


def test_three_invalid_results_exclude_an_agent_with_the_evidence_shown(scene):
    for count in range(3):
        assert scene.agent().state == "ready", count
        invalid(scene, scene.live_offers("a")[0])
    status = scene.agent()
    assert (status.state, status.quarantined) == ("quarantined", "summary.invalid")
    assert len(status.evidence) == 3
    assert all("1 rewards" in line for line in status.evidence)
    assert scene.counter("quarantine.agents") == 1


@pytest.mark.parametrize(
    ("weight", "every_s", "enough"), [(1.0, 1200.0, 3), (1.5, 3600.0, 2), (0.5, 60.0, 5)]
)
def test_what_comes_within_the_time_that_is_promised_excludes(scene, weight, every_s, enough):
    """Evidence weighs less with time, and never comes at one instant."""
    ctx = scene.core._ctx
    for count in range(enough):
        assert ctx.tables.agents["a"].quarantined == "", count
        quarantine.evidence(ctx, "a", "reward.differs", f"job {count}", weight)
        ctx.now += every_s
    assert ctx.tables.agents["a"].quarantined == "reward.differs"


def test_two_accidents_exclude_nobody(scene):
    for count in range(2):
        quarantine.evidence(scene.core._ctx, "a", "summary.invalid", f"job {count}")
    assert scene.agent().quarantined == ""


def test_old_evidence_weighs_less(scene):
    for _ in range(2):
        invalid(scene, scene.live_offers("a")[0])
    for _ in range(3600):
        scene.now += 2.0
        scene.beats("a")
        if scene.now > 7000.0:
            break
    invalid(scene, scene.live_offers("a")[0])
    assert scene.agent().state == "ready"


def test_evidence_weighs_over_restarts_of_the_scheduler(scene):
    """And halves on: the clock goes on where it was."""
    for _ in range(2):
        invalid(scene, scene.live_offers("a")[0])
        scene.restart()
        scene.joined("a", slots=2)
    invalid(scene, scene.live_offers("a")[0])
    assert (scene.agent().state, scene.agent().quarantined) == ("quarantined", "summary.invalid")


def test_a_crash_loop_is_seen_over_restarts_of_the_scheduler(scene):
    scene.joined("b", slots=2)
    for incarnation in range(2, 7):
        assert scene.agent().quarantined == ""
        scene.restart()
        scene.joined("b", slots=2)
        scene.joined("a", incarnation=incarnation)
        scene.wait(1.0)
    assert scene.agent().quarantined == "crash_loop"


def test_failures_in_a_row_are_counted_over_restarts_of_the_scheduler():
    scene = make_scene(run=make_run(max_attempts=100), retry_backoff_max_s=0.0)
    scene.joined("b", slots=2)
    for count in range(quarantine.OWN_FAILURES):
        scene.restart()
        scene.joined("b", slots=2)
        scene.joined("a", slots=2)
        assert scene.agent().quarantined == "", count
        scene.failed(scene.live_offers("a")[0], "engine.generation")
    assert scene.agent().quarantined == "failures_in_a_row"


def test_what_an_agent_did_is_one_row_that_goes_with_results_a_release_and_the_agent():
    scene = make_scene(forget_agent_s=60.0)
    scene.joined("a", slots=2)
    scene.joined("b", slots=2)

    def rows() -> list[str]:
        return [key for table, key in scene.rows if table == "conduct"]

    assert rows() == []
    scene.joined("a", incarnation=2)
    assert rows() == ["a"]
    offer = scene.live_offers("a")[0]
    scene.accepted(offer)
    scene.finished(offer)
    assert rows() == []
    for incarnation in range(3, 30):
        scene.joined("a", incarnation=incarnation)
    [starts] = [c.starts for c in scene.core._ctx.tables.conducts.values()]
    assert len(starts) <= 16
    scene.asked(AgentOrder(agent="a", order="release"))
    assert rows() == []
    for incarnation in (1, 2):
        scene.joined("c", incarnation=incarnation, versions={})
    assert rows() == ["c"]
    scene.feed(FromAgent("c", Goodbye(reason="off")))
    scene.wait(61.0)
    assert rows() == []


def test_a_body_of_another_job_speaks_against_its_agent(scene):
    scene.joined("b", slots=2)
    for count in range(3):
        scene.produced(scene.effects)
        for offer in scene.live_offers("a")[:2] + scene.live_offers("b")[:2]:
            scene.accepted(offer)
            scene.finished(offer)
        scene.requested(1)
        [policy] = scene.core._ctx.policies.values()
        job = next(iter(policy.taken[1]))
        scene.refused_group(1, job, "body.other")
        assert scene.counter("quarantine.evidence.body.other") == count + 1


def test_two_trainers_who_say_the_same_count_once(scene):
    for _ in range(5):
        quarantine.body_refused(scene.core._ctx, "a", "r/t-000000#1", "body.other")
    assert scene.agent().evidence == ("body.other: r/t-000000#1",)
    assert scene.agent().state == "ready"


def test_a_missing_body_is_not_the_agents_fault(scene):
    quarantine.body_refused(scene.core._ctx, "a", "r/t-000000#1", "body.missing")
    assert scene.agent().evidence == ()


def test_a_crash_loop_excludes_an_agent_when_another_can_work(scene):
    for incarnation in range(2, 7):
        scene.wait(1.0)
        scene.joined("a", incarnation=incarnation)
    assert scene.agent().state == "ready"  # it is the only one
    scene.joined("b", slots=2)
    for incarnation in range(7, 9):
        scene.wait(1.0)
        scene.joined("a", incarnation=incarnation)
    assert scene.agent().quarantined == "crash_loop"
    assert scene.agent("b").state == "ready"


def test_starts_with_results_in_between_are_no_crash_loop(scene):
    scene.joined("b", slots=2)
    for incarnation in range(2, 12):
        scene.produced(scene.effects)
        scene.joined("a", incarnation=incarnation)
        if scene.live_offers("a"):
            offer = scene.live_offers("a")[0]
            scene.accepted(offer)
            scene.finished(offer)
        elif incarnation > 5:
            break
        scene.wait(1.0)
    assert scene.agent().quarantined == ""


def test_starts_after_a_goodbye_are_no_crash_loop(scene):
    scene.joined("b", slots=2)
    for incarnation in range(2, 12):
        scene.feed(FromAgent("a", Goodbye(reason="update")))
        scene.joined("a", incarnation=incarnation)
    assert scene.agent().state == "ready"


def test_many_own_failures_in_a_row_exclude_an_agent_when_another_does_well():
    scene = make_scene(run=make_run(max_attempts=100), retry_backoff_max_s=0.0)
    scene.joined("a", slots=2)
    scene.joined("b", slots=2)
    for offer in scene.live_offers("b"):
        scene.accepted(offer)
    for count in range(quarantine.OWN_FAILURES):
        scene.wait(0.1)
        offers = scene.live_offers("a")
        assert offers, count
        scene.failed(offers[0], "engine.generation")
    assert scene.agent().quarantined == "failures_in_a_row"


def test_failures_that_are_the_runs_exclude_nobody():
    scene = make_scene(run=make_run(max_attempts=100), retry_backoff_max_s=0.0)
    scene.joined("a", slots=2)
    scene.joined("b", slots=2)
    for _ in range(40):
        scene.wait(0.1)
        for agent in ("a", "b"):
            for offer in scene.live_offers(agent)[:1]:
                scene.failed(offer, "workflow.error")
    assert [scene.agent(agent).quarantined for agent in ("a", "b")] == ["", ""]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("agent.draining", "away"),
        ("weights.timeout", "copy"),
        ("store", "box"),
        ("engine.apply", "box"),
        ("engine.generation", "job"),
        ("trajectory.malformed", "data"),
        ("integrity.checksum", "data"),
        ("integrity.size", "box"),
        ("reward.timeout", "job"),
        ("workflow.error", "job"),
        ("never.heard.of", "job"),
    ],
)
def test_every_code_has_a_class(code, expected):
    assert class_of(code) == expected


def test_what_is_the_boxs_fault_is_tried_elsewhere_and_no_failure_of_the_job(scene):
    scene.joined("b", slots=2)
    offer = scene.live_offers("a")[0]
    scene.accepted(offer)
    scene.failed(offer, "store")
    job = scene.core._ctx.tables.jobs[offer.job]
    assert (job.failures, job.losses, job.avoid) == (0, 1, ["a"])
