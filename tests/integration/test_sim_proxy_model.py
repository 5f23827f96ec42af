"""The simulator's ``proxy`` link model against the emulator itself, on one profile file."""

import asyncio
import random
from pathlib import Path

import pytest

from sim.fair_share import Pipe
from sim.kernel import Kernel
from sim.link_profile import find_profile
from sim.link_proxy import LinkProxy
from sim.links import LinkKeys, link_rate
from sim.network import Network
from sim.scenario import AgentsSpec, Scenario
from transport.messages import Ping

PROFILES = """
[far]
delay_up = "30ms"
delay_down = "50ms"
rate_up = "16Mbit/s"
rate_down = "40Mbit/s"

[broken]
rtt = "60ms"
rate = "40Mbit/s"
outages = [{ start = "300ms", duration = "400ms" }]
"""
SIZE = 1_500_000
KEYS = {"agents": AgentsSpec(per_site=1)}


class Modelled:
    """The cloud and one agent behind a profile, in virtual time."""

    def __init__(self, file: Path, name: str) -> None:
        self.scenario = Scenario(
            name="x", link_model="proxy", profiles={"edge": name}, profile_file=str(file), **KEYS
        )
        self.kernel = Kernel()
        topology = self.scenario.topology()
        self.network = Network(self.kernel, topology, random.Random(0), keys=self.scenario)
        (plan,) = self.scenario.fleet(0)
        nic, cloud = self.scenario.nic_rate, self.scenario.cloud
        self.heard: list[float] = []
        self.network.add("cloud", cloud, Pipe("nic-up", nic), Pipe("nic", nic), self._hear)
        edge = (Pipe("up", plan.up), Pipe("down", plan.down))
        self.network.add("edge", "edge", *edge, lambda *_: self._answer())

    def _hear(self, *_: object) -> None:
        self.heard.append(self.kernel.now)

    def _answer(self) -> None:
        self.network.send("edge", "cloud", Ping(sequence=2, sent_s=0.0))

    def round_trip_s(self) -> float:
        self.network.send("cloud", "edge", Ping(sequence=1, sent_s=0.0))
        self.kernel.run(10.0)
        return self.heard[-1]

    def fetched_s(self, source: str, begin_s: float, *sizes: int) -> list[float]:
        """How long each takes that the agent asks for, or sends, at ``begin_s``."""
        done: list[float] = []
        target = "edge" if source == "cloud" else "cloud"

        def asked(_: object = None) -> None:
            for size in sizes:
                self.network.transfer(
                    source, target, size, lambda: done.append(self.kernel.now - begin_s)
                )

        wait_s = self.network.delay_s("edge", "cloud") if source == "cloud" else 0.0
        self.kernel.at(begin_s + wait_s, asked)
        self.kernel.run(100.0)
        return done


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """``get n`` sends n bytes; ``put n`` takes n bytes, notes when, and says so."""
    while line := await reader.readline():
        word, number = line.split()
        if word == b"get":
            writer.write(bytes(int(number)))
        else:
            await reader.readexactly(int(number))
            ARRIVED.append(asyncio.get_running_loop().time())
            writer.write(b".")
        await writer.drain()
    writer.close()


ARRIVED: list[float] = []


async def emulated_s(file: Path, name: str, word: str, *sizes: int) -> tuple[float, list[float]]:
    """When some transfers began, together, each on its own open connection, counted from when the
    profile took effect; and how long each took."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = LinkProxy(find_profile(name, file), {"t": ("127.0.0.1", port)}, rng=random.Random(1))
    loop = asyncio.get_running_loop()
    await proxy.start()
    started_s = loop.time()
    opened = [await asyncio.open_connection(*proxy.addresses["t"]) for _ in sizes]
    for reader, writer in opened:  # a new connection takes a round trip of its own
        writer.write(b"get 1\n")
        await reader.readexactly(1)
    ARRIVED.clear()
    began_s = loop.time()

    async def one(size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        writer.write(f"{word} {size}\n".encode())
        if word == "get":
            await reader.readexactly(size)
            ended_s = loop.time()
        else:
            writer.write(bytes(size))
            await reader.readexactly(1)
            ended_s = max(ARRIVED)
        writer.close()
        return ended_s - began_s

    try:
        took = await asyncio.gather(*(one(n, *c) for n, c in zip(sizes, opened, strict=True)))
        return began_s - started_s, list(took)
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "links.toml"
    path.write_text(PROFILES)
    return path


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "word", "sizes"),
    [
        ("far", "get", (SIZE,)),
        ("far", "put", (SIZE,)),
        ("far", "get", (SIZE, SIZE)),
        ("broken", "get", (SIZE,)),
    ],
)
async def test_bulk_takes_as_long_as_in_the_emulator(
    file: Path, name: str, word: str, sizes: tuple[int, ...]
) -> None:
    source = "cloud" if word == "get" else "edge"
    excess = []
    for _ in range(3):  # a busy machine makes the emulator late, never early
        began_s, real_s = await emulated_s(file, name, word, *sizes)
        modelled_s = Modelled(file, name).fetched_s(source, began_s, *sizes)
        assert len(modelled_s) == len(sizes)
        assert max(real_s) >= 0.98 * max(modelled_s)
        excess.append(max(real_s) / max(modelled_s) - 1.0)
        if excess[-1] <= 0.1:
            return
    pytest.fail(f"the emulator took longer by {excess}")


@pytest.mark.asyncio
async def test_a_round_trip_takes_as_long_as_in_the_emulator(file: Path) -> None:
    modelled_s = Modelled(file, "far").round_trip_s()
    real_s = [(await emulated_s(file, "far", "get", 1))[1][0] for _ in range(3)]
    assert modelled_s - 0.002 <= min(real_s) <= modelled_s + 0.02


def test_the_emulators_profile_is_the_scenarios(file: Path) -> None:
    profile, made = find_profile("far", file), Modelled(file, "far")
    assert made.network.delay_s("edge", "cloud") == profile.delay_up_s
    assert made.network.delay_s("cloud", "edge") == profile.delay_down_s
    (plan,) = made.scenario.fleet(0)
    assert plan.up == link_rate(profile.rate_up_bits_per_s) == 2e6
    assert plan.down == link_rate(profile.rate_down_bits_per_s) == 5e6
    assert isinstance(made.scenario, LinkKeys)
