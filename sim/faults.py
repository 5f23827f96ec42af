"""What goes wrong and when: agents that crash, are preempted or slow, wrong clocks, dead trainers,
hosts that are cut off.

Who is cut off loses the messages that are under way, and its transfers wait (a link profile's own
outages lose nothing, see ``sim.links``).

What always holds: the plan is a function of the seed alone, drawn per agent and kind, so that it is
the same whatever the scheduler decides, and one kind does not change another's times; spans of one
kind that overlap on an agent are one.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from transport.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Speed = Annotated[float, Meta(ge=0.001, le=1000.0)]
Skew = Annotated[float, Meta(ge=-1e9, le=1e9)]


class Fault(msgspec.Struct, frozen=True, order=True):
    """Something that happens to a host. ``amount`` is the notice's seconds, the share of its usual
    speed (``slow``), or the seconds that a clock is ahead (``skew``); a ``wiped`` crash takes the
    disk with it."""

    at_s: float
    host: str
    what: Literal["crash", "return", "cut", "restore", "notice", "slow", "skew"]
    amount: float = 0.0
    wiped: bool = False


class Partition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All agents of a site, or one agent, are cut off for a while."""

    where: str
    start_s: Seconds
    duration_s: Seconds


class PlannedCrash(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="what",
    tag="crash",
):
    """Agents die at once, and come back after ``down_s`` (0: never)."""

    where: str
    at_s: Seconds
    down_s: Seconds = 30.0
    wiped: bool = False


class PlannedPreemption(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="what",
    tag="preempt",
):
    """Agents are told at ``at_s`` that their machines go in ``notice_s``; another one, with an
    empty disk if ``wiped``, takes over ``down_s`` later (0: never)."""

    where: str
    at_s: Seconds
    notice_s: Seconds = 30.0
    down_s: Seconds = 120.0
    wiped: bool = True


class PlannedSlowness(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="what",
    tag="slow",
):
    """Agents draw ``speed`` times as many tokens per second as usual for a while."""

    where: str
    at_s: Seconds
    duration_s: Seconds
    speed: Speed


class PlannedSkew(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="what",
    tag="skew",
):
    """From ``at_s`` on the agents' wall clocks are ``ahead_s`` ahead (below 0: behind)."""

    where: str
    ahead_s: Skew
    at_s: Seconds = 0.0


