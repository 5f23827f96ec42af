"""What our HTTP servers have in common, with a real socket."""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter

import pytest
from aiohttp import web

from scheduler import http_server
from scheduler.http_access import tls_context
from scheduler.http_server import HttpListener
from tests.integration.test_gateway_life import certificate

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
pytestmark = pytest.mark.asyncio


async def test_a_reader_that_takes_nothing_of_a_whole_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_server, "STALLED_S", 0.5)

    async def handle(request: web.BaseRequest) -> web.Response:
        listener.heard(request.protocol)
        return web.Response(body=bytes(32 * 2**20))

    listener = HttpListener(
        handle, host="127.0.0.1", tls=None, max_connections=1, counters=Counter(), setting="here"
    )
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(listener.run([0], port.set_result))
    try:
        async with asyncio.timeout(15.0):
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                silent.connect(("127.0.0.1", await port))
                silent.sendall(REQUEST)
                while not await _answered(port.result()):
                    await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _answered(port: int) -> bool:
    """Whether there is room for another connection."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        head = await reader.read(15)
        writer.transport.abort()
        return head.startswith(b"HTTP/1.1 200")
    return False


async def test_with_tls_those_who_say_nothing_are_counted_before_their_handshake(tmp_path):
    made, key = certificate(tmp_path)
    context = tls_context(made, key, "here.")
    trusting = ssl.create_default_context(cafile=str(made))
    counters: Counter[str] = Counter()

    async def handle(request: web.BaseRequest) -> web.Response:
        listener.heard(request.protocol)
        return web.Response()

    listener = HttpListener(
        handle, host="127.0.0.1", tls=context, max_connections=4, counters=counters, setting="here"
    )
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(listener.run([0], port.set_result))
    try:
        async with asyncio.timeout(5.0):  # less than a handshake may take
            await port
            many = (asyncio.open_connection("127.0.0.1", port.result()) for _ in range(20))
            silent = await asyncio.gather(*many)
            while counters["too_many_connections"] < 16:
                await asyncio.sleep(0.01)
            for _, writer in silent:
                writer.transport.abort()
            reply = b""
            while not reply:  # who is gone counts no more
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port.result(), ssl=trusting
                    )
                    writer.write(REQUEST)
                    reply = await reader.read(15)
                    writer.transport.abort()
                await asyncio.sleep(0.01)
        assert reply.startswith(b"HTTP/1.1 200")
        assert counters["too_many_connections"] >= 16
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
