"""Several evaluations of a run: each with a task, a workflow and answers of its own."""

import msgspec
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

from scheduler.core.effects import ProduceItems, RecordEvaluation, RunEnded
from scheduler.core.events import ItemsProduced
from transport.messages import ExternalJob, Item, JobSubmit, LeaseOffer
from transport.runs import EvaluationSpec, PartSpec, TaskSpec
from transport.status import EvaluationStatus

MATHS = {"items": 4, "items_per_job": 8, "samples": 4, "temperature": 0.8, "items_between": 2}
MIXTURE = TaskSpec(
    source="mixture",
    parts=(
        PartSpec(source="reasoning-gym", dataset="chain_sum"),
        PartSpec(source="jsonl", path="f/facts.jsonl", reward="exact"),
    ),
)


class MixedScene(Scene):
    """Every third item is a fact."""

    def make_items(self, asked: ProduceItems) -> tuple[Item, ...]:
        return tuple(
            msgspec.structs.replace(item, family="chain_sum" if item.index % 3 else "facts")
            for item in make_items(asked.start, asked.count)
        )


def make_evaluated(evaluations: dict, kind: type[Scene] = Scene, **changes) -> Scene:
    return make_scene(run=make_run(evaluations=evaluations, **changes), kind=kind)


def evals(scene: Scene, name: str = "") -> list[LeaseOffer]:
    tables = scene.core._ctx.tables
    return [
        offer
        for offer in scene.live_offers()
        if offer.kind == "eval"
        and name in ("", tables.evaluations[tables.jobs[offer.job].evaluation].name)
    ]


def train(scene: Scene) -> list[LeaseOffer]:
    return [offer for offer in scene.live_offers() if offer.kind == "train"]


def stepped(scene: Scene, step: int) -> None:
    scene.produced(scene.effects)
    for offer in train(scene):
        scene.finished(offer, scene.agent().versions[SOLVER])
    scene.requested(step)
    scene.stepped(step)
    scene.version_stored(step)
    scene.serving(step)
    scene.produced(scene.effects)


def status_of(scene: Scene, name: str, policy: str = SOLVER) -> list[EvaluationStatus]:
    return [status for status in scene.policy(policy).evaluations if status.name == name]


def test_each_evaluation_asks_for_its_own_items_and_offers_its_own_settings():
    own = TaskSpec(source="jsonl", path="facts.jsonl", reward="exact")
    scene = Scene()
    scene.submitted(
        make_run(
            evaluation={"items": 2},
            evaluations={
                "maths": MATHS,
                "facts": {"items": 3, "task": own, "max_new_tokens": 99},
            },
            workflow={"settings": {"system": "Be brief."}},
        )
    )
    requests = of_type(scene.effects, ProduceItems)
    asked = {e.evaluation: e.count for e in requests if e.kind == "eval"}
    assert asked == {"held-out": 2, "maths": 4, "facts": 3}
    scene.version_stored(0)
    scene.feed(ItemsProduced(RUN, "eval", 0, make_items(0, 3), "facts"))
    scene.joined("a", slots=64)
    [facts] = evals(scene)
    assert (facts.group_size, len(facts.items), facts.max_new_tokens) == (1, 3, 99)
    assert (facts.reward.name, facts.temperature) == ("exact", 0.0)
    assert facts.settings == {"system": "Be brief."}
    scene.feed(ItemsProduced(RUN, "eval", 0, make_items(0, 4), "maths"))
    maths = evals(scene, "maths")
    assert [(len(offer.items), offer.group_size) for offer in maths] == [(2, 4), (2, 4)]
    assert {(o.temperature, o.max_new_tokens, o.reward.name) for o in maths} == {
        (0.8, 16, "reasoning-gym")
    }
    scene.feed(ItemsProduced(RUN, "eval", 0, make_items(0, 2)))
    assert len(evals(scene, "held-out")) == 1


def test_the_answers_of_an_item_are_counted_together():
    scene = make_evaluated({"maths": {**MATHS, "accuracy_threshold": 0.5}})
    scene.joined("a", slots=64)
    first, second = evals(scene)
    scene.finished(first, rewards=(0.0, 0.4, 0.49, -1.0, 0.5, 0.0, 0.0, 0.0))
    [open_] = status_of(scene, "maths")
    assert (open_.scored, open_.done, open_.accuracy) == (2, False, 1 / 8)
    assert open_.pass_at == {"1": 0.125, "2": 0.25, "4": 0.5}
    scene.restart()
    scene.joined("a", slots=64)
    effects = scene.finished(second, rewards=(*(1.0,) * 6, 0.0, 0.0))
    [record] = of_type(effects, RecordEvaluation)
    status = record.evaluation
    assert (status.name, status.samples, status.scored, status.items) == ("maths", 4, 4, 4)
    assert status.accuracy == 7 / 16
    assert status.pass_at["1"] == pytest.approx(7 / 16)
    assert status.pass_at["4"] == 0.75
    assert scene.policy().evaluations == (status,)


