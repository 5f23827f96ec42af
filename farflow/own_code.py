"""What a file names of users' own code, as far as it can be imported where one checks the file.

What always holds: only what the file names is imported, and as a daemon would (packages and
``PYTHONPATH``); what cannot be imported here is said and refused by nobody, because it need not be
installed on the machine where one checks; what can be imported is checked as what ships is.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from edge_agent.workflow_registry import load_workflow
from farflow.workflow_settings import check_own, is_program, workflows
from scheduler.data.algorithms import check_algorithm, named_algorithms
from transport.errors import ConfigError
from transport.run_faults import module_faults, task_functions
from transport.runs import RunSpec, SourceFields


def check_own_code(data: Mapping[str, Any], spec: RunSpec | None) -> list[str]:
    """Checks the filters, replay selectors, curators, task functions and workflows that are not
    ours in the merged tables ``data``, whose run is ``spec``. Tables have passed their own checks.
    Returns a text for each that cannot be imported here: ``my_data:nope (cannot import: ...)``.

    Raises:
        ConfigError: one is there and is wrong, its settings are, or the file's own scheduler does
            not list its module; names the key and the remedy.
    """
    found = _Imported()
    table = data.get("scheduler", {})
    for key in ("data_modules", "task_modules"):
        for name in table.get(key, ()):
            found.module(name)
    if spec is not None:
        # A run's file alone does not say what its scheduler lists.
        own = "scheduler" in data or "local" in data
        _check_algorithms(spec, found, table.get("data_modules", ()) if own else None)
        _check_tasks(spec, found, table.get("task_modules", ()) if own else None)
    for where, reference in _workflows(data, spec):
        if found.named(reference) is not None:
            with _key(where), contextlib.redirect_stdout(sys.stderr):
                loaded = load_workflow(reference)
            if spec is not None:
                check_own(spec, reference, loaded.settings)
    return [f"{name} (cannot import: {why})" for name, why in found.missing.items()]


class _Imported:
    """Modules that were tried, and the names that stay unchecked with the reason."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType | str] = {}
        self.missing: dict[str, str] = {}

    def named(self, reference: str) -> ModuleType | None:
        """The module of ``module:function``."""
        return self.module(reference.partition(":")[0], reference)

    def module(self, name: str, reference: str = "") -> ModuleType | None:
        """The module ``name``; without it None, and ``reference`` is noted."""
        if name not in self._modules:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # ours may be read by a program
                    self._modules[name] = importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a user's module
                said = str(error) if isinstance(error, ImportError | SyntaxError) else repr(error)
                self._modules[name] = said
        found = self._modules[name]
        if isinstance(found, str):
            self.missing[reference or name] = found
            return None
        return found


def _check_algorithms(spec: RunSpec, found: _Imported, listed: tuple[str, ...] | None) -> None:
    for where, kind, named in named_algorithms(spec):
        if ":" not in named.name:
            continue
        name = named.name.partition(":")[0]
        if listed is not None and name not in listed:  # raises, and says what is listed
            check_algorithm(where, kind, named, {one: ModuleType(one) for one in listed})
        module = found.named(named.name)
        if module is not None:
            check_algorithm(where, kind, named, {name: module})


def _check_tasks(spec: RunSpec, found: _Imported, listed: tuple[str, ...] | None) -> None:
    if listed is not None:
        for fault in module_faults(spec, listed):
            raise ConfigError(fault)
    for where, source in task_functions(spec):
        module = found.named(source.function)
        if module is not None:
            _check_task(where, source, module)


def _check_task(where: str, source: SourceFields, module: ModuleType) -> None:
    name = source.function.partition(":")[2]
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}.function: module {module.__name__!r} has no function {name!r}; write it as"
            " def NAME(seed, **settings) that yields items"
        )
    try:
        inspect.signature(function).bind(0, **source.settings)
    except TypeError as error:
        raise ConfigError(
            f"{where}.settings: {source.function} does not take them: {error}; they are its"
            " arguments after seed"
        ) from error
    except ValueError:  # compiled, and says nothing of its arguments
        return


def _workflows(data: Mapping[str, Any], spec: RunSpec | None) -> Iterator[tuple[str, str]]:
    """Users' own workflows with the key of each. One without a colon is a shipped one or a fault,
    which needs no import."""
    tables = {"agent": data.get("agent", {})}
    agents = data.get("local", {}).get("agents", {})
    tables.update((f"local.agents.{name}", agent) for name, agent in agents.items())
    for where, table in tables.items():
        for place, reference in enumerate(table.get("workflows", ())):
            key = f"{where}.workflows[{place}]"
            if ":" in reference:
                yield key, reference
            else:
                with _key(key):
                    load_workflow(reference)
    named: set[str] = set()
    for _, key, one in () if spec is None else workflows(spec):
        # An evaluation of the run's workflow with other settings names it no second time.
        if ":" in one.reference and not is_program(one.reference) and one.reference not in named:
            named.add(one.reference)
            yield key, one.reference


@contextlib.contextmanager
def _key(where: str) -> Iterator[None]:
    """Faults name the key ``where``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
