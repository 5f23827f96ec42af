"""The gateway's process: its connections, its tokens, its port.

What always holds: it listens only once the tokens were read; ``FOLDER/gateway/address`` is its
address while it listens; where the port is taken it ends, and the scheduler starts it again later.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from scheduler.config import HttpTable, SchedulerConfig
from scheduler.gateway.access import TokenBook, first_token
from scheduler.gateway.app import Gateway
from scheduler.gateway.audit import Audit
from scheduler.gateway.calls import Line, World
from scheduler.gateway.feed import Feed
from scheduler.gateway.mqtt import MqttBridge
from scheduler.gateway.routes import ROUTES
from scheduler.gateway.submitters import Submitters
from scheduler.http_access import tls_context
from scheduler.http_server import HttpListener
from scheduler.operator import Operator
from scheduler.service import claim
from scheduler.service_main import service_command
from transport.errors import StoreError
from transport.keys import GATEWAY
from transport.links import Network
from transport.plane_hub import reachable, remembered_ports
from transport.runtime.clock import Clock
from transport.runtime.files import atomic_write, next_incarnation, private_dir

ANSWER_S: Final = 5.0
MOST_ORDERS: Final = 64
MOST_LOGS: Final = 4
ADDRESS: Final = "address"

_log = structlog.get_logger()


def address_of(table: HttpTable, port: int) -> str:
    """Where the interface is reached from this machine."""
    scheme = "https" if table.certificate else "http"
    return f"{scheme}://{reachable(table.host)}:{port}/"


async def serve(
    config: SchedulerConfig,
    *,
    network: Network,
    clock: Clock,
    rng: random.Random,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Serve HTTP until ``stop``; returns the exit status.

    Raises:
        ConfigError: keys, certificate or address cannot be used.
        StoreError: the folder cannot be used.
    """
    folder = private_dir(Path(config.scheduler.folder) / GATEWAY)
    with await claim(folder, stop):
        (folder / ADDRESS).unlink(missing_ok=True)
        running = asyncio.create_task(
            _serve(config, folder, network=network, clock=clock, rng=rng, on_ready=on_ready)
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            running.cancel()
            outcomes = await asyncio.gather(running, return_exceptions=True)
            (folder / ADDRESS).unlink(missing_ok=True)
        error = outcomes[0]
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error
    return 0


async def _serve(
    config: SchedulerConfig,
    folder: Path,
    *,
    network: Network,
    clock: Clock,
    rng: random.Random,
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    table, keys = config.http, Path(config.transport.keys)
    tls = (
        tls_context(Path(table.certificate), Path(table.key), "http.")
        if table.certificate
        else None
    )
    await asyncio.to_thread(first_token, keys, folder)
    book = TokenBook(keys)
    await asyncio.to_thread(book.refresh)
    async with contextlib.AsyncExitStack() as stack:

        async def operator() -> Operator:
            key = keys / f"{GATEWAY}.toml"
            made = Operator(config.transport, key, answer_s=ANSWER_S, network=network)
            return await stack.enter_async_context(made)

        asking = await operator()
        life = next_incarnation(folder, clock.wall_s())
        audit = Audit(folder.parent, life, clock)
        stack.callback(audit.close)
        submitters = Submitters(config.transport, network, ANSWER_S)
        stack.push_async_callback(submitters.close)
        feed = Feed(asking, await operator(), clock)
        stack.push_async_callback(feed.close)
        world = World(
            config=config,
            folder=folder.parent,
            clock=clock,
            life=life,
            book=book,
            feed=feed,
            orders=Line(asking, MOST_ORDERS),
            logs=Line(await operator(), MOST_LOGS),
            submitters=submitters,
            disk=asyncio.Lock(),
        )
        bridge = None
        if config.mqtt.enabled:
            bridge = MqttBridge(
                config.mqtt, feed, world.orders, book, audit, folder, clock=clock, rng=rng
            )
            world.bridge = bridge.counts
        gateway = Gateway(world, ROUTES, audit)
        gateway.listener = HttpListener(
            gateway.handle,
            host=table.host,
            tls=tls,
            max_connections=table.max_connections,
            counters=world.refused,
            setting="http.port",
            max_per_address=table.max_connections_per_address,
            shared=table.shared_addresses,
        )
        world.connections = lambda: gateway.listener.connections

        def listening(port: int) -> None:
            if not table.port:
                atomic_write(folder / "port", f"{port}\n".encode())
            address = address_of(table, port)
            atomic_write(folder / ADDRESS, f"{address}\n".encode())
            on_ready({"ready": True, "port": port, "address": address})
            _log.info("gateway.ready", address=address, tokens=len(book))

        ports = [table.port] if table.port else [*remembered_ports(folder / "port"), 0]
        beside = [asyncio.create_task(_keep(gateway, world))]
        if bridge is not None:
            beside.append(asyncio.create_task(bridge.run()))
        try:
            await gateway.listener.run(ports, listening)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


async def _keep(gateway: Gateway, world: World) -> None:
    """Look at the tokens again and again."""
    while True:
        await asyncio.sleep(TokenBook.SCAN_INTERVAL_S)
        try:
            await asyncio.to_thread(world.book.refresh)
        except StoreError as error:
            _log.error("http.tokens_unreadable", reason=str(error))
            continue
        names = world.book.names()
        gateway.rates.keep(names)
        await world.submitters.keep(names)


if __name__ == "__main__":
    service_command(GATEWAY, serve)()
