"""The gateway's process: limits, slow and many readers, its death and return, ports, TLS."""

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from gateway_world import GatewayWorld, gateway_world, read_events
from service_world import WAIT_S, until

from scheduler.config import HttpTable
from scheduler.gateway.access import LOCAL_SECRET, HttpRole, create_token
from transport.errors import ConfigError
from transport.runtime.clock import SystemClock
from transport.runtime.config import convert

STREAM = {"Accept": "text/event-stream"}


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key of this machine and its own certificate, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.fromtimestamp(SystemClock().wall_s(), tz=datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file


def gateway_pid(world: GatewayWorld) -> int:
    """The gateway among the daemon's children."""
    for pid in world.world.children():
        with contextlib.suppress(FileNotFoundError):
            if b"scheduler.gateway.service" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory):
    """A gateway with narrow limits and TLS, at its first start; and a context that trusts it."""
    folder = tmp_path_factory.mktemp("small")
    made, key = certificate(folder)
    limits = {"requests_per_s": 5.0, "max_connections": 8, "open_metrics": True}
    tls = {"certificate": str(made), "key": str(key)}
    async with gateway_world(folder, tokens=False, **limits, **tls) as world:
        await world.address()
        yield world, ssl.create_default_context(cafile=str(made))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_first_start_makes_a_token_and_speaks_tls(small):
    world, trusting = small
    assert (await world.address()).startswith("https://")
    secret_file = world.folder / "gateway" / LOCAL_SECRET
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert world.token_file("local").stat().st_mode & 0o777 == 0o600
    secret = secret_file.read_text().strip()
    assert secret not in world.token_file("local").read_text()
    async with world.client(secret) as client:
        async with client.get("/v1/about", ssl=trusting) as reply:
            about = await reply.json()
        assert (about["token"], about["role"]) == ("local", "operator")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get("/v1/about")
    async with world.client(None) as client:
        async with client.get("/metrics", ssl=trusting) as reply:
            assert reply.status == 200
        async with client.get("/v1/runs", ssl=trusting) as reply:
            assert reply.status == 401


async def status_of(client: aiohttp.ClientSession, path: str, **more: Any) -> int:
    async with client.get(path, **more) as reply:
        return reply.status


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_may_ask_so_often_and_have_so_many_requests_open(small):
    world, trusting = small
    keys = world.world.folder / "keys"
    often = await asyncio.to_thread(create_token, keys, "often", HttpRole.VIEWER)
    other = await asyncio.to_thread(create_token, keys, "other", HttpRole.VIEWER)
    # What was made first counts too once the last does, and was not asked with yet.
    async with world.client(other) as client, asyncio.timeout(WAIT_S):
        while await status_of(client, "/v1/runs", ssl=trusting) == 401:
            await asyncio.sleep(0.05)
    async with world.client(often) as client:
        codes = []
        for _ in range(14):
            async with client.get("/v1/runs", ssl=trusting) as reply:
                codes.append(reply.status)
                if reply.status == 429:
                    assert int(reply.headers["Retry-After"]) >= 1
                    assert (await reply.json())["code"] == "http.too_often"
        assert codes[:10] == [200] * 10
        assert 429 in codes
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client(other))
        for _ in range(2):  # a quarter of the connections
            asked = client.get("/v1/events", headers=STREAM, ssl=trusting)
            stream = await stack.enter_async_context(asked)
            assert stream.status == 200
        async with client.get("/v1/runs", ssl=trusting) as reply:
            assert (reply.status, (await reply.json())["code"]) == (503, "http.busy")


@pytest.mark.asyncio(loop_scope="module")
async def test_more_connections_than_there_may_be_are_closed_unheard(small):
    world, trusting = small
    host, port = (await world.address())[len("https://") : -1].split(":")
    opened, closed = [], 0
    for _ in range(12):
        try:
            opened.append(await asyncio.open_connection(host, int(port), ssl=trusting))
        except ConnectionError:
            closed += 1
    for reader, writer in opened:
        try:
            async with asyncio.timeout(0.1):
                closed += await reader.read(1) == b""
        except TimeoutError:
            pass  # one of those that may be there
        except ConnectionError:
            closed += 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert closed >= 3


