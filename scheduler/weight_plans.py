"""Agents' standing requests and the plans that answer them.

What always holds: a request stands until its answer was sent or the agent fell silent; working out
a plan never holds up the chunks that others wait for; what is remembered of agents is bounded. An
agent that holds a version which the trainer left behind (rollback) waits for a bridge from there
while one is being made, instead of fetching the whole model.
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import structlog

from scheduler.service import Worker
from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import ahead_of
from transport.envelope import LIMITS, encode
from transport.errors import LocalProtocolError, StoreError
from transport.messages import Ahead, Plane, WeightsPlan, WeightsRequest
from transport.runtime.clock import Clock
from transport.source_links import MAX_AHEAD_BYTES
from transport.weights.manifest import FileEntry, decode_manifest
from transport.weights.plan import LinkSpeed

CACHED_PLANS: Final = 1024
FORGET_S: Final = 60.0
"""Agents repeat a standing request every few seconds; after so long it is not theirs any more."""

MAX_STANDING: Final = 100_000
ASKED_LATELY_S: Final = 1800.0
MAX_ASKED: Final = 512

_log = structlog.get_logger()


class PlanFor(NamedTuple):
    """The answer to a route's standing request about a policy."""

    route: bytes
    policy: str


class _Standing(NamedTuple):
    request: WeightsRequest
    agent: str
    at_s: float


class _Key(NamedTuple):
    """Requests with the same are answered by the same plan."""

    policy: str
    have_version: int | None
    have_digest: str
    upto: int | None
    link: LinkSpeed
    ahead_bytes: int
    ahead_piece_bytes: int


class _Made(NamedTuple):
    frames: Sequence[bytes]
    ahead: tuple[Ahead, ...] = ()
    held_back: bool = False
    failed: bool = False


