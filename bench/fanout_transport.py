"""How long bytes take from the store to the agents: rows of ``bench.fanout`` about the network.

The payload is opaque: every cell of a BF16 model gets new random bits, so that the delta has as
many bytes as the model and nothing to compute; what is measured is the stream. Time is from
"durable at the store" to "last chunk verified at the last agent", of real daemons.

What always holds: the ideal is payload bytes (of all agents together) / rate + 1 round trip; a
plain TCP transfer of as many bytes to as many receivers runs through the same emulator in the same
run, and its ratio stands beside, as does the emulator's own share of a miss.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.fanout_agents import Agents, AgentSpec, agents
from bench.fanout_cloud import Cloud, Publishing, Tensors, next_version, payload_bytes
from bench.fanout_link import (
    CRAWL,
    NEAR,
    REGION,
    SLOW_OCEAN,
    START_S,
    Emulator,
    LinkPath,
    emulated,
    plain_times,
)
from bench.report import Row
from transport.envelope import LIMITS, decode, encode
from transport.keys import KeyPair, load_server_key, trainer_name
from transport.messages import Ping, Plane, Pong
from transport.plane_links import link_options
from transport.weights.publication import Publication
from transport.weights.tensors import TensorBytes

TARGET = 1.25
SLOW_TARGET = 1.10
PING_EVERY_S = 0.02
IDLE_PINGS = 10
FETCHING_BYTES = 64 * 1024
"""An agent that has so much has begun to fetch."""


@dataclass(frozen=True)
class Setup:
    """Agents behind one emulated link, and the policy that they host."""

    name: str
    path: LinkPath
    count: int

    @property
    def policy(self) -> str:
        return f"bench/{self.name}"

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(f"{self.name}{number}" for number in range(self.count))

    @property
    def title(self) -> str:
        return f"{self.path.name}, {self.count} agent{'s' if self.count > 1 else ''}"


SETUPS = (
    Setup("ocean", SLOW_OCEAN, 1),
    Setup("region", REGION, 8),
    Setup("near", NEAR, 1),
)
SLOW_AGENT = "crawler"


class Push(NamedTuple):
    """Seconds from "durable" to the last chunk at the last agent, bytes of the payload, and bytes
    that passed the link towards the agents meanwhile."""

    took_s: float
    size_bytes: int
    egress_bytes: int


def opaque(cells: int, seed: int) -> Tensors:
    """BF16 weights of random finite bits."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, cells, np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] ^= 0x4000
    return {"weight": TensorBytes("BF16", (cells,), bits.tobytes())}


class Bench:
    """A running setup: its link, its agents, its trainer and the chain that it publishes."""

    def __init__(
        self, setup: Setup, link: Emulator, fleet: Agents, publishing: Publishing, cells: int
    ) -> None:
        self.setup = setup
        self.link = link
        self.fleet = fleet
        self._cells = cells
        self.publishing = publishing
        self._weights = opaque(cells, 0)
        self._last = publishing.first(self._weights, {"config.json": b"{}"})

    async def begin(self) -> None:
        """Publish version 0, which the agents have in a folder of their own."""
        await self.publishing.publish(self._last)
        await self.settled()

    async def settled(self) -> None:
        """Until every agent's request for the next version stands at the store."""
        policy, version = self.setup.policy, self._last.manifest.version
        await self.fleet.until_asking(self.setup.agents, policy, version)
        await asyncio.sleep(self.setup.path.rtt_s)  # the request's way

    def _next(self) -> Publication:
        new = opaque(self._cells, self._last.manifest.version + 1)
        self._last = next_version(self._weights, new, self._last, policy=self.setup.policy)
        self._weights = new
        return self._last

    async def push(self) -> Push:
        """Publish one more version and wait until the last agent has it."""
        made = await asyncio.to_thread(self._next)
        before = await self.link.down_bytes("weights")
        durable_s = await self.publishing.publish(made)
        seen = [
            await self.fleet.served(name, self.setup.policy, made.manifest.version)
            for name in self.setup.agents
        ]
        egress = await self.link.down_bytes("weights") - before
        await self.settled()
        took_s = max(one["chunk_s"] for one in seen) - durable_s
        return Push(took_s, payload_bytes(made), egress)

    async def pushes(self, count: int) -> Push:
        """Several, of which the medians."""
        done = [await self.push() for _ in range(count)]
        return Push(
            statistics.median(one.took_s for one in done),
            done[-1].size_bytes,
            int(statistics.median(one.egress_bytes for one in done)),
        )


def agent_spec(
    cloud_: Cloud,
    name: str,
    link: Emulator,
    models: dict[str, str],
    *,
    engine: str = "fake",
    relays: Sequence[dict[str, Any]] = (),
) -> AgentSpec:
    """A daemon behind ``link``; ``models`` are folders that spare it the download of version 0."""
    transport = cloud_.transport(link.ports["weights"], link.ports["control"])
    return AgentSpec(
        name=name,
        transport={**msgspec.to_builtins(transport), "relays": relays},
        agent={
            "folder": str(cloud_.folder / f"agent-{name}"),
            "key": str(cloud_.folder / "keys" / f"{name}.toml"),
            "engine": engine,
            "slots": 1,
            "drain_s": 0.2,
            "local_models": models,
        },
    )


