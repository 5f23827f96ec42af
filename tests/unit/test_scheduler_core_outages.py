"""What an outage must not teach, and runs whose trainers are not there to end them."""

import pytest
from core_builders import SOLVER, Scene, make_agent_hello, make_run, make_scene

from scheduler.core.events import FromAgent, FromService
from scheduler.core.settings import TRAJECTORY_LOG
from transport.messages import Goodbye, HeldAttempt, Hello, Role


def upload_s_per_byte(scene: Scene, agent: str = "a") -> float | None:
    return scene.core._ctx.agents[agent].estimate.up_byte_s.value


def log_joined(scene: Scene) -> None:
    scene.feed(FromService(TRAJECTORY_LOG, Hello(role=Role.SERVICE, incarnation=1, build="b")))


def back(scene: Scene, agent: str = "a") -> None:
    """The same process says hello again, with all that it holds."""
    held = tuple(
        HeldAttempt(attempt=offer.attempt, fence=offer.fence, started=True)
        for offer in scene.live_offers(agent)
    )
    scene.feed(FromAgent(agent, make_agent_hello(1, held=held)))


def working() -> Scene:
    scene = make_scene(run=make_run(policy={"max_policy_lag": 9, "steps": 99}))
    scene.joined("a")
    for offer in scene.live_offers("a"):
        scene.accepted(offer)
    return scene


def test_a_result_teaches_the_uplink():
    scene = working()
    scene.wait(3.1)
    scene.finished(scene.live_offers("a")[0], size_bytes=1000)
    assert upload_s_per_byte(scene) == pytest.approx((3.1 - 1.1) / 1000)


def test_a_scheduler_that_was_down_does_not_make_its_agents_uplinks_slow():
    scene = working()
    offer = scene.live_offers("a")[0]
    scene.now += 27.0
    scene.produced(scene.restart())
    log_joined(scene)
    back(scene)
    scene.wait(12.5)
    scene.finished(offer)
    assert upload_s_per_byte(scene) is None


def test_an_agent_whose_link_was_down_is_not_taken_for_slow():
    scene = working()
    offer = scene.live_offers("a")[0]
    scene.wait(8.0)
    back(scene)
    scene.wait(5.0)
    scene.finished(offer)
    assert upload_s_per_byte(scene) is None
    for _ in range(31):
        scene.wait(1.0)
        scene.beats("a")
    known = [offer.attempt for offer in scene.live_offers("a")]
    scene.finished(scene.live_offers("a")[0])
    [fresh, *_] = [o for o in scene.live_offers("a") if o.attempt not in known]
    scene.accepted(fresh)
    scene.wait(2.1)
    scene.finished(fresh)
    assert upload_s_per_byte(scene) is not None


def test_a_log_that_was_away_does_not_make_uplinks_slow():
    scene = working()
    scene.wait(8.0)
    log_joined(scene)
    scene.finished(scene.live_offers("a")[0])
    assert upload_s_per_byte(scene) is None


def test_a_stopped_run_whose_trainer_left_before_its_first_step_ends():
    scene = make_scene()
    scene.trainer_says(Goodbye(reason="crashed"))
    scene.commanded("stop")
    assert scene.run().state == "finished"


def test_a_stopped_run_waits_for_a_trainer_that_has_something_to_export():
    scene = working()
    scene.requested(1)
    for offer in scene.live_offers("a")[:2]:
        scene.finished(offer)
    scene.stepped(1)
    scene.trainer_says(Goodbye(reason="moved"))
    scene.commanded("stop")
    assert scene.run().state == "stopping"
    reply = scene.commanded("abandon")
    assert reply.ok
    assert (scene.run().state, scene.run().reason) == ("finished", "abandoned")
    assert scene.books(SOLVER).balance == 0
    assert scene.commanded("abandon").code == "run.finished"
