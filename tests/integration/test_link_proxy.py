"""The emulated link on real sockets: what it delays, shares, holds back and never changes."""

import asyncio
import contextlib
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sim.link_profile import LinkProfile, Outage
from sim.link_proxy import LinkProxy
from sim.link_shaper import GUARANTEED_BYTES, MIN_FLIGHT_BYTES, PIECE_BYTES, READ_BYTES, send_reset
from sim.link_sockets import SEGMENT_BYTES, SOCKET_BUFFER_BYTES, listening_socket
from transport.errors import ConfigError

pytestmark = pytest.mark.asyncio

MBIT = 1e6
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[int]:
    """A TCP server on loopback; yields its port, and waits for its handlers at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            expected = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
            with contextlib.suppress(*expected):
                await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@contextlib.asynccontextmanager
async def linked(profile: LinkProfile, **ports: int) -> AsyncIterator[LinkProxy]:
    proxy = LinkProxy(
        profile, {n: ("127.0.0.1", p) for n, p in ports.items()}, rng=random.Random(7)
    )
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


@contextlib.asynccontextmanager
async def connected(
    proxy: LinkProxy, target: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*proxy.addresses[target])
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    """Returns once ``condition`` holds; fails the test if it does not within five seconds."""
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def reset(writer: asyncio.StreamWriter) -> None:
    assert isinstance(writer.transport, asyncio.Transport)
    send_reset(writer.transport)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def round_trip_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began = now()
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
    return now() - began


def profile(**fields: object) -> LinkProfile:
    return LinkProfile(name="test", **fields)  # type: ignore[arg-type]


async def test_a_round_trip_takes_both_one_way_delays() -> None:
    async with (
        served(echo) as port,
        linked(profile(delay_up_s=0.010, delay_down_s=0.020), a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        first = await round_trip_s(reader, writer)
        best = min([await round_trip_s(reader, writer) for _ in range(8)])
    assert 0.030 <= best < 0.050  # the upper bounds here are for machines that are busy
    # TCP's handshake precedes the first byte.
    assert first >= 0.060


async def test_two_connections_of_different_targets_share_one_rate_fairly() -> None:
    size, rate = 1_000_000, 40 * MBIT
    arrivals: list[tuple[float, int, str]] = []

    def sink(name: str) -> Handler:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                arrivals.append((now(), len(data), name))
            writer.write(b"!")

        return handle

    async def push(proxy: LinkProxy, target: str) -> None:
        async with connected(proxy, target) as (reader, writer):
            writer.write(bytes(size))
            writer.write_eof()
            await reader.read()

    async with (
        served(sink("a")) as port_a,
        served(sink("b")) as port_b,
        linked(profile(rate_up_bits_per_s=rate), a=port_a, b=port_b) as proxy,
    ):
        await asyncio.gather(push(proxy, "a"), push(proxy, "b"))
    took_s = arrivals[-1][0] - arrivals[0][0]
    carried = sum(n for _, n, _ in arrivals) - arrivals[0][1]
    assert carried * 8 / took_s == pytest.approx(rate, rel=0.15)
    half_time = arrivals[0][0] + took_s / 2
    shares = {
        name: sum(n for t, n, at in arrivals if at == name and t < half_time) for name in "ab"
    }
    assert shares["a"] == pytest.approx(shares["b"], rel=0.3)


async def test_a_small_message_does_not_wait_for_the_bulk_in_front_of_it() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass

    async with (
        served(swallow) as port_bulk,
        served(echo) as port_small,
        linked(profile(rate_up_bits_per_s=20 * MBIT), bulk=port_bulk, small=port_small) as proxy,
        connected(proxy, "bulk") as (_, bulk),
        connected(proxy, "small") as (reader, writer),
    ):
        await round_trip_s(reader, writer)
        bulk.write(bytes(4_000_000))
        await until(lambda: proxy.stats().up.queued_bytes > 450_000)  # 180 ms of the link's time
        assert min([await round_trip_s(reader, writer) for _ in range(5)]) < 0.1
        assert proxy.stats().up.queued_bytes > 400_000


async def test_bytes_arrive_unchanged_whatever_their_chunks_and_the_jitter() -> None:
    rng = random.Random(3)
    sent = [rng.randbytes(rng.randrange(1, 400_000)) for _ in range(3)]

    async def exchange(proxy: LinkProxy, data: bytes) -> bytes:
        async with connected(proxy, "a") as (reader, writer):

            async def send() -> None:
                at = 0
                while at < len(data):
                    step = rng.choice((1, 100, 5_000, 70_000))
                    writer.write(data[at : at + step])
                    at += step
                    await writer.drain()
                    await asyncio.sleep(rng.choice((0, 0, 0.001)))
                writer.write_eof()

            _, received = await asyncio.gather(send(), reader.read(-1))
            return received

    link = profile(
        delay_up_s=0.004,
        delay_down_s=0.004,
        jitter_s=0.004,
        rate_up_bits_per_s=80 * MBIT,
        rate_down_bits_per_s=120 * MBIT,
    )
    async with served(echo) as port, linked(link, a=port) as proxy:
        assert await asyncio.gather(*(exchange(proxy, data) for data in sent)) == sent
        stats = proxy.stats()
    total = sum(map(len, sent))
    assert (stats.targets["a"].up_bytes, stats.targets["a"].down_bytes) == (total, total)
    assert (stats.up.queued_bytes, stats.up.in_flight_bytes) == (0, 0)
    assert (stats.down.queued_bytes, stats.down.in_flight_bytes) == (0, 0)
    assert stats.targets["a"].connections_total == 3


async def test_an_outage_stalls_bytes_and_then_delivers_them() -> None:
    async with (
        served(echo) as port,
        linked(profile(delay_up_s=0.02), a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        await round_trip_s(reader, writer)
        writer.write(b"in flight")
        await until(lambda: proxy.stats().up.in_flight_bytes)
        proxy.set_down()
        writer.write(b", queued")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.06):
                await reader.read(1)
        assert proxy.stats().is_down
        proxy.set_up()
        assert await reader.readexactly(17) == b"in flight, queued"
        stats = proxy.stats()
    assert not stats.is_down
    assert stats.outages_total == 1
    assert stats.outage_s >= 0.06


async def test_a_connection_made_during_an_outage_is_silent_until_it_ends() -> None:
    async with served(echo) as port, linked(profile(), a=port) as proxy:
        proxy.set_down()
        async with connected(proxy, "a") as (reader, writer):
            writer.write(b"anybody there?")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await reader.read(1)
            proxy.set_down(0.01)
            assert await reader.readexactly(14) == b"anybody there?"


async def test_an_outage_with_reset_kills_the_connections() -> None:
    async with (
        served(echo) as port,
        linked(profile(), a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        await round_trip_s(reader, writer)
        proxy.set_down(reset=True)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        assert proxy.stats().targets["a"].connections == 0


async def test_outages_of_the_profile_come_on_schedule() -> None:
    link = profile(outages=(Outage(start_s=0.03, duration_s=0.06),))
    async with (
        served(echo) as port,
        linked(link, a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        await until(lambda: proxy.stats().outages_total)
        await round_trip_s(reader, writer)
        stats = proxy.stats()
    assert stats.outages_total == 1
    assert 0.06 <= stats.outage_s < 0.2


async def test_a_receiver_that_does_not_read_holds_the_sender_back() -> None:
    go = asyncio.Event()
    received = bytearray()

    async def lazy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        await go.wait()
        while data := await reader.read(1 << 20):
            received.extend(data)
        writer.write(b"!")

    data = random.Random(1).randbytes(6_000_000)
    link = profile(rate_up_bits_per_s=1_000 * MBIT, queue_bytes=200_000)
    async with (
        served(lazy) as port,
        linked(link, a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES
        )
        writer.write(data)
        writer.write_eof()
        held = -1
        while (stats := proxy.stats()).up.queued_bytes + stats.up.in_flight_bytes != held:
            held = stats.up.queued_bytes + stats.up.in_flight_bytes
            await asyncio.sleep(0.03)
        assert 0 < stats.up.in_flight_bytes <= MIN_FLIGHT_BYTES + PIECE_BYTES
        assert 0 < stats.up.queued_bytes <= 200_000 + GUARANTEED_BYTES + READ_BYTES
        assert writer.transport.get_write_buffer_size() > 3_000_000  # still with the sender
        go.set()
        assert await reader.read(1) == b"!"
    assert bytes(received) == data


async def test_a_stuck_receiver_does_not_stop_the_other_connections() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    link = profile(rate_up_bits_per_s=500 * MBIT, queue_bytes=200_000)
    async with (
        served(never) as port_stuck,
        served(echo) as port_echo,
        linked(link, stuck=port_stuck, well=port_echo) as proxy,
        connected(proxy, "stuck") as (_, stuck),
        connected(proxy, "well") as (reader, writer),
    ):
        stuck.write(bytes(12_000_000))
        await until(lambda: proxy.stats().up.queued_bytes >= 200_000)
        assert await round_trip_s(reader, writer) < 1.0
        stuck.transport.abort()


async def test_a_target_that_refuses_resets_the_client() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
        async with (
            linked(profile(delay_up_s=0.005), a=closed.getsockname()[1]) as proxy,
            connected(proxy, "a") as (reader, _),
        ):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            assert proxy.stats().targets["a"].refused_total == 1


async def test_a_client_that_resets_is_seen_to_do_so_behind_its_bytes() -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.readexactly(5))
        try:
            await reader.read(1)
        except ConnectionResetError:
            seen.put_nowait(b"reset")

    async with served(watch) as port, linked(profile(delay_up_s=0.01), a=port) as proxy:
        async with connected(proxy, "a") as (_, writer):
            writer.write(b"bytes")
            assert await seen.get() == b"bytes"
            reset(writer)
        assert await seen.get() == b"reset"


async def test_a_new_profile_takes_effect_on_open_connections() -> None:
    async with (
        served(echo) as port,
        linked(profile(), a=port) as proxy,
        connected(proxy, "a") as (reader, writer),
    ):
        assert min([await round_trip_s(reader, writer) for _ in range(5)]) < 0.05
        proxy.set_profile(profile(delay_up_s=0.03, delay_down_s=0.03))
        assert await round_trip_s(reader, writer) >= 0.06
        proxy.set_profile(profile())
        assert min([await round_trip_s(reader, writer) for _ in range(5)]) < 0.05


async def test_closing_ends_connections_and_listeners_even_during_an_outage() -> None:
    async with served(echo) as port, linked(profile(delay_up_s=0.01), a=port) as proxy:
        reader, writer = await asyncio.open_connection(*proxy.addresses["a"])
        await round_trip_s(reader, writer)
        proxy.set_down()
        late = await asyncio.open_connection(*proxy.addresses["a"])
        await proxy.close()
        for stream, other in ((reader, writer), late):
            with pytest.raises(ConnectionResetError):
                await stream.read(1)
            other.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*proxy.addresses["a"])
        assert len(asyncio.all_tasks()) <= 2  # this test and the server's handler


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_ends_do_the_books_balance_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def moody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(rng.randrange(1, 1 << 16)):
            writer.write(data)
            if rng.random() < 0.2:
                reset(writer)
            if rng.random() < 0.2:
                return
            await writer.drain()

    async def client(proxy: LinkProxy) -> None:
        with contextlib.suppress(OSError):  # reset, or reset before it said its end
            async with connected(proxy, "a") as (reader, writer):
                for _ in range(rng.randrange(5)):
                    writer.write(bytes(rng.randrange(1, 300_000)))
                    if rng.random() < 0.5:
                        await reader.read(rng.randrange(1, 1 << 16))
                    await asyncio.sleep(rng.choice((0, 0.001)))
                ending = rng.randrange(3)
                if ending == 0:
                    reset(writer)
                elif ending == 1:
                    writer.write_eof()
                    await reader.read(-1)

    async def weather(proxy: LinkProxy) -> None:
        for _ in range(8):
            await asyncio.sleep(0.01)
            proxy.set_down(0.004, reset=rng.random() < 0.3)
            proxy.set_profile(profile(delay_up_s=rng.choice((0, 0.003)), jitter_s=0.001))

    link = profile(delay_up_s=0.002, rate_up_bits_per_s=400 * MBIT, queue_bytes=70_000)
    async with served(moody) as port, linked(link, a=port) as proxy:
        await asyncio.gather(weather(proxy), *(client(proxy) for _ in range(20)))
        await until(lambda: not proxy.stats().targets["a"].connections)
        stats = proxy.stats()
    for lane in (stats.up, stats.down):
        assert (lane.queued_bytes, lane.in_flight_bytes) == (0, 0)
    assert not complaints


async def test_a_listening_address_in_use_is_a_clear_refusal() -> None:
    async with served(echo) as port:
        proxy = LinkProxy(
            profile(),
            {"control": ("127.0.0.1", 1)},
            rng=random.Random(0),
            listen={"control": ("127.0.0.1", port)},
        )
        with pytest.raises(ConfigError, match=f"'control': cannot listen on 127.0.0.1:{port}"):
            await proxy.start()
        await proxy.close()


@contextlib.asynccontextmanager
async def link_command(
    port: int, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, object]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "sim.cli", "link", "run", "--target", f"a=127.0.0.1:{port}", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        assert ready["ready"] is True
        yield process, ready
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def tell(process: asyncio.subprocess.Process, command: object) -> dict[str, object]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    reply: dict[str, object] = json.loads(await process.stdout.readline())
    return reply


async def test_the_command_obeys_lines_on_stdin_and_ends_with_it() -> None:
    async with (
        served(echo) as port,
        link_command(port, "--profile", "wan-80ms", "--stop-on-eof") as (process, ready),
    ):
        address = ready["targets"]["a"]  # type: ignore[index]
        reader, writer = await asyncio.open_connection(address["host"], address["port"])
        await round_trip_s(reader, writer)
        assert await round_trip_s(reader, writer) >= 0.08
        assert await tell(process, {"profile": "local"}) == {"ok": "profile"}
        assert min([await round_trip_s(reader, writer) for _ in range(5)]) < 0.07
        assert await tell(process, {"down": True, "reset": True}) == {"ok": "down"}
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
        stats = await tell(process, {"stats": True})
        assert stats["stats"]["is_down"] is True  # type: ignore[index]
        assert "give exactly one" in str((await tell(process, {}))["error"])
        assert "positive" in str((await tell(process, {"down": -1}))["error"])
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0


async def test_the_command_takes_commands_on_a_private_socket_and_ends_on_sigterm(
    tmp_path: object,
) -> None:
    path = f"{tmp_path}/control"
    async with served(echo) as port, link_command(port, "--control", path) as (process, _):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"down": 5}\n{"stats": true}\n')
        assert json.loads(await reader.readline()) == {"ok": "down"}
        assert json.loads(await reader.readline())["stats"]["is_down"] is True
        writer.write(b"x" * 200_000 + b"\n")
        assert "bytes at most" in json.loads(await reader.readline())["error"]
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="others bound segments in their own way")
async def test_no_segment_is_so_long_that_the_last_one_waits_for_an_acknowledgement() -> None:
    """Segments of half a buffer made every other transfer 40 ms longer: a delayed ACK."""
    listener = listening_socket("plain", ("127.0.0.1", 0))
    with listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            for end in (client, accepted):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SEGMENT_BYTES