def test_an_evaluation_with_one_answer_reports_its_accuracy_alone():
    scene = make_evaluated({"plain": {"items": 2}})
    scene.joined("a", slots=64)
    scene.finished(evals(scene)[0], rewards=(1.0, 0.0))
    [status] = status_of(scene, "plain")
    assert (status.accuracy, status.pass_at, status.samples) == (0.5, {}, 1)


def test_several_are_open_at_once_and_each_has_its_own_clock():
    scene = make_evaluated(
        {
            "often": {"items": 2, "items_between": 2, "every_versions": 1, "at_start": False},
            "rarely": {"items": 2, "items_between": 2, "every_versions": 3, "at_start": False},
        },
        policy={"steps": 9},
    )
    scene.joined("a", slots=64)
    assert not evals(scene)
    for step in range(1, 4):
        stepped(scene, step)
        if step == 2:
            for offer in evals(scene):
                scene.finished(offer, offer.pinned[SOLVER])
    assert [e.version for e in status_of(scene, "often")] == [1, 3] or [
        e.version for e in status_of(scene, "often")
    ] == [1, 2]
    assert [e.version for e in status_of(scene, "rarely")] == [3]


def test_the_number_of_open_in_between_evaluations_is_bounded():
    names = [f"e{n:02}" for n in range(12)]
    scene = make_evaluated(
        {name: {"items": 1, "every_versions": 1, "at_start": False} for name in names},
        policy={"steps": 9},
    )
    scene.joined("a", slots=64)
    stepped(scene, 1)
    assert len(scene.core._ctx.evaluations) == 8
    while offers := evals(scene):
        scene.produced(scene.finished(offers[0], 1))
    assert {e.name for e in scene.policy().evaluations if e.done} == set(names)


def test_in_between_evaluations_of_all_names_keep_few_agents_back():
    between = {"items": 1, "items_between": 12, "items_per_job": 2, "every_versions": 1}
    names = {name: {**between, "at_start": False} for name in ("x", "y", "z")}
    scene = make_evaluated(names)
    for name in "abc":
        scene.joined(name, slots=4)
    stepped(scene, 1)
    for name in "bc":
        scene.serving(1, name)
    assert len(evals(scene)) > 1
    assert len({scene.offered_to[offer.attempt] for offer in evals(scene)}) == 1


def test_the_run_ends_when_every_evaluation_that_is_wanted_at_the_end_is_done():
    scene = make_evaluated(
        {
            "a": {"items": 1, "at_start": False},
            "b": {"items": 1, "at_start": False},
            "c": {"items": 1, "at_start": False, "at_end": False, "every_versions": 7},
        },
        policy={"steps": 1},
    )
    scene.joined("a", slots=64)
    stepped(scene, 1)
    scene.checkpointed(1, final=True)
    scene.produced(scene.effects)
    first, second = evals(scene)
    assert not of_type(scene.finished(first, 1), RunEnded)
    assert scene.run().state == "running"
    scene.restart()
    scene.joined("a", slots=64, versions={SOLVER: 1})
    effects = scene.finished(second, 1)
    assert [(e.run, e.reason) for e in of_type(effects, RunEnded)] == [(RUN, "completed")]
    assert sorted(e.name for e in scene.policy().evaluations) == ["a", "b"]


def test_a_run_without_an_evaluation_at_the_end_completes_at_once():
    scene = make_evaluated({"a": {"items": 1, "at_end": False}}, policy={"steps": 1})
    scene.joined("a", slots=64)
    scene.finished(evals(scene)[0])
    stepped(scene, 1)
    effects = scene.checkpointed(1, final=True)
    assert [(e.run, e.reason) for e in of_type(effects, RunEnded)] == [(RUN, "completed")]


def test_an_evaluation_that_starts_over_forgets_its_counts():
    scene = make_evaluated({"maths": MATHS})
    scene.joined("a", slots=64)
    first, second = evals(scene)
    scene.finished(first)
    scene.version_stored(1)
    scene.declined(second, "version_passed")
    scene.produced(scene.wait(2.5))
    [status] = status_of(scene, "maths")
    assert (status.version, status.scored, status.pass_at) == (1, 0, {})
    scene.serving(1)
    for _ in range(8):
        for offer in [*evals(scene), *train(scene)]:
            scene.finished(offer, 1)
        scene.produced(scene.effects[-20:])
    [status] = status_of(scene, "maths")
    assert (status.scored, status.accuracy, status.done) == (4, 1.0, True)


def test_jobs_of_a_mixture_hold_items_of_one_part_and_have_its_reward():
    scene = make_evaluated({"all": {"items": 9, "items_per_job": 4}}, MixedScene, task=MIXTURE)
    scene.joined("a", slots=64)
    offers = evals(scene)
    families = [{item.family for item in offer.items} for offer in offers]
    assert all(len(one) == 1 for one in families)
    rewards = {(*one, offer.reward.name) for one, offer in zip(families, offers, strict=True)}
    assert rewards == {("chain_sum", "reasoning-gym"), ("facts", "exact")}
    assert sorted(item.index for offer in offers for item in offer.items) == list(range(9))
    assert {(o.items[0].family, o.reward.name) for o in train(scene)} == rewards
    for offer in offers:
        scene.finished(offer)
    assert status_of(scene, "all")[0].done


