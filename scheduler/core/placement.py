"""Which agent gets a job.

    finish = rtt + wait for a slot + tokens / rate + bytes / uplink + weight catch-up

A placement is refused when the group would be too old once it is trained on, for every policy that
wants it. Batches go out at the times G, G + I, G + 2 I ... (G: the running step has to end and the
batch to fill; I: the usual time from one to the next), each one optimizer step later than the one
before. So a group that begins d steps behind the head and is back after t is used, in steps from
now,

    at the earliest   1 if a step is running, + the batches that go out before t (there must be
                      groups for them)
    by its place      (r + min(f, q t)) / B, whole: r groups at hand (those of the running step
                      among them) and f in flight can be used no longer than it and go first;
                      q groups come back per second, B make a batch
    refused when      d + the larger of both > bound

unless the policy has been starved (nothing in flight or buffered) for a while: then anything is
better than waiting for ever. While q is unknown everything in flight counts, and while I is, the
trainer's busy time paces it: min(t / busy, (r + q t) / B). A group is meant that is longer than
three quarters of all.

Example: bound 2, batches every 15 s, the next one in 9 s, a step running. A group that begins at
the head and is back after 20 s misses one batch: 0 + 1 + 1 = 2 is taken; one that begins a step
behind, or takes 30 s, is refused.

With a queue, the earliest finish may be on an agent that is busy now: what faster agents take on
in time waits for them (``absorbing``).

Among agents that finish within ``NEAR_TIE`` of the best one the cheapest per token is taken, then
the smaller name: differences that small are below what anybody can predict.

What always holds: a rule only looks at its arguments and its random numbers; equal costs go to
the smaller agent name; None means that no candidate will do. The four baselines neither predict
nor refuse; they are there to be compared with.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from scheduler.core.settings import PlacementName

if TYPE_CHECKING:
    import random

PROBE_SHARE = 0.02
"""How often the best idle but long unused agent is tried instead of the best one."""
PROBE_AFTER_S = 60.0
NEAR_TIE = 0.03
"""Lengths and rates scatter by far more than this; a percent or two of time is not worth money."""
HOLD = 0.4
"""Part of what faster agents would take on that is kept for them (measured: 0 to 0.4 better, above
the same, with slower agents idle)."""


Absorber = tuple[float, float, float]
"""A finish time, groups per second that agents of at most that take on, and those weighted by their
finish times."""


class PolicyView(msgspec.Struct, frozen=True):
    """A policy that wants the group: its lag bound, its trainer's busy seconds per step (None:
    unknown), groups of a batch, groups buffered or being trained on (``ready``), groups in flight,
    how many come back per second (None: unknown), and whether it has been starved. ``earlier`` are
    ready groups and groups in flight that can be used no longer than one that begins 1, 2 ... steps
    behind the head. The next batch goes out in ``grant_s``, others every ``interval_s`` (None:
    unknown); ``running`` groups are in the step that is under way."""

    policy: str
    bound: int
    busy_s: float | None
    batch: int
    ready: int
    in_flight: int
    rate: float | None
    starved: bool
    earlier: tuple[tuple[int, int], ...] = ()
    grant_s: float = 0.0
    interval_s: float | None = None
    running: int = 0


class JobView(msgspec.Struct, frozen=True):
    """What placement knows of a job. Tokens are expected per sequence and of the longest one, which
    has at most ``tokens_likely`` in three of four cases; ``kind`` names work that takes the same
    time per token. ``queued`` jobs wait, this one among them; ``absorbers`` would take some on (see
    ``absorbing``), and it may be kept waiting for agents that are more than ``patience_s``
    faster."""

    kind: str
    sequences: int
    tokens_mean: float
    tokens_longest: float
    tokens_likely: float
    body_bytes: float
    policies: tuple[PolicyView, ...]
    queued: int = 0
    absorbers: tuple[Absorber, ...] = ()
    patience_s: float = 0.0

    def tolerant(self) -> "JobView":
        """The same job, if every policy took anything."""
        policies = tuple(msgspec.structs.replace(one, starved=True) for one in self.policies)
        return msgspec.structs.replace(self, policies=policies)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An agent with room. ``load`` is sequences it holds already, ``wait_s`` what the group loses
    by waiting for slots there, ``token_s`` seconds per token of one sequence, ``lags`` belongs to
    ``JobView.policies`` (of the versions that it will begin with), ``idle_s`` is time since its
    last offer, ``token_usd`` what a token costs there (0: not priced)."""

    agent: str
    slots: int
    load: int
    rtt_s: float
    wait_s: float
    token_s: float
    up_byte_s: float
    catch_up_s: float
    lags: tuple[int, ...]
    idle_s: float
    token_usd: float = 0.0


