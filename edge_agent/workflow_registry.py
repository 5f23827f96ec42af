"""Which workflows there are: shipped ones by name, anybody's as ``module:function``.

What always holds: a fingerprint is the SHA-256 of the source of the module that defines the
workflow, so two agents with the same one run the same code of it (what it imports is not in it);
loading fails with a ``ConfigError`` that names the reference and the remedy, whatever the module
does.
"""

import hashlib
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from edge_agent.rollouts import Rollout
from transport.errors import ConfigError
from transport.messages import Item
from transport.runs import MAX_ROLLOUTS

if TYPE_CHECKING:
    from edge_agent.workflow import WorkflowContext

SHIPPED: Final = ("single_turn", "multi_turn", "solve_and_verify", "tool_use")
_SHIPPED_PACKAGE: Final = "edge_agent.workflows"

WorkflowFunction = Callable[["WorkflowContext", Item], Awaitable[Sequence[Rollout]]]


class Workflow(NamedTuple):
    """A workflow as it is advertised and run: ``rollouts`` is how many each sibling returns,
    ``settings`` what ``[workflow.settings]`` must be (None: nobody checks them beforehand)."""

    reference: str
    fingerprint: str
    function: WorkflowFunction
    rollouts: int = 1
    settings: type[msgspec.Struct] | None = None


class NoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a workflow that has none."""


_registry: dict[tuple[str, str], WorkflowFunction] = {}
_rollouts: dict[WorkflowFunction, int] = {}
_settings: dict[WorkflowFunction, type[msgspec.Struct] | None] = {}


def workflow(
    name: str, *, rollouts: int = 1, settings: type[msgspec.Struct] | None = None
) -> Callable[[WorkflowFunction], WorkflowFunction]:
    """Register a function as the workflow ``name`` of its module. With ``rollouts`` above 1 each
    sibling returns so many (one per role, say), role by role: first those of all siblings in the
    first role, in order, then those in the second. An evaluation wants one per sibling all the
    same, the one that is scored. With ``settings`` a run's file is checked against that Struct
    before anything starts (``farflow.workflow_settings``).

    Raises:
        ValueError: more than ``MAX_ROLLOUTS`` rollouts, or none.
    """
    if not 1 <= rollouts <= MAX_ROLLOUTS:
        raise ValueError(f"workflow {name!r}: rollouts is {rollouts}, must be 1 to {MAX_ROLLOUTS}")

    def register(function: WorkflowFunction) -> WorkflowFunction:
        _registry[function.__module__, name] = function
        _rollouts[function] = rollouts
        _settings[function] = settings
        return function

    return register


def load_workflow(reference: str) -> Workflow:
    """A shipped workflow by name, or ``module:function`` (a registered name works as well).

    Raises:
        ConfigError: there is none; names the reference and what there is.
    """
    module_name, separator, name = reference.partition(":")
    if not separator:
        if reference not in SHIPPED:
            raise ConfigError(
                f"workflow {reference!r} is not known; shipped are {', '.join(SHIPPED)}, "
                "others are written as module:function"
            )
        module_name, name = f"{_SHIPPED_PACKAGE}.{reference}", reference
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"workflow {reference!r}: is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, (ImportError, SyntaxError)) else repr(error)
        raise ConfigError(
            f"workflow {reference!r}: {said}; install its package into the agent's environment "
            "(`pip install PACKAGE`), or add the folder it is in to PYTHONPATH"
        ) from error
    function = _registry.get((module.__name__, name)) or getattr(module, name, None)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow {reference!r}: {module_name} has no async function {name!r}")
    return Workflow(
        reference,
        _fingerprint(module, reference),
        function,
        _rollouts.get(function, 1),
        _settings.get(function),
    )


def _fingerprint(module: ModuleType, reference: str) -> str:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(f"workflow {reference!r}: its source cannot be read: {error}") from error
    return hashlib.sha256(source.encode()).hexdigest()
