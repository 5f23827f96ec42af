"""A run's data functions between the world and the core: asked before the core hears of a group,
so that what they say is part of the event, is in the event log, and is the same in a replay.

    TrajectoriesStored -> prepare -> the same event with verdicts -> core
    ItemsProduced      -> prepare -> the same event with what curators say -> core
    RunSubmit          -> prepare -> the same event with the fault of its algorithms, if any -> core

What always holds: the core never calls a data function; a function that raises or gives nonsense
costs nothing but its own opinion (the group is kept, the failure is counted and logged); a run
whose functions cannot be found any more goes on without them, and every group counts that; the
daemon and the simulator use this same class.

Functions are called on the deciding loop, for a few small numbers per group: one that takes long
holds up everything, which is why only modules that the scheduler's configuration lists are used.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from scheduler.core.events import Event, FromOperator, FromService, ItemsProduced, Verdict
from scheduler.data.curators import CURATORS
from scheduler.data.filters import FILTERS
from scheduler.data.registry import Algorithm, Bound, Kind, bind, load_modules
from scheduler.data.selectors import SELECTORS
from scheduler.data.views import GroupView, HistoryView, ItemView
from transport.errors import ConfigError
from transport.ids import policy_name
from transport.messages import GroupSummary, Item, RunSubmit, TrajectoriesStored
from transport.runs import AlgorithmSpec, DataSpec, RunSpec

if TYPE_CHECKING:
    from scheduler.core.histories import ItemHistory
    from scheduler.core.machine import OpenGroup, SchedulerCore

MAX_RUNS: Final = 256
"""Runs whose functions are kept at hand."""

_SHIPPED: Final[Mapping[Kind, Mapping[str, Algorithm[Any]]]] = {
    "filter": FILTERS,
    "replay selector": SELECTORS,
    "curator": CURATORS,
}

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _PolicyData:
    """The functions of one policy; ``missing`` are names that could not be found."""

    filters: tuple[Bound, ...] = ()
    select: Bound | None = None
    missing: tuple[str, ...] = ()


def check_algorithms(spec: RunSpec, modules: Mapping[str, ModuleType] | None = None) -> None:
    """Whether a run's data functions are there and their settings right; without ``modules`` those
    in modules are left for the scheduler to check.

    Raises:
        ConfigError: names the key and the remedy.
    """
    for where, kind, named in named_algorithms(spec):
        check_algorithm(where, kind, named, modules)


def named_algorithms(spec: RunSpec) -> Iterator[tuple[str, Kind, AlgorithmSpec]]:
    """What a run names, with the key and the kind of each."""
    for name, policy in spec.policies.items():
        where = f"policies.{name}.data"
        for place, one in enumerate(policy.data.filters):
            yield f"{where}.filters[{place}]", "filter", one
        yield f"{where}.replay.select", "replay selector", policy.data.replay.select
    for place, one in enumerate(spec.curators):
        yield f"run.curators[{place}]", "curator", one


def check_algorithm(
    where: str, kind: Kind, named: AlgorithmSpec, modules: Mapping[str, ModuleType] | None
) -> None:
    """``check_algorithms`` of one of ``named_algorithms``."""
    bind(named, kind, _SHIPPED[kind], modules, where)


def chance(seed: int, index: int) -> float:
    """A number in [0, 1) for an item of a run, the same whenever it is asked for."""
    digest = blake2b(f"curators/{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class DataAlgorithms:
    """The data functions of all runs of one scheduler. ``modules`` are those that runs may name
    functions of.

    Raises:
        ConfigError: a module cannot be imported.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = load_modules(modules)
        self._runs: dict[str, dict[str, _PolicyData]] = {}
        self._curators: dict[str, tuple[tuple[Bound, ...], tuple[str, ...]]] = {}
        self._logged: dict[str, None] = {}

    def prepare(self, core: "SchedulerCore", event: Event) -> Event:
        """``event`` as the core is to hear it."""
        match event:
            case FromService(message=TrajectoriesStored(summaries=summaries)):
                verdicts = [self._verdicts(core, summary) for summary in summaries]
                if any(verdicts):
                    return msgspec.structs.replace(event, verdicts=tuple(verdicts))
            case ItemsProduced(run=run, kind="train", items=items):
                judged = self._of_items(core, run, items)
                if any(verdict != Verdict() for verdict in judged):
                    return msgspec.structs.replace(event, verdicts=judged)
            case FromOperator(message=RunSubmit(run=spec)):
                try:
                    check_algorithms(spec, self._modules)
                except ConfigError as error:
                    return msgspec.structs.replace(event, fault=str(error))
            case _:
                pass
        return event

    def _verdicts(self, core: "SchedulerCore", summary: GroupSummary) -> dict[str, Verdict]:
        """By policy id, where there is something to say."""
        group = core.open_group(summary.job)
        if group is None:
            return {}
        data = self._of_run(group.spec)
        found: dict[str, Verdict] = {}
        for policy in group.policies:
            name = policy_name(policy)
            view = None if name not in data else _view(group, policy, summary)
            if view is None:
                continue
            verdict = self._verdict(data[name], view)
            if verdict != Verdict():
                found[policy] = verdict
        return found

    def _of_items(
        self, core: "SchedulerCore", run: str, items: tuple[Item, ...]
    ) -> tuple[Verdict, ...]:
        spec = core.run_spec(run)
        if spec is None or not spec.curators:
            return ()
        curators, missing = self._curators_of(spec)
        found: list[Verdict] = []
        for item in items:
            own, of_family = core.histories(run, item)
            view = ItemView(
                run=run,
                index=item.index,
                family=item.family,
                prompt=item.prompt,
                chance=chance(spec.seed, item.index),
                own=_history(own),
                of_family=_history(of_family),
            )
            found.append(self._first_objection(curators, view, list(missing)))
        return tuple(found)

    def _curators_of(self, spec: RunSpec) -> tuple[tuple[Bound, ...], tuple[str, ...]]:
        known = self._curators.get(spec.name)
        if known is None:
            try:
                known = (_curators(spec, self._modules), ())
            except ConfigError as error:
                _log.error("data.missing", reason=str(error))
                known = ((), tuple(found.name for found in spec.curators))
            self._curators[spec.name] = known
            _bound(self._curators)
        return known

    def _of_run(self, spec: RunSpec) -> dict[str, _PolicyData]:
        """By policy name, those that have any."""
        known = self._runs.get(spec.name)
        if known is None:
            known = {}
            for name, policy in spec.policies.items():
                data = self._of_policy(policy.data, f"policies.{name}.data")
                if data != _PolicyData():
                    known[name] = data
            self._runs[spec.name] = known
            _bound(self._runs)
        return known

    def _of_policy(self, spec: DataSpec, where: str) -> _PolicyData:
        try:
            return _policy_data(spec, self._modules, where)
        except ConfigError as error:
            # It was taken by a scheduler that had them: its work must not stop now.
            _log.error("data.missing", reason=str(error))
            names = [found.name for found in spec.filters]
            if spec.replay.ratio:
                names.append(spec.replay.select.name)
            return _PolicyData(missing=tuple(names))

    def _verdict(self, data: _PolicyData, view: GroupView) -> Verdict:
        verdict = self._first_objection(data.filters, view, list(data.missing))
        if verdict.filter or data.select is None:
            return verdict
        failed = list(verdict.failed)
        score = 0.0
        try:
            score = float(data.select(view))
            if not math.isfinite(score):
                raise ValueError(f"gave {score}, which is no number")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a user's function
            self._fails(data.select, view, error, failed)
            score = 0.0
        drawn = data.select.algorithm.drawn
        return Verdict(failed=tuple(failed), score=score, drawn=drawn)

    def _first_objection(
        self, functions: Sequence[Bound], view: GroupView | ItemView, failed: list[str]
    ) -> Verdict:
        for function in functions:
            try:
                objects = bool(function(view))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a user's function
                self._fails(function, view, error, failed)
                continue
            if objects:
                return Verdict(filter=function.name, failed=tuple(failed))
        return Verdict(failed=tuple(failed))

    def _fails(
        self,
        function: Bound,
        view: GroupView | ItemView,
        error: BaseException,
        failed: list[str],
    ) -> None:
        failed.append(function.name)
        key = f"{view.run}/{function.name}"
        if key not in self._logged and len(self._logged) < MAX_RUNS:
            # Once: the books count how often.
            self._logged[key] = None
            _log.error(
                "data.failed",
                run=view.run,
                function=function.name,
                index=view.index,
                error=repr(error)[:500],
            )


