"""What trainers find of recorded log-probabilities, and when it excludes an agent."""

import msgspec
import pytest
from core_builders import SOLVER, Scene, make_run, make_scene

from scheduler.core import honesty
from scheduler.core.events import FromAgent
from transport.messages import (
    AgentOrder,
    ExplainRequest,
    Goodbye,
    GroupDrift,
    StepReport,
)

BOUND = 0.1
RIGHT, WRONG = 0.01, 0.5


def drift_scene(forget_agent_s: float = 3600.0, **changes) -> Scene:
    """Two agents; a batch has four groups; a window is one group's 1000 tokens."""
    policy = {"steps": 200, "batch_groups": 4, "max_policy_lag": 8, "checkpoint_every": 50}
    scene = make_scene(run=make_run(policy=policy, **changes), forget_agent_s=forget_agent_s)
    scene.joined("a", slots=4)
    scene.joined("b", slots=4)
    return scene


def batch(scene: Scene, step: int) -> dict[str, list[str]]:
    """Make the groups of a step and have them taken: jobs by agent."""
    while True:
        asked, scene.effects = scene.effects, []
        scene.produced(asked)
        offers = scene.live_offers("a")[:2] + scene.live_offers("b")[:2]
        for offer in offers:
            scene.accepted(offer)
            scene.finished(offer, version=step - 1)
        scene.requested(step, groups=4)
        taken = scene.core._ctx.policies[SOLVER].taken.get(step, {})
        if taken:
            break
    by_agent: dict[str, list[str]] = {"a": [], "b": []}
    for id in taken:
        by_agent[scene.core._ctx.tables.jobs[id].result.agent].append(id)
    return by_agent


def report(step: int, *drifts: GroupDrift, version: int | None = None) -> StepReport:
    made = step if version is None else version
    return StepReport(
        policy=SOLVER, step=step, version=made, busy_s=2.0, waiting_s=1.0, drifts=drifts
    )


def drift(job: str, difference: float, tokens: int = 1000, version: int = 0) -> GroupDrift:
    return GroupDrift(
        job=job, version=version, tokens=tokens, difference=difference, kl=difference**2
    )


def steps(scene: Scene, count: int, first: int = 1, **differences: float) -> None:
    """Steps whose trainer finds the given means for the agents' groups."""
    for step in range(first, first + count):
        jobs = batch(scene, step)
        drifts = [drift(job, value) for name, value in differences.items() for job in jobs[name]]
        scene.trainer_says(report(step, *drifts))
        scene.version_stored(step)
        for name in ("a", "b"):
            scene.serving(step, name)


def test_the_third_window_in_a_row_excludes_the_agent_with_what_was_found():
    scene = drift_scene()
    for step in (1, 2):
        steps(scene, 1, step, a=WRONG, b=RIGHT)
        assert scene.agent("a").state == "ready", step
    steps(scene, 1, 3, a=WRONG, b=RIGHT)
    status = scene.agent("a")
    assert (status.state, status.quarantined) == ("quarantined", honesty.DRIFT)
    assert len(status.evidence) == 3
    assert status.evidence[0].startswith(
        f"{honesty.DRIFT}: {SOLVER} step 1: 0.5 nats a token from the trainer's over"
    )
    assert "(max_drift 0.1), kl 0.25" in status.evidence[0]
    assert scene.agent("b").evidence == ()
    assert scene.counter(f"quarantine.evidence.{honesty.DRIFT}") == 3
    assert scene.counter("quarantine.agents") == 1


def test_explain_shows_what_was_found_of_honest_agents_too():
    scene = drift_scene()
    steps(scene, 1, a=WRONG, b=RIGHT)
    for name, mean in (("a", "0.5"), ("b", "0.01")):
        reasons = scene.asked(ExplainRequest(subject=name)).reasons
        [found] = [line for line in reasons if line.startswith("log-probabilities of")]
        assert f"{SOLVER} step 1: {mean} nats a token" in found


def test_the_quarantine_survives_a_restart():
    scene = drift_scene()
    steps(scene, 3, a=WRONG, b=RIGHT)
    scene.restart()
    scene.joined("a", slots=4)
    assert scene.agent("a").state == "quarantined"
    assert len(scene.agent("a").evidence) == 3


def test_an_agent_on_the_bound_is_honest():
    scene = drift_scene()
    steps(scene, 5, a=BOUND, b=RIGHT)
    assert scene.agent("a").evidence == ()


