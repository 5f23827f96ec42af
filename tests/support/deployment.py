"""The whole scheduler daemon with its services, for tests that speak to it over real sockets."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from service_world import POLICY, WAIT_S, PlaneLink

from scheduler.children import overrides_of
from scheduler.config import HttpTable, MqttTable, SchedulerConfig, SchedulerTable
from scheduler.operator import Operator
from transport.keys import KeyPair, create_keys, load_server_key
from transport.messages import Plane
from transport.plane_links import link_options
from transport.runtime.settings import TransportConfig
from transport.zmq_links import ZmqNetwork


class Deployment:
    """A scheduler as a child process, and peers of it in this one; ``table`` is ``[scheduler]``."""

    def __init__(
        self,
        folder: Path,
        network: ZmqNetwork,
        http: HttpTable | None = None,
        mqtt: MqttTable | None = None,
        **table: Any,
    ) -> None:
        self.folder = folder
        self.http = http or HttpTable(enabled=False)
        self.mqtt = mqtt or MqttTable()
        self.network = network
        self.table = {
            "heartbeat_s": 0.2,
            "lost_after_s": 5.0,
            "reconnect_grace_s": 5.0,
            "retry_backoff_s": 0.1,
            **table,
        }
        self.ports: dict[str, int] = {}
        self.child: asyncio.subprocess.Process | None = None
        self.links: list[PlaneLink] = []

    async def start(self) -> None:
        config = SchedulerConfig(
            transport=TransportConfig(
                control_port=0,
                trajectories_port=0,
                weights_port=0,
                keys=str(self.folder / "keys"),
            ),
            scheduler=SchedulerTable(folder=str(self.folder / "scheduler"), **self.table),
            http=self.http,
            mqtt=self.mqtt,
        )
        program = "from scheduler.cli import scheduler_group; scheduler_group()"
        self.child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            "run",
            *overrides_of(config),
            "--stop-on-eof",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self.child.stdout is not None
        async with asyncio.timeout(2 * WAIT_S):
            line = await self.child.stdout.readline()
        self.ports = json.loads(line)["ports"]

    async def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        assert self.child is not None
        if self.child.returncode is None:
            self.child.send_signal(how)
        status = await asyncio.wait_for(self.child.wait(), WAIT_S)
        self.child._transport.close()
        return status

    def children(self) -> list[int]:
        assert self.child is not None
        pid = self.child.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def transport(self) -> TransportConfig:
        return TransportConfig(
            control_port=self.ports["control"],
            keys=str(self.folder / "keys"),
        )

    def operator(self, name: str = "operator", answer_s: float = WAIT_S) -> Operator:
        key = self.folder / "keys" / f"{name}.toml"
        return Operator(self.transport(), key, answer_s=answer_s, network=self.network)

    def link(self, key: KeyPair | str, plane: Plane = Plane.CONTROL) -> PlaneLink:
        keys = self.folder / "keys"
        pair = KeyPair.load(keys / f"{key}.toml") if isinstance(key, str) else key
        options = link_options(self.transport(), plane)._replace(reconnect_s=0.02)
        server = load_server_key(keys)
        endpoint = f"tcp://127.0.0.1:{self.ports[plane.value]}"
        link = PlaneLink(self.network.link(endpoint, options, key=pair, server_key=server), plane)
        self.links.append(link)
        return link


@contextlib.asynccontextmanager
async def deployment(
    folder: Path, http: HttpTable | None = None, mqtt: MqttTable | None = None, **table: Any
) -> AsyncIterator[Deployment]:
    """``folder`` gets keys of agents a and b, a trainer, an operator and a viewer; without ``http``
    there is no gateway."""
    create_keys(folder / "keys", agents=("a", "b"), trainers=(POLICY,), viewers=("viewer",))
    network = ZmqNetwork()
    world = Deployment(folder, network, http, mqtt, **table)
    try:
        await world.start()
        yield world
    finally:
        for link in world.links:
            await link.close()
        await world.end()
        await network.close()
