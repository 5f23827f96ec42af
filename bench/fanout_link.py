"""The emulated wide-area link of ``bench.fanout``: ``farflow sim link run`` as a child, and a plain
TCP transfer through it, the reference that shows what the emulator itself costs.

What always holds: the child ends with the bench, in whatever way; a plain transfer of B bytes is
asked for on a connection that is open already, so that an ideal link takes one round trip and
B / rate for it; everything waits for a bounded time.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.runtime.processes import ChildProcess, ChildSpec, start_child

START_S = 30.0
REPLY_S = 5.0
PLAIN_S = 120.0
FARFLOW = (sys.executable, "-m", "farflow")
_BLOCK = bytes(range(256)) * 1024  # 256 KiB
_SIZE_BYTES = 8

Address = tuple[str, int]


@dataclass(frozen=True)
class LinkPath:
    """A link as the issue names it."""

    name: str
    rate_bits_s: float
    rtt_s: float

    def ideal_s(self, size_bytes: float) -> float:
        """``size_bytes`` over the link and one round trip."""
        return size_bytes * 8 / self.rate_bits_s + self.rtt_s

    def table(self) -> dict[str, str]:
        """The profile as ``profiles.toml`` has it."""
        return {"rtt": f"{self.rtt_s * 1e3:g}ms", "rate": f"{self.rate_bits_s / 1e6:g}Mbit/s"}


SLOW_OCEAN = LinkPath("50 Mbit/s, 180 ms", 50e6, 0.180)
REGION = LinkPath("200 Mbit/s, 80 ms", 200e6, 0.080)
NEAR = LinkPath("1 Gbit/s, 20 ms", 1e9, 0.020)
CRAWL = LinkPath("1 Mbit/s, 80 ms", 1e6, 0.080)


class Emulator:
    """One emulated link; ``ports`` is where each of its targets is reached."""

    def __init__(self, child: ChildProcess, ports: Mapping[str, int]) -> None:
        self.child = child
        self.ports = ports

    async def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Tell the emulator something and return its answer, which must be no refusal."""
        self.child.write_line(json.dumps(command).encode())
        reply: dict[str, Any] = json.loads(await self.child.read_line(REPLY_S))
        assert "error" not in reply, reply
        return reply

    async def shape(self, path: LinkPath) -> None:
        await self.command({"profile": path.table()})

    async def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self.command({"stats": True}))["stats"]
        return stats

    async def down_bytes(self, target: str) -> int:
        """Bytes that the target has sent through the link so far."""
        return int((await self.stats())["targets"][target]["down_bytes"])


@asynccontextmanager
async def emulated(
    path: LinkPath, targets: Mapping[str, int], folder: Path
) -> AsyncIterator[Emulator]:
    """A link of the form of ``path`` to ports of this machine."""
    argv = [*FARFLOW, "sim", "link", "run", "--stop-on-eof", "--log-level", "error"]
    for name, port in targets.items():
        argv += ["--target", f"{name}=127.0.0.1:{port}"]
    number = count_files(folder, "link-*.log")
    child = await start_child(
        ChildSpec(
            name="link",
            argv=tuple(argv),
            log_path=folder / f"link-{number}.log",
            capture_stdout=True,
            grace_s=3.0,
        )
    )
    try:
        ready = json.loads(await child.read_line(START_S))
        emulator = Emulator(child, {name: int(at["port"]) for name, at in ready["targets"].items()})
        await emulator.shape(path)
        yield emulator
    finally:
        await child.terminate()


def count_files(folder: Path, pattern: str) -> int:
    """How many files of that form there are."""
    return sum(1 for _ in folder.glob(pattern))


class PlainServer:
    """Sends as many bytes as it is asked for, over plain TCP."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.port = int(server.sockets[0].getsockname()[1])

    @classmethod
    async def start(cls) -> "PlainServer":
        return cls(await asyncio.start_server(_give, "127.0.0.1", 0))

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


async def _give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            left = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
            while left:
                writer.write(_BLOCK[:left])
                left -= min(left, len(_BLOCK))
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has gone
    finally:
        writer.close()


class PlainClient:
    """A connection through the link to a ``PlainServer``."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray(1 << 18)

    @classmethod
    async def open(cls, port: int) -> "PlainClient":
        connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        client = cls(connection)
        await client.take(1)  # the far end is connected
        return client

    async def take(self, size_bytes: int) -> float:
        """Seconds from asking for ``size_bytes`` to the last of them."""
        loop = asyncio.get_running_loop()
        began_s = time.monotonic()
        async with asyncio.timeout(PLAIN_S):
            await loop.sock_sendall(self._socket, size_bytes.to_bytes(_SIZE_BYTES))
            left = size_bytes
            while left:
                took = await loop.sock_recv_into(self._socket, self._buffer)
                assert took, "the plain connection ended early"
                left -= took
        return time.monotonic() - began_s

    def close(self) -> None:
        self._socket.close()


async def plain_times(port: int, sizes: Iterable[int], clients: int = 1) -> list[float]:
    """For each size, how long ``clients`` connections at once take until the last has it all."""
    opened = [await PlainClient.open(port) for _ in range(clients)]
    try:
        return [max(await asyncio.gather(*(c.take(size) for c in opened))) for size in sizes]
    finally:
        for client in opened:
            client.close()