@pytest.mark.asyncio
async def test_the_gateway_dies_and_comes_back_where_it_was_and_nobody_else_notices(tmp_path):
    async with gateway_world(tmp_path) as world:
        address = await world.address()
        await world.join("a")
        before = gateway_pid(world)
        async with world.client("operator") as client:
            async with client.get("/v1/events", headers=STREAM) as stream:
                await read_events(stream, "status")
                async with client.post("/v1/agents/a/cordon") as reply:
                    assert reply.status == 200
                [(number, _)] = await read_events(stream, "transition")
                os.kill(before, signal.SIGKILL)
                async with world.world.operator() as operator:
                    assert (await operator.order("a", "uncordon")) == ""
                with contextlib.suppress(aiohttp.ClientError):
                    await stream.content.read()

            async def back() -> bool:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with client.get("/v1/healthz") as reply:
                        return reply.status == 200
                return False

            async with asyncio.timeout(WAIT_S):
                while gateway_pid(world) in (0, before) or not await back():
                    await asyncio.sleep(0.05)
            assert await world.address() == address
            # What happened while it was away is told to one who says what it heard last.
            headers = {**STREAM, "Last-Event-ID": str(number)}
            async with client.get("/v1/events", headers=headers) as stream:
                [(_, told)] = await read_events(stream, "transition")
        assert told["what"] == "ordered to uncordon"
        assert told["facts"]["by"] == "operator"


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_port_that_is_taken_is_said_and_tried_again_and_harms_nobody(tmp_path, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with gateway_world(tmp_path, port=port) as world:
            async with world.world.operator() as operator:
                assert (await operator.status()).term == 1
            said = ""

            def down() -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return "gateway.down" in said

            await until(down, "gateway.down")
            lines = [json.loads(line) for line in said.splitlines() if "gateway.down" in line]
            assert f"http.port: 127.0.0.1:{port}: " in lines[0]["reason"]
            assert "http.enabled = false" in lines[0]["remedy"]
            taken.close()
            assert await world.address() == f"http://127.0.0.1:{port}/"


def test_beyond_this_machine_only_with_tls():
    for host in ("0.0.0.0", "10.0.0.1", "example.org", "::"):  # noqa: S104
        with pytest.raises(ValueError, match=r"set certificate and key, or host = 127\.0\.0\.1"):
            HttpTable(host=host)
        HttpTable(host=host, certificate="c.pem", key="k.pem")
        HttpTable(host=host, enabled=False)
        with pytest.raises(ValueError, match="open_metrics"):
            HttpTable(host=host, certificate="c.pem", key="k.pem", open_metrics=True)
    with pytest.raises(ConfigError, match="belong together"):
        convert({"key": "k.pem"}, HttpTable)


async def _stir(world: GatewayWorld, rounds: int) -> int:
    """Transitions, two a round; the number of the last."""
    async with world.world.operator() as operator:
        for _ in range(rounds):
            await operator.order("a", "cordon", reason="r" * 450)
            await operator.order("a", "uncordon", reason="r" * 450)
        return (await operator.events()).last


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_slow_reader_loses_the_oldest_is_told_so_and_costs_bounded_memory(tmp_path):
    async with gateway_world(tmp_path) as world:
        await world.join("a")
        base = await world.address()
        host, port = base[len("http://") : -1].split(":")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, (host, int(port)))
        asked = (
            "GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
            f"Authorization: Bearer {world.tokens['viewer']}\r\n\r\n"
        )
        await loop.sock_sendall(slow, asked.encode())
        got = b""
        async with asyncio.timeout(WAIT_S):
            while b"event: status" not in got:
                got += await loop.sock_recv(slow, 1 << 10)
        before = _resident_bytes(gateway_pid(world))
        last = 0
        for _ in range(8):
            last = await _stir(world, 400)
            await asyncio.sleep(0.05)
        assert _resident_bytes(gateway_pid(world)) - before < 24 * 2**20
        async with asyncio.timeout(2 * WAIT_S):
            while f"id: {last}\n".encode() not in got:
                got += await loop.sock_recv(slow, 1 << 16)
        slow.close()
        assert b"event: missed" in got
        missed = sum(
            json.loads(line[len(b"data: ") :])["missed"]
            for line in got.splitlines()
            if line.startswith(b'data: {"missed"')
        )
        assert missed > 500
        told = got.count(b"event: transition")
        assert told + missed >= 6400


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.asyncio
@pytest.mark.slow
async def test_fifty_viewers_hear_everything_and_the_scheduler_feels_one(tmp_path):
    async with gateway_world(tmp_path) as world, contextlib.AsyncExitStack() as stack:
        await world.join("a")
        client = await stack.enter_async_context(world.client("viewer"))
        client._connector._limit = 100
        streams = [
            await stack.enter_async_context(client.get("/v1/events", headers=STREAM))
            for _ in range(50)
        ]
        async with world.world.operator() as operator:
            quiet = (await operator.status()).counters["loop.lag_ms"]
        stirring = asyncio.create_task(_stir(world, 100))
        heard = await asyncio.gather(*(read_events(s, "transition", 200) for s in streams))
        await stirring
        assert all(one == heard[0] for one in heard)
        async with world.world.operator() as operator:
            status = await operator.status()
        assert status.counters["loop.lag_ms"] <= quiet + 50
        assert msgspec.json.encode(status)
