"""A fleet of simulated agents in one process: each has its own key, socket and connection.

Their heartbeats spread over the interval as real agents' do (``edge_agent.core.session``).
They speak the control plane's protocol and do no work: an offer is accepted at once and its result
is there ``work_s`` later. The same process stands in for the trajectory log, with its key: bodies
of ``BODY_BYTES`` go to a file that is synced before the scheduler hears of them, as the real one
does, but they need not travel there, and nobody fetches them.

What always holds: every message is real MessagePack over CURVE, one connection per agent; nothing
waits for one agent. Sockets are drained without asyncio: the agents are not what is measured.
"""

import hashlib
import heapq
import os
import random
import select
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from transport.envelope import encode
from transport.ids import Fence
from transport.messages import (
    KINDS,
    AgentInventory,
    BodiesGone,
    BodiesReleased,
    GroupSummary,
    Heartbeat,
    HeldAttempt,
    Hello,
    HelloRequired,
    LeaseOffer,
    LeaseOffers,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
    Message,
    Ping,
    Role,
    SummariesAccepted,
    TrajectoriesStored,
    VersionRef,
    Welcome,
)
from transport.zmq_socket import raise_file_limit

BODY_BYTES: Final = 1000
SUMMARIES_PER_MESSAGE: Final = 256
TURN_S: Final = 0.001
DIGEST: Final = "0" * 64


class Seen(msgspec.Struct):
    """What happened since the last question. ``offer_s`` are delays from submission to offer of
    external jobs, by the clock that both processes share."""

    ready: int = 0
    offers: int = 0
    offer_frames: int = 0
    results: int = 0
    refused: int = 0
    syncs_s: list[float] = []
    offer_s: list[float] = []


class Fleet(NamedTuple):
    """What the process is told; keys as (name, public, secret). Agents stand at ``sites`` in turn,
    nowhere when there are none; work takes ``work_s``, more or less by the share ``spread``."""

    endpoint: str
    server_key: str
    agents: tuple[tuple[str, str, str], ...]
    log_key: tuple[str, str]
    slots: int
    work_s: float
    policy: str
    folder: str
    sites: tuple[str, ...] = ()
    spread: float = 0.0


class _Offer(msgspec.Struct):
    """The part of an offer that an agent without an engine needs."""

    attempt: str
    fence: Fence
    job: str


class _Offers(msgspec.Struct):
    offers: list[_Offer]


_OFFER = msgspec.msgpack.Decoder(_Offer).decode
_OFFERS = msgspec.msgpack.Decoder(_Offers).decode


def submitted_ns(job: str) -> int | None:
    """When a job was submitted: the load writes it into the id, RUN/x-SUBMITTER.NANOSECONDS-N."""
    _, external, rest = job.partition("/x-")
    return int(rest.partition(".")[2].partition("-")[0]) if external else None


