"""Who is who on the control plane: routes to names, messages to events.

What always holds: a peer's name is its key's; a name belongs to the route that said ``Hello``
last (an agent's only while no other process speaks with its key, ``scheduler.speakers``), and what
comes over another route is answered with ``HelloRequired`` and goes no further;
operators need no hello, each of their requests is answered on the route it came from. What cannot
be sent is counted: the core repeats what matters until it is confirmed. A heartbeat's reply says
when the heartbeat came and when the reply left, by our wall clock: deciding and committing are no
part of anybody's round trip.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from scheduler.core.events import Event, FromAgent, FromOperator, FromService, FromTrainer
from scheduler.speakers import Speakers, duplicate
from transport.envelope import CONTROL_FRAME_BYTES
from transport.messages import (
    FEATURE_OFFERS,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    HostedPolicies,
    Message,
    Probe,
    ProbeReply,
    Refuse,
    Role,
    StatusReply,
    Welcome,
)
from transport.plane_hub import Arrival, PlaneHub
from transport.runtime.build import installed_build
from transport.runtime.clock import Clock
from transport.status import AgentStatus, Alert, SchedulerStatus

if TYPE_CHECKING:
    from scheduler.signer_book import SignerBook

MAX_REQUESTS: Final = 10_000
"""Operators' requests without an answer yet; older ones are forgotten, and asked again."""

Gauges = Callable[[], dict[str, int]]
Standing = Callable[[Sequence[AgentStatus]], tuple[Alert, ...]]

_log = structlog.get_logger()


