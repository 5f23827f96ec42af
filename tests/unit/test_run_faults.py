"""Runs whose tasks or evaluations make no sense are refused with the key to change."""

from typing import Any

import pytest
from core_builders import Scene, make_run

from transport.runs import PartSpec, TaskSpec

PART = PartSpec(source="reasoning-gym", dataset="chain_sum")


def gym(**changes: Any) -> TaskSpec:
    return TaskSpec(source="reasoning-gym", dataset="chain_sum", **changes)


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
        (
            {"policy": {"chat_template_kwargs": {"tools": []}}},
            "policies.solver.chat_template_kwargs.tools: is given by the agent itself",
        ),
        (
            {"policy": {"chat_template_kwargs": {"a b": 1}}},
            "policies.solver.chat_template_kwargs.a b: is no name",
        ),
        (
            {"policy": {"chat_template_kwargs": {"deep": [[[[[1]]]]]}}},
            "policies.solver.chat_template_kwargs.deep: must be a truth value",
        ),
        (
            {"policy": {"chat_template_kwargs": {"nan": float("nan")}}},
            "policies.solver.chat_template_kwargs.nan: must be a truth value",
        ),
        (
            {"policy": {"chat_template_kwargs": {"text": "x" * 2000}}},
            "policies.solver.chat_template_kwargs: takes 2009 bytes, at most 1024",
        ),
        (
            {"task": gym(reward="code")},
            'task.reward: source = "reasoning-gym" has no tests for "code"',
        ),
        (
            {"task": gym(reward="math-verify", answer="boxed")},
            'task.answer: reward = "math-verify" finds the answer itself',
        ),
        (
            {"task": gym(instruction="ä" * 2049)},
            "task.instruction: 4098 bytes, at most 4096",
        ),
        (
            {"task": TaskSpec(source="mixture", parts=(PART,), answer="tags")},
            "task.answer: belongs to one of the parts",
        ),
        (
            {"task": TaskSpec(source="mixture", parts=(PART,), instruction="Be brief.")},
            "task.instruction: belongs to one of the parts",
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