class Score(msgspec.Struct, frozen=True, gc=False):
    """Smaller is better. It remembers who was scored for what: most scores are never looked at."""

    cost: float
    agent: str
    stated: tuple[tuple[str, float], ...] = ()
    scored: tuple[JobView, Candidate] | None = None

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """What the cost is made of."""
        return self.stated if self.scored is None else parts_of(*self.scored)

    def __str__(self) -> str:
        parts = " ".join(f"{name}={value:.3g}" for name, value in self.parts)
        return f"{self.agent} cost={self.cost:.3g} {parts}"


class Choice(msgspec.Struct, frozen=True):
    """``lags`` are those that the group should begin with, by policy."""

    agent: str
    score: Score
    reason: str = "best"
    lags: tuple[tuple[str, int], ...] = ()


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
        best: Candidate | None = None
        best_s = 0.0
        last_resort: tuple[int, float, str, Candidate] | None = None
        unused: Candidate | None = None
        for candidate, finish_s in zip(candidates, all_expected_s(job, candidates), strict=True):
            if (candidate.load == 0 and candidate.idle_s > PROBE_AFTER_S) and (
                unused is None
                or candidate.idle_s > unused.idle_s
                or (candidate.idle_s == unused.idle_s and candidate.agent < unused.agent)
            ):
                unused = candidate
            if best is not None and (
                finish_s > best_s or (finish_s == best_s and candidate.agent >= best.agent)
            ):
                continue
            excess = excess_lag(job, candidate, finish_s) if job.policies else 0
            if excess == 0:
                best, best_s = candidate, finish_s
            elif excess is not None:
                key = (excess, finish_s, candidate.agent, candidate)
                last_resort = key if last_resort is None else min(last_resort, key, key=_by_name)
        if best is None:
            return None if last_resort is None else _choice(job, last_resort[3], "starved")
        if taken_on(job, best_s - best.wait_s) >= job.queued:
            return None
        if (
            unused is not None
            and unused is not best
            and self._rng.random() < PROBE_SHARE
            and excess_lag(job, unused, expected_s(job, unused)) == 0
        ):
            return _choice(job, unused, "probe")
        if best.token_usd > 0.0:
            cheapest = _cheapest_near(job, candidates, best_s)
            if cheapest is not best:
                return _choice(job, cheapest, "cheapest")
        return _choice(job, best, "best")


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


def soonest(job: JobView, candidates: Sequence[Candidate], reason: str) -> Choice | None:
    """The candidate that would be done first and stay fresh enough, whatever rule is in use:
    second attempts and recalls are not what the rules are compared by."""
    best: Candidate | None = None
    best_s = 0.0
    for candidate, finish_s in zip(candidates, all_expected_s(job, candidates), strict=True):
        if best is not None and (finish_s, candidate.agent) >= (best_s, best.agent):
            continue
        if excess_lag(job, candidate, finish_s) == 0:
            best, best_s = candidate, finish_s
    return None if best is None else _choice(job, best, reason)


def expected_s(job: JobView, candidate: Candidate) -> float:
    """Seconds until the group would be back."""
    return all_expected_s(job, (candidate,))[0]


def all_expected_s(job: JobView, candidates: Sequence[Candidate]) -> list[float]:
    """Of each candidate, seconds until the group would be back from it."""
    tokens, body_bytes = job.tokens_longest, job.body_bytes
    return [
        one.rtt_s + one.wait_s + tokens * one.token_s + body_bytes * one.up_byte_s + one.catch_up_s
        for one in candidates
    ]


def excess_lag(job: JobView, candidate: Candidate, finish_s: float) -> int | None:
    """Steps by which the group would be too old: 0 when fresh enough, None when refused. That is
    asked of a group that is longer than three quarters of all: where only a typical one is in time,
    half of them are stopped. A few very long answers must not speak for all. Of several policies
    one that can use it is enough: a dead trainer's buffer must not keep the others' groups back."""
    least: int | None = None if job.policies else 0
    finish_s -= (job.tokens_longest - job.tokens_likely) * candidate.token_s
    for policy, lag in zip(job.policies, candidate.lags, strict=True):
        excess = lag - policy.bound + steps_ahead(policy, lag, finish_s)
        if excess <= 0:
            return 0
        if policy.starved:
            least = excess if least is None else min(least, excess)
    return least


