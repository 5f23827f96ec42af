"""What goes wrong and when: crashes of agents, death of a trainer, hosts that are cut off.

Who is cut off loses the messages that are under way, and its transfers wait (a link profile's own
outages lose nothing, see ``sim.links``).

What always holds: the plan is a function of the seed alone, drawn per agent, so that it is the same
whatever the scheduler decides.
"""

import random
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Fault(msgspec.Struct, frozen=True, order=True):
    """Something that happens to a host."""

    at_s: float
    host: str
    what: Literal["crash", "return", "cut", "restore"]


class Partition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All agents of a site, or one agent, are cut off for a while."""

    where: str
    start_s: Seconds
    duration_s: Seconds


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``agent_mtbf_s`` is the mean of exponential times between an agent's crashes (0: none), each
    down for ``agent_down_s`` before it is started again, which takes ``agent_start_s``. A trainer
    named in ``dead_trainers`` (a policy's name) dies after ``trainer_dies_s`` and comes back after
    ``trainer_down_s`` (0: never). ``link_mtbf_s`` is the mean of exponential times between the
    moments at which an agent is cut off (0: none), ``link_down_s`` the mean of how long,
    exponential as well; ``partitions`` are planned ones."""

    agent_mtbf_s: Seconds = 0.0
    agent_down_s: Seconds = 30.0
    agent_start_s: Seconds = 0.0
    dead_trainers: tuple[str, ...] = ()
    trainer_dies_s: Seconds = 300.0
    trainer_down_s: Seconds = 0.0
    link_mtbf_s: Seconds = 0.0
    link_down_s: Seconds = 20.0
    partitions: tuple[Partition, ...] = ()


def agent_faults(spec: FaultSpec, agents: list[str], seed: int, until_s: float) -> list[Fault]:
    """Crashes and returns of all agents up to ``until_s``, by time."""
    faults: list[Fault] = []
    if spec.agent_mtbf_s <= 0.0:
        return faults
    for number, agent in enumerate(agents):
        rng = random.Random(seed * 1_000_003 + number)  # noqa: S311
        at_s = rng.expovariate(1.0 / spec.agent_mtbf_s)
        while at_s < until_s:
            faults.append(Fault(at_s, agent, "crash"))
            at_s += spec.agent_down_s
            faults.append(Fault(at_s + spec.agent_start_s, agent, "return"))
            at_s += rng.expovariate(1.0 / spec.agent_mtbf_s)
    return sorted(faults)


def link_faults(
    spec: FaultSpec, agents: Sequence[tuple[str, str]], seed: int, until_s: float
) -> list[Fault]:
    """When agents (name and site) are cut off and come back, by time. Spans that overlap are one.

    Raises:
        ConfigError: a partition is of no site and no agent.
    """
    known = {place for agent in agents for place in agent}
    for number, partition in enumerate(spec.partitions):
        if partition.where not in known:
            raise ConfigError(
                f"faults.partitions[{number}].where: {partition.where!r} is no site or agent"
            )
    faults: list[Fault] = []
    for number, (agent, site) in enumerate(agents):
        spans = [
            (partition.start_s, partition.start_s + partition.duration_s)
            for partition in spec.partitions
            if partition.where in (agent, site)
        ]
        if spec.link_mtbf_s > 0.0:
            rng = random.Random(seed * 1_000_033 + number)  # noqa: S311
            at_s = rng.expovariate(1.0 / spec.link_mtbf_s)
            while at_s < until_s:
                end_s = at_s + spec.link_down_s * rng.expovariate(1.0)
                spans.append((at_s, end_s))
                at_s = end_s + rng.expovariate(1.0 / spec.link_mtbf_s)
        for begin_s, end_s in _merged(spans):
            faults += [Fault(begin_s, agent, "cut"), Fault(end_s, agent, "restore")]
    return sorted(faults)


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(spans):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((begin_s, end_s))
    return merged
