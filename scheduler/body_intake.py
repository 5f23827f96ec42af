"""Large bodies on their way from the agents into the trajectory log, chunk by chunk.

What always holds: the log decides what is sent and when, within each agent's own delay-controlled
window, so that agents share what there is and none delays another; a body is handed on once it is
whole, its digest not yet compared, and nobody is told of it here: only the log's own sync makes it
durable; what is there is not asked for again, whichever end was restarted or cut off. Chunks stay
in memory while their body comes in quickly; those of one that does not are written beside the log
after ``SPILL_S``, or at once where memory is short, unsynced: they outlive this process but not a
power cut, and each is hashed before it is believed after a restart. Partial bodies take at most
``MAX_PARTIAL_BYTES`` of disk: the oldest that nobody is sending go first. A body that does not
arrive is dropped in silence, and the agent offers it again.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from scheduler.incoming_body import (
    Incoming,
    chunks_fault,
    partial_entry,
    read_whole,
    write_chunks,
)
from scheduler.service import Worker
from transport.chunk_exchange import ChunkExchange
from transport.chunk_parts import ChunkSource, WantedChunk
from transport.delivery_window import DeliveryWindow
from transport.envelope import encode
from transport.errors import StoreError
from transport.fair_sender import FairSender
from transport.messages import Chunk, ChunkRequest, GroupSummary, OfferedBody
from transport.plane_hub import PlaneHub
from transport.runtime.clock import Clock
from transport.summaries import summary_fault
from transport.weights.blobs import BlobFolder
from transport.weights.tensors import Buffer

MAX_PARTIAL_BYTES: Final = 2**30
MAX_OFFERED: Final = 1024
"""Bodies of one agent that are known and not durable; it offers the others again."""
MAX_BEGUN: Final = 64
"""Bodies of one agent that are asked for at a time."""
ABANDON_S: Final = 60.0
"""An agent from which nothing comes for so long has to offer again."""
SPILL_S: Final = 0.5
MAX_HELD_BYTES: Final = 64 * 2**20
"""Chunks in memory, of all agents together, before the oldest ones are written."""
AGENT: Final = "agent"
"""The one source of a body."""
_PART: Final = ".part"

_log = structlog.get_logger()


@dataclass(slots=True)
class _Agent:
    name: str
    route: bytes
    window: DeliveryWindow
    exchange: ChunkExchange
    bodies: dict[str, Incoming] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: float = 0.0

    @property
    def open(self) -> bool:
        return any(not body.whole for body in self.bodies.values())


class BodyIntake:
    """``folder`` is for partial bodies. ``hand_on`` takes a whole body, whose digest is not
    compared yet, with its agent and the route to answer on, and ``settled`` is to be called with
    what became of it; ``has_room`` says whether the log would take a body of that size; ``queued``
    hears after ``queued_bytes`` changed.

    Raises:
        StoreError: the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        hub: PlaneHub,
        clock: Clock,
        *,
        hand_on: Callable[[str, bytes, GroupSummary, bytes], None],
        has_room: Callable[[int], bool],
        queued: Callable[[], None],
    ) -> None:
        self._blobs = BlobFolder(folder)
        self._requests: FairSender[ChunkRequest] = FairSender(hub.send_frames, _frames)
        self._clock = clock
        self._hand_on = hand_on
        self._has_room = has_room
        self._queued = queued
        self._disk = Worker("body-intake")
        self._agents: dict[str, _Agent] = {}
        self._windows: dict[str, DeliveryWindow] = {}
        self._started: asyncio.Queue[_Agent] = asyncio.Queue()
        self._partials: OrderedDict[str, int] = OrderedDict()  # oldest first; bytes of each
        self._in_use: Counter[str] = Counter()
        self._removals: set[asyncio.Task[None]] = set()
        self.queued_bytes = 0
        """Chunks in memory."""
        self.counters: Counter[str] = Counter()
        self._find_partials(folder)

    def _find_partials(self, folder: Path) -> None:
        parts = sorted((path.stat().st_mtime, path) for path in folder.glob(f"*{_PART}"))
        for _, path in parts:
            self._partials[path.name.removesuffix(_PART)] = path.stat().st_size

    # ---- what arrives -------------------------------------------------------------------------

    def offered(self, name: str, route: bytes, body: OfferedBody) -> str:
        """An agent has a body that the log lacks; says what is wrong with that, or nothing."""
        summary = body.summary
        fault = summary_fault(summary) or chunks_fault(body)
        if fault:
            return fault
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = self._new_agent(name, route)
            self._started.put_nowait(agent)
        elif agent.route != route:
            agent.route = route
            agent.exchange.source_up(AGENT)  # what was on the way over the last link is lost
        agent.heard_s = self._clock.monotonic_s()
        known = agent.bodies.get(summary.digest)
        if known is not None:
            known.route = route
        elif len(agent.bodies) < MAX_OFFERED:
            agent.bodies[summary.digest] = Incoming(summary, route, partial_entry(name, body))
        else:
            self.counters["over_limit"] += 1
        agent.wake.set()
        return ""

    def _new_agent(self, name: str, route: bytes) -> _Agent:
        window = self._windows.setdefault(name, DeliveryWindow())
        return _Agent(name, route, window, ChunkExchange([ChunkSource(AGENT, window)]))

    def chunk_arrived(self, name: str, chunk: Chunk, payload: list[bytes]) -> None:
        """A piece of a body; the next ones are asked for at once."""
        agent = self._agents.get(name)
        if agent is None:
            self.counters["chunk.not_expected"] += 1
            return
        now = agent.heard_s = self._clock.monotonic_s()
        if not chunk.found or not payload:
            agent.exchange.not_found(AGENT, chunk.digest, chunk.index, chunk.part_bytes)
            agent.wake.set()
            return
        found = agent.exchange.received(
            AGENT, chunk.digest, chunk.index, chunk.part_bytes, payload[0], now
        )
        if found is not None:
            self._keep(agent, *found, now)
        self._ask(agent)

    def _keep(self, agent: _Agent, wanted: WantedChunk, data: Buffer, now: float) -> None:
        """The connection is authenticated and the whole body's digest is compared before it is
        stored, so that this one is not."""
        body = agent.bodies.get(wanted.file_digest)
        if not agent.exchange.verified(wanted, data, right=True) or body is None:
            return
        if body.missing is None or wanted.number not in body.missing:
            return
        if not body.held:
            body.held_s = now
            agent.wake.set()  # it may have to be written in time
        body.held[wanted.number] = data
        body.missing.discard(wanted.number)
        self._count(len(data))
        if len(body.held) == len(body.entry.chunk_digests):
            whole = b"".join(body.held[index] for index in range(len(body.held)))
            self._hand_over(agent, body, whole)
        if not body.missing or self.queued_bytes > MAX_HELD_BYTES:
            agent.wake.set()

    def settled(self, name: str, digest: str, *, keep: bool) -> bytes | None:
        """The log is done with a body that was handed on. ``keep``: there was no room for it, and
        when it is offered again it shall be here. Returns the route to answer on, None for a body
        that did not come this way."""
        agent = self._agents.get(name)
        body = None if agent is None else agent.bodies.get(digest)
        if agent is None or body is None or not body.whole:
            return None
        del agent.bodies[digest]
        self._let_go(body, keep=keep)
        agent.wake.set()
        return body.route

    def look_again(self) -> None:
        """There may be room now."""
        for agent in self._agents.values():
            agent.wake.set()

    # ---- the background -----------------------------------------------------------------------

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"intake": self._run(), "requests": self._requests.run()}

    async def close(self) -> None:
        await asyncio.gather(*self._removals)
        await asyncio.to_thread(self._disk.close)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # a bug in one ends the process, not only it
            while True:
                agent = await self._started.get()
                tasks.create_task(self._bring_in(agent), name=f"bodies of {agent.name}")

    async def _bring_in(self, agent: _Agent) -> None:
        try:
            while agent.bodies:
                await self._begin(agent)
                self._ask(agent)
                self._drop_failed(agent)
                now = self._clock.monotonic_s()
                if agent.open and now - agent.heard_s >= ABANDON_S:
                    self.counters["abandoned"] += 1
                    break
                deadline = agent.exchange.next_deadline()
                if deadline is None:
                    deadline = (agent.heard_s if agent.open else now) + ABANDON_S
                if any(body.held for body in agent.bodies.values()):
                    deadline = min(deadline, now + SPILL_S)
                await _wait(agent.wake, min(max(0.0, deadline - now), ABANDON_S))
                await self._spill(agent)
        except StoreError as error:  # its bodies stay in the agent's spool and are offered again
            self.counters["disk"] += 1
            _log.error("body.not_written", agent=agent.name, reason=str(error))
        finally:
            del self._agents[agent.name]
            for body in agent.bodies.values():
                self._let_go(body, keep=True)

    def _ask(self, agent: _Agent) -> None:
        """What a connection that is gone was asked for is asked for again when the agent offers
        over another one, or in time."""
        for _, request in agent.exchange.next_requests(self._clock.monotonic_s()):
            self._requests.ask(agent.route, request)

    async def _begin(self, agent: _Agent) -> None:
        """Want chunks of the next bodies, as many as keep the window full."""
        begun = [b for b in agent.bodies.values() if b.missing is not None and not b.whole]
        ahead_bytes = sum(len(b.missing or ()) * b.entry.chunk_bytes for b in begun)
        count = len(begun)
        for body in [b for b in agent.bodies.values() if b.missing is None]:
            enough = ahead_bytes >= 2 * agent.window.limit_bytes()
            if (begun and enough) or count >= MAX_BEGUN or not await self._reserve(body):
                return
            present = await self._disk.run(self._blobs.present, body.entry)
            every = range(len(body.entry.chunk_digests))
            body.missing = {index for index in every if index not in present}
            self.counters["chunks.resumed"] += len(present)
            for index in sorted(body.missing):
                agent.exchange.want(body.wanted(index))
            begun.append(body)
            count += 1
            ahead_bytes += len(body.missing) * body.entry.chunk_bytes
            if not body.missing:
                agent.wake.set()

    async def _reserve(self, body: Incoming) -> bool:
        """Room on disk for a body, made by removing older ones that nobody is sending."""
        if not self._has_room(body.entry.size_bytes):
            return False
        name = body.entry.digest
        total = sum(self._partials.values()) - self._partials.get(name, 0)
        for old in [old for old in self._partials if old != name and not self._in_use[old]]:
            if total + body.entry.size_bytes <= MAX_PARTIAL_BYTES:
                break
            total -= self._partials.pop(old)
            await self._disk.run(self._blobs.remove, old)
        if total and total + body.entry.size_bytes > MAX_PARTIAL_BYTES:
            return False
        self._partials[name] = body.entry.size_bytes
        self._in_use[name] += 1
        return True

    async def _spill(self, agent: _Agent) -> None:
        """Write what has been in memory for long, or too much; hand on what is whole now."""
        for body in [body for body in agent.bodies.values() if body.missing is not None]:
            if body.whole:
                continue
            due = self._clock.monotonic_s() >= body.held_s + SPILL_S
            if body.held and (due or not body.missing or self.queued_bytes > MAX_HELD_BYTES):
                chunks = dict(body.held)
                await self._disk.run(write_chunks, self._blobs, body.entry, chunks)
                self._let_go_of_chunks(body, chunks)
            if not (body.missing or body.held or body.whole):
                data = await self._disk.run(read_whole, self._blobs, body.entry)
                self._hand_over(agent, body, data)

    def _hand_over(self, agent: _Agent, body: Incoming, data: bytes) -> None:
        self._let_go_of_chunks(body, dict(body.held))
        body.whole = True
        self.counters["bodies"] += 1
        self._hand_on(agent.name, body.route, body.summary, data)

    def _let_go_of_chunks(self, body: Incoming, chunks: dict[int, Buffer]) -> None:
        """These are on disk, or not wanted any more."""
        for index, data in chunks.items():
            if body.held.pop(index, None) is not None:
                self._count(-len(data))
        body.held_s = self._clock.monotonic_s()

    def _drop_failed(self, agent: _Agent) -> None:
        """Bodies that the agent does not have (any more) or that never arrive right."""
        for digest, _ in agent.exchange.failed:
            body = agent.bodies.pop(digest, None)
            if body is None:
                continue
            self.counters["failed"] += 1
            for index in body.missing or ():
                agent.exchange.forget((digest, index))
            self._let_go(body, keep=False)
        agent.exchange.failed.clear()

    def _let_go(self, body: Incoming, *, keep: bool) -> None:
        name = body.entry.digest
        self._let_go_of_chunks(body, dict(body.held))
        if body.missing is None:
            return
        self._in_use[name] -= 1
        if self._in_use[name] <= 0:
            del self._in_use[name]
            if not keep:
                self._partials.pop(name, None)
                removal = asyncio.get_running_loop().create_task(self._remove(name))
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)

    async def _remove(self, name: str) -> None:
        try:
            await self._disk.run(self._blobs.remove, name)
        except StoreError as error:
            _log.warning("body.partial_not_removed", reason=str(error))

    def _count(self, more_bytes: int) -> None:
        self.queued_bytes += more_bytes
        self._queued()


async def _frames(request: ChunkRequest) -> Sequence[bytes]:
    return encode(request)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
