"""Runs whose tasks or evaluations make no sense are refused with the key to change."""

import pytest
from core_builders import Scene, make_run

from transport.runs import PartSpec, TaskSpec


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"evaluation": {}, "evaluations": {"held-out": {}}}, "evaluations.held-out: is the name"),
        ({"evaluations": {f"e{n}": {} for n in range(17)}}, "evaluations: 17 of them, at most 16"),
        ({"evaluations": {"A b": {}}}, "evaluations.A b: the name must be"),
        ({"evaluations": {"x": {"samples": 4}}}, "evaluations.x.temperature: is 0 (greedy)"),
        (
            {"evaluations": {"x": {"samples": 4, "temperature": 1.0, "pass_at": (2, 8)}}},
            "evaluations.x.pass_at: pass@8 needs samples = 8 or more, it is 4",
        ),
        ({"evaluation": {"split": "held-out"}}, "evaluation.split: without a task of its own"),
        (
            {"evaluations": {"x": {"at_start": False, "at_end": False}}},
            "evaluations.x: is never due",
        ),
        (
            {"evaluations": {"x": {"task": TaskSpec(source="jsonl", reward="exact")}}},
            "evaluations.x.task.path: missing",
        ),
        (
            {"task": TaskSpec(source="python", function="os:system", reward="exact")},
            "task.function: module 'os' is not one that the scheduler may use; add it to",
        ),
        (
            {
                "evaluations": {
                    "x": {
                        "task": TaskSpec(
                            source="mixture",
                            parts=(PartSpec(source="python", function="m:f", reward="exact"),),
                        )
                    }
                }
            },
            "evaluations.x.task.parts[0].function: module 'm' is not one",
        ),
    ],
)
def test_a_run_whose_evaluations_make_no_sense_is_refused(changes: dict, fault: str):
    reply = Scene().submitted(make_run(**changes))
    assert (reply.ok, reply.code) == (False, "run.invalid")
    assert reply.message.startswith(fault)


def test_a_module_that_is_listed_may_be_used():
    task = TaskSpec(source="python", function="m:f", reward="exact")
    assert Scene(task_modules=("m",)).submitted(make_run(task=task)).ok
