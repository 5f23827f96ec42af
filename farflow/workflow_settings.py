"""What a run's workflows are given, checked before anything starts.

An attempt whose settings are wrong fails as ``workflow.malformed`` on every agent, again and again,
so they are checked where a file is read: each evaluation's as well as the run's own.

A Struct of settings says itself what goes together (``__post_init__``), and with a method
``faults(policies, *, training)`` what does not go with a run of these policies: texts that begin
with the key, as in ``edge_agent.workflows.solve_and_verify``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import msgspec

from edge_agent.workflow_registry import SHIPPED, load_workflow
from edge_agent.workflows.program import ProgramSettings
from transport.errors import ConfigError
from transport.runs import RunSpec, WorkflowSpec
from transport.runtime.config import convert

PROGRAM: Final = "program"
"""``program:NAME`` is a table of an agent's, not a module."""

ONE_POLICY: Final = ("single_turn", "multi_turn", "tool_use")
"""Shipped workflows that generate with the run's only policy."""


def check_shipped(run: RunSpec) -> None:
    """Checks every workflow of a run that needs no module of a user's.

    Raises:
        ConfigError: there is none of that name, or its settings are wrong; names the key.
    """
    for where, key, spec in workflows(run):
        if ":" not in spec.reference:
            if spec.reference not in SHIPPED:
                raise ConfigError(
                    f"{key}: {spec.reference!r} is not known; shipped are {', '.join(SHIPPED)},"
                    " others are written as module:function"
                )
            if spec.reference in ONE_POLICY and len(spec.policies) != 1:
                raise ConfigError(
                    f"{key}: {spec.reference!r} generates with one policy, but workflow.policies"
                    f" has {len(spec.policies)}: {', '.join(spec.policies)}; name one there, or"
                    " another workflow"
                )
            _check(spec, where, load_workflow(spec.reference).settings, training=key == _OWN)
        elif is_program(spec.reference):
            _check(spec, where, ProgramSettings, training=key == _OWN)


def check_own(run: RunSpec, reference: str, settings: type[msgspec.Struct] | None) -> None:
    """Checks the settings of a user's workflow wherever the run names it; raises as above."""
    for where, key, spec in workflows(run):
        if spec.reference == reference:
            _check(spec, where, settings, training=key == _OWN)


_OWN: Final = "workflow.reference"


def workflows(run: RunSpec) -> Iterator[tuple[str, str, WorkflowSpec]]:
    """Every workflow of a run: the key of its settings and that of its name. An evaluation that has
    neither of its own is checked with the run's, whose keys are the ones to change."""
    yield "workflow.settings", _OWN, run.workflow
    for name, spec in run.all_evaluations().items():
        if not spec.workflow and spec.settings is None:
            continue
        where = "evaluation" if spec is run.evaluation else f"evaluations.{name}"
        yield f"{where}.settings", f"{where}.workflow", spec.workflow_of(run.workflow)


def is_program(reference: str) -> bool:
    """Whether a workflow is a program of an agent's owner."""
    return reference.partition(":")[0] == PROGRAM


def _check(
    spec: WorkflowSpec, where: str, settings: type[msgspec.Struct] | None, *, training: bool
) -> None:
    if settings is None:
        return
    try:
        made = msgspec.convert(spec.settings, settings)  # as an agent does it
    except msgspec.ValidationError as error:
        convert(spec.settings, settings, where)  # says it better, where it refuses them too
        raise ConfigError(f"{where}: {error}") from error
    faults: Callable[..., Iterable[str]] = getattr(made, "faults", _no_faults)
    for fault in faults(spec.policies, training=training):
        raise ConfigError(f"{where}.{fault}")


def _no_faults(policies: Collection[str], *, training: bool) -> Iterable[str]:
    return ()