def test_one_bad_batch_is_evidence_but_excludes_nobody():
    scene = drift_scene()
    for first in range(1, 20, 3):
        steps(scene, 2, first, a=RIGHT, b=RIGHT)
        scene.now += 2 * 3600.0
        steps(scene, 1, first + 2, a=WRONG, b=RIGHT)
    assert scene.agent("a").state == "ready"
    assert len(scene.agent("a").evidence) == 7


def test_a_window_in_between_that_is_right_begins_the_row_anew():
    scene = drift_scene()
    for first in (1, 4, 7):
        steps(scene, 2, first, a=WRONG, b=RIGHT)
        scene.now += 4 * 3600.0
        steps(scene, 1, first + 2, a=RIGHT, b=RIGHT)
    assert scene.agent("a").state == "ready"


def test_what_all_agents_show_is_not_the_agents_fault():
    scene = drift_scene()
    steps(scene, 8, a=WRONG, b=WRONG)
    assert scene.agent("a").evidence == scene.agent("b").evidence == ()
    assert scene.counter("honesty.unwitnessed") == 16
    assert scene.counter("honesty.windows") == 16


def test_a_witness_of_long_ago_is_none():
    scene = drift_scene()
    steps(scene, 1, b=RIGHT)
    steps(scene, honesty.WITNESS_STEPS, 2)
    steps(scene, 3, 2 + honesty.WITNESS_STEPS, a=WRONG)
    assert scene.agent("a").evidence == ()
    assert scene.counter("honesty.unwitnessed") == 3


def test_the_only_agent_measured_is_not_excluded():
    scene = drift_scene()
    steps(scene, 6, a=WRONG)
    assert scene.agent("a").state == "ready"


def test_a_witness_of_steps_that_were_rolled_back_is_none():
    scene = drift_scene()
    steps(scene, 6, b=RIGHT)
    scene.trainer_joined(incarnation=2, step=0, version=0)
    scene.requested(1, groups=4)
    jobs = scene.core._ctx.tables.jobs
    taken = scene.core._ctx.policies[SOLVER].taken[1]
    own = [id for id in taken if jobs[id].result.agent == "a"]
    scene.trainer_says(report(1, *(drift(id, WRONG) for id in own), version=7))
    assert scene.counter("honesty.unwitnessed") == 1
    assert scene.agent("a").evidence == ()


def test_few_tokens_wait_for_more():
    scene = drift_scene(drift_tokens=4000)
    for step in range(1, 8):
        jobs = batch(scene, step)
        drifts = [drift(jobs["a"][0], WRONG, 999), drift(jobs["b"][0], RIGHT, 4000)]
        scene.trainer_says(report(step, *drifts))
        windows = (step * 999) // 4000 if step < 5 else 1
        assert len(scene.agent("a").evidence) == windows, step


def test_a_mean_is_over_tokens_not_over_groups():
    scene = drift_scene(drift_tokens=10_000)
    jobs = batch(scene, 1)
    drifts = [
        drift(jobs["a"][0], WRONG, 100),
        drift(jobs["a"][1], RIGHT, 9900),
        drift(jobs["b"][0], RIGHT, 10_000),
    ]
    scene.trainer_says(report(1, *drifts))
    window = scene.core._ctx.policies[SOLVER].drifts["a"]
    assert window.mean == (100 * WRONG + 9900 * RIGHT) / 10_000
    assert (window.tokens, window.closed_tokens) == (0, 10_000)


def test_a_report_that_is_repeated_counts_once():
    scene = drift_scene(drift_tokens=5000)
    jobs = batch(scene, 1)
    said = report(1, drift(jobs["a"][0], WRONG))
    for _ in range(8):
        scene.trainer_says(said)
    assert scene.core._ctx.policies[SOLVER].drifts["a"].tokens == 1000


def test_groups_that_the_step_did_not_take_are_nobodys():
    scene = drift_scene()
    jobs = batch(scene, 1)
    scene.trainer_says(report(1, drift("r/t-999999", WRONG), drift("", WRONG)))
    steps(scene, 1, 2, a=RIGHT)
    scene.trainer_says(report(3, drift(jobs["a"][0], WRONG)))
    assert scene.counter("honesty.unknown_group") == 3
    assert scene.agent("a").evidence == ()


def test_impossible_numbers_of_a_trainer_hurt_nobody():
    scene = drift_scene()
    jobs = batch(scene, 1)
    drifts = [drift(jobs["a"][0], -1e15), drift(jobs["a"][1], RIGHT, 0), drift(jobs["b"][0], 0.0)]
    scene.trainer_says(report(1, *drifts))
    assert scene.agent("a").evidence == ()


def test_max_drift_0_looks_at_nothing():
    scene = drift_scene(max_drift=0.0)
    steps(scene, 5, a=WRONG, b=RIGHT)
    assert scene.counter("honesty.windows") == 0
    assert scene.agent("a").state == "ready"


