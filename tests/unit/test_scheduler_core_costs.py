"""What a run costs, what its trainer could use, and whether lengths are biased."""

import pytest
from core_builders import SOLVER, Scene, make_run, make_scene

from scheduler.core import bias
from scheduler.core.events import FromAgent
from transport.messages import Goodbye, Ping, VersionServing


def cost(scene: Scene) -> float:
    return scene.run().cost_usd


def busy_scene(**changes) -> Scene:
    """An agent of 36 $ an hour, a cent a second, at work on the run."""
    scene = make_scene(**changes)
    scene.joined("a", price_usd_hour=36.0, egress_usd_gb=100.0)
    scene.trainer_joined()
    for offer in scene.live_offers("a"):
        scene.accepted(offer)
    return scene


def beat_for(scene: Scene, seconds: int) -> None:
    for _ in range(seconds):
        scene.wait(1.0)
        if scene.agent("a").state == "ready":
            scene.beats("a")


def test_an_agents_time_is_charged_to_the_run_that_it_works_for():
    scene = busy_scene()
    before = cost(scene)
    beat_for(scene, 60)
    assert cost(scene) - before == pytest.approx(0.60, abs=0.03)


def test_an_idle_agent_costs_too_and_a_lost_one_does_not():
    scene = busy_scene()
    beat_for(scene, 10)
    scene.wait(20.0)
    assert scene.agent("a").state == "lost"
    before = cost(scene)
    scene.wait(60.0)
    assert cost(scene) == before


def test_bytes_that_leave_are_charged_at_their_price():
    scene = busy_scene(egress_usd_gb=50.0)
    before = cost(scene)
    scene.finished(scene.live_offers("a")[0], size_bytes=2_000_000)
    assert cost(scene) - before == pytest.approx(0.02)
    scene.version_stored(1)
    before = cost(scene)
    scene.serving(1)  # fetched 1000 bytes
    assert cost(scene) - before == pytest.approx(50.0 * 1000 / 1e9)


def test_an_agent_that_lies_about_what_it_fetched_ends_no_run():
    scene = busy_scene(egress_usd_gb=0.1, run=make_run(budget_usd=100.0))
    scene.version_stored(1)
    before = cost(scene)
    for version in (1, 1, 1, 999):
        lie = VersionServing(
            policy=SOLVER, version=version, digest="d", pause_s=0.0, fetched_bytes=2**53
        )
        scene.feed(FromAgent("a", lie))
    assert cost(scene) - before <= 2 * 50_000 * 0.1 / 1e9 + 1e-12
    assert scene.run().state == "running"


def test_an_agent_that_says_it_costs_the_world_is_charged_a_bounded_price():
    scene = make_scene()
    scene.joined("a", price_usd_hour=1e9)
    beat_for(scene, 36)
    assert cost(scene) <= 10.5


def test_a_run_stops_when_its_budget_is_spent_and_says_so():
    scene = busy_scene(run=make_run(budget_usd=0.3))
    beat_for(scene, 29)
    assert scene.run().state == "running"
    beat_for(scene, 5)
    assert scene.run().state in ("stopping", "finished")
    assert scene.run().reason == "stopped: budget_usd = 0.3 is spent"
    assert cost(scene) == pytest.approx(0.3, abs=0.05)


def test_what_was_spent_survives_a_restart():
    scene = busy_scene()
    beat_for(scene, 60)
    before = cost(scene)
    assert before > 0.5
    scene.restart()
    assert cost(scene) == pytest.approx(before)


def test_two_runs_share_what_an_agent_costs():
    scene = busy_scene()
    scene.submitted(make_run("s"))
    beat_for(scene, 60)
    total = cost(scene) + scene.run("s").cost_usd
    assert total == pytest.approx(0.60, abs=0.03)


