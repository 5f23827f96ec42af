"""Runs: submission, commands, admission of work, the end."""

import msgspec
import pytest
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    grants,
    make_items,
    make_run,
    make_scene,
    messages,
    of_type,
)

from scheduler.core.effects import ProduceItems, RunEnded, StartTaskSource, StopTaskSource
from scheduler.core.events import ItemsProduced, TaskSourceFailed
from transport.messages import (
    HostedPolicies,
    LeaseOffer,
    LeaseRevoke,
    Ping,
    RunState,
    RunSubmit,
    StatusRequest,
    Welcome,
)
from transport.runs import TaskSpec


def step_through(scene: Scene, steps: int, *, first: int = 1, groups: int = 2) -> None:
    """Generate, train, publish and checkpoint, step by step."""
    for step in range(first, first + steps):
        scene.produced(scene.effects)
        scene.requested(step, groups=groups)
        for offer in scene.live_offers():
            scene.finished(offer, step - 1)
        scene.stepped(step)
        scene.version_stored(step)
        scene.checkpointed(step)
        scene.serving(step)


def test_submitting_starts_the_task_source_and_tells_agents_what_to_host():
    scene = Scene()
    scene.joined("a")
    assert scene.submitted().ok
    assert of_type(scene.effects, StartTaskSource) == [StartTaskSource(make_run())]
    assert messages(scene.effects, HostedPolicies, "a")[-1].policies == (SOLVER,)
    assert scene.run().state == "running"


def test_submitting_the_same_run_twice_is_harmless():
    scene = make_scene()
    before = len(of_type(scene.effects, StartTaskSource))
    assert scene.submitted().ok
    assert len(of_type(scene.effects, StartTaskSource)) == before


def test_another_run_under_a_live_name_is_refused():
    reply = make_scene().submitted(make_run(seed=9))
    assert (reply.ok, reply.code) == (False, "run.exists")


def test_the_name_of_a_finished_run_is_taken():
    scene = make_scene()
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    reply = scene.submitted(make_run(seed=9))
    assert (reply.ok, reply.code) == (False, "run.finished")
    assert "use another" in reply.message


def test_submitting_a_finished_run_again_is_harmless_and_says_so():
    scene = make_scene()
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    reply = scene.submitted()
    assert reply.ok
    assert "has finished before (stopped)" in reply.message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": "No Good"}, "name"),
        ({"policies": ("Bad Name",)}, "policies"),
        ({"policy": {"trained": False}}, "policies"),
        ({"task": TaskSpec(source="jsonl", path="x")}, "task.reward"),
    ],
)
def test_a_run_that_makes_no_sense_names_the_key_to_change(changes, key):
    reply = Scene().submitted(make_run(**{"name": "r", **changes}))
    assert (reply.ok, reply.code) == (False, "run.invalid")
    assert reply.message.startswith(key)


def test_a_workflow_and_its_policies_must_fit():
    spec = make_run()
    other = msgspec.structs.replace(spec.workflow, policies=("judge",))
    reply = Scene().submitted(msgspec.structs.replace(spec, workflow=other))
    assert reply.message.startswith("workflow.policies: judge")
    both = make_run(policies=("judge", "solver"))
    one = msgspec.structs.replace(both.workflow, policies=("solver",))
    reply = Scene().submitted(msgspec.structs.replace(both, workflow=one))
    assert reply.message.startswith("policies.judge")


def test_no_more_groups_are_made_than_the_lag_bound_allows():
    scene = make_scene()
    assert scene.books().submitted == 4  # (1 + 1) * 2


def test_a_running_batch_counts_until_its_version_is_out():
    scene = make_scene()
    scene.joined("a", slots=8)
    for offer in scene.live_offers():
        scene.finished(offer)
    scene.requested(1)
    scene.produced(scene.effects)
    assert scene.books().submitted == 4
    scene.stepped(1)
    scene.produced(scene.effects)
    assert scene.books().submitted == 6