def steps_ahead(policy: PolicyView, lag: int, finish_s: float) -> int:
    """Whole steps that the trainer makes before it uses a group that begins ``lag`` steps behind
    the head and is back after so long."""
    ready, flying = policy.ready, policy.in_flight
    if lag > 0 and policy.earlier:
        ready, flying = policy.earlier[min(lag, len(policy.earlier)) - 1]
    # Asked once per candidate: comparisons, because calls of ``min`` and ``max`` take longer.
    ahead, rate = float(flying), policy.rate
    if rate is not None and rate * finish_s < ahead:
        ahead = rate * finish_s
    queue = int((ready + ahead) / policy.batch)
    if policy.interval_s is None:
        return max(int(steps_meanwhile(policy, finish_s)), queue)
    late_s = finish_s - policy.grant_s
    grants = 0
    if late_s > 0.0:
        grants = 1 + int(late_s / policy.interval_s)
        filled = int((policy.ready - policy.running + _back(policy, finish_s)) / policy.batch)
        if filled < grants:
            grants = filled
    if policy.running > 0:
        grants += 1
    return grants if grants > queue else queue


def steps_meanwhile(policy: PolicyView, time_s: float) -> float:
    """Steps that the trainer makes in so long: no more than it can, and has groups for."""
    if policy.busy_s is None:
        return 0.0
    paced = time_s / max(policy.busy_s, 1e-6)
    return min(paced, (policy.ready + _back(policy, time_s)) / policy.batch)


def _back(policy: PolicyView, time_s: float) -> float:
    """Groups that come back in so long. None if nothing is in flight, however many came lately:
    else everything would be refused for the sake of groups that are refused like it."""
    if policy.rate is None or not policy.in_flight:
        return float(policy.in_flight)
    return policy.rate * time_s


def taken_on(job: JobView, finish_s: float) -> float:
    """How many waiting groups are kept for agents that would bring them back before ``finish_s``
    (of one that begins at once); none when those have not taken any for as long as that saves."""
    at = bisect_left(job.absorbers, (finish_s * (1.0 - NEAR_TIE),))
    if not at or finish_s - job.absorbers[0][0] <= job.patience_s:
        return -1.0
    _, rate, weighted = job.absorbers[at - 1]
    return HOLD * (rate * finish_s - weighted)


def parts_of(job: JobView, candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """What the finish time is made of, and the lag to begin with."""
    return (
        ("rtt_s", candidate.rtt_s),
        ("wait_s", candidate.wait_s),
        ("generate_s", job.tokens_longest * candidate.token_s),
        ("upload_s", job.body_bytes * candidate.up_byte_s),
        ("catch_up_s", candidate.catch_up_s),
        ("lag", float(max(candidate.lags, default=0))),
    )


def _cheapest_near(job: JobView, candidates: Sequence[Candidate], best_s: float) -> Candidate:
    """The cheapest per token of those that finish hardly later than the best one."""
    near: list[tuple[float, str, Candidate]] = []
    for candidate, finish_s in zip(candidates, all_expected_s(job, candidates), strict=True):
        if finish_s <= best_s * (1.0 + NEAR_TIE) and excess_lag(job, candidate, finish_s) == 0:
            near.append((candidate.token_usd, candidate.agent, candidate))
    return min(near, key=_by_name)[2]


def _choice(job: JobView, candidate: Candidate, reason: str) -> Choice:
    score = Score(expected_s(job, candidate), candidate.agent, scored=(job, candidate))
    lags: tuple[tuple[str, int], ...] = ()
    if job.policies:
        names = (policy.policy for policy in job.policies)
        lags = tuple(zip(names, candidate.lags, strict=True))
    return Choice(candidate.agent, score, reason, lags)


def _by_name(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[:-1]


def _least(keys: list[tuple[float, str]], name: str) -> Choice | None:
    if not keys:
        return None
    cost, agent = min(keys)
    return Choice(agent, Score(cost, agent, ((name, cost),)))
