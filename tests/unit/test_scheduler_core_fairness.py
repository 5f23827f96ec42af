"""Whose turn it is: priorities, shares, quotas, families."""

from collections.abc import Sequence
from typing import Any

from core_builders import Scene, make_run

from scheduler.core.events import ItemsProduced
from scheduler.core.placement import Candidate, Choice, JobView, Score
from transport.messages import Item


class NoLongOnes:
    """A rule that finds no place for long answers."""

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        if job.kind.endswith("|long"):
            return None
        return Choice(candidates[0].agent, Score(0.0, candidates[0].agent, ()))


def runs(scene: Scene, **specs: dict[str, Any]) -> None:
    """Several runs with a lot to do, each with version 0 stored."""
    for name, changes in specs.items():
        policy = {"batch_groups": 50, **changes.pop("policy", {})}
        scene.submitted(make_run(name, policy=policy, **changes))
        scene.version_stored(0, policy=f"{name}/solver")
        scene.trainer_joined(f"t-{name}", policy=f"{name}/solver")
    scene.produced(scene.effects)


def joined(scene: Scene, agent: str, slots: int, *names: str) -> None:
    scene.joined(agent, slots=slots, versions={f"{name}/solver": 0 for name in names})


def sequences(scene: Scene) -> dict[str, int]:
    ctx = scene.core._ctx
    return {name: live.in_flight for name, live in ctx.runs.items()}


def test_runs_hold_sequences_in_proportion_to_their_shares():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"share": 3.0}, q={"share": 1.0})
    joined(scene, "a", 80, "p", "q")
    assert sequences(scene) == {"p": 60, "q": 20}


def test_tenants_come_before_their_runs():
    scene = Scene(prefetch_groups=0, tenant_shares={"x": 3.0})
    runs(
        scene,
        p={"tenant": "x", "share": 1.0},
        q={"tenant": "x", "share": 2.0},
        s={"tenant": "y", "share": 100.0},
    )
    joined(scene, "a", 80, "p", "q", "s")
    assert sequences(scene) == {"p": 20, "q": 40, "s": 20}


def test_what_one_run_does_not_want_others_have():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"policy": {"batch_groups": 1}}, q={})
    joined(scene, "a", 80, "p", "q")
    assert sequences(scene) == {"p": 4, "q": 76}


def test_a_higher_priority_goes_first():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={}, q={"priority": 5, "policy": {"batch_groups": 10}})
    joined(scene, "a", 60, "p", "q")
    assert sequences(scene) == {"p": 20, "q": 40}


def test_a_run_at_its_quota_does_not_hold_up_others():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"max_sequences_in_flight": 6, "priority": 9}, q={})
    joined(scene, "a", 60, "p", "q")
    assert sequences(scene) == {"p": 6, "q": 54}


def test_a_group_larger_than_the_quota_goes_alone():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"max_sequences_in_flight": 1})
    joined(scene, "a", 60, "p")
    assert sequences(scene) == {"p": 2}


def test_tokens_per_minute_are_kept_over_time():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"tokens_per_minute": 160})
    joined(scene, "a", 200, "p")
    assert sequences(scene)["p"] == 20  # 10 groups of 2 x 8 expected tokens
    for _ in range(12):
        for offer in scene.live_offers():
            scene.finished(offer, 0, ("p/solver",))  # 8 tokens each, as expected
        scene.wait(5.0)
        scene.beats("a", versions={"p/solver": 0})
    made = scene.core._ctx.counters()["attempts.offered"]
    assert 10 + 7 <= made <= 10 + 11


def test_expected_tokens_come_back_when_nobody_takes_the_group():
    scene = Scene(prefetch_groups=0)
    runs(scene, p={"tokens_per_minute": 160})
    joined(scene, "a", 200, "p")
    bucket = scene.core._ctx.runs["p"].bucket
    before = bucket.level
    assert before is not None
    scene.declined(scene.live_offers()[0], "full")
    assert bucket.level == before + 16.0


def test_work_of_another_family_is_not_hidden_behind_what_nobody_can_take():
    scene = Scene(prefetch_groups=0)
    scene.submitted(make_run(policy={"batch_groups": 4}))
    scene.version_stored(0)
    scene.trainer_joined()
    families = tuple(
        Item(index=n, prompt=str(n), answer="1", family="short" if n == 5 else "long")
        for n in range(8)
    )
    scene.feed(ItemsProduced("r", "train", 0, families))
    scene.core._ctx.rule = NoLongOnes()
    scene.joined("a", slots=8)
    assert [offer.items[0].index for offer in scene.live_offers()] == [5]
