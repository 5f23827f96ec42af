"""A run's TOML file as the ``RunSpec`` that is submitted to the scheduler.

Paths in the file are relative to the file; what is submitted holds absolute ones. Everything that
can be checked without starting anything is checked here, with the path of the key.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cloud_trainer.emulated_trainer import EmulatedSettings
from cloud_trainer.numpy_trainer import NumpySettings
from cloud_trainer.presets import resolve_settings
from farflow.idle_settings import idle_faults
from farflow.workflow_settings import check_shipped
from scheduler.data.algorithms import check_algorithms
from transport.errors import ConfigError
from transport.ids import NAME_RULE, is_name
from transport.run_faults import run_faults
from transport.runs import (
    AlgorithmSpec,
    EvaluationSpec,
    PartSpec,
    PolicySpec,
    RunSpec,
    TaskSpec,
    WorkflowSpec,
)
from transport.runtime.config import convert


class RunTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[run]``. Runs of equal ``priority`` get sequences in flight in proportion to their tenants'
    shares (``scheduler.tenant_shares``), and within a ``tenant`` to their own ``share``; a higher
    priority goes first. 0 stands for no limit: ``max_groups`` in all, ``max_sequences_in_flight``
    at once, ``tokens_per_minute``, and ``budget_usd``, which stops the run once agents' time and
    egress have cost so much. ``hedge_share`` of its tokens may be spent on second attempts for the
    last groups of a batch. ``require`` maps labels of agents (``[agent] labels``; ``hardware``,
    ``engine`` and ``agent`` are there by themselves) to the values that are allowed, for example
    ``require = {region = ["eu-west-1"]}`` for data that must stay there. With ``mode`` sync all
    policies and agents meet at a barrier before every step, as in synchronous trainers: groups are
    made by the newest weights alone, nothing is made while a trainer works. It is there to be
    compared with. ``curators`` (``[[run.curators]]``) are asked in order for each training item;
    the first one that objects has it skipped. Log-probabilities that an agent recorded may differ
    from those of a trainer's weights by ``max_drift`` nats a token, in the mean over
    ``drift_tokens`` tokens; more is evidence against it (0: not looked at). Of the share
    ``recheck_rewards`` of training groups another agent finds the rewards again, as far as they are
    functions of item and response (docs/operations.md). Where ``recheck_by`` names agents, only
    they are asked, and what they find is the truth; else two of three agents must agree."""

    name: str
    mode: Literal["async", "sync"] = "async"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 5
    max_groups: Annotated[int, Meta(ge=0, le=10**9)] = 0
    tenant: str = "default"
    share: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    max_sequences_in_flight: Annotated[int, Meta(ge=0, le=10**9)] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0, le=10**9)] = 0
    budget_usd: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    hedge_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.03
    max_drift: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.1
    drift_tokens: Annotated[int, Meta(ge=1, le=10**9)] = 1000
    recheck_rewards: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.02
    recheck_by: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    require: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}
    curators: Annotated[tuple[AlgorithmSpec, ...], Meta(max_length=16)] = ()


class RunTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a file that describe a run."""

    run: RunTable
    policies: dict[str, PolicySpec]
    task: TaskSpec
    workflow: WorkflowSpec
    evaluation: EvaluationSpec | None = None
    evaluations: dict[str, EvaluationSpec] = {}


RUN_TABLES = RunTables.__struct_fields__

_SETTINGS: dict[str, type[msgspec.Struct]] = {
    "numpy": NumpySettings,
    "emulated": EmulatedSettings,
}


def run_spec(data: dict[str, Any], folder: Path) -> RunSpec:
    """The run in the merged tables ``data``; ``folder`` is where relative paths start.

    Raises:
        ConfigError: a table is missing or a value is wrong; names the key and the remedy.
    """
    for name in ("run", "policies", "task", "workflow"):
        if name not in data:
            raise ConfigError(
                f"[{name}]: missing; a run needs [run], [policies.NAME], [task] and [workflow]"
            )
    tables = convert({k: data[k] for k in RUN_TABLES if k in data}, RunTables)
    if not is_name(tables.run.name):
        raise ConfigError(f"run.name: {tables.run.name!r} must be {NAME_RULE}")
    if not tables.policies:
        raise ConfigError("policies: at least one [policies.NAME] is needed")
    policies = {}
    for name, policy in tables.policies.items():
        if not is_name(name):
            raise ConfigError(f"policies.{name}: the name must be {NAME_RULE}")
        model = (folder / policy.model).resolve()
        if not policy.model or not (model / "config.json").is_file():
            raise ConfigError(
                f"policies.{name}.model: {model / 'config.json'} is missing; give a local "
                f"Hugging Face model folder, as hf download ORGANISATION/NAME --local-dir {model}"
                " makes it"
            )
        where = f"policies.{name}.settings"
        if policy.trainer == "torch":
            resolve_settings(policy.settings, where)
        else:
            convert(policy.settings, _SETTINGS[policy.trainer], where)
        policies[name] = msgspec.structs.replace(policy, model=str(model))
    for name in tables.workflow.policies:
        if name not in policies:
            raise ConfigError(
                f"workflow.policies: {name!r} is not among [policies.*]: "
                f"{', '.join(sorted(policies))}"
            )
    for name, policy in policies.items():
        if policy.trained and name not in tables.workflow.policies:
            raise ConfigError(
                f"policies.{name}: is trained, but workflow.policies does not "
                "generate with it; add it there or set trained = false"
            )
        temperature = policy.settings.get("temperature", 1.0)
        if (
            policy.trained
            and policy.trainer == "torch"
            and temperature != tables.workflow.temperature
            and tables.workflow.temperature > 0.0
        ):
            raise ConfigError(
                f"policies.{name}.settings.temperature: is {temperature}, but "
                f"workflow.temperature is {tables.workflow.temperature}; the loss compares "
                "log-probabilities at one temperature, set both alike"
            )
    if not is_name(tables.run.tenant):
        raise ConfigError(f"run.tenant: {tables.run.tenant!r} must be {NAME_RULE}")
    run = RunSpec(
        policies=policies,
        task=tables.task,
        workflow=tables.workflow,
        evaluation=tables.evaluation,
        evaluations=tables.evaluations,
        **msgspec.structs.asdict(tables.run),
    )
    fault = next(run_faults(run), None) or next(idle_faults(run), None)
    if fault is not None:
        raise ConfigError(fault)
    check_algorithms(run)
    check_shipped(run)
    return _with_files(run, folder)


def _with_files(run: RunSpec, folder: Path) -> RunSpec:
    """The run with absolute paths of its tasks' files, all of which are there."""
    evaluation = run.evaluation
    if evaluation is not None:
        evaluation = _evaluation_with_files(evaluation, folder, "evaluation")
    return msgspec.structs.replace(
        run,
        task=_task_with_files(run.task, folder, "task"),
        evaluation=evaluation,
        evaluations={
            name: _evaluation_with_files(spec, folder, f"evaluations.{name}")
            for name, spec in run.evaluations.items()
        },
    )


def _evaluation_with_files(spec: EvaluationSpec, folder: Path, where: str) -> EvaluationSpec:
    if spec.task is None:
        return spec
    task = _task_with_files(spec.task, folder, f"{where}.task")
    return msgspec.structs.replace(spec, task=task)


def _task_with_files(task: TaskSpec, folder: Path, where: str) -> TaskSpec:
    parts = tuple(
        msgspec.structs.replace(part, path=_file(part, folder, f"{where}.parts[{number}]"))
        for number, part in enumerate(task.parts)
    )
    return msgspec.structs.replace(task, path=_file(task, folder, where), parts=parts)


def _file(source: TaskSpec | PartSpec, folder: Path, where: str) -> str:
    """The absolute path of a source's file; empty where it has none."""
    if not source.path:
        return ""
    path = (folder / source.path).resolve()
    if not path.is_file():
        raise ConfigError(f"{where}.path: {path} is not a file")
    return str(path)