def test_no_groups_are_made_that_no_step_is_left_for():
    scene = make_scene(run=make_run(policy={"steps": 3, "max_policy_lag": 9}))
    assert scene.books().submitted == 6
    scene.joined("a", slots=16)
    step_through(scene, 3)
    assert (scene.books().submitted, scene.books().trained) == (6, 6)


def test_items_in_parts_and_items_twice_make_each_job_once():
    scene = Scene()
    scene.submitted()
    [asked] = of_type(scene.effects, ProduceItems)
    scene.feed(ItemsProduced(RUN, "train", 0, make_items(0, 3)))
    scene.feed(ItemsProduced(RUN, "train", 0, make_items(0, 3)))
    scene.feed(ItemsProduced(RUN, "train", 5, make_items(5, 1)))
    scene.feed(ItemsProduced(RUN, "train", 2, make_items(2, 3)))
    assert asked.count == 6
    assert scene.books().submitted == 4
    jobs = sorted(key for table, key in scene.rows if table == "job")
    assert jobs == [f"r/t-{n:06d}" for n in range(4)]


def test_items_that_do_not_come_are_asked_for_again():
    scene = Scene()
    scene.submitted()
    effects = scene.wait(31.0)
    [again] = of_type(effects, ProduceItems)
    assert (again.kind, again.start, again.count) == ("train", 0, 6)


def test_items_for_nobody_are_ignored():
    scene = make_scene()
    scene.feed(ItemsProduced("other", "train", 0, make_items(0, 3)))
    scene.feed(ItemsProduced("other", "eval", 0, make_items(0, 3)))
    assert scene.books().submitted == 4


def test_a_task_source_without_items_fails_the_run():
    scene = Scene()
    scene.submitted()
    effects = scene.feed(ItemsProduced(RUN, "train", 0, ()))
    [ended] = of_type(effects, RunEnded)
    assert ended.reason == "failed: the task source has no training item 0"


def test_a_broken_task_source_fails_the_run_after_the_trainer_has_exported():
    scene = make_scene()
    effects = scene.feed(TaskSourceFailed(RUN, "task", "line 3: no answer"))
    assert [m.state for m in messages(effects, RunState, "t")] == ["stopping"]
    [ended] = of_type(scene.checkpointed(0, final=True), RunEnded)
    assert ended.reason == "failed: task: line 3: no answer"
    assert scene.run().reason == ended.reason


def test_a_paused_run_places_and_grants_nothing_and_goes_on_when_resumed():
    scene = make_scene()
    effects_before = len(scene.effects)
    assert scene.commanded("pause").ok
    assert [m.state for m in messages(scene.effects[effects_before:], RunState, "t")] == ["paused"]
    scene.joined("a", slots=8)
    assert not scene.live_offers()
    scene.commanded("resume")
    assert len(scene.live_offers()) == 4
    scene.commanded("pause")
    for offer in scene.live_offers():
        scene.finished(offer)
    assert not grants(scene.requested(1))
    start = len(scene.effects)
    scene.commanded("resume")
    assert len(grants(scene.effects[start:])) == 1


def test_a_trainer_that_joins_a_paused_run_hears_so():
    scene = make_scene()
    scene.commanded("pause")
    effects = scene.trainer_joined(incarnation=2)
    assert messages(effects, RunState, "t")[0].state == "paused"


def test_stopping_cancels_work_and_ends_when_the_trainer_has_exported():
    scene = make_scene()
    scene.joined("a")
    effects_before = len(scene.effects)
    assert scene.commanded("stop").ok
    effects = scene.effects[effects_before:]
    assert [m.reason for m in messages(effects, LeaseRevoke, "a")] == ["job_over"] * 3
    assert scene.books().cancelled == 4
    assert scene.run().state == "stopping"
    [welcome] = messages(scene.trainer_joined(incarnation=2), Welcome)
    assert welcome.stopping
    effects = scene.checkpointed(0, final=True)
    assert [(e.run, e.reason) for e in of_type(effects, RunEnded)] == [(RUN, "stopped")]
    assert of_type(effects, StopTaskSource) == [StopTaskSource(RUN)]
    assert [m.state for m in messages(effects, RunState, "t")] == ["finished"]


