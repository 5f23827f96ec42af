"""Evaluations: pinned, held out, never in the way of training."""

import pytest
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    make_items,
    make_run,
    make_scene,
    messages,
    of_type,
)

from scheduler.core import keepers
from scheduler.core.effects import ProduceItems, RecordEvaluation, RunEnded
from scheduler.core.events import FromAgent, ItemsProduced
from transport.messages import (
    AgentOrder,
    ExternalJob,
    Goodbye,
    HeartbeatReply,
    Item,
    JobSubmit,
    LeaseOffer,
    LeaseRevoke,
    Welcome,
)

EVALUATION = {"items": 5, "items_per_job": 2, "items_between": 2}


def make_evaluated(**changes) -> Scene:
    evaluation = {**EVALUATION, **changes.pop("evaluation", {})}
    return make_scene(run=make_run(evaluation=evaluation, **changes))


def evals(scene: Scene) -> list[LeaseOffer]:
    return [offer for offer in scene.live_offers() if offer.kind == "eval"]


def train(scene: Scene) -> list[LeaseOffer]:
    return [offer for offer in scene.live_offers() if offer.kind == "train"]


def stepped(scene: Scene, step: int) -> None:
    scene.produced(scene.effects)
    for offer in train(scene):
        scene.finished(offer, scene.agent().versions[SOLVER])
    scene.requested(step)
    scene.stepped(step)
    scene.version_stored(step)


def test_version_zero_is_evaluated_on_held_out_items_before_training_begins():
    scene = make_evaluated()
    effects = scene.joined("a", slots=64)
    kinds = [offer.kind for offer in messages(effects, LeaseOffer)]
    assert kinds == ["eval"] * 3 + ["train"] * 4
    first = evals(scene)[0]
    assert first.job == "r/e-000000"
    assert (len(first.items), first.group_size, first.temperature) == (2, 1, 0.0)
    assert first.pinned == {SOLVER: 0}


def test_nothing_is_evaluated_before_the_version_is_stored():
    scene = Scene()
    scene.submitted(make_run(evaluation=EVALUATION))
    scene.produced(scene.effects)
    scene.joined("a", slots=64)
    assert not evals(scene)
    scene.version_stored(0)
    assert len(evals(scene)) == 3


def test_accuracy_counts_rewards_of_one_and_is_recorded_once():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    first, second, third = evals(scene)
    scene.finished(first, rewards=(1.0, 0.99))
    scene.finished(second, rewards=(1.0, 1.0))
    effects = scene.finished(third, rewards=(0.0,))
    [record] = of_type(effects, RecordEvaluation)
    assert (record.evaluation.accuracy, record.evaluation.scored) == (0.6, 5)
    assert (record.evaluation.version, record.evaluation.step, record.evaluation.done) == (0, 0, 1)
    assert scene.policy().evaluations == (record.evaluation,)
    row = scene.books(kind="eval")
    assert (row.submitted, row.scored, row.balance) == (3, 3, 0)


def test_bodies_of_evaluations_are_released_at_once():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    scene.finished(evals(scene)[0])
    assert len([key for table, key in scene.rows if table == "release"]) == 1


def test_a_source_with_few_held_out_items_is_evaluated_on_those():
    scene = Scene()
    scene.submitted(make_run(evaluation=EVALUATION))
    scene.version_stored(0)
    scene.joined("a", slots=64)
    [asked] = [e for e in of_type(scene.effects, ProduceItems) if e.kind == "eval"]
    assert (asked.start, asked.count) == (0, 5)
    effects = scene.feed(ItemsProduced(RUN, "eval", 0, make_items(0, 3)))
    [rest] = of_type(effects, ProduceItems)
    assert (rest.start, rest.count) == (3, 2)
    scene.feed(ItemsProduced(RUN, "eval", 3, ()))
    assert [len(offer.items) for offer in evals(scene)] == [2, 1]
    for offer in evals(scene):
        scene.finished(offer)
    [status] = scene.policy().evaluations
    assert (status.items, status.scored, status.done) == (3, 3, True)


