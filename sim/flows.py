"""Transfers under way: who gets how much of the links, and when each of them is through.

Rates are max-min fair (``fair_share``) and change only when a transfer begins, ends or is held, a
link changes, or a TCP window grows. Only transfers that meet at a link which cannot carry what all
of them could use have to be worked out together; a link that can is left out, so a change costs as
much as it concerns others.

What always holds: no link carries more than its rate; a transfer that is held moves nothing; all of
a transfer's bytes are moved before it is done; many changes at one instant are worked out once.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from sim.fair_share import Pipe, max_min
from sim.kernel import Alarm, Kernel
from sim.tcp import Window

CROWD: Final = 100
"""Among more transfers than this that have to be worked out together, windows grow on a common grid
of ``GRID_S``, so that many of them grow at once."""
GRID_S: Final = 0.01

_DONE_BYTES: Final = 1e-3
_FULL: Final = 1.0 - 1e-9


class Connection:
    """One direction of the TCP connections between two hosts: a link that is as fast as their
    window lets it be, and widens each round trip in which all of it is used (next at
    ``grows_at_s``)."""

    __slots__ = ("_alarm", "_flows", "_kernel", "carried", "grows_at_s", "pipe", "window")

    def __init__(self, name: str, window: Window, flows: "Flows", kernel: Kernel) -> None:
        self.window = window
        self.pipe = Pipe(name, window.rate)
        self.carried = 0
        self._flows = flows
        self._kernel = kernel
        self._alarm = Alarm(kernel, self._round_trip_over)
        self.grows_at_s = math.inf

    def began(self) -> None:
        """A transfer begins; the first after a silence may find a smaller window."""
        if self.carried == 0:
            self.window.begin(self._kernel.now)
            self._changed()
        self.carried += 1

    def ended(self) -> None:
        self.carried -= 1
        self.window.used_s = self._kernel.now
        if self.carried == 0:
            self._stop()

    def anew(self) -> None:
        """Begin with the initial window: the connections are new, or timed out."""
        self.window.reset()
        self._changed()

    def travel(self, rtt_s: float) -> None:
        """The round trip is another one from now on."""
        self.window.travel(rtt_s)
        self._changed()

    def judge(self, rate: float, in_crowd: bool) -> None:
        """The transfers move at ``rate`` together from now on: is it the window that holds them?"""
        if self.window.is_open or rate < self.pipe.rate * _FULL:
            self._stop()
        elif self.grows_at_s == math.inf:
            self.grows_at_s = self._kernel.now + self.window.rtt_s
            if in_crowd:
                self.grows_at_s = math.ceil(self.grows_at_s / GRID_S) * GRID_S
            self._alarm.set(self.grows_at_s)

    def _stop(self) -> None:
        self.grows_at_s = math.inf
        self._alarm.set(None)

    def _round_trip_over(self) -> None:
        self.grows_at_s = math.inf
        self.window.grow()
        self._changed()

    def _changed(self) -> None:
        if self.pipe.rate != self.window.rate:
            self.pipe.rate = self.window.rate
            self._flows.link_changed(self.pipe)


class Flow:
    """A transfer. ``bound`` is in bytes per second, ``rate`` its present one; ``remaining`` are the
    bytes that had not left at ``since_s``. ``left`` is called when the last one has."""

    __slots__ = (
        "alarm",
        "bound",
        "connection",
        "held",
        "left",
        "limit",
        "number",
        "owner",
        "pipes",
        "rate",
        "remaining",
        "share",
        "since_s",
        "size_bytes",
    )

    def __init__(
        self,
        owner: Any,
        pipes: tuple[Pipe, ...],
        connection: Connection | None,
        size_bytes: int,
        bound: float,
        left: Callable[["Flow"], None],
    ) -> None:
        self.owner = owner
        self.pipes = pipes if connection is None else (*pipes, connection.pipe)
        self.connection = connection
        self.size_bytes = size_bytes
        self.remaining = float(size_bytes)
        self.bound = bound
        self.left = left
        self.held = False
        self.rate = 0.0
        self.since_s = 0.0
        self.limit = 0.0
        self.share = 0
        self.number = -1
        self.alarm: Alarm

    def moved_bytes(self, now: float) -> int:
        """How many have left, in whole bytes."""
        rest = self.remaining - self.rate * (now - self.since_s)
        return min(self.size_bytes, max(0, self.size_bytes - math.ceil(rest - _DONE_BYTES)))


class _Load:
    """What goes through a link. ``wanted`` is what its transfers could use without it, rounded up
    to whole bytes per second each, so that it adds up exactly."""

    __slots__ = ("flows", "is_tight", "wanted")

    def __init__(self) -> None:
        self.flows: dict[Flow, None] = {}
        self.wanted = 0
        self.is_tight = False

    def binds(self, pipe: Pipe) -> bool:
        return len(self.flows) > 1 and self.wanted > pipe.capacity


class Flows:
    """All transfers of a network."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._loads: dict[Pipe, _Load] = {}
        self._under_way: dict[Flow, None] = {}
        self._changed: dict[Flow, None] = {}
        self._emptied: dict[Pipe, None] = {}
        self._planning = False
        self._numbers = 0

    def __iter__(self) -> Any:
        """Transfers under way, oldest first; a copy, so that they may end meanwhile."""
        return iter(tuple(self._under_way))

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._under_way

    def begin(self, flow: Flow) -> Flow:
        """Let a transfer begin now."""
        self._numbers += 1
        flow.number = self._numbers
        flow.since_s = self._kernel.now
        flow.alarm = Alarm(self._kernel, lambda: self._due(flow))
        self._under_way[flow] = None
        if flow.connection is not None:
            flow.connection.began()
        for pipe in flow.pipes:
            load = self._loads.get(pipe)
            if load is None:
                load = self._loads[pipe] = _Load()
            load.flows[flow] = None
        self._limit(flow)
        return flow

    def cancel(self, flow: Flow) -> int | None:
        """Forget a transfer; how many bytes had left, or None when it had ended already."""
        if flow not in self._under_way:
            return None
        self._progress(flow)
        self._remove(flow)
        return flow.moved_bytes(self._kernel.now)

    def hold(self, flow: Flow, is_held: bool) -> None:
        """Let a transfer wait, or go on."""
        if flow.held != is_held:
            flow.held = is_held
            self._limit(flow)

    def link_changed(self, pipe: Pipe) -> None:
        """A link is faster or slower from now on."""
        load = self._loads.get(pipe)
        if load is not None:
            for flow in load.flows:
                self._limit(flow)

    # ---- shares --------------------------------------------------------------------------------

    def _limit(self, flow: Flow) -> None:
        """What a transfer could use at most has changed, perhaps."""
        limit = flow.bound
        for pipe in flow.pipes:
            capacity = pipe.capacity
            if capacity < limit:
                limit = capacity
        if flow.held:
            limit = 0.0
        flow.limit = limit
        share = math.ceil(limit)
        if share != flow.share:
            for pipe in flow.pipes:
                self._loads[pipe].wanted += share - flow.share
            flow.share = share
        self._changed[flow] = None
        self._plan_soon()

    def _remove(self, flow: Flow) -> None:
        del self._under_way[flow]
        flow.alarm.set(None)
        self._changed.pop(flow, None)
        for pipe in flow.pipes:
            load = self._loads[pipe]
            del load.flows[flow]
            load.wanted -= flow.share
            if load.is_tight:
                self._emptied[pipe] = None
            elif not load.flows:
                del self._loads[pipe]
        flow.rate = 0.0
        if flow.connection is not None:
            flow.connection.ended()
        if self._emptied:
            self._plan_soon()

    def _plan_soon(self) -> None:
        if not self._planning:
            self._planning = True
            self._kernel.at(self._kernel.now, self._plan)

    def _plan(self, _: object = None) -> None:
        self._planning = False
        began_with = self._changed
        group = self._group()
        loads = self._loads
        paths = [[p for p in flow.pipes if loads[p].is_tight] for flow in group]
        if any(paths):
            rates = max_min(paths, [flow.limit for flow in group])
        else:
            rates = [flow.limit for flow in group]
        connections: dict[Connection, None] = {}
        for flow, rate in zip(group, rates, strict=True):
            changes = rate != flow.rate
            if changes:
                self._progress(flow)
                flow.rate = rate
            if flow.connection is None:
                if changes:
                    self._set_alarm(flow)
            elif changes or flow in began_with:
                connections[flow.connection] = None
        for connection in connections:
            on_it = loads[connection.pipe].flows
            connection.judge(sum(flow.rate for flow in on_it), len(group) > CROWD)
            for flow in on_it:
                self._set_alarm(flow)

    def _group(self) -> list[Flow]:
        """What changed and all that it meets at links that bind, or have until now, by age."""
        found = dict(self._changed)
        links = dict.fromkeys(pipe for flow in found for pipe in flow.pipes) | self._emptied
        self._changed, self._emptied = {}, {}
        waiting = list(links)
        while waiting:
            pipe = waiting.pop()
            load = self._loads.get(pipe)
            if load is None:
                continue
            was_tight, load.is_tight = load.is_tight, load.binds(pipe)
            if not load.flows:
                del self._loads[pipe]
            elif was_tight or load.is_tight:
                for flow in load.flows:
                    if flow not in found:
                        found[flow] = None
                        for other in flow.pipes:
                            if other not in links:
                                links[other] = None
                                waiting.append(other)
        return sorted(found, key=lambda flow: flow.number)

    # ---- progress ------------------------------------------------------------------------------

    def _progress(self, flow: Flow) -> None:
        now = self._kernel.now
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since_s))
        flow.since_s = now

    def _set_alarm(self, flow: Flow) -> None:
        end_s = flow.since_s + flow.remaining / flow.rate if flow.rate > 0.0 else math.inf
        # A window that is about to grow makes another end: no need to wait for this one.
        until_s = math.inf if flow.connection is None else flow.connection.grows_at_s
        flow.alarm.set(end_s if end_s < math.inf and end_s <= until_s else None)

    def _due(self, flow: Flow) -> None:
        self._progress(flow)
        # Time has a resolution, too: what would end within it has ended.
        soon_s = 1e-12 * max(1.0, self._kernel.now)
        if flow.remaining > max(_DONE_BYTES, flow.rate * soon_s):
            self._set_alarm(flow)
            return
        flow.remaining = 0.0
        self._remove(flow)
        flow.left(flow)