def setup_specs(
    made: Cloud, setup: Setup, link: Emulator, relays: Sequence[dict[str, Any]] = ()
) -> list[AgentSpec]:
    """The agents of a setup behind its link."""
    models = {setup.policy: str(made.model(setup.policy))}
    return [agent_spec(made, name, link, models, relays=relays) for name in setup.agents]


async def ping_times(
    made: Cloud, port: int, policy: str, until: asyncio.Event, least: int
) -> list[float]:
    """Round trips of small messages on the control plane, in seconds."""
    keys = made.folder / "keys"
    link = made.network.link(
        f"tcp://127.0.0.1:{port}",
        link_options(made.transport(0), Plane.CONTROL),
        key=KeyPair.load(keys / f"{trainer_name(policy)}.toml"),
        server_key=load_server_key(keys),
    )
    times: list[float] = []
    limits = LIMITS[Plane.CONTROL]

    async def receive() -> None:
        while True:
            for frames in await link.recv():
                message, _ = decode(frames, limits)
                if isinstance(message, Pong):
                    times.append(time.monotonic() - message.sent_s)

    receiving = asyncio.create_task(receive())
    try:
        await link.wait_connected()
        sequence = 0
        while not until.is_set() or len(times) < least:
            link.send(encode(Ping(sequence=sequence, sent_s=time.monotonic()), limits=limits))
            sequence += 1
            await asyncio.sleep(PING_EVERY_S)
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await link.close()
    return times


def _transport_row(setup: Setup, which: str, push: Push) -> Row:
    ratio = push.took_s / setup.path.ideal_s(push.size_bytes * setup.count)
    return Row(
        metric=f"transport, {setup.title}, {push.size_bytes / 1e6:.1f} MB each, {which}",
        value=push.took_s,
        unit="s",
        reference="bytes / link + 1 RTT",
        ratio=ratio,
        target=f"<= {TARGET}",
        ok=ratio <= TARGET,
    )


async def setup_rows(bench: Bench, repeats: int) -> tuple[list[Row], Push]:
    """Cold, warm and the plain reference of one setup; and the warm push for further rows."""
    setup = bench.setup
    cold = await bench.push()
    warm = await bench.pushes(repeats)
    plain = await plain_times(
        bench.link.ports["plain"], [warm.size_bytes] * max(1, repeats // 2), setup.count
    )
    rows = [
        _transport_row(setup, "cold", cold),
        _transport_row(setup, f"warm, median of {repeats}", warm),
        Row(
            metric=f"plain TCP, {setup.title}, {warm.size_bytes / 1e6:.1f} MB each",
            value=statistics.median(plain),
            unit="s",
            reference="bytes / link + 1 RTT",
            ratio=statistics.median(plain) / setup.path.ideal_s(warm.size_bytes * setup.count),
        ),
    ]
    return rows, warm


async def control_rows(made: Cloud, bench: Bench) -> list[Row]:
    """Round trips of control messages beside a push, and on the idle link."""
    setup = bench.setup
    idle, busy = asyncio.Event(), asyncio.Event()
    idle.set()
    port = bench.link.ports["control"]
    quiet = await ping_times(made, port, setup.policy, idle, IDLE_PINGS)
    pinging = asyncio.create_task(ping_times(made, port, setup.policy, busy, 1))
    await bench.push()
    busy.set()
    loaded = await pinging
    lane = (await bench.link.stats())["down"]
    quiet_s = statistics.median(quiet)
    rows = [
        Row(
            metric=f"control RTT during a push, {setup.path.name}, {what}",
            value=value * 1e3,
            unit="ms",
            reference="median on the idle link",
            ratio=value / quiet_s,
        )
        for what, value in (("median", statistics.median(loaded)), ("worst", max(loaded)))
    ]
    return [
        *rows,
        Row(
            metric=f"queue at the bottleneck, {setup.path.name}, worst so far",
            value=lane["queue_delay_max_s"] * 1e3,
            unit="ms",
            reference="RTT",
            ratio=lane["queue_delay_max_s"] / setup.path.rtt_s,
        ),
    ]


async def slow_agent_row(
    stack: AsyncExitStack, made: Cloud, bench: Bench, repeats: int, without: Push
) -> Row:
    """The same pushes while an agent on a link of 1 Mbit/s fetches the same policy."""
    targets = {"weights": made.store_port, "control": made.control_port}
    link = await stack.enter_async_context(emulated(CRAWL, targets, made.folder))
    models = {bench.setup.policy: str(bench.publishing.model)}
    spec = agent_spec(made, SLOW_AGENT, link, models)
    await stack.enter_async_context(agents([spec], made.folder))
    async with asyncio.timeout(START_S):
        while await link.down_bytes("weights") < FETCHING_BYTES:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
    beside = await bench.pushes(repeats)
    ratio = beside.took_s / without.took_s
    return Row(
        metric=f"transport, {bench.setup.title}, beside one at 1 Mbit/s, median of {repeats}",
        value=beside.took_s,
        unit="s",
        reference="without the slow agent",
        ratio=ratio,
        target=f"<= {SLOW_TARGET}",
        ok=ratio <= SLOW_TARGET,
    )