def test_a_large_evaluation_is_made_bit_by_bit():
    scene = make_evaluated(evaluation={"items": 1000, "items_per_job": 1})
    assert scene.books(kind="eval").submitted == 64
    scene.joined("a", slots=500)
    offers = evals(scene)
    assert len(offers) == 64
    for offer in offers:
        scene.produced(scene.finished(offer))
    assert scene.books(kind="eval").submitted == 128


def test_items_with_long_texts_are_spread_over_more_jobs_so_that_offers_fit_a_frame():
    scene = Scene()
    scene.submitted(make_run(evaluation=EVALUATION))
    long = tuple(Item(index=n, prompt="x" * 30_000, answer="y") for n in range(5))
    scene.feed(ItemsProduced(RUN, "eval", 0, long))
    assert scene.books(kind="eval").submitted == 5


def test_an_agent_past_the_version_is_not_asked():
    scene = make_evaluated()
    scene.version_stored(1)
    scene.joined("late", slots=64, versions={SOLVER: 1})
    assert not evals(scene)
    scene.joined("a", slots=64)
    assert {scene.offered_to[offer.attempt] for offer in evals(scene)} == {"a"}


def test_an_agent_that_declines_as_too_far_is_not_asked_again_for_that_version():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    offers = evals(scene)
    scene.declined(offers[0], "version_passed")
    scene.declined(offers[1], "version_passed")
    assert evals(scene) == [offers[2]]
    scene.beats()
    scene.wait(5.0)
    assert evals(scene) == [offers[2]]


def test_an_evaluation_that_no_agent_can_serve_starts_over_at_the_newest_version():
    scene = make_evaluated()
    scene.joined("a", slots=8)
    held = evals(scene)
    scene.version_stored(1)
    scene.declined(held[0], "version_passed")
    effects = scene.wait(2.5)
    assert held[1].attempt in [m.attempt for m in messages(effects, LeaseRevoke)]
    scene.produced(effects)
    scene.finished(train(scene)[0])
    assert {tuple(offer.pinned.items()) for offer in evals(scene)} == {((SOLVER, 1),)}
    row = scene.books(kind="eval")
    assert (row.cancelled, row.balance) == (3, 0)
    assert scene.counter("evaluations.restarted") == 1


def kept_back(effects: list, agent: str = "a") -> dict[str, int]:
    """What an agent was told last not to pass."""
    return messages(effects, HeartbeatReply, agent)[-1].upto


def test_one_agent_keeps_version_zero_back_until_it_is_evaluated():
    scene = make_evaluated()
    [welcome] = messages(scene.joined("a", slots=64, versions={}), Welcome)
    assert welcome.upto == {SOLVER: 0}
    scene.joined("b", slots=64)
    assert kept_back(scene.beats("b"), "b") == {SOLVER: 0}  # which has it already
    assert kept_back(scene.heard("a")) == {}
    scene.serving(0)
    assert (kept_back(scene.beats("b"), "b"), kept_back(scene.beats("a"))) == ({SOLVER: 0}, {})
    scene.version_stored(1)
    scene.serving(1)
    *most, last = evals(scene)
    for offer in most:
        scene.finished(offer)
    assert kept_back(scene.beats("b"), "b") == {SOLVER: 0}
    scene.finished(last)
    assert kept_back(scene.beats("b"), "b") == {}
    assert scene.policy().evaluations[0].version == 0


def test_another_agent_keeps_it_back_when_the_first_is_lost_or_ordered_away():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    scene.joined("b", slots=64)
    scene.joined("c", slots=64)
    assert kept_back(scene.beats("a")) == {SOLVER: 0}
    scene.joined("a", 2, slots=64, workflows={"another": "f"})
    assert kept_back(scene.beats("b"), "b") == {SOLVER: 0}
    scene.asked(AgentOrder(agent="b", order="cordon"))
    scene.wait(2.5)  # a heartbeat later at the latest
    assert kept_back(scene.beats("b"), "b") == {}
    assert kept_back(scene.beats("c"), "c") == {SOLVER: 0}
    scene.restart()
    [welcome] = messages(scene.joined("c", slots=64), Welcome)
    assert welcome.upto == {SOLVER: 0}
    scene.commanded("stop")
    scene.wait(2.5)
    assert kept_back(scene.beats("c"), "c") == {}


