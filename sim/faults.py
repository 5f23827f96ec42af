"""What goes wrong and when: crashes of agents, death of a trainer, hosts that are cut off.

What always holds: the plan is a function of the seed alone, drawn per agent, so that it is the same
whatever the scheduler decides.
"""

import random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Fault(msgspec.Struct, frozen=True, order=True):
    """Something that happens to a host."""

    at_s: float
    host: str
    what: Literal["crash", "return", "cut", "restore"]


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``agent_mtbf_s`` is the mean of exponential times between an agent's crashes (0: none), each
    down for ``agent_down_s``. A trainer named in ``dead_trainers`` (a policy's name) dies after
    ``trainer_dies_s`` and comes back after ``trainer_down_s`` (0: never)."""

    agent_mtbf_s: Seconds = 0.0
    agent_down_s: Seconds = 30.0
    dead_trainers: tuple[str, ...] = ()
    trainer_dies_s: Seconds = 300.0
    trainer_down_s: Seconds = 0.0


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
            faults.append(Fault(at_s, agent, "return"))
            at_s += rng.expovariate(1.0 / spec.agent_mtbf_s)
    return sorted(faults)
