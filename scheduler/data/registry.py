"""How a function becomes a data algorithm, and how a run's name for one is looked up.

    @filter_function("short_prompts")
    def short_prompts(group: GroupView, settings: NoSettings) -> bool: ...

What always holds: a name is one of the shipped ones or ``module:function``, and a module is only
looked at when the scheduler's configuration lists it; settings are checked against the function's
own Struct before a run is taken, and an error names the key; nothing here is global state: an
algorithm is the value that its decorator made.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

import msgspec

from scheduler.data.views import GroupView, ItemView
from transport.errors import ConfigError
from transport.runs import AlgorithmSpec
from transport.runtime.config import convert

Kind = Literal["filter", "replay selector", "curator"]


class AlgorithmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings of data algorithms."""


class NoSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """Of a function that has none."""


S = TypeVar("S", bound=AlgorithmSettings)


@dataclass(frozen=True, slots=True)
class Algorithm(Generic[S]):
    """A registered function and the Struct of its settings. ``drawn`` belongs to replay selectors:
    the values are weights to draw with, not an order."""

    kind: Kind
    name: str
    function: Callable[..., Any]
    settings: type[S]
    drawn: bool = False

    def __call__(self, view: Any, settings: S) -> Any:
        """What the function says."""
        return self.function(view, settings)


@dataclass(frozen=True, slots=True)
class Bound:
    """An algorithm with the settings of one run. ``name`` is what the run calls it."""

    name: str
    algorithm: Algorithm[Any]
    settings: AlgorithmSettings

    def __call__(self, *views: Any) -> Any:
        return self.algorithm.function(*views, self.settings)


def filter_function(
    name: str,
    settings: type[S] = NoSettings,  # type: ignore[assignment]
) -> Callable[[Callable[[GroupView, S], bool]], Algorithm[S]]:
    """Make a filter: a pure function that says whether a group is not to be trained on."""
    return lambda function: Algorithm("filter", name, function, settings)


def replay_selector(
    name: str,
    settings: type[S] = NoSettings,  # type: ignore[assignment]
    *,
    drawn: bool = False,
) -> Callable[[Callable[[GroupView, S], float]], Algorithm[S]]:
    """Make a replay selector: a pure function that gives a group a finite number when it arrives.
    Highest numbers go first and the newest among equals; with ``drawn`` they are weights (at least
    0) with which groups are drawn anew for each batch."""
    return lambda function: Algorithm("replay selector", name, function, settings, drawn)


def curator(
    name: str,
    settings: type[S] = NoSettings,  # type: ignore[assignment]
) -> Callable[[Callable[[ItemView, S], bool]], Algorithm[S]]:
    """Make a curator: a pure function that says whether a training item is skipped this time."""
    return lambda function: Algorithm("curator", name, function, settings)


def load_modules(names: Sequence[str]) -> dict[str, ModuleType]:
    """Import the modules whose functions runs may name.

    Raises:
        ConfigError: one cannot be imported; names it and the remedy.
    """
    found: dict[str, ModuleType] = {}
    for place, name in enumerate(names):
        where = f"scheduler.data_modules[{place}]"
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"{where}: {name!r} is not the name of a Python module")
        try:
            found[name] = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever a module does when it is imported
            raise ConfigError(
                f"{where}: {name!r} cannot be imported: {error!r}; install its package where the"
                " scheduler runs, or add the folder it is in to PYTHONPATH"
            ) from error
    return found


def bind(
    spec: AlgorithmSpec,
    kind: Kind,
    shipped: Mapping[str, Algorithm[Any]],
    modules: Mapping[str, ModuleType] | None,
    where: str,
) -> Bound | None:
    """The algorithm that ``spec`` names, with its settings checked; ``where`` is its key. With
    ``modules`` None, what is in a module is left to be looked up later: None.

    Raises:
        ConfigError: no such algorithm, or wrong settings; names the key and the remedy.
    """
    if ":" in spec.name:
        if modules is None:
            return None
        algorithm = _in_module(spec.name, kind, modules, where)
    else:
        found = shipped.get(spec.name)
        if found is None:
            raise ConfigError(
                f"{where}.name: there is no {kind} {spec.name!r}; shipped are"
                f" {', '.join(sorted(shipped))}, others are written as module:function"
            )
        algorithm = found
    settings = convert(spec.settings, algorithm.settings, f"{where}.settings")
    return Bound(spec.name, algorithm, settings)


def _in_module(
    name: str, kind: Kind, modules: Mapping[str, ModuleType], where: str
) -> Algorithm[Any]:
    module_name, _, attribute = name.partition(":")
    module = modules.get(module_name)
    if module is None:
        listed = ", ".join(sorted(modules)) or "none"
        raise ConfigError(
            f"{where}.name: module {module_name!r} is not one that the scheduler may use; add it to"
            f" [scheduler] data_modules and restart the scheduler (listed: {listed})"
        )
    algorithm = getattr(module, attribute, None)
    if not isinstance(algorithm, Algorithm) or algorithm.kind != kind:
        decorator = {"filter": "filter_function", "replay selector": "replay_selector"}
        what = "is not there" if algorithm is None else "is something else"
        raise ConfigError(
            f"{where}.name: {name!r} must be a {kind}, and {what}; decorate the function with"
            f" @{decorator.get(kind, kind)}"
        )
    if not issubclass(algorithm.settings, AlgorithmSettings):
        raise ConfigError(
            f"{where}.name: the settings of {name!r} must be a subclass of AlgorithmSettings"
            f" ({inspect.getmodule(AlgorithmSettings).__name__})"  # type: ignore[union-attr]
        )
    return algorithm
