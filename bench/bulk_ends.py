"""The ends of the streams that ``bench.bulk`` measures, each in a process of its own:

    python -m bench.bulk_ends raw-server source|sink
    python -m bench.bulk_ends raw-client source|sink PORT
    python -m bench.bulk_ends agent-up SPEC.json
    python -m bench.bulk_ends agent-down SPEC.json

``raw`` is one plain TCP stream with large socket buffers, moved by blocking calls. ``agent-up`` is
an agent's production uplink (``bench.uplink``), counted in bodies that the log has acknowledged,
which it does after its fsync. ``agent-down`` is how an agent's production code fetches a version's
chunks, counted as their parts arrive; they are verified, and nothing is written.

What always holds: the counting end says ``[monotonic seconds, bytes so far]`` as JSON lines and
``[]`` when all has come; a process ends with its standard input.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from transport.messages import Plane
from transport.runtime.logs import configure_logging
from transport.runtime.settings import TransportConfig

SAY_S = 0.02
SOCKET_BUFFER_BYTES = 16 << 20
SOURCE_S = 12.0
"""A source ends by itself: its sink may be gone behind an emulator that keeps the connection."""
_BLOCK_BYTES = 1 << 20


class EndSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent's end finds its key, its spool and the cloud; ``entries`` are the files that
    it fetches (MessagePack of ``FileEntry``)."""

    keys: str
    name: str
    transport: dict[str, Any]
    spool: str = ""
    entries: str = ""


class Progress:
    """Says how many bytes there are, at most every ``SAY_S``."""

    def __init__(self) -> None:
        self.bytes = 0
        self.silent = False
        self._said_s = 0.0

    def add(self, count: int) -> None:
        self.bytes += count
        now = time.monotonic()
        if now - self._said_s >= SAY_S and not self.silent:
            self._said_s = now
            print(json.dumps([now, self.bytes]), flush=True)

    def end(self) -> None:
        """All has come."""
        print(json.dumps([time.monotonic(), self.bytes]), flush=True)
        print("[]", flush=True)


def _tuned(sock: socket.socket) -> socket.socket:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return sock


def _move(connection: socket.socket, what: str, progress: Progress) -> None:
    with connection, contextlib.suppress(ConnectionError):
        if what == "source":
            block, until_s = os.urandom(_BLOCK_BYTES), time.monotonic() + SOURCE_S
            while time.monotonic() < until_s:
                connection.sendall(block)
            return
        buffer = bytearray(_BLOCK_BYTES)
        while count := connection.recv_into(buffer):
            progress.add(count)


def raw_server(what: str) -> None:
    """Serve every connection; ``[]`` says that a new one is counted from now on."""
    with _tuned(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        progress = Progress()
        while True:
            connection, _ = listening.accept()
            progress.silent = True
            progress = Progress()
            print("[]", flush=True)
            threading.Thread(target=_move, args=(connection, what, progress), daemon=True).start()


def raw_client(what: str, port: int) -> None:
    with _tuned(socket.socket()) as connection:
        connection.connect(("127.0.0.1", port))
        _move(connection, what, Progress())


async def agent_up(spec: EndSpec) -> None:
    from bench.uplink import SPOOL_BYTES, Uplink
    from edge_agent.spool import Spool
    from transport.keys import KeyPair, load_server_key
    from transport.messages import Message, TrajectoryAcks
    from transport.zmq_links import ZmqNetwork

    spool = await asyncio.to_thread(Spool, Path(spec.spool), SPOOL_BYTES)
    sizes = {summary.digest: summary.size_bytes for summary in spool.entries()}
    progress = Progress()

    def heard(message: Message) -> None:
        if isinstance(message, TrajectoryAcks):
            progress.add(sum(sizes.pop(body.digest, 0) for body in message.bodies))

    network = ZmqNetwork()
    uplink = Uplink(
        network,
        msgspec.convert(spec.transport, TransportConfig),
        spool,
        key=KeyPair.load(Path(spec.keys) / f"{spec.name}.toml"),
        server_key=load_server_key(Path(spec.keys)),
        heard=heard,
    )
    await uplink.empty.wait()
    progress.end()
    await uplink.close()
    await network.close()


async def agent_down(spec: EndSpec) -> None:
    from edge_agent.weight_download import Downloads
    from transport.chunk_parts import SourceId
    from transport.chunks import ReceivedChunk
    from transport.keys import KeyPair, load_server_key
    from transport.messages import Chunk, Message
    from transport.plane_links import PlaneLinks
    from transport.runtime.clock import SystemClock
    from transport.source_links import ORIGIN, SourceLinks
    from transport.weights.manifest import FileEntry
    from transport.zmq_links import ZmqNetwork

    transport = msgspec.convert(spec.transport, TransportConfig)
    key = KeyPair.load(Path(spec.keys) / f"{spec.name}.toml")
    server_key = load_server_key(Path(spec.keys))
    packed = await asyncio.to_thread(Path(spec.entries).read_bytes)
    entries = msgspec.msgpack.decode(packed, type=list[FileEntry])
    network = ZmqNetwork()
    links = PlaneLinks(network, transport, key=key, server_key=server_key, planes=[Plane.WEIGHTS])
    downloads: Downloads | None = None
    progress = Progress()

    def arrived(source: SourceId, chunk: Chunk, payload: list[bytes]) -> None:
        if downloads is not None:
            progress.add(sum(map(len, payload)))
            downloads.arrived(source, chunk, payload)

    def changed(source: SourceId, up: bool) -> None:
        if downloads is not None:
            downloads.changed(source, up)

    def from_store(message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Chunk):
            arrived(ORIGIN, message, payload)

    sources = SourceLinks(
        network,
        transport,
        links,
        key=key,
        server_key=server_key,
        window_bytes=64 << 20,
        clock=SystemClock(),
        arrived=arrived,
        changed=changed,
    )
    downloads = Downloads(sources, SystemClock())

    def keep(chunk: ReceivedChunk) -> None:
        """Verified; nothing is written."""

    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(links.receive(Plane.WEIGHTS, from_store)),
            tasks.create_task(links.watch(Plane.WEIGHTS, lambda _, up: changed(ORIGIN, up))),
            tasks.create_task(sources.run()),
        ]
        await downloads.fetch(entries, {}, keep)
        progress.end()
        for task in background:
            task.cancel()
    await sources.close()
    await links.close()
    await network.close()


def main(role: str, *rest: str) -> None:
    match role:
        case "raw-server":
            raw_server(rest[0])
        case "raw-client":
            raw_client(rest[0], int(rest[1]))
        case "agent-up" | "agent-down":
            configure_logging("warning", component=role)
            spec = msgspec.json.decode(Path(rest[0]).read_bytes(), type=EndSpec)
            asyncio.run(agent_up(spec) if role == "agent-up" else agent_down(spec))
        case _:
            raise SystemExit(f"no such end: {role}")


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        main(*sys.argv[1:])
    except (BrokenPipeError, ConnectionError):
        sys.exit(0)  # the other end has gone
