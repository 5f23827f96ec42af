"""Nothing that comes back can be used: an alert, and no advice to add slots."""

from pathlib import Path

import pytest
from core_builders import SOLVER, Scene, make_run, make_scene

from farflow.watch import Watch
from scheduler.core.unusable import LEAST, UnusableWatch
from transport.runs import AlgorithmSpec, DataSpec
from transport.status import Alert

ZERO = DataSpec(filters=(AlgorithmSpec(name="zero_advantage"),))


def make(**policy: object) -> Scene:
    scene = make_scene(run=make_run(max_attempts=2, policy={"batch_groups": 2, **policy}))
    scene.joined("a", slots=64)
    scene.trainer_joined()
    return scene


def unusable(scene: Scene) -> list[Alert]:
    return [a for a in scene.core.status(scene.now).alerts if a.code == "groups.unusable"]


def filter_all(scene: Scene, count: int) -> None:
    for _ in range(count):
        scene.produced(scene.finished(scene.live_offers()[0], rewards=(1.0, 1.0)))


def test_a_filter_that_rejects_everything_is_an_alert_until_a_group_is_usable() -> None:
    scene = make(data=ZERO)
    filter_all(scene, LEAST - 1)
    assert unusable(scene) == []
    filter_all(scene, 1)
    [alert] = unusable(scene)
    assert alert.subject == SOLVER
    said = f"none of the last {LEAST} groups and attempts could be used, {LEAST} were filtered by"
    assert alert.message.startswith(f"{said} zero_advantage: loosen or remove that filter")
    [demand] = scene.core.status(scene.now).demand
    assert demand.more_slots == 0
    assert "filtered by zero_advantage" in demand.reason
    scene.finished(scene.live_offers()[0], rewards=(1.0, 0.0))
    assert unusable(scene) == []


def test_a_workflow_that_fails_every_attempt_is_an_alert_with_the_code() -> None:
    scene = make()
    for _ in range(40):
        for offer in scene.live_offers():
            scene.produced(scene.failed(offer, "workflow.malformed"))
        scene.produced(scene.wait(2.0))
    [alert] = unusable(scene)
    assert " failed with workflow.malformed: `farflow dead show`" in alert.message


def test_failures_among_groups_that_are_used_are_none() -> None:
    scene = make(steps=100, max_policy_lag=50)
    for _ in range(20):
        first, second, *_ = scene.live_offers()
        scene.failed(first, "workflow.error")
        scene.produced(scene.finished(second, rewards=(1.0, 0.0)))
    assert unusable(scene) == []


def test_larger_batches_want_more_evidence() -> None:
    watch = UnusableWatch()
    for number in range(4 * 32 - 1):
        watch.lost("filtered", "short", float(number))
    assert not watch.standing(32)
    watch.lost("failed", "task.error", 999.0)
    assert "127 were filtered by short" in watch.standing(32)
    assert watch.since_s == 0.0
    watch.usable()
    assert not watch.standing(32)


@pytest.mark.parametrize("times", [1, 3])
def test_up_says_an_alert_once(tmp_path: Path, times: int) -> None:
    scene = make(data=ZERO)
    filter_all(scene, LEAST)
    watch = Watch(tmp_path / "metrics.jsonl")
    lines = [watch.update(scene.core.status(scene.now), 0.0) for _ in range(times)]
    [line] = [line for found in lines for line in found if "groups.unusable" in line]
    assert line.startswith(f"ALERT groups.unusable {SOLVER}: none of the last")