def test_who_keeps_a_version_back_gets_no_work_of_a_later_one():
    """It would wait for a version that its agent is not to fetch, and the evaluation for its slots
    and for its pin."""
    scene = make_evaluated(evaluation={"items": 40})
    scene.joined("a", slots=4)
    scene.requested(1)
    scene.stepped(1)
    scene.version_stored(1)
    judged = ExternalJob(id="one", items=make_items(0, 1), pinned={SOLVER: 1}, priority=9)
    assert scene.asked(JobSubmit(run=RUN, jobs=(judged,)), "judge").receipts[0].code == ""
    assert kept_back(scene.beats("a")) == {SOLVER: 0}
    for _ in range(40):
        scene.produced(scene.effects)
        live = scene.live_offers()
        kinds = {offer.kind for offer in live}
        if "external" in kinds:
            break
        for offer in live:
            scene.finished(offer)
    assert scene.policy().evaluations[0].done
    assert kept_back(scene.beats("a")) == {}
    assert kinds == {"external"}


def test_agents_that_are_gone_keep_nobody_from_being_looked_at(monkeypatch):
    monkeypatch.setattr(keepers, "MAX_LOOKED_AT", 2)
    scene = make_evaluated()
    for name in ("x", "y"):
        scene.joined(name, slots=64)
        scene.feed(FromAgent(name, Goodbye(reason="spot")))
    [welcome] = messages(scene.joined("a", slots=64), Welcome)
    assert welcome.upto == {SOLVER: 0}


def test_an_agent_with_work_of_a_later_version_keeps_none_back():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    scene.joined("b", slots=2)
    scene.version_stored(1)
    judged = ExternalJob(id="one", items=make_items(0, 1), pinned={SOLVER: 1})
    scene.asked(JobSubmit(run=RUN, jobs=(judged,)), "judge")
    [offer] = [offer for offer in scene.live_offers("b") if offer.kind == "external"]
    scene.accepted(offer)
    assert kept_back(scene.beats("a")) == {SOLVER: 0}
    scene.asked(AgentOrder(agent="a", order="cordon"))
    scene.wait(2.5)
    assert kept_back(scene.heard("b", held=scene.held_by("b")), "b") == {}


def test_nothing_is_kept_back_for_a_source_without_items_or_between_steps():
    scene = Scene()
    scene.submitted(make_run(evaluation={**EVALUATION, "every_versions": 1}, policy={"steps": 9}))
    scene.version_stored(0)
    assert messages(scene.joined("a", slots=64), Welcome)[0].upto == {}
    scene.produced(scene.effects)
    assert kept_back(scene.beats("a")) == {SOLVER: 0}
    for offer in evals(scene):
        scene.finished(offer)
    stepped(scene, 1)
    scene.serving(1)
    scene.produced(scene.effects)
    assert {offer.pinned[SOLVER] for offer in evals(scene)} == {1}
    assert kept_back(scene.beats("a", versions={SOLVER: 1})) == {}


def test_in_between_evaluations_come_every_so_many_versions_and_are_skipped_when_busy():
    scene = make_evaluated(evaluation={"every_versions": 2}, policy={"steps": 9})
    scene.joined("a", slots=64)
    for offer in evals(scene):
        scene.finished(offer)
    pins: dict[int, None] = {}
    for step in range(1, 8):
        stepped(scene, step)
        scene.serving(step)
        scene.produced(scene.effects)
        for offer in evals(scene):
            pins[offer.pinned[SOLVER]] = None
            if step not in (3, 4, 5):
                scene.finished(offer, offer.pinned[SOLVER])
    assert list(pins) == [2, 4, 6] or list(pins) == [2, 4, 7]


def test_in_between_evaluations_leave_the_slots_to_training():
    scene = make_evaluated(
        evaluation={"every_versions": 1, "items_between": 40}, policy={"batch_groups": 8}
    )
    scene.joined("a", slots=20)
    for offer in evals(scene):
        scene.finished(offer)
    for offer in train(scene):
        scene.finished(offer)
    scene.requested(1, groups=8)
    scene.stepped(1)
    scene.version_stored(1)
    scene.serving(1)
    scene.produced(scene.effects)
    seen = []
    while offers := train(scene):
        scene.finished(offers[0], 1)
        if scene.books().queued:
            seen.append(sum(len(offer.items) for offer in evals(scene)))
    assert set(seen) == {2}  # one job: at most a tenth of the slots


