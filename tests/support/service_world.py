"""A deployment's keys and peers around one service process, over real CURVE sockets."""

import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from scheduler.config import SchedulerConfig, SchedulerTable
from transport.envelope import LIMITS, decode, encode
from transport.errors import WindowFull
from transport.keys import KeyPair, create_keys, load_server_key
from transport.links import Link
from transport.messages import Hello, Message, Ping, Plane, Pong, Welcome
from transport.plane_hub import PlaneHub
from transport.plane_links import link_options
from transport.runtime.clock import SystemClock
from transport.runtime.settings import TransportConfig
from transport.zmq_links import ZmqNetwork

POLICY = "sums/solver"
WAIT_S = 10.0


async def until(condition: Callable[[], bool], what: str = "condition") -> None:
    """Poll a condition; the interval bounds the test's delay, not its outcome."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


class PlaneLink:
    """One peer's link to a plane: sends messages, keeps what arrives."""

    def __init__(self, link: Link, plane: Plane) -> None:
        self.link = link
        self.plane = plane
        self.received: list[tuple[Message, list[bytes]]] = []
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            for frames in await self.link.recv():
                self.received.append(decode(frames, LIMITS[self.plane]))

    async def send(self, message: Message, payload: Sequence[bytes] = ()) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.link.wait_connected()
        await until(lambda: self._try(encode(message, payload, LIMITS[self.plane])), "sent")

    def _try(self, frames: list[bytes]) -> bool:
        try:
            self.link.send(frames)
        except WindowFull:
            return False
        return True

    async def expect(self, kind: type[Message], count: int = 1) -> list[Message]:
        """The first ``count`` messages of a kind, taken out of what arrived."""
        await until(
            lambda: sum(isinstance(m, kind) for m, _ in self.received) >= count,
            f"{count} {kind.__name__}, got {[type(m).__name__ for m, _ in self.received]}",
        )
        found = [m for m, _ in self.received if isinstance(m, kind)][:count]
        self.received = [(m, p) for m, p in self.received if m not in found]
        return found

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.link.close()


class ControlStandIn:
    """The control plane as a service sees it: says welcome and pong, keeps the rest."""

    def __init__(self, hub: PlaneHub) -> None:
        self.hub = hub
        self.routes: dict[str, bytes] = {}
        self.hellos: list[Hello] = []
        self.received: list[Message] = []
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            for arrival in await self.hub.recv():
                match arrival.message:
                    case Hello():
                        self.hellos.append(arrival.message)
                        self.routes[arrival.peer.name] = arrival.route
                        welcome = Welcome(term=1, heartbeat_s=0.2, lost_after_s=5.0)
                        self.hub.send(arrival.route, welcome)
                    case Ping(sequence=sequence, sent_s=sent_s):
                        self.hub.send(arrival.route, Pong(sequence=sequence, sent_s=sent_s))
                    case message:
                        self.received.append(message)

    def of(self, kind: type[Message]) -> list:
        return [message for message in self.received if isinstance(message, kind)]

    def send(self, name: str, message: Message) -> None:
        assert self.hub.send(self.routes[name], message)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.hub.close()


class ServiceWorld:
    """Keys, a control stand-in, and services in this process or as child processes."""

    def __init__(self, folder: Path, network: ZmqNetwork, control: ControlStandIn) -> None:
        self.folder = folder
        self.network = network
        self.control = control
        self.transport = transport(folder, control.hub.port)
        self.links: list[PlaneLink] = []

    def config(self, **table: object) -> SchedulerConfig:
        scheduler = SchedulerTable(folder=str(self.folder / "scheduler"), **table)
        return SchedulerConfig(transport=self.transport, scheduler=scheduler)

    @contextlib.asynccontextmanager
    async def serving(self, serve, config: SchedulerConfig) -> AsyncIterator[int]:
        """A service on this loop; gives its port."""
        ready: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        network = ZmqNetwork()
        task = asyncio.create_task(
            serve(
                config,
                network=network,
                clock=SystemClock(),
                rng=random.Random(1),
                stop=stop,
                on_ready=ready.set_result,
            )
        )
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
            if task.done():
                task.result()
            yield ready.result()["port"]
            assert not task.done(), "the service ended by itself"
        finally:
            stop.set()
            status = await asyncio.wait_for(task, WAIT_S)
            await network.close()
        assert status == 0

    @contextlib.asynccontextmanager
    async def process(
        self, module: str, config: SchedulerConfig
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
        """A service as a child process; gives it and its port."""
        overrides = []
        for name in ("transport", "scheduler"):
            for key, value in flattened(name, msgspec.to_builtins(getattr(config, name))):
                overrides += ["--set", f"{key}={json.dumps(value)}"]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *overrides,
            "--stop-on-eof",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        try:
            assert child.stdout is not None
            async with asyncio.timeout(WAIT_S):
                line = await child.stdout.readline()
            yield child, json.loads(line)["port"]
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
            child._transport.close()

    def link(self, name: str, plane: Plane, port: int) -> PlaneLink:
        keys = self.folder / "keys"
        link = PlaneLink(
            self.network.link(
                f"tcp://127.0.0.1:{port}",
                link_options(self.transport, plane)._replace(reconnect_s=0.02),
                key=KeyPair.load(keys / f"{name}.toml"),
                server_key=load_server_key(keys),
            ),
            plane,
        )
        self.links.append(link)
        return link


def flattened(prefix: str, table: dict) -> Iterator[tuple[str, object]]:
    """Every setting of a table and of those in it, by its dotted name."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", value


def transport(folder: Path, control_port: int) -> TransportConfig:
    return TransportConfig(
        host="127.0.0.1",
        control_port=control_port,
        trajectories_port=0,
        weights_port=0,
        keys=str(folder / "keys"),
    )


@contextlib.asynccontextmanager
async def service_world(folder: Path) -> AsyncIterator[ServiceWorld]:
    """``folder`` gets keys of agents a and b, the trainers of two policies and an operator."""
    create_keys(folder / "keys", agents=("a", "b"), trainers=(POLICY, "sums/judge"))
    network = ZmqNetwork()
    hub = PlaneHub(
        network,
        Plane.CONTROL,
        transport(folder, 0),
        port=0,
        port_file=folder / "control-port",
        clock=SystemClock(),
    )
    world = ServiceWorld(folder, network, ControlStandIn(hub))
    try:
        yield world
    finally:
        for link in world.links:
            await link.close()
        await world.control.close()
        await network.close()