def test_agents_need_the_rewards_of_all_parts_of_a_mixture():
    scene = make_evaluated({}, MixedScene, task=MIXTURE)
    scene.joined("exact-only", slots=64, rewards=("exact",))
    assert not scene.live_offers()
    assert scene.run().reason == "no agent offers reward reasoning-gym"
    scene.joined("a", slots=64)
    assert train(scene)


def test_a_submitters_job_has_one_reward():
    scene = make_evaluated({}, MixedScene, task=MIXTURE)
    scene.joined("a", slots=64)
    items = tuple(
        Item(index=0, prompt="p", answer="a", family=family) for family in ("facts", "chain_sum")
    )
    jobs = (ExternalJob(id="both", items=items), ExternalJob(id="one", items=items[:1]))
    both, one = scene.asked(JobSubmit(run=RUN, jobs=jobs)).receipts
    assert (both.code, one.state) == ("job.invalid", "queued")
    assert "their families have different rewards" in both.message
    [offer] = [o for o in scene.live_offers() if o.kind == "external"]
    assert offer.reward.name == "exact"


def test_a_workflow_of_its_own_goes_to_agents_that_have_it_and_gets_no_settings_of_the_run():
    scene = make_evaluated(
        {"tools": {"items": 2, "workflow": "my.module:tools", "max_new_tokens": 40}},
        workflow={"settings": {"system": "Be brief."}},
    )
    scene.joined("plain", slots=64)
    assert not evals(scene)
    assert train(scene)
    assert scene.run().reason == "evaluation tools: no agent offers workflow my.module:tools"
    scene.joined("able", slots=8, workflows={"single_turn": "f1", "my.module:tools": "t1"})
    [offer] = evals(scene)
    assert scene.offered_to[offer.attempt] == "able"
    assert (offer.workflow, offer.settings) == ("my.module:tools", {})
    scene.finished(offer, lengths=(40 * 64, 1))  # several turns of 40 tokens
    assert status_of(scene, "tools")[0].done


def test_agents_with_other_code_of_an_evaluations_workflow_are_not_mixed_until_none_is_left():
    scene = make_evaluated(
        {"tools": {"items": 4, "items_per_job": 1, "workflow": "m:f"}}, max_attempts=9
    )
    scene.joined("a", slots=1, workflows={"m:f": "one"})
    held = evals(scene)
    assert len(held) < 4
    scene.joined("b", slots=8, workflows={"m:f": "two"})
    assert evals(scene) == held
    scene.joined("a", 2, slots=1, workflows={"single_turn": "f1"})
    scene.beats()
    scene.wait(2.5)
    assert {scene.offered_to[offer.attempt] for offer in evals(scene)} == {"b"}
    assert scene.counter("placement.code_changed") == 1


def test_a_longer_answer_than_the_evaluation_allows_is_no_result():
    scene = make_evaluated({"short": {"items": 1, "max_new_tokens": 4}})
    scene.joined("a", slots=64)
    scene.finished(evals(scene)[0], lengths=(5,))
    assert scene.counter("results.invalid") == 1
    assert not status_of(scene, "short")[0].done


def test_rows_of_before_load_with_the_name_that_they_had():
    scene = make_scene(run=make_run(evaluation={"items": 4}))
    scene.joined("a", slots=64)
    scene.finished(evals(scene)[0], rewards=(1.0, 1.0, 1.0, 0.0))
    for table, key, gone in (
        ("evaluation", "r/v-000001", ("name", "samples", "counts")),
        ("policy", SOLVER, ("evaluated_steps",)),
    ):
        row = msgspec.msgpack.decode(scene.rows[table, key])
        scene.rows[table, key] = msgspec.msgpack.encode(
            {field: value for field, value in row.items() if field not in gone}
        )
    scene.restart()
    [status] = scene.policy().evaluations
    assert (status.name, status.accuracy, status.pass_at) == ("held-out", 0.75, {})
    assert (status.scored, status.done) == (4, True)


def test_answers_of_reasoning_gym_may_be_compared_as_well():
    task = TaskSpec(source="reasoning-gym", dataset="chain_sum", reward="exact")
    scene = make_scene(run=make_run(task=task))
    scene.joined("a", slots=64)
    assert {offer.reward.name for offer in train(scene)} == {"exact"}


def test_statuses_of_before_are_read_with_defaults():
    old = b'{"policy":"r/p","version":1,"step":1,"items":4,"scored":4,"accuracy":0.5,"done":true}'
    status = msgspec.json.decode(old, type=EvaluationStatus)
    assert (status.name, status.samples, status.pass_at) == ("held-out", 1, {})
    assert EvaluationSpec() == msgspec.json.decode(b"{}", type=EvaluationSpec)


def test_what_an_evaluation_waits_for_is_told_with_its_name():
    from transport.messages import ExplainRequest

    scene = make_evaluated({"maths": MATHS})
    found = scene.asked(ExplainRequest(subject="r/v-000001"))
    assert found.reasons[0] == "maths (start): 0 of 4 items scored, 2 jobs open"
    assert messages(scene.effects, LeaseOffer) == []