def step(scene: Scene, number: int) -> None:
    """One step of the trainer, with whatever the agent has to deliver for it."""
    scene.requested(number)
    for _ in range(50):
        if scene.policy().trainer == "training":
            break
        for offer in scene.live_offers("a")[:1]:
            scene.accepted(offer)
            scene.finished(offer, version=number - 1, generating_s=20.0)
        scene.wait(1.0)
        scene.trainer_says(Ping(sequence=1, sent_s=scene.now))
        scene.beats("a", versions={SOLVER: number - 1})
    scene.stepped(number)
    scene.version_stored(number)
    scene.serving(number)


def demand(scene: Scene):
    [found] = scene.core.demand()
    return found


def test_there_is_no_demand_before_a_step_or_without_a_trainer():
    scene = make_scene()
    scene.joined("a")
    assert (demand(scene).binds, demand(scene).more_slots) == ("nothing", 0)
    scene.trainer_says(Goodbye(reason="done for today"))
    assert (demand(scene).binds, demand(scene).more_slots) == ("training", 0)


def test_slow_generation_asks_for_slots_and_says_what_they_would_bring():
    # A group of 2 x 8 tokens takes 20 s, a step 2 s: generation is the bottleneck.
    scene = make_scene(run=make_run(policy={"max_policy_lag": 20, "steps": 50}))
    scene.joined("a", slots=2)
    scene.trainer_joined()
    for number in (1, 2, 3):
        step(scene, number)
    found = demand(scene)
    assert found.binds == "generation"
    assert found.more_slots > 2
    assert found.steps_hour_with > 2 * found.steps_hour
    assert scene.core.status(scene.now).demand == (found,)


def test_no_slots_are_asked_for_when_results_would_be_too_old_anyway():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0, "steps": 50}))
    scene.joined("a", slots=2)
    scene.trainer_joined()
    for number in (1, 2, 3):
        step(scene, number)
    found = demand(scene)
    assert (found.binds, found.more_slots) == ("staleness", 0)
    assert "too old" in found.reason


def test_training_binds_when_generation_keeps_up():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 20, "steps": 50}))
    scene.joined("a", slots=1000)
    scene.trainer_joined()
    for number in (1, 2):
        step(scene, number)
    assert (demand(scene).binds, demand(scene).more_slots) == ("training", 0)


def test_a_bias_of_lengths_is_an_alert(monkeypatch):
    monkeypatch.setattr(bias, "MIN_GROUPS", 4)
    monkeypatch.setattr(bias, "LOOK_GROUPS", 1)
    monkeypatch.setattr(bias, "LEVEL_1_PERCENT", 0.5)
    scene = busy_scene(run=make_run(policy={"max_policy_lag": 8, "steps": 50}))
    watch = scene.core._ctx.policies[SOLVER].lengths
    for length in range(20):
        watch.returned(100.0 + length)
        watch.trained(10.0 + length)
    scene.wait(5.0)
    [alert] = scene.core.status(scene.now).alerts
    assert (alert.code, alert.subject) == ("bias.length", SOLVER)


def test_trained_lengths_are_those_of_the_groups_that_a_checkpoint_covers():
    scene = busy_scene()
    scene.requested(1)
    for offer in scene.live_offers("a")[:2]:
        scene.finished(offer, lengths=(8, 4))
    watch = scene.core._ctx.policies[SOLVER].lengths
    assert list(watch._returned) == [6.0, 6.0]
    assert list(watch._trained) == []
    scene.stepped(1)
    scene.checkpointed(1)
    assert list(watch._trained) == [6.0, 6.0]


def test_what_is_known_of_an_agents_versions_goes_with_the_run():
    scene = busy_scene()
    scene.version_stored(1)
    scene.serving(1)
    lie = VersionServing(policy="no/such", version=1, digest="d", pause_s=0.0)
    scene.feed(FromAgent("a", lie))
    live = scene.core._ctx.agents["a"]
    assert live.billed.keys() == live.served_s.keys() == {SOLVER}
    scene.commanded("abandon")
    assert scene.run().state == "finished"
    scene.serving(2)
    assert not live.billed
    assert not live.served_s