def test_agents_go_on_hosting_the_last_run_until_there_is_another():
    scene = make_scene()
    scene.joined("a")
    scene.commanded("stop")
    effects = scene.checkpointed(0, final=True)
    assert messages(effects, HostedPolicies, "a")[0].policies == (SOLVER,)
    start = len(scene.effects)
    scene.submitted(make_run("s"))
    assert messages(scene.effects[start:], HostedPolicies, "a")[0].policies == ("s/solver",)


def test_stopping_a_run_whose_trainer_never_came_ends_it_at_once():
    scene = Scene()
    scene.submitted()
    scene.commanded("stop")
    assert scene.run().state == "finished"


def test_stopping_does_not_wait_for_ever_for_a_dead_trainer():
    scene = make_scene()
    scene.commanded("stop")
    scene.wait(scene.settings.work_grace_s + 1)
    assert (scene.run().state, scene.run().reason) == ("finished", "stopped")


@pytest.mark.parametrize(
    ("run", "command", "code"),
    [("other", "pause", "run.unknown"), (RUN, "pause", "run.stopping")],
)
def test_commands_that_make_no_sense_are_refused(run, command, code):
    scene = make_scene()
    scene.commanded("stop")
    reply = scene.commanded(command, run)
    assert (reply.ok, reply.code) == (False, code)
    assert reply.message


def test_a_run_completes_when_its_trainer_is_done_and_leaves_nothing_behind():
    scene = make_scene()
    scene.joined("a", slots=8)
    step_through(scene, 5)
    effects = scene.checkpointed(5, final=True)
    assert [(e.run, e.reason) for e in of_type(effects, RunEnded)] == [(RUN, "completed")]
    tables = {table for table, _ in scene.rows}
    assert "job" not in tables
    assert [key for table, key in scene.rows if table == "version"] == ["r/solver@5"]
    row = scene.books()
    assert (row.trained, row.submitted, row.balance) == (10, 10, 0)
    assert scene.policy().trainer == "done"
    scene.gone(*[key for table, key in scene.rows if table == "release"])
    assert "release" not in {table for table, _ in scene.rows}


def test_a_budget_of_groups_ends_the_run_when_no_batch_can_follow():
    scene = make_scene(run=make_run(max_groups=5))
    scene.joined("a", slots=16)
    step_through(scene, 2)
    assert scene.books().submitted == 5
    for offer in scene.live_offers():
        scene.finished(offer, 2)
    effects = scene.requested(3)
    assert [m.state for m in messages(effects, RunState, "t")] == ["stopping"]
    assert of_type(scene.checkpointed(2, final=True), RunEnded)[0].reason == "stopped"


def test_two_runs_share_the_agents():
    scene = make_scene()
    other = make_run("s")
    scene.submitted(other)
    scene.version_stored(0, policy="s/solver")
    scene.trainer_joined("u", policy="s/solver")
    scene.produced(scene.effects)
    effects = scene.joined("a", slots=6, versions={SOLVER: 0, "s/solver": 0})
    placed = [offer.job for offer in messages(effects, LeaseOffer)]
    assert placed == ["r/t-000000", "s/t-000000", "r/t-000001", "s/t-000001"]


def test_a_trainer_key_may_serve_one_run_after_another_but_not_two_at_once():
    scene = make_scene()
    scene.submitted(make_run("s"))
    scene.trainer_joined("t", policy="s/solver")
    assert scene.counter("refused.trainer.other_policy") == 1
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    assert messages(scene.trainer_joined("t", policy="s/solver"), Welcome)


def test_the_status_is_given_to_who_asks():
    scene = make_scene()
    reply = scene.asked(StatusRequest())
    assert reply.status == scene.core.status(scene.now)
    assert scene.asked(Ping(sequence=1, sent_s=0.0)).code == "command.unknown"
    assert scene.asked(RunSubmit(run=make_run())).ok