def _policy_data(
    spec: DataSpec, modules: Mapping[str, ModuleType] | None, where: str
) -> _PolicyData:
    filters = [
        bind(found, "filter", FILTERS, modules, f"{where}.filters[{place}]")
        for place, found in enumerate(spec.filters)
    ]
    select = bind(
        spec.replay.select, "replay selector", SELECTORS, modules, f"{where}.replay.select"
    )
    return _PolicyData(
        filters=tuple(found for found in filters if found is not None),
        select=select if spec.replay.ratio > 0.0 else None,
    )


def _curators(spec: RunSpec, modules: Mapping[str, ModuleType] | None) -> tuple[Bound, ...]:
    found = [
        bind(named, "curator", CURATORS, modules, f"run.curators[{place}]")
        for place, named in enumerate(spec.curators)
    ]
    return tuple(one for one in found if one is not None)


def _bound(kept: dict[str, Any]) -> None:
    while len(kept) > MAX_RUNS:
        del kept[next(iter(kept))]


def _history(row: "ItemHistory | None") -> HistoryView:
    if row is None:
        return HistoryView()
    return HistoryView(
        groups=row.groups, reward=row.reward, means=tuple(row.means), spreads=tuple(row.spreads)
    )


def _view(group: "OpenGroup", policy: str, summary: GroupSummary) -> GroupView | None:
    """None for a policy that drew nothing, and for a summary that does not add up: the core
    refuses it."""
    span = summary.versions.get(policy)
    if span is None or not summary.rewards or len(summary.rewards) != len(summary.lengths):
        return None
    rewards, lengths = summary.rewards, summary.lengths
    members = summary.members.get(policy)
    if members is not None:
        if not members or max(members) >= len(rewards) or min(members) < 0:
            return None
        rewards = tuple(rewards[place] for place in members)
        lengths = tuple(lengths[place] for place in members)
    return GroupView(
        run=group.spec.name,
        policy=policy_name(policy),
        index=group.index,
        family=group.family,
        rewards=rewards,
        lengths=lengths,
        sequences=len(summary.rewards),
        truncated=summary.truncated,
        prompt_tokens=summary.prompt_tokens,
        oldest=span[0],
        newest=span[1],
    )