Planned = PlannedCrash | PlannedPreemption | PlannedSlowness | PlannedSkew


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times between random faults of an agent are exponential, with these means (0: none).

    ``agent_mtbf_s``: crashes, each down for ``agent_down_s`` before it is started again; a share
    ``agent_wiped_share`` of them takes the disk (spool and weights). ``preempt_mtbf_s``: its
    machine is taken away with ``preempt_notice_s`` of notice and replaced after ``preempt_down_s``;
    ``preempt_wiped_share`` of the replacements have another disk. Every start takes
    ``agent_start_s``. ``slow_mtbf_s``: it draws ``slow_speed`` times as many tokens per second, for
    ``slow_s`` in the mean, exponential. ``link_mtbf_s``: it is cut off, ``link_down_s`` in the
    mean, exponential. ``clock_skew_s`` is the most that an agent's wall clock is ahead or behind,
    uniform. ``planned`` faults (``what`` = ``crash``, ``preempt``, ``slow`` or ``skew``) and
    ``partitions`` happen to an agent or all agents of a site.

    A trainer named in ``dead_trainers`` (a policy's name) dies after ``trainer_dies_s`` and comes
    back after ``trainer_down_s`` (0: never)."""

    agent_mtbf_s: Seconds = 0.0
    agent_down_s: Seconds = 30.0
    agent_start_s: Seconds = 0.0
    agent_wiped_share: Share = 0.0
    preempt_mtbf_s: Seconds = 0.0
    preempt_notice_s: Seconds = 30.0
    preempt_down_s: Seconds = 120.0
    preempt_wiped_share: Share = 1.0
    slow_mtbf_s: Seconds = 0.0
    slow_s: Seconds = 60.0
    slow_speed: Speed = 0.5
    clock_skew_s: Seconds = 0.0
    dead_trainers: tuple[str, ...] = ()
    trainer_dies_s: Seconds = 300.0
    trainer_down_s: Seconds = 0.0
    link_mtbf_s: Seconds = 0.0
    link_down_s: Seconds = 20.0
    partitions: tuple[Partition, ...] = ()
    planned: tuple[Planned, ...] = ()


def all_faults(
    spec: FaultSpec,
    agents: Sequence[tuple[str, str]],
    policies: Sequence[str],
    seed: int,
    until_s: float,
) -> list[Fault]:
    """Everything that happens to agents (name and site) and trainers up to ``until_s``, by time.

    Raises:
        ConfigError: something is to happen to what is not there.
    """
    for name in spec.dead_trainers:
        if name not in policies:
            known = ", ".join(policies)
            raise ConfigError(f"faults.dead_trainers: {name!r} is no policy; there are {known}")
    faults = agent_faults(spec, agents, seed, until_s)
    faults += link_faults(spec, agents, seed, until_s)
    for name in spec.dead_trainers:
        faults.append(Fault(spec.trainer_dies_s, f"trainer-{name}", "crash"))
        if spec.trainer_down_s > 0.0:
            back_s = spec.trainer_dies_s + spec.trainer_down_s
            faults.append(Fault(back_s, f"trainer-{name}", "return"))
    return sorted(faults)


def agent_faults(
    spec: FaultSpec, agents: Sequence[tuple[str, str]], seed: int, until_s: float
) -> list[Fault]:
    """What happens to the agents' own machines up to ``until_s``, by time.

    Raises:
        ConfigError: a planned fault is of no site and no agent.
    """
    _check_places("planned", [planned.where for planned in spec.planned], agents)
    faults: list[Fault] = []
    for number, (agent, site) in enumerate(agents):
        planned = [one for one in spec.planned if one.where in (agent, site)]
        deaths = [*_crashes(spec, seed, number, until_s)]
        slow = [*_slow_spans(spec, seed, number, until_s)]
        for at_s, death in _preemptions(spec, seed, number, until_s):
            faults.append(Fault(at_s, agent, "notice", spec.preempt_notice_s))
            deaths.append(death)
        if spec.clock_skew_s > 0.0:
            ahead_s = _rng("skew", seed, number).uniform(-spec.clock_skew_s, spec.clock_skew_s)
            faults.append(Fault(0.0, agent, "skew", ahead_s))
        for one in planned:
            match one:
                case PlannedCrash():
                    deaths.append((one.at_s, _back_s(spec, one.at_s, one.down_s), one.wiped))
                case PlannedPreemption():
                    faults.append(Fault(one.at_s, agent, "notice", one.notice_s))
                    gone_s = one.at_s + one.notice_s
                    deaths.append((gone_s, _back_s(spec, gone_s, one.down_s), one.wiped))
                case PlannedSlowness():
                    slow.append((one.at_s, one.at_s + one.duration_s, one.speed))
                case PlannedSkew():
                    faults.append(Fault(one.at_s, agent, "skew", one.ahead_s))
        for begin_s, end_s, wiped in _merged(deaths, lambda one, other: one or other):
            faults.append(Fault(begin_s, agent, "crash", wiped=wiped))
            if end_s < _NEVER_S:
                faults.append(Fault(end_s, agent, "return"))
        for begin_s, end_s, speed in _merged(slow, min):
            faults.append(Fault(begin_s, agent, "slow", speed))
            faults.append(Fault(end_s, agent, "slow", 1.0))
    return sorted(faults)


def link_faults(
    spec: FaultSpec, agents: Sequence[tuple[str, str]], seed: int, until_s: float
) -> list[Fault]:
    """When agents (name and site) are cut off and come back, by time.

    Raises:
        ConfigError: a partition is of no site and no agent.
    """
    _check_places("partitions", [partition.where for partition in spec.partitions], agents)
    faults: list[Fault] = []
    for number, (agent, site) in enumerate(agents):
        spans = [
            (partition.start_s, partition.start_s + partition.duration_s, True)
            for partition in spec.partitions
            if partition.where in (agent, site)
        ]
        if spec.link_mtbf_s > 0.0:
            rng = random.Random(seed * 1_000_033 + number)  # noqa: S311
            at_s = rng.expovariate(1.0 / spec.link_mtbf_s)
            while at_s < until_s:
                end_s = at_s + spec.link_down_s * rng.expovariate(1.0)
                spans.append((at_s, end_s, True))
                at_s = end_s + rng.expovariate(1.0 / spec.link_mtbf_s)
        for begin_s, end_s, _ in _merged(spans, lambda one, _: one):
            faults += [Fault(begin_s, agent, "cut"), Fault(end_s, agent, "restore")]
    return sorted(faults)


# ---- draws -------------------------------------------------------------------------------------

_NEVER_S: Final = 1e18

Death = tuple[float, float, bool]
"""From, until, and whether the disk goes as well."""
_Kind = TypeVar("_Kind")


def _crashes(spec: FaultSpec, seed: int, number: int, until_s: float) -> Iterator[Death]:
    if spec.agent_mtbf_s <= 0.0:
        return
    rng = random.Random(seed * 1_000_003 + number)  # noqa: S311
    disks = _rng("wiped", seed, number)
    at_s = rng.expovariate(1.0 / spec.agent_mtbf_s)
    while at_s < until_s:
        up_s = at_s + spec.agent_down_s
        yield at_s, up_s + spec.agent_start_s, disks.random() < spec.agent_wiped_share
        at_s = up_s + rng.expovariate(1.0 / spec.agent_mtbf_s)


def _preemptions(
    spec: FaultSpec, seed: int, number: int, until_s: float
) -> Iterator[tuple[float, Death]]:
    """When the notice comes, and what follows."""
    if spec.preempt_mtbf_s <= 0.0:
        return
    rng = _rng("preempt", seed, number)
    at_s = rng.expovariate(1.0 / spec.preempt_mtbf_s)
    while at_s < until_s:
        gone_s = at_s + spec.preempt_notice_s
        up_s = gone_s + spec.preempt_down_s + spec.agent_start_s
        yield at_s, (gone_s, up_s, rng.random() < spec.preempt_wiped_share)
        at_s = up_s + rng.expovariate(1.0 / spec.preempt_mtbf_s)


def _slow_spans(
    spec: FaultSpec, seed: int, number: int, until_s: float
) -> Iterator[tuple[float, float, float]]:
    if spec.slow_mtbf_s <= 0.0:
        return
    rng = _rng("slow", seed, number)
    at_s = rng.expovariate(1.0 / spec.slow_mtbf_s)
    while at_s < until_s:
        end_s = at_s + spec.slow_s * rng.expovariate(1.0)
        yield at_s, end_s, spec.slow_speed
        at_s = end_s + rng.expovariate(1.0 / spec.slow_mtbf_s)


def _rng(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind}/{seed}/{number}")  # noqa: S311


def _back_s(spec: FaultSpec, gone_s: float, down_s: float) -> float:
    return gone_s + down_s + spec.agent_start_s if down_s > 0.0 else _NEVER_S


def _check_places(key: str, places: list[str], agents: Sequence[tuple[str, str]]) -> None:
    known = {place for agent in agents for place in agent}
    for number, where in enumerate(places):
        if where not in known:
            sites = ", ".join(dict.fromkeys(site for _, site in agents))
            raise ConfigError(
                f"faults.{key}[{number}].where: {where!r} is no site or agent; sites are {sites}, "
                "their agents SITE-0, SITE-1 and so on"
            )


def _merged(
    spans: list[tuple[float, float, _Kind]], both: Callable[[_Kind, _Kind], _Kind]
) -> list[tuple[float, float, _Kind]]:
    """Spans that overlap or touch as one; ``both`` says what kind it is then."""
    merged: list[tuple[float, float, _Kind]] = []
    for begin_s, end_s, kind in sorted(spans, key=lambda span: span[:2]):
        if merged and begin_s <= merged[-1][1]:
            before_s, until_s, before = merged[-1]
            merged[-1] = (before_s, max(end_s, until_s), both(before, kind))
        else:
            merged.append((begin_s, end_s, kind))
    return merged