class _Peer:
    """A DEALER that is drained without waiting."""

    def __init__(self, context: "zmq.Context[Any]", fleet: Fleet, public: str, secret: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, fleet.server_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(fleet.endpoint)
        self.descriptor = int(self.socket.getsockopt(zmq.FD))

    def say(self, message: Message) -> None:
        self.socket.send_multipart(encode(message), zmq.NOBLOCK)

    def drain(self) -> Iterable[tuple[type[Message] | None, bytes]]:
        """Everything that is there: sending empties the mailbox too, so look again after it."""
        while True:
            try:
                prefix, header = self.socket.recv_multipart(zmq.NOBLOCK)[:2]
            except zmq.Again:
                return
            yield KINDS.get(prefix[1]), header


class _Agent(_Peer):
    def __init__(self, context: "zmq.Context[Any]", fleet: Fleet, index: int) -> None:
        self.name, public, secret = fleet.agents[index]
        super().__init__(context, fleet, public, secret)
        sites = fleet.sites
        self.labels = {"site": sites[index % len(sites)]} if sites else {}
        self.held: dict[str, Fence] = {}
        self.sequence = 0
        self.welcome = False


class _Process:
    """The loop of the process."""

    def __init__(self, fleet: Fleet, pipe: Any) -> None:
        self._fleet = fleet
        self._pipe = pipe
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(fleet.agents) + 64)
        self._epoll = select.epoll()
        self._seen = Seen()
        self._due: list[tuple[float, str, _Agent, _Offer]] = []
        self._beats: list[tuple[float, str, _Agent]] = []
        self._heartbeat_s = 2.0
        self._rng = random.Random(1)
        self._versions = {fleet.policy: VersionRef(version=0, digest=DIGEST)}
        self._log = _Peer(self._context, fleet, *fleet.log_key)
        self._log_said_s = 0.0
        self._to_sync: SimpleQueue[list[GroupSummary]] = SimpleQueue()
        self._synced: SimpleQueue[tuple[list[GroupSummary], float]] = SimpleQueue()
        self._made: list[GroupSummary] = []
        self._agents: dict[int, _Agent] = {}

    def run(self) -> None:
        threading.Thread(target=self._sync, daemon=True).start()
        self._epoll.register(self._log.descriptor, select.EPOLLIN)
        self._log.say(Hello(role=Role.SERVICE, incarnation=1, build="bench"))
        for index in range(len(self._fleet.agents)):
            agent = _Agent(self._context, self._fleet, index)
            self._agents[agent.descriptor] = agent
            self._epoll.register(agent.descriptor, select.EPOLLIN)
            agent.say(self._hello(agent))
        while True:
            for descriptor, _ in self._epoll.poll(TURN_S):
                if descriptor == self._log.descriptor:
                    self._log_heard()
                else:
                    self._agent_heard(self._agents[descriptor])
            now = time.monotonic()
            self._finish(now)
            self._beat(now)
            if self._pipe.poll():
                if self._pipe.recv() == "end":
                    return
                self._pipe.send(msgspec.msgpack.encode(self._seen))
                self._seen = Seen(ready=self._seen.ready)

    def _hello(self, agent: _Agent) -> Hello:
        inventory = AgentInventory(
            slots=self._fleet.slots,
            hardware="bench",
            engine="none",
            workflows={"single_turn": "1"},
            rewards=("exact",),
            versions=self._versions,
            labels=agent.labels,
        )
        return Hello(
            role=Role.AGENT, incarnation=1, build="bench", features=("offers",), agent=inventory
        )

    # ---- what arrives ------------------------------------------------------------------------

    def _agent_heard(self, agent: _Agent) -> None:
        for kind, header in agent.drain():
            if kind is LeaseOffers:
                self._offered(agent, _OFFERS(header).offers)
            elif kind is LeaseOffer:
                self._offered(agent, [_OFFER(header)])
            elif kind is LeaseRevoke:
                agent.held.pop(msgspec.msgpack.decode(header, type=LeaseRevoke).attempt, None)
            elif kind is HelloRequired:
                agent.say(self._hello(agent))
            elif kind is Welcome and not agent.welcome:
                welcome = msgspec.msgpack.decode(header, type=Welcome)
                self._heartbeat_s = welcome.heartbeat_s
                agent.welcome = True
                heapq.heappush(self._beats, (time.monotonic(), agent.name, agent))

    def _offered(self, agent: _Agent, offers: list[_Offer]) -> None:
        now = time.monotonic()
        seen, spread = self._seen, self._fleet.spread
        seen.offer_frames += 1
        seen.offers += len(offers)
        replies = []
        for offer in offers:
            agent.held[offer.attempt] = offer.fence
            replies.append(LeaseReply(attempt=offer.attempt, fence=offer.fence, accepted=True))
            at_ns = submitted_ns(offer.job)
            if at_ns is not None:
                seen.offer_s.append(now - at_ns / 1e9)
            due_s = now + self._fleet.work_s * self._rng.uniform(1.0 - spread, 1.0 + spread)
            heapq.heappush(self._due, (due_s, offer.attempt, agent, offer))
        agent.say(replies[0] if len(replies) == 1 else LeaseReplies(replies=tuple(replies)))

    def _log_heard(self) -> None:
        for kind, header in self._log.drain():
            if kind is HelloRequired:
                self._log.say(Hello(role=Role.SERVICE, incarnation=1, build="bench"))
            elif kind is SummariesAccepted:
                digests = msgspec.msgpack.decode(header, type=SummariesAccepted).digests
                self._seen.results += len(digests)
            elif kind is BodiesReleased:
                digests = msgspec.msgpack.decode(header, type=BodiesReleased).digests
                self._log.say(BodiesGone(digests=digests))

    # ---- what is due -------------------------------------------------------------------------

    def _finish(self, now: float) -> None:
        due, policy = self._due, self._fleet.policy
        while due and due[0][0] <= now:
            _, _, agent, offer = heapq.heappop(due)
            if agent.held.pop(offer.attempt, None) is None:
                self._seen.refused += 1
                continue
            self._made.append(
                GroupSummary(
                    attempt=offer.attempt,
                    fence=offer.fence,
                    job=offer.job,
                    digest=hashlib.sha256(offer.attempt.encode()).hexdigest(),
                    size_bytes=BODY_BYTES,
                    rewards=(1.0,),
                    lengths=(32,),
                    versions={policy: (0, 0)},
                    prompt_tokens=8,
                    queued_s=0.0,
                    generating_s=self._fleet.work_s,
                    agent=agent.name,
                )
            )
        if self._made and self._to_sync.empty():
            self._to_sync.put(self._made)
            self._made = []
        while not self._synced.empty():
            batch, took_s = self._synced.get()
            self._seen.syncs_s.append(took_s)
            for start in range(0, len(batch), SUMMARIES_PER_MESSAGE):
                some = tuple(batch[start : start + SUMMARIES_PER_MESSAGE])
                self._log.say(TrajectoriesStored(summaries=some))

    def _beat(self, now: float) -> None:
        beats = self._beats
        if now - self._log_said_s >= self._heartbeat_s:
            self._log_said_s = now
            self._log.say(Ping(sequence=1, sent_s=now))
        while beats and beats[0][0] <= now:
            _, _, agent = heapq.heappop(beats)
            if not agent.sequence:
                self._seen.ready += 1
            agent.sequence += 1
            held = tuple(HeldAttempt(attempt=a, fence=f) for a, f in agent.held.items())
            agent.say(
                Heartbeat(
                    sequence=agent.sequence,
                    sent_s=now,
                    held=held,
                    running_sequences=len(held),
                    versions=self._versions,
                )
            )
            spread = self._rng.uniform(0.5, 1.5) if agent.sequence == 1 else 1.0
            heapq.heappush(beats, (now + self._heartbeat_s * spread, agent.name, agent))

    def _sync(self) -> None:
        """In its own thread: bodies to disk."""
        path = Path(self._fleet.folder) / "bodies"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        body = os.urandom(BODY_BYTES)
        while True:
            batch = self._to_sync.get()
            began = time.perf_counter()
            os.write(descriptor, body * len(batch))
            os.fdatasync(descriptor)
            self._synced.put((batch, time.perf_counter() - began))


def run_fleet(fleet: Fleet, pipe: Any) -> None:
    """The process; ``pipe`` answers any question with ``Seen``, and "end" ends it."""
    raise_file_limit()
    _Process(fleet, pipe).run()
