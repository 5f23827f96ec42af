"""An agent's uplink alone: the production's spool, core, uploader and links, and nothing that makes
groups. The spool is filled before the start.

What always holds: what the core wants for the trajectories plane is done as the agent's shell does
it; everything else that it wants is left undone, since there is nobody else here.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_agent.core.effects import (
    DropSpooled,
    Effect,
    OfferBodies,
    RemakeLink,
    ToTrajectoryLog,
)
from edge_agent.core.events import Event, FromTrajectoryLog, LinkDown, LinkUp, Tick
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from edge_agent.spool import Spool
from edge_agent.uploader import Uploader
from transport.keys import KeyPair
from transport.links import Network
from transport.messages import ChunkRequest, GroupSummary, Message, Plane
from transport.plane_links import PlaneLinks
from transport.runtime.settings import TransportConfig
from transport.trajectory import body_digest

PLANE = Plane.TRAJECTORIES
SPOOL_BYTES = 2**33
_MIN_WAIT_S = 0.001


class Uplink:
    """Sends all that ``spool`` holds; made inside the running loop. ``heard`` is told of every
    message from the log."""

    def __init__(
        self,
        network: Network,
        transport: TransportConfig,
        spool: Spool,
        *,
        key: KeyPair | None,
        server_key: str | None,
        heard: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.spool = spool
        self.links = PlaneLinks(network, transport, key=key, server_key=server_key, planes=(PLANE,))
        settings = AgentSettings(slots=1)
        self.core = AgentCore(
            settings,
            incarnation=1,
            build="bench",
            rng=random.Random(0),
            spooled=spool.entries(),
            now=self._loop.time(),
        )
        self._heard = heard
        self._uploader = Uploader(self.links, spool, self.feed)
        self._timer: asyncio.TimerHandle | None = None
        self._events: list[Event] = []
        self._handling = False
        self._drops: set[asyncio.Task[None]] = set()
        self.empty = asyncio.Event()
        self._tasks = [
            self._loop.create_task(self.links.receive(PLANE, self._from_log)),
            self._loop.create_task(self.links.watch(PLANE, self._changed)),
            self._loop.create_task(self._uploader.run()),
        ]
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            for effect in self.core.handle(self._events.pop(0), self._loop.time()):
                self._perform(effect)
        self._handling = False
        if self._timer is not None:
            self._timer.cancel()
        due = self.core.next_deadline()
        if due is not None:
            wait_s = max(_MIN_WAIT_S, due - self._loop.time())
            self._timer = self._loop.call_later(wait_s, self.feed, Tick())
        if not self.core.status().spooled:
            self.empty.set()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ToTrajectoryLog(summary=summary):
                self._uploader.put(summary)
            case OfferBodies(summaries=summaries):
                self._uploader.offer(summaries)
            case RemakeLink(plane=plane) if plane is PLANE:
                self._uploader.clear()
                self.links.renew(plane)
            case DropSpooled(digest=digest):
                self._uploader.dropped(digest)
                drop = self._loop.create_task(asyncio.to_thread(self.spool.drop, digest))
                self._drops.add(drop)
                drop.add_done_callback(self._drops.discard)
            case _:
                pass

    def _from_log(self, message: Message, payload: list[bytes]) -> None:
        self._heard(message)
        if isinstance(message, ChunkRequest):
            self._uploader.asked(message)
        self.feed(FromTrajectoryLog(message=message))

    def _changed(self, plane: Plane, up: bool) -> None:
        self._uploader.clear()
        self.feed(LinkUp(plane=plane) if up else LinkDown(plane=plane))

    async def close(self) -> None:
        """As a crash would: nothing is finished but what the disk is doing."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._drops, return_exceptions=True)
        await self.links.close()


def fill(folder: Path, bodies: int, size_bytes: int, *, seed: int = 0) -> None:
    """A spool of random bodies (nothing compresses them), with summaries that the log takes. It is
    to be opened anew, as an agent finds it when it starts."""
    spool = Spool(folder, SPOOL_BYTES)
    source = np.random.default_rng(seed)
    for number in range(bodies):
        body = source.bytes(size_bytes)
        job = f"bench/t-{seed:04d}{number:06d}"
        summary = GroupSummary(
            attempt=f"{job}#1",
            fence=(1, number),
            job=job,
            digest=body_digest(body),
            size_bytes=size_bytes,
            rewards=(1.0,) * 8,
            lengths=(2048,) * 8,
            versions={"bench/solver": (0, 1)},
            prompt_tokens=96,
            queued_s=0.0,
            generating_s=1.0,
        )
        spool.put(summary, body)
