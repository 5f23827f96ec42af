"""Who is who on the control plane: routes to names, messages to events.

What always holds: a peer's name is its key's; a name belongs to the route that said ``Hello``
last, and what comes over another route is answered with ``HelloRequired`` and goes no further;
operators need no hello, each of their requests is answered on the route it came from. What cannot
be sent is counted: the core repeats what matters until it is confirmed.
"""

from collections import Counter
from typing import Final

import msgspec
import structlog

from scheduler.core.events import Event, FromAgent, FromOperator, FromService, FromTrainer
from transport.envelope import CONTROL_FRAME_BYTES
from transport.messages import (
    Goodbye,
    Hello,
    HelloRequired,
    Message,
    Refuse,
    Role,
    StatusReply,
)
from transport.plane_hub import Arrival, PlaneHub
from transport.status import SchedulerStatus

MAX_REQUESTS: Final = 10_000
"""Operators' requests without an answer yet; older ones are forgotten, and asked again."""

_log = structlog.get_logger()


class ControlPlane:
    """Turns arrivals into events and effects into messages."""

    def __init__(self, hub: PlaneHub) -> None:
        self._hub = hub
        self._routes: dict[str, bytes] = {}
        self._requests: dict[int, bytes] = {}
        self._next_request = 1
        self.counters: Counter[str] = Counter()

    def event(self, arrival: Arrival) -> Event | None:
        """The event that a message is; None when it stops here."""
        route, peer, message, _ = arrival
        if peer.role in (Role.OPERATOR, Role.VIEWER, Role.SUBMITTER):
            return self._request(route, peer.name, message)
        if isinstance(message, Hello):
            if message.role is not peer.role:
                reason = f"the key of {peer.name!r} has role {peer.role.value}, not {message.role}"
                self._hub.send(route, Refuse(code="role.mismatch", message=reason))
                return None
            if self._routes.get(peer.name) != route:
                _log.debug("peer.route", peer=peer.name)
            self._routes[peer.name] = route
        elif self._routes.get(peer.name) != route:
            self.counters["hello_required"] += 1
            if not isinstance(message, Goodbye):
                self._hub.send(route, HelloRequired())
            return None
        match peer.role:
            case Role.AGENT:
                return FromAgent(peer.name, message)
            case Role.TRAINER:
                return FromTrainer(peer.name, message)
            case Role.SERVICE:
                return FromService(peer.name, message)
            case Role.SCHEDULER | Role.RELAY | Role.SUBMITTER:  # nothing else to say here
                return None

    def send(self, peer: str, message: Message) -> None:
        """Hand a message to a peer, wherever it was heard from last."""
        route = self._routes.get(peer)
        if route is None:
            self.counters["send.unknown_peer"] += 1
            _log.debug("peer.not_connected", peer=peer, message=type(message).__name__)
        elif not self._hub.send(route, message):
            self.counters["send.lost"] += 1

    def reply(self, request: int, message: Message) -> None:
        """Answer an operator's request; one that was forgotten is asked again."""
        route = self._requests.pop(request, None)
        if route is None:
            self.counters["send.unknown_request"] += 1
            return
        if isinstance(message, StatusReply):
            status = message.status
            counters = {**status.counters, **self._wire_counters()}
            status = msgspec.structs.replace(status, counters=counters)
            message = StatusReply(status=fitting(status))
        self._hub.send(route, message)

    def _wire_counters(self) -> dict[str, int]:
        """What was turned away before it became an event, and what could not be sent."""
        found = {**self._hub.counters, **self.counters}
        return {f"control.{name}": found[name] for name in sorted(found)}

    def _request(self, route: bytes, name: str, message: Message) -> FromOperator:
        number = self._next_request
        self._next_request += 1
        self._requests[number] = route
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        return FromOperator(name, number, message)


def fitting(status: SchedulerStatus) -> SchedulerStatus:
    """A status that fits one control frame: of a very large fleet only the first agents, of very
    many runs only the latest, and counters ``status.agents_left_out`` and ``status.runs_left_out``
    that say so."""
    everybody = status.agents
    shown = len(everybody)
    while shown and not _fits(status):
        shown = shown * 3 // 4
        left_out = len(everybody) - shown
        status = msgspec.structs.replace(
            status,
            agents=everybody[:shown],
            counters={**status.counters, "status.agents_left_out": left_out},
        )
    runs = status.runs
    shown = len(runs)
    while shown and not _fits(status):
        shown = shown * 3 // 4
        left_out = len(runs) - shown
        status = msgspec.structs.replace(
            status,
            runs=runs[left_out:],
            counters={**status.counters, "status.runs_left_out": left_out},
        )
    return status


def _fits(status: SchedulerStatus) -> bool:
    return len(msgspec.msgpack.encode(status)) <= CONTROL_FRAME_BYTES - 1024
