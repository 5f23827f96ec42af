"""The control plane of a deployment without a core, for tests about keys: it welcomes whoever may
speak and keeps what it said."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from service_world import PlaneLink

from scheduler.control_plane import ControlPlane
from scheduler.core.events import FromAgent
from scheduler.signer_book import SignerBook
from transport.keys import DeploymentKeys, create_keys
from transport.links import ServerKeys
from transport.messages import Hello, Plane, Welcome
from transport.plane_hub import PlaneHub
from transport.plane_links import link_options
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.settings import TransportConfig
from transport.zmq_links import ZmqNetwork

POLICY = "run/solver"
WAIT_S = 8.0


class KeyCloud:
    """Agents a and b, one trainer; ``start`` may be called again after ``stop``."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.folder = folder
        self.clock = clock or SystemClock()
        self.keys_folder = folder / "cloud"
        self.keys: DeploymentKeys = create_keys(
            self.keys_folder, agents=["a", "b"], trainers=[POLICY]
        )
        self.network = ZmqNetwork()
        self.box_network = ZmqNetwork()
        self.events: list[FromAgent] = []
        self.links: list[PlaneLink] = []
        self.heartbeat_s = 0.2
        self.port = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, plane: Plane = Plane.CONTROL) -> None:
        self.hub = PlaneHub(
            self.network,
            plane,
            TransportConfig(keys=str(self.keys_folder)),
            port=self.port,
            port_file=self.folder / f"{plane.value}-port",
            clock=SystemClock(),
        )
        self.port = self.hub.port
        self.plane = ControlPlane(self.hub, self.clock)
        self.plane.book = SignerBook(self.keys_folder)
        self._tasks = [
            asyncio.create_task(self._serve()),
            asyncio.create_task(self.hub.keep_refreshing()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hub.close()

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await self.stop()
        await self.network.close()
        await self.box_network.close()

    async def _serve(self) -> None:
        while True:
            for arrival in await self.hub.recv():
                event = self.plane.event(arrival)
                if event is None:
                    continue
                assert isinstance(event, FromAgent)
                self.events.append(event)
                if isinstance(arrival.message, Hello):
                    welcome = Welcome(
                        term=1, heartbeat_s=self.heartbeat_s, lost_after_s=9.0, policies=(POLICY,)
                    )
                    self.plane.send(arrival.peer.name, welcome)

    def box(self, name: str = "box") -> Path:
        """A box's own folder of keys, as enrolment leaves it."""
        folder = self.folder / name
        (folder / "signers").mkdir(parents=True)
        for file in ("server.public.toml", "root.public.toml"):
            (folder / file).write_text((self.keys_folder / file).read_text())
        return folder

    def link(
        self,
        agent: str = "a",
        server_key: str | ServerKeys | None = None,
        plane: Plane = Plane.CONTROL,
    ) -> PlaneLink:
        options = link_options(TransportConfig(), plane)
        link = PlaneLink(
            self.box_network.link(
                f"tcp://127.0.0.1:{self.port}",
                options._replace(reconnect_s=0.02, reconnect_max_s=0.1),
                key=self.keys.agents[agent],
                server_key=server_key or self.keys.server.public_key,
            ),
            plane,
        )
        self.links.append(link)
        return link

    def heard(self, kind: type) -> int:
        return sum(isinstance(event.message, kind) for event in self.events)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0.005)
