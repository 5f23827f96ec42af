"""A run's TOML file as the ``RunSpec`` that is submitted to the scheduler.

Paths in the file are relative to the file; what is submitted holds absolute ones. Everything that
can be checked without starting anything is checked here, with the path of the key.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cloud_trainer.emulated_trainer import EmulatedSettings
from cloud_trainer.numpy_trainer import NumpySettings
from cloud_trainer.torch_settings import TorchSettings
from transport.errors import ConfigError
from transport.ids import NAME_RULE, is_name
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.runtime.config import convert


class RunTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[run]``. Runs of equal ``priority`` get sequences in flight in proportion to their tenants'
    shares (``scheduler.tenant_shares``), and within a ``tenant`` to their own ``share``; a higher
    priority goes first. 0 stands for no limit: ``max_groups`` in all, ``max_sequences_in_flight``
    at once, ``tokens_per_minute``, and ``budget_usd``, which stops the run once agents' time and
    egress have cost so much. ``hedge_share`` of its tokens may be spent on second attempts for the
    last groups of a batch. ``require`` maps labels of agents (``[agent] labels``; ``hardware``,
    ``engine`` and ``agent`` are there by themselves) to the values that are allowed, for example
    ``require = {region = ["eu-west-1"]}`` for data that must stay there."""

    name: str
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
    require: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}


class RunTables(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a file that describe a run."""

    run: RunTable
    policies: dict[str, PolicySpec]
    task: TaskSpec
    workflow: WorkflowSpec
    evaluation: EvaluationSpec | None = None


RUN_TABLES = RunTables.__struct_fields__

_SETTINGS: dict[str, type[msgspec.Struct]] = {
    "torch": TorchSettings,
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
                "Hugging Face model folder"
            )
        convert(policy.settings, _SETTINGS[policy.trainer], f"policies.{name}.settings")
        policies[name] = msgspec.structs.replace(policy, model=str(model))
    task = tables.task
    if task.source == "jsonl":
        if not task.path:
            raise ConfigError('task.path: missing; source = "jsonl" needs the path of a file')
        path = (folder / task.path).resolve()
        if not path.is_file():
            raise ConfigError(f"task.path: {path} is not a file")
        if task.reward == "verifier":
            raise ConfigError(
                'task.reward: source = "jsonl" brings no verifier; use "exact" or "math-verify"'
            )
        task = msgspec.structs.replace(task, path=str(path))
    elif not task.dataset:
        raise ConfigError(
            'task.dataset: missing; source = "reasoning-gym" needs the name of a data set'
        )
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
        if policy.trained and policy.trainer == "torch":
            if tables.workflow.temperature == 0.0:
                raise ConfigError(
                    "workflow.temperature: is 0 (greedy); learning needs sampled sequences, use 1.0"
                )
            if temperature != tables.workflow.temperature:
                raise ConfigError(
                    f"policies.{name}.settings.temperature: is {temperature}, but "
                    f"workflow.temperature is {tables.workflow.temperature}; the loss compares "
                    "log-probabilities at one temperature, set both alike"
                )
    if not is_name(tables.run.tenant):
        raise ConfigError(f"run.tenant: {tables.run.tenant!r} must be {NAME_RULE}")
    return RunSpec(
        policies=policies,
        task=task,
        workflow=tables.workflow,
        evaluation=tables.evaluation,
        **msgspec.structs.asdict(tables.run),
    )