def test_a_released_agent_begins_anew():
    scene = drift_scene()
    steps(scene, 3, a=WRONG, b=RIGHT)
    scene.asked(AgentOrder(agent="a", order="release"))
    assert "a" not in scene.core._ctx.policies[SOLVER].drifts
    assert scene.agent("a").evidence == ()
    assert scene.agent("a").state != "quarantined"


def test_what_was_found_of_a_forgotten_agent_is_forgotten():
    scene = drift_scene(forget_agent_s=60.0)
    steps(scene, 1, a=RIGHT, b=RIGHT)
    later = batch(scene, 2)
    scene.feed(FromAgent("a", Goodbye(reason="over")))
    for offer in scene.live_offers("a"):
        scene.finished(offer, version=1)
    for _ in range(100):
        scene.beats("b")
        scene.wait(1.0)
    assert "a" not in scene.core._ctx.agents
    assert "a" not in scene.core._ctx.policies[SOLVER].drifts
    scene.trainer_says(report(2, drift(later["a"][0], RIGHT)))
    assert "a" not in scene.core._ctx.policies[SOLVER].drifts


# ---- groups that are behind ---------------------------------------------------------------------


def behind(scene: Scene, count: int, first: int = 1, moved: float = 0.3, **own: float) -> None:
    """Steps whose trainer finds the given means, all of ``a``'s groups being older ones."""
    for step in range(first, first + count):
        jobs = batch(scene, step)
        fresh = [drift(job, own["b"]) for job in jobs["b"]] if "b" in own else []
        old = [msgspec.structs.replace(drift(job, own["a"]), moved=moved) for job in jobs["a"]]
        said = report(step, *fresh)
        scene.trainer_says(msgspec.structs.replace(said, older=tuple(old)))
        scene.version_stored(step)
        for name in ("a", "b"):
            scene.serving(step, name)


def test_an_agent_that_is_always_behind_is_held_to_account():
    scene = drift_scene()
    behind(scene, 3, a=honesty.SLACK * 0.3 + WRONG, b=RIGHT)
    status = scene.agent("a")
    assert (status.state, status.quarantined) == ("quarantined", honesty.DRIFT)
    assert "0.5 nats a token from the trainer's over" in status.evidence[0]
    assert status.evidence[0].endswith(", beside 0.3 that the policy moved")


def test_what_the_policy_itself_moved_is_nobodys_fault():
    scene = drift_scene()
    behind(scene, 8, a=honesty.SLACK * 0.3 + RIGHT, b=RIGHT)
    assert scene.agent("a").evidence == ()
    assert scene.counter("honesty.windows") == 16


def test_groups_that_are_behind_are_looked_at_together():
    """One of few tokens says little: 0.2 and 1 nats are 0.6, twice what the policy moved."""
    scene = drift_scene(drift_tokens=2000)
    jobs = batch(scene, 1)
    old = [
        msgspec.structs.replace(drift(job, difference), moved=0.3)
        for job, difference in zip(jobs["a"], (0.2, 1.0), strict=True)
    ]
    scene.trainer_says(msgspec.structs.replace(report(1), older=tuple(old)))
    assert scene.core._ctx.policies[SOLVER].drifts["a"].mean == pytest.approx(0.0)


def test_less_than_the_policy_moved_does_not_make_up_for_a_lie_at_the_head():
    scene = drift_scene(drift_tokens=2000)
    jobs = batch(scene, 1)
    old = msgspec.structs.replace(drift(jobs["a"][0], 0.0), moved=5.0)
    said = report(1, drift(jobs["a"][1], WRONG))
    scene.trainer_says(msgspec.structs.replace(said, older=(old,)))
    assert scene.core._ctx.policies[SOLVER].drifts["a"].mean == pytest.approx(WRONG / 2)


def test_a_way_of_less_than_nothing_is_none():
    scene = drift_scene()
    behind(scene, 3, moved=-9.0, a=RIGHT, b=RIGHT)
    assert scene.agent("a").evidence == ()


def test_who_is_behind_and_right_is_a_witness():
    scene = drift_scene()
    for step in range(1, 4):
        jobs = batch(scene, step)
        old = [msgspec.structs.replace(drift(job, 0.3), moved=0.3) for job in jobs["b"]]
        said = report(step, *(drift(job, WRONG) for job in jobs["a"]))
        scene.trainer_says(msgspec.structs.replace(said, older=tuple(old)))
        scene.version_stored(step)
        for name in ("a", "b"):
            scene.serving(step, name)
    assert scene.agent("a").quarantined == honesty.DRIFT
