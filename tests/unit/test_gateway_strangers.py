"""Who has no token: how often it may ask, by which name, and that it is counted. The gateway is a
real one on a real port, with a status that never changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from scheduler import http_server
from scheduler.config import HttpTable, SchedulerConfig
from scheduler.gateway.access import HttpRole, Rates, TokenBook, create_token
from scheduler.gateway.app import OPEN_PER_S, STRANGERS_PER_S, Gateway
from scheduler.gateway.audit import Audit
from scheduler.gateway.calls import World
from scheduler.gateway.feed import Feed
from scheduler.gateway.routes import ROUTES
from scheduler.http_server import HttpListener
from transport.runtime.clock import ManualClock
from transport.status import SchedulerStatus

pytestmark = pytest.mark.asyncio


class Scheduler:
    async def status(self) -> SchedulerStatus:
        return SchedulerStatus(term=1, build="b", uptime_s=1.0, runs=(), agents=(), counters={})


class Here:
    """``said`` is the status and the body of an answer."""

    def __init__(self, port: int, secret: str, world: World, clock: ManualClock) -> None:
        self.port, self.secret, self.world, self.clock = port, secret, world, clock

    async def said(
        self, path: str, *, host: str = "", token: str = "", address: str = "127.0.0.1"
    ) -> tuple[int, str]:
        headers = {"Host": host} if host else {}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"http://127.0.0.1:{self.port}{path}"
            async with session.get(url, headers=headers) as answer:
                return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def gateway(folder: Path, **http: Any) -> AsyncIterator[Here]:
    secret = create_token(folder / "keys", "look", HttpRole.VIEWER)
    book = TokenBook(folder / "keys")
    book.refresh()
    config, clock = SchedulerConfig(http=HttpTable(**http)), ManualClock()
    nothing: Any = None
    world = World(
        config=config, folder=folder, clock=clock, life=1, book=book,
        feed=Feed(Scheduler(), nothing, clock),  # type: ignore[arg-type]  # asked for nothing else
        orders=nothing, logs=nothing, submitters=nothing, disk=asyncio.Lock(),
    )  # fmt: skip
    audit = Audit(folder, 1, clock)
    made = Gateway(world, ROUTES, audit)
    table = config.http
    made.listener = HttpListener(
        made.handle, host="127.0.0.1", tls=None, max_connections=table.max_connections,
        counters=world.refused, setting="here",
        max_per_address=table.max_connections_per_address, shared=table.shared_addresses,
    )  # fmt: skip
    world.connections = lambda: made.listener.connections
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(made.listener.run([0], port.set_result))
    try:
        async with asyncio.timeout(30.0):
            yield Here(await port, secret, world, clock)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        audit.close()


@pytest.mark.parametrize("path", ["/", "/v1/healthz", "/nothing/here", "/v1/openapi.json"])
async def test_requests_that_need_no_token_are_counted_by_address(tmp_path, monkeypatch, path):
    monkeypatch.setattr(http_server, "group_of", lambda address, _: address)
    async with gateway(tmp_path) as here:
        url = f"http://127.0.0.1:{here.port}{path}"
        async with aiohttp.ClientSession() as session:
            for _ in range(round(2 * OPEN_PER_S)):
                async with session.get(url) as answer:
                    assert answer.status != 429
            async with session.get(url) as answer:
                assert (answer.status, "Retry-After" in answer.headers) == (429, True)
        assert (await here.said(path, address="127.0.0.2"))[0] != 429
        assert (await here.said("/metrics", token=here.secret))[0] == 200
        here.clock.advance(1.0)
        assert (await here.said(path))[0] != 429


async def test_wrong_tokens_and_none_are_as_bad(tmp_path):
    async with gateway(tmp_path) as here:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{here.port}/v1/status"
            for number in range(round(2 * STRANGERS_PER_S)):
                headers = {"Authorization": "Bearer x"} if number % 2 else {}
                async with session.get(url, headers=headers) as answer:
                    assert answer.status == 401
            async with session.get(url) as answer:
                assert answer.status == 429
        assert (await here.said("/v1/status", token=here.secret))[0] == 200


async def test_only_so_many_addresses_are_remembered():
    rates = Rates(1.0, 3)
    for name in ("a", "b", "c"):
        assert [rates.take(name, 0.0), rates.take(name, 0.0)] == [0.0, 0.0]
    assert [rates.take(name, 0.0) == 0.0 for name in ("d", "e", "f")] == [True, True, False]
    assert rates.take("a", 0.0) > 0.0
    assert rates.take("g", 9.0) == 0.0  # those who have saved up all are forgotten
    assert len(rates._left) == 1


async def test_open_metrics_are_not_read_through_a_name_that_leads_here(tmp_path):
    async with gateway(tmp_path, open_metrics=True) as here:
        for host in ("evil.example", f"evil.example:{here.port}"):
            status, text = await here.said("/metrics", host=host)
            assert (status, "localhost, 127.0.0.1 or [::1]" in text) == (421, True)
            assert (await here.said("/metrics", host=host, token=here.secret))[0] == 200
        status, text = await here.said("/metrics", host=f"localhost:{here.port}")
        assert status == 200
        assert 'farflow_http_refused_total{code="http.host"} 2' in text
    async with gateway(tmp_path / "closed") as here:
        assert (await here.said("/metrics", host="localhost"))[0] == 401


async def test_one_address_has_its_part_of_the_connections_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server, "group_of", lambda address, _: address)
    async with gateway(tmp_path, max_connections_per_address=3) as here:
        silent = [
            await asyncio.open_connection("127.0.0.1", here.port, local_addr=("127.0.0.2", 0))
            for _ in range(8)
        ]
        while here.world.refused["too_many_of_address"] < 5:
            await asyncio.sleep(0.01)
        status, text = await here.said("/metrics", token=here.secret)
        assert status == 200
        assert 'farflow_http_refused_total{code="too_many_of_address"} 5' in text
        assert "farflow_http_connections 4" in text
        assert "farflow_scheduler_status_age_seconds 0" in text
        for _, writer in silent:
            writer.transport.abort()
        while here.world.connections() > 0:
            await asyncio.sleep(0.01)
        assert (await here.said("/v1/healthz", address="127.0.0.2"))[0] == 200  # gone is gone


async def test_this_machine_and_shared_addresses_have_all_of_them(tmp_path):
    async with gateway(tmp_path, max_connections_per_address=1) as here:
        both = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(5)]
        assert (await here.said("/v1/healthz"))[0] == 200
        assert not here.world.refused
        for _, writer in both:
            writer.transport.abort()