def test_an_in_between_evaluation_keeps_few_agents_back():
    scene = make_evaluated(evaluation={"every_versions": 1, "items_between": 10})
    for name in "abc":
        scene.joined(name, slots=8)
    for offer in evals(scene):
        scene.finished(offer)
    stepped(scene, 1)
    for name in "abc":
        scene.serving(1, name)
    scene.produced(scene.effects)
    assert len(evals(scene)) > 1
    assert len({scene.offered_to[offer.attempt] for offer in evals(scene)}) == 1


def test_two_pins_of_one_policy_are_never_held_by_one_agent():
    scene = make_evaluated(evaluation={"every_versions": 1})
    scene.joined("a", slots=64)
    for offer in evals(scene)[:2]:
        scene.finished(offer)
    [left] = evals(scene)
    scene.accepted(left)
    stepped(scene, 1)
    scene.produced(scene.effects)
    assert evals(scene) == [left]


def test_the_end_evaluates_the_head_and_then_the_run_is_completed():
    scene = make_evaluated(policy={"steps": 1})
    scene.joined("a", slots=64)
    for offer in evals(scene):
        scene.finished(offer, rewards=(0.0,) * len(offer.items))
    stepped(scene, 1)
    scene.checkpointed(1, final=True)
    scene.serving(1)
    assert scene.run().state == "running"
    scene.produced(scene.effects)
    offers = evals(scene)
    assert {offer.pinned[SOLVER] for offer in offers} == {1}
    for offer in offers:
        effects = scene.finished(offer, 1)
    assert of_type(effects, RecordEvaluation)[0].evaluation.accuracy == 1.0
    assert [(e.run, e.reason) for e in of_type(effects, RunEnded)] == [(RUN, "completed")]
    assert [status.version for status in scene.policy().evaluations] == [0, 1]


def test_a_stopped_run_is_not_evaluated_any_more():
    scene = make_evaluated()
    scene.joined("a", slots=64)
    scene.commanded("stop")
    assert not scene.live_offers()
    assert scene.books(kind="eval").cancelled == 3
    scene.checkpointed(0, final=True)
    assert scene.run().reason == "stopped"


@pytest.mark.parametrize("attempts", [1, 2])
def test_items_whose_job_keeps_failing_are_left_out_of_the_score(attempts):
    scene = make_evaluated(max_attempts=attempts)
    scene.joined("a", slots=64)
    bad, *rest = evals(scene)
    scene.failed(bad)
    while retries := [offer for offer in evals(scene) if offer.job == bad.job]:
        scene.failed(retries[0])
    for offer in rest:
        scene.finished(offer)
    [status] = scene.policy().evaluations
    assert (status.scored, status.items, status.done, status.accuracy) == (3, 5, True, 1.0)
    assert (status.failed, status.failure) == (2, "engine.generation")


def test_an_evaluation_without_a_single_answer_is_not_done_and_says_why():
    scene = make_evaluated(max_attempts=1)
    scene.joined("a", slots=64)
    effects = []
    for offer in evals(scene):
        effects = scene.failed(offer, "workflow.malformed")
    [record] = of_type(effects, RecordEvaluation)
    [status] = scene.policy().evaluations
    assert record.evaluation == status
    assert (status.done, status.failed, status.failure) == (False, 5, "workflow.malformed")


def test_finished_in_between_evaluations_are_kept_only_for_a_while():
    scene = make_evaluated(evaluation={"every_versions": 1}, policy={"steps": 60})
    scene.checks = False
    scene.joined("a", slots=64)
    for step in range(1, 50):
        for offer in evals(scene):
            scene.finished(offer)
        stepped(scene, step)
        scene.checkpointed(step)
        scene.serving(step)
        scene.produced(scene.effects[-20:])
    rows = [key for table, key in scene.rows if table == "evaluation"]
    assert len(rows) <= 35
    assert scene.policy().evaluations[0].version == 0