class ControlPlane:
    """Turns arrivals into events and effects into messages."""

    def __init__(self, hub: PlaneHub, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._build = installed_build()
        self._speakers = Speakers()
        self._told: dict[str, str] = {}
        """The next server key that each agent was told last."""
        self._hosted: dict[str, tuple[str, ...]] = {}
        self.book: SignerBook | None = None
        """Whose certificates agents are to be told."""
        self._beats: dict[str, tuple[int, float]] = {}
        self._routes: dict[str, bytes] = {}
        self._features: dict[str, frozenset[str]] = {}
        self._requests: dict[int, bytes] = {}
        self._next_request = 1
        self.counters: Counter[str] = Counter()
        self.gauges: Gauges = dict
        self.alerts: Standing = lambda _agents: ()
        """What the daemon adds to a status."""

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
            if peer.role is Role.AGENT and not self._may_speak(route, peer.name, message):
                return None
            if self._routes.get(peer.name) != route:
                _log.debug("peer.route", peer=peer.name)
            self._routes[peer.name] = route
            self._features[peer.name] = frozenset(message.features)
        elif isinstance(message, Probe):
            self.counters["probes"] += 1
            self._hub.send(route, self._probed(peer.name, message))
            return None
        elif self._routes.get(peer.name) != route:
            self.counters["hello_required"] += 1
            if not isinstance(message, Goodbye):
                self._hub.send(route, HelloRequired())
            return None
        match peer.role:
            case Role.AGENT:
                self._speakers.heard(peer.name, self._clock.monotonic_s())
                if isinstance(message, Heartbeat):
                    self._beats[peer.name] = (message.sequence, self._clock.wall_s())
                return FromAgent(peer.name, message)
            case Role.TRAINER:
                return FromTrainer(peer.name, message)
            case Role.SERVICE:
                return FromService(peer.name, message)
            case Role.SCHEDULER | Role.RELAY | Role.SUBMITTER:  # nothing else to say here
                return None

    def takes_offers(self, peer: str) -> bool:
        """Whether the peer understands several offers in one message."""
        return FEATURE_OFFERS in self._features.get(peer, ())

    def send(self, peer: str, message: Message) -> None:
        """Hand a message to a peer, wherever it was heard from last."""
        if isinstance(message, HeartbeatReply):
            message = self._stamped(peer, message)
        elif isinstance(message, Welcome | HostedPolicies) and peer in self._speakers:
            message = self._with_signers(peer, message)
        route = self._routes.get(peer)
        if route is None:
            self.counters["send.unknown_peer"] += 1
            _log.debug("peer.not_connected", peer=peer, message=type(message).__name__)
        elif not self._hub.send(route, message):
            self.counters["send.lost"] += 1
        elif isinstance(message, Welcome):
            self._tell_next_key(peer)

    def keys_changed(self) -> None:
        """Tell every agent what the book says now."""
        for peer in self._speakers.names():
            hosted = self._hosted.get(peer)
            if hosted:
                self.send(peer, HostedPolicies(policies=hosted))
            self._tell_next_key(peer)

    def reply(self, request: int, message: Message) -> None:
        """Answer an operator's request; one that was forgotten is asked again."""
        route = self._requests.pop(request, None)
        if route is None:
            self.counters["send.unknown_request"] += 1
            return
        if isinstance(message, StatusReply):
            status = message.status
            status = msgspec.structs.replace(
                status,
                counters={**status.counters, **self._wire_counters(), **self.gauges()},
                alerts=(*status.alerts, *self.alerts(status.agents)),
            )
            message = StatusReply(status=fitting(status))
        self._hub.send(route, message)

    def _may_speak(self, route: bytes, name: str, hello: Hello) -> bool:
        """Take a hello's process as the one that speaks for ``name``, or refuse it."""
        now = self._clock.monotonic_s()
        other = self._speakers.other_route(name, hello, now)
        if other is not None and other[0] != route and self._hub.reachable(other[0]):
            self.counters["refused.agent.duplicate"] += 1
            _log.warning("agent.duplicate", agent=name)
            self._hub.send(route, duplicate(name, other[1]))
            return False
        self._speakers.took(name, route, hello, now)
        return True

    def _with_signers(
        self, peer: str, message: Welcome | HostedPolicies
    ) -> Welcome | HostedPolicies:
        self._hosted[peer] = message.policies
        if isinstance(message, Welcome):
            self._speakers.beats(peer, message.heartbeat_s)
        signers = () if self.book is None else self.book.of(message.policies)
        return msgspec.structs.replace(message, signers=signers) if signers else message

    def _tell_next_key(self, peer: str) -> None:
        route = self._routes.get(peer)
        if self.book is None or self.book.following is None or route is None:
            return
        if peer in self._speakers and self._hub.send(route, self.book.following):
            self._told[peer] = self.book.following.public_key

    def next_key_counts(self) -> dict[str, int]:
        """During a change of the server's key: how many agents that are connected were told the
        next one, and how many were not."""
        if self.book is None or self.book.following is None:
            return {}
        key = self.book.following.public_key
        here = [
            name
            for name in self._speakers.names()
            if name in self._routes and self._hub.reachable(self._routes[name])
        ]
        told = sum(self._told.get(name) == key for name in here)
        return {"server_key.told_next": told, "server_key.not_told_next": len(here) - told}

    def _probed(self, name: str, probe: Probe) -> ProbeReply:
        now_s = self._clock.wall_s()
        bound = self._routes.get(name)
        return ProbeReply(
            sequence=probe.sequence,
            sent_s=probe.sent_s,
            received_s=now_s,
            replied_s=self._clock.wall_s(),
            build=self._build,
            name=name,
            known=bound is not None and self._hub.reachable(bound),
        )

    def _stamped(self, peer: str, reply: HeartbeatReply) -> HeartbeatReply:
        """Only a peer's latest heartbeat is remembered: an earlier one teaches nothing more."""
        sequence, received_s = self._beats.get(peer, (-1, 0.0))
        if sequence != reply.sequence:
            return reply
        del self._beats[peer]
        return msgspec.structs.replace(reply, received_s=received_s, replied_s=self._clock.wall_s())

    def _wire_counters(self) -> dict[str, int]:
        """What was turned away before it became an event, and what could not be sent."""
        found = {**self._hub.counters, **self.counters, **self.next_key_counts()}
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
    before = status.counters.get("status.agents_left_out", 0)
    while shown and not _fits(status):
        shown = shown * 3 // 4
        left_out = len(everybody) - shown
        status = msgspec.structs.replace(
            status,
            agents=everybody[:shown],
            counters={**status.counters, "status.agents_left_out": before + left_out},
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
