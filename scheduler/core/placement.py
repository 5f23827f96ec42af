"""Which agent gets a job.

    finish = rtt + wait for a slot + tokens / rate + bytes / uplink + weight catch-up

A placement is refused when the group would be too old once it is trained on:

    lag at consumption = lag of the agent's version now
                       + min(finish / trainer's busy time, batches buffered or in flight)

and the bound is exceeded, unless the policy has been starved (nothing in flight or buffered) for
a while: then anything is better than waiting for ever.

Example: an agent whose version is one step behind the head, a finish time of 40 s, 12 s per step
and 3 batches ahead gives 1 + min(3.3, 3) = 4, which a bound of 4 allows and a bound of 3 refuses.

What always holds: a rule only looks at its arguments and its random numbers; equal costs go to
the smaller agent name; None means that no candidate will do. The four baselines neither predict
nor refuse; they are there to be compared with.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from scheduler.core.settings import PlacementName

if TYPE_CHECKING:
    import random

PROBE_SHARE = 0.02
"""How often the best idle but long unused agent is tried instead of the best one."""
PROBE_AFTER_S = 60.0


class PolicyView(msgspec.Struct, frozen=True):
    """A policy that wants the group: its lag bound, its trainer's busy seconds per step (None:
    unknown), whole batches buffered or in flight, and whether it has been starved."""

    policy: str
    bound: int
    busy_s: float | None
    batches_ahead: int
    starved: bool


class JobView(msgspec.Struct, frozen=True):
    """What placement knows of a job. Tokens are expected per sequence and of the longest one."""

    job: str
    sequences: int
    tokens_mean: float
    tokens_longest: float
    body_bytes: float
    policies: tuple[PolicyView, ...]


class Candidate(msgspec.Struct, frozen=True):
    """An agent with room. ``load`` is sequences it holds already, ``token_s`` seconds per token
    of one sequence, ``lags`` belongs to ``JobView.policies``, ``idle_s`` is time since its last
    offer."""

    agent: str
    slots: int
    load: int
    rtt_s: float
    token_s: float
    up_byte_s: float
    catch_up_s: float
    lags: tuple[int, ...]
    idle_s: float


class Score(msgspec.Struct, frozen=True, order=True):
    """Smaller is better; ``parts`` say what the cost is made of."""

    cost: float
    agent: str
    parts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        parts = " ".join(f"{name}={value:.3g}" for name, value in self.parts)
        return f"{self.agent} cost={self.cost:.3g} {parts}"


class Choice(msgspec.Struct, frozen=True):
    agent: str
    score: Score
    reason: str = "best"


class PlacementRule(Protocol):
    """Picks one of several candidates that all may take the job."""

    def choose(
        self, job: JobView, candidates: Sequence[Candidate], now: float
    ) -> Choice | None: ...


class FinishTime:
    """Earliest finish among the agents that stay fresh enough."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        best: tuple[float, str] | None = None
        last_resort: tuple[int, float, str] | None = None
        unused: tuple[float, str] | None = None
        found: dict[str, Candidate] = {}
        for candidate in candidates:
            finish_s = _finish_s(job, candidate)
            excess = _excess_lag(job, candidate, finish_s)
            name = candidate.agent
            found[name] = candidate
            if excess is None:
                continue
            if excess > 0:
                if last_resort is None or (excess, finish_s, name) < last_resort:
                    last_resort = (excess, finish_s, name)
                continue
            if best is None or (finish_s, name) < best:
                best = (finish_s, name)
            if candidate.load == 0 and candidate.idle_s > PROBE_AFTER_S:
                key = (-candidate.idle_s, name)
                unused = key if unused is None else min(unused, key)
        if best is None:
            if last_resort is None:
                return None
            return _finish_choice(job, found[last_resort[2]], "starved")
        if unused is not None and unused[1] != best[1] and self._rng.random() < PROBE_SHARE:
            return _finish_choice(job, found[unused[1]], "probe")
        return _finish_choice(job, found[best[1]], "best")


class RoundRobin:
    """The agent that has waited longest for an offer."""

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        return _least([(-c.idle_s, c.agent) for c in candidates], "last_offer")


class LeastOutstanding:
    """The fewest outstanding sequences per slot."""

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        return _least([(c.load / c.slots, c.agent) for c in candidates], "per_slot")


class Nearest:
    """The shortest round trip."""

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        return _least([(c.rtt_s, c.agent) for c in candidates], "rtt_s")


class TwoChoices:
    """The less loaded (per slot) of two random agents."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(self, job: JobView, candidates: Sequence[Candidate], now: float) -> Choice | None:
        two = candidates if len(candidates) <= 2 else self._rng.sample(list(candidates), 2)
        return _least([(c.load / c.slots, c.agent) for c in two], "per_slot")


def make_rule(name: PlacementName, rng: "random.Random") -> PlacementRule:
    match name:
        case "finish-time":
            return FinishTime(rng)
        case "round-robin":
            return RoundRobin()
        case "least-outstanding":
            return LeastOutstanding()
        case "nearest":
            return Nearest()
        case "two-choices":
            return TwoChoices(rng)


def _wait_s(job: JobView, candidate: Candidate) -> float:
    """Sequences beyond the slots run in waves of mean length before the job is through."""
    excess = max(0, candidate.load + job.sequences - candidate.slots)
    return excess / candidate.slots * job.tokens_mean * candidate.token_s


def _finish_s(job: JobView, candidate: Candidate) -> float:
    return (
        candidate.rtt_s
        + _wait_s(job, candidate)
        + job.tokens_longest * candidate.token_s
        + job.body_bytes * candidate.up_byte_s
        + candidate.catch_up_s
    )


def _excess_lag(job: JobView, candidate: Candidate, finish_s: float) -> int | None:
    """Steps by which the group would be too old: 0 when fresh enough, None when refused."""
    worst = 0
    for policy, lag in zip(job.policies, candidate.lags, strict=True):
        advanced = 0
        if policy.busy_s is not None:
            advanced = int(min(finish_s / max(policy.busy_s, 1e-6), policy.batches_ahead))
        excess = lag + advanced - policy.bound
        if excess > 0 and not policy.starved:
            return None
        worst = max(worst, excess)
    return worst


def _finish_choice(job: JobView, candidate: Candidate, reason: str) -> Choice:
    parts = (
        ("rtt_s", candidate.rtt_s),
        ("wait_s", _wait_s(job, candidate)),
        ("generate_s", job.tokens_longest * candidate.token_s),
        ("upload_s", job.body_bytes * candidate.up_byte_s),
        ("catch_up_s", candidate.catch_up_s),
        ("lag", float(max(candidate.lags, default=0))),
    )
    score = Score(cost=_finish_s(job, candidate), agent=candidate.agent, parts=parts)
    return Choice(candidate.agent, score, reason)


def _least(keys: list[tuple[float, str]], name: str) -> Choice | None:
    if not keys:
        return None
    cost, agent = min(keys)
    return Choice(agent, Score(cost=cost, agent=agent, parts=((name, cost),)))