class Planner:
    """``library`` is the thread that ``versions`` belongs to; ``ready`` is called when the frames
    of a plan can be had, ``trouble`` with a policy for which upkeep has something to do, and
    whether somebody waits for just that. With ``bridges`` false nobody waits for a bridge."""

    def __init__(
        self,
        versions: WeightVersions,
        library: Worker,
        clock: Clock,
        *,
        ready: Callable[[PlanFor], None],
        trouble: Callable[[str, bool], None],
        bridges: bool,
    ) -> None:
        self._versions = versions
        self._library = library
        self._clock = clock
        self._ready = ready
        self._trouble = trouble
        self._bridges = bridges
        self._standing: dict[PlanFor, _Standing] = {}
        self._due: dict[PlanFor, None] = {}
        self._wake = asyncio.Event()
        self._plans: OrderedDict[_Key, _Made] = OrderedDict()
        self._changes = 0
        self._sent_ahead: dict[PlanFor, tuple[int | None, float]] = {}
        self._held: dict[tuple[str, str], tuple[int | None, float]] = {}  # by policy and agent
        self._asked: dict[str, deque[tuple[float, Asked]]] = {}  # the library's thread's
        self.counters: Counter[str] = Counter()

    def request(self, route: bytes, agent: str, request: WeightsRequest) -> None:
        key = PlanFor(route, request.policy)
        if key not in self._standing and len(self._standing) >= MAX_STANDING:
            self.counters["too_many_requests"] += 1
            return
        now = self._clock.monotonic_s()
        if self._sent_ahead.get(key, (-1, 0.0))[0] == request.have_version:
            # Repeated while the plan was on its way: what followed that is on its way too.
            request = msgspec.structs.replace(request, ahead_bytes=0)
        self._standing[key] = _Standing(request, agent, now)
        self._held[request.policy, agent] = (request.have_version, now)
        self._is_due(key)

    def changed(self, policy: str) -> None:
        """There is something new to plan with, or less of the old."""
        self._changes += 1
        self._plans.clear()
        for key in self._standing:
            if key.policy == policy:
                self._is_due(key)

    def frames(self, key: PlanFor) -> Sequence[bytes]:
        """Of the plan that a standing request is due; none when there is nothing new, or what was
        worked out is out of date (``ready`` will say)."""
        standing = self._standing.get(key)
        if standing is None:
            return ()
        made = self._plans.get(_key(standing.request))
        if made is None:
            self._is_due(key)
            return ()
        return made.frames

    def sent(self, key: PlanFor) -> tuple[Ahead, ...]:
        """The agent asks again when it has applied the plan, or when the plan got lost. Returns
        what the plan said is to follow it."""
        standing = self._standing.pop(key, None)
        made = None if standing is None else self._plans.get(_key(standing.request))
        if standing is None or made is None or not made.ahead:
            return ()
        self._sent_ahead[key] = (standing.request.have_version, self._clock.monotonic_s())
        return made.ahead

    def holders(self, policy: str) -> list[int]:
        """Versions that living agents hold."""
        held = (version for (of, _), (version, _) in list(self._held.items()) if of == policy)
        return [version for version in held if version is not None]

    def asking(self) -> set[str]:
        """Policies that living agents ask for."""
        return {policy for policy, _ in self._held}

    def asked_lately(self, policy: str) -> list[Asked]:
        """In the library's thread: which ways were asked for."""
        before = self._clock.monotonic_s() - ASKED_LATELY_S
        return [asked for at_s, asked in self._asked.get(policy, ()) if at_s >= before]

    def forget_silent(self) -> None:
        before = self._clock.monotonic_s() - FORGET_S
        for key in [key for key, standing in self._standing.items() if standing.at_s < before]:
            del self._standing[key]
        for key in [key for key, (_, at_s) in self._sent_ahead.items() if at_s < before]:
            del self._sent_ahead[key]
        for holder in [holder for holder, (_, at_s) in self._held.items() if at_s < before]:
            del self._held[holder]

    async def run(self) -> None:
        """Work out plans until cancelled."""
        while True:
            if not self._due:
                self._wake.clear()
                await self._wake.wait()
            waiting = next(iter(self._due))
            del self._due[waiting]
            standing = self._standing.get(waiting)
            if standing is None:
                continue
            key = _key(standing.request)
            made = self._plans.get(key)
            if made is None:
                changes = self._changes
                made = await self._library.run(self._make, key)
                if changes != self._changes:  # what was worked out is out of date
                    self._is_due(waiting)
                    continue
                self._plans[key] = made
                if len(self._plans) > CACHED_PLANS:
                    self._plans.popitem(last=False)
                if made.held_back or made.failed:
                    self._trouble(key.policy, made.held_back)
            if made.frames:
                self._ready(waiting)

    def _is_due(self, key: PlanFor) -> None:
        self._due[key] = None
        self._wake.set()

    def _make(self, key: _Key) -> _Made:
        """In the library's thread."""
        versions = self._versions
        try:
            newest = versions.head(key.policy)
            if newest is not None and key.have_version is not None:
                self._note(key.policy, Asked(key.have_version, newest.version))
            if self._bridges and versions.awaits_bridge(
                key.policy, key.have_version, key.have_digest, key.upto
            ):
                return _Made((), held_back=True)
            plan = versions.plan(
                key.policy, key.have_version, key.have_digest, key.upto, link=key.link
            )
            if plan is None:
                return _Made(())
            plan = msgspec.structs.replace(plan, ahead=_ahead(plan, key))
            return _Made(encode(plan, limits=LIMITS[Plane.WEIGHTS]), plan.ahead)
        except (StoreError, LocalProtocolError) as error:
            _log.warning("weights.no_plan", policy=key.policy, upto=key.upto, reason=str(error))
            return _Made((), failed=key.upto is None)

    def _note(self, policy: str, asked: Asked) -> None:
        notes = self._asked.setdefault(policy, deque(maxlen=MAX_ASKED))
        notes.append((self._clock.monotonic_s(), asked))


def _key(request: WeightsRequest) -> _Key:
    speed = LinkSpeed(_octave(request.rate_bytes_s), _octave(request.decode_cells_s))
    return _Key(
        request.policy,
        request.have_version,
        request.have_digest,
        request.upto,
        speed,
        _rounded(min(request.ahead_bytes, MAX_AHEAD_BYTES)),
        _rounded(min(request.ahead_piece_bytes, MAX_AHEAD_BYTES)),
    )


def _ahead(plan: WeightsPlan, key: _Key) -> tuple[Ahead, ...]:
    """What of the plan's deltas follows it unasked. Nothing of a snapshot, which the agent may
    have in a folder, and nothing to one without a copy."""
    if not key.ahead_bytes or key.have_version is None:
        return ()
    entries: list[FileEntry] = []
    for step in plan.steps:
        for entry in decode_manifest(step.manifest).files:
            if entry.name in step.files:
                if entry.kind not in ("delta", "composite"):
                    return ()
                entries.append(entry)
    return ahead_of(entries, ahead_bytes=key.ahead_bytes, piece_bytes=key.ahead_piece_bytes)


def _rounded(value: int) -> int:
    """Down to three binary digits, so that agents with about the same window share a plan."""
    spare = max(value.bit_length() - 3, 0)
    return value >> spare << spare


def _octave(value: float) -> float:
    """The next power of two, so that agents of about the same speed share a plan."""
    return 2.0 ** round(math.log2(value)) if value >= 1.0 else 0.0
