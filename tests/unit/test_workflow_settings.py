"""Settings of workflows, and settings that can do nothing, are refused where a file is read."""

from pathlib import Path
from typing import Any

import pytest

from farflow.own_code import check_own_code
from farflow.run_file import run_spec
from transport.errors import ConfigError

TWO = {"policies": {"solver": {"model": "."}, "verifier": {"model": "."}}}
OWN = """
import msgspec
from edge_agent.workflow import workflow

class Settings(msgspec.Struct):
    depth: int = 1

    def faults(self, policies, *, training):
        if self.depth > 3 and training:
            yield f"depth: {self.depth} is too deep; use 3"

@workflow("flow", settings=Settings)
async def flow(context, item):
    return []
"""


def made(
    tmp_path: Path, workflow: dict[str, Any], *, run: dict[str, Any] | None = None, **more: Any
) -> Any:
    """The run of a file with one policy ``p``, or those in ``more``."""
    (tmp_path / "config.json").write_text("{}")
    policies = more.pop("policies", {"p": {"model": ".", **more.pop("policy", {})}})
    data = {
        "run": {"name": "r", **(run or {})},
        "policies": policies,
        "task": {"source": "reasoning-gym", "dataset": "chain_sum"},
        "workflow": {"policies": list(policies), **workflow},
        **more,
    }
    return run_spec(data, tmp_path)


def of(reference: str, **settings: Any) -> dict[str, Any]:
    return {"reference": reference, "settings": settings}


@pytest.mark.parametrize(
    ("workflow", "more"),
    [
        (of("multi_turn", turns=64, retry="no"), {}),
        (of("tool_use", tools=["python"], turns=2), {}),
        (of("solve_and_verify", yes="right", no="wrong"), TWO),
        # To measure a verifier, it is evaluated as the solver.
        (
            of("solve_and_verify"),
            {**TWO, "evaluations": {"x": {"settings": {"solver": "verifier"}}}},
        ),
        (of("program:mine", policy="p", models={"gpt": "p"}, timeout_s=3), {}),
        (of("not_installed:flow", anything=1), {}),
        ({}, {"evaluations": {"x": {"workflow": "multi_turn", "settings": {"turns": 3}}}}),
        # An evaluation with a workflow of its own does not get the run's settings.
        (of("multi_turn", turns=3), {"evaluations": {"x": {"workflow": "single_turn"}}}),
    ],
)
def test_settings_that_are_right_are_taken(
    tmp_path: Path, workflow: dict[str, Any], more: dict[str, Any]
) -> None:
    assert made(tmp_path, workflow, **more).name == "r"


EVALUATED = {"x": {"settings": {"solver": "nobody"}}}


@pytest.mark.parametrize(
    ("workflow", "more", "said"),
    [
        (of("multi_turn", turns=0), {}, "workflow.settings.turns: Expected `int` >= 1"),
        (of("multi_turn", turns=100_000), {}, "workflow.settings.turns: Expected `int` <= 64"),
        (of("multi_turn", retry=3), {}, "workflow.settings.retry: "),
        (of("tool_use", tools=["perl"]), {}, "workflow.settings.tools[0]: .* calculator, python"),
        (of("single_turn", foo=1), {}, "workflow.settings.foo: unknown key; known are none"),
        (of("singleturn"), {}, "workflow.reference: 'singleturn' is not known; shipped are"),
        (of("single_turn"), TWO, "workflow.reference: 'single_turn' generates with one policy"),
        (of("solve_and_verify", yess="x"), TWO, "workflow.settings.yess: unknown key"),
        (of("solve_and_verify", yes="X", no="x "), TWO, "workflow.settings: no: 'x ' begins as"),
        (of("solve_and_verify", yes="A", no="AB"), TWO, "workflow.settings: no: 'AB' begins as"),
        (
            of("solve_and_verify", solver="a"),
            TWO,
            "settings.solver: 'a' is not in workflow.policies",
        ),
        (
            of("solve_and_verify", verifier="solver"),
            TWO,
            "settings.verifier: 'solver' is the solver",
        ),
        (of("program:mine", policy="q"), {}, "workflow.settings.policy: 'q' is not in"),
        (
            of("program:mine", models={"gpt": "q"}),
            {},
            "workflow.settings.models.gpt: 'q' is not in",
        ),
        # As text no agent would take it.
        (of("program:mine", timeout_s="3s"), {}, "workflow.settings: Expected `float`, got `str`"),
        (
            of("solve_and_verify"),
            {**TWO, "evaluations": EVALUATED},
            "evaluations.x.settings.solver",
        ),
        ({}, {"evaluation": {"settings": {"foo": 1}}}, "evaluation.settings.foo: unknown key"),
        ({}, {"evaluations": {"x": {"workflow": "nosuch"}}}, "evaluations.x.workflow: 'nosuch' is"),
    ],
)
def test_settings_that_every_attempt_would_fail_for_are_refused(
    tmp_path: Path, workflow: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("[0]", r"\[0\]")):
        made(tmp_path, workflow, **more)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": "deep"}, "workflow.settings.depth: Expected `int`"),
        ({"depth": 9}, "workflow.settings.depth: 9 is too deep; use 3"),
    ],
)
def test_settings_of_ones_own_workflow_are_checked_where_it_says_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "own_settings_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    reference = "own_settings_of_test:flow"
    assert check_own_code({}, made(tmp_path, of(reference, depth=3))) == []
    with pytest.raises(ConfigError, match=said):
        check_own_code({}, made(tmp_path, of(reference, **settings)))
    assert check_own_code({}, made(tmp_path, of("not_installed:flow", **settings)))


def test_a_workflow_of_an_evaluation_is_looked_for_like_the_runs(tmp_path: Path) -> None:
    evaluated = made(tmp_path, {}, evaluations={"x": {"workflow": "not_installed:flow"}})
    [said] = check_own_code({}, evaluated)
    assert said.startswith("not_installed:flow (cannot import")


NUMPY = {"trainer": "numpy"}


@pytest.mark.parametrize(
    ("workflow", "more", "said"),
    [
        ({"policies": ["p", "p"]}, {}, "workflow.policies: 'p' is there twice"),
        ({}, {"policy": {"trained": False}}, "policies: none is trained"),
        ({"group_size": 1}, {}, "workflow.group_size: is 1, but policies.p compares"),
        ({"group_size": 1}, {"policy": {"settings": {"preset": "rloo"}}}, "workflow.group_size"),
        ({"group_size": 1}, {"policy": NUMPY}, "workflow.group_size: is 1"),
        ({"temperature": 0.0}, {}, "workflow.temperature: is 0"),
        ({"temperature": 0.0}, {"policy": NUMPY}, "workflow.temperature: is 0"),
        (
            {},
            {"policy": {"max_policy_lag": 0, "data": {"replay": {"ratio": 0.5}}}},
            "policies.p.data.replay.ratio: is 0.5, but with max_policy_lag = 0",
        ),
        (
            {},
            {"policy": {"batch_groups": 1, "data": {"replay": {"ratio": 0.5}}}},
            "policies.p.data.replay.ratio: is 0.5, less than one group",
        ),
        ({}, {"run": {"require": {"region": []}}}, "run.require.region: allows no value"),
    ],
)
def test_settings_that_could_do_nothing_are_refused(
    tmp_path: Path, workflow: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, workflow, **more)


def test_a_critic_needs_no_siblings(tmp_path: Path) -> None:
    policy = {"settings": {"preset": "ppo"}}
    assert made(tmp_path, {"group_size": 1}, policy=policy).workflow.group_size == 1
