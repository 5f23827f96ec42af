"""What agents have to do: items, lengths, turns and rewards of sequences, times of steps and swaps.

What always holds: a sequence's length, turns and reward are functions of its job's seed and its
place in the group, a step's time and its delta's size of the run's seed, the policy and the step;
never of the agent, the attempt or the time, so that two placement rules are compared on the same
work.
"""

import hashlib
import math
from statistics import NormalDist
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from edge_agent.config import FakeEngineTable
from edge_agent.engines.fake import ServiceTimes, place_uniform
from transport.messages import Item, LeaseOffer

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Spread = Annotated[float, Meta(ge=0.0, le=100.0)]
"""A coefficient of variation."""

_TURNS: Final = 0x5DEECE66D
_TOOLS: Final = 0x2545F4914F6CDD1D
"""What a job's seed is mixed with, so that turns and tool times do not go with lengths."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths are log-normal in tokens, or those of ``lengths_file`` (``sim.trace_files``) as often
    as they occur there, cut off at ``max_new_tokens``. A sequence has one of ``turns`` many turns,
    drawn, which share its tokens evenly; between two of them a tool works for ``tool_s`` in the
    mean (log-normal with ``tool_cv``), while the slot is ``free`` for others, as with the
    production workflows, or ``held``. ``body_bytes_per_token`` is what a packed trajectory takes.
    ``delta_bytes`` is the size of a version's delta, ``full_bytes`` of the whole model;
    ``deltas_file`` has the sizes of one step after the other instead, repeated. ``train_s`` is the
    mean time of a step (log-normal with ``train_cv``), ``publish_s`` until its version's files are
    ready, ``apply_s`` from a version's last byte until an agent can serve it, ``swap_s`` the pause
    of an engine that takes new weights, ``store_s`` the time in which a body or version becomes
    durable."""

    mean_tokens: Annotated[float, Meta(gt=0.0, le=1e6)] = 1200.0
    cv_tokens: Spread = 1.2
    lengths_file: str = ""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 16_384
    prompt_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    first_token_s: Seconds = 0.0
    turns: Annotated[tuple[Annotated[int, Meta(ge=1, le=1000)], ...], Meta(min_length=1)] = (1,)
    tool_s: Seconds = 0.0
    tool_cv: Spread = 0.0
    tool_slot: Literal["free", "held"] = "free"
    body_bytes_per_token: Annotated[float, Meta(gt=0.0, le=1e4)] = 5.0
    train_s: Seconds = 12.0
    train_cv: Spread = 0.0
    publish_s: Seconds = 0.0
    apply_s: Seconds = 0.0
    delta_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 150_000_000
    deltas_file: str = ""
    full_bytes: Annotated[int, Meta(ge=1, le=2**50)] = 1_200_000_000
    swap_s: Seconds = 0.3
    store_s: Seconds = 0.005
    items_s: Seconds = 0.002

    def gap_bytes(self, versions: int) -> int:
        """Bytes that lead over ``versions`` versions at once: the changed cells' union, assuming
        that steps change cells independently, which is the most that it can be.

        Example: a delta of 1/8 of the model; two versions take 1 - (7/8)^2 = 15/64 of it.
        """
        share = min(1.0, self.delta_bytes / self.full_bytes)
        return round(self.full_bytes * (1.0 - (1.0 - share) ** max(0, versions)))


class Turns(NamedTuple):
    """One sequence: tokens of each turn, seconds of the tool after each but the last."""

    tokens: tuple[int, ...]
    tool_s: tuple[float, ...]


class Draws:
    """Lengths, turns and rewards of ``workload``.

    Raises:
        ConfigError: its ``lengths_file`` does not do.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        table = FakeEngineTable(mean_tokens=workload.mean_tokens, cv_tokens=workload.cv_tokens)
        self._times = ServiceTimes(table)
        self._seen: list[int] = []
        if workload.lengths_file:
            from sim.trace_files import read_lengths

            self._seen = sorted(read_lengths(workload.lengths_file))

    def lengths(self, offer: LeaseOffer) -> list[int]:
        """Tokens of each sequence of a group, in order."""
        most = min(self.workload.max_new_tokens, offer.max_new_tokens)
        count = len(offer.items) * offer.group_size
        places = [place_uniform(offer.seed, n) for n in range(count)]
        if seen := self._seen:
            return [min(most, seen[int(place * len(seen))]) for place in places]
        return [self._times.tokens(place, most) for place in places]

    def turns(self, offer: LeaseOffer, lengths: list[int]) -> list[Turns] | None:
        """How sequences of these lengths go on; None where each is one turn. A sequence has no more
        turns than tokens."""
        workload = self.workload
        if workload.turns == (1,):
            return None
        found: list[Turns] = []
        for place, tokens in enumerate(lengths):
            choice = int(place_uniform(offer.seed ^ _TURNS, place) * len(workload.turns))
            count = min(tokens, workload.turns[choice])
            whole, left = divmod(tokens, count)
            tools = (
                place_uniform(offer.seed ^ _TOOLS, 1000 * place + turn) for turn in range(count - 1)
            )
            found.append(
                Turns(
                    tuple(whole + (turn < left) for turn in range(count)),
                    tuple(log_normal(workload.tool_s, workload.tool_cv, tool) for tool in tools),
                )
            )
        return found

    def rewards(self, offer: LeaseOffer) -> tuple[float, ...]:
        count = len(offer.items) * offer.group_size
        return tuple(float(place_uniform(offer.seed, -1 - n) < 0.5) for n in range(count))


class Steps:
    """Times and delta sizes of a policy's steps, which count from 1.

    Raises:
        ConfigError: the workload's ``deltas_file`` does not do.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sizes: tuple[int, ...] = ()
        if workload.deltas_file:
            from sim.trace_files import read_deltas

            self._sizes = read_deltas(workload.deltas_file)

    def delta_bytes(self, step: int) -> int:
        """Size of the delta of one step, never more than the whole model."""
        if not self._sizes:
            return self._workload.delta_bytes
        return min(self._workload.full_bytes, self._sizes[(step - 1) % len(self._sizes)])

    def gap_bytes(self, have: int, want: int) -> int:
        """Bytes that lead from step ``have`` to ``want`` at once (``Workload.gap_bytes``)."""
        if not self._sizes:
            return self._workload.gap_bytes(want - have)
        full_bytes, kept = self._workload.full_bytes, 1.0
        for step in range(have + 1, want + 1):
            kept *= 1.0 - self.delta_bytes(step) / full_bytes
        return round(full_bytes * (1.0 - kept))


def step_seed(seed: int, policy: str) -> int:
    """What the times of a policy's steps are drawn with."""
    return int(make_digest("steps", seed, policy)[:16], 16)


def log_normal(mean: float, cv: float, uniform: float) -> float:
    """The value at ``uniform`` in [0, 1) of a log-normal distribution with this mean and
    coefficient of variation."""
    if cv <= 0.0 or mean <= 0.0:
        return mean
    variance = math.log1p(cv * cv)
    normal = NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9))
    return mean * math.exp(math.sqrt(variance) * normal - variance / 2)


def make_items(start: int, count: int) -> tuple[Item, ...]:
    """Prompts of a usual size."""
    return tuple(
        Item(
            index=index,
            prompt=f"{index:08d} " + "a word or two about the problem " * 12,
            answer="1",
        )
        for index in range(start, start + count)
    )


def make_digest(*parts: object) -> str:
    """64 hexadecimal digits that stand for content."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
