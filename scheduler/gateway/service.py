"""The gateway's process: its connections, its tokens, its port.

What always holds: it listens only once the tokens were read; ``FOLDER/gateway/address`` is its
address while it listens; where the port is taken it ends, and the scheduler starts it again later;
of what runs beside each other (the port, the tokens, the bridge) none goes on alone: one that ends
ends the process with its error. Tokens that cannot be read count as they were last read for about
ten seconds, and then no token counts until they can be.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Mapping
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
from transport.keys import GATEWAY
from transport.links import Network
from transport.plane_hub import reachable, remembered_ports
from transport.runtime.clock import Clock
from transport.runtime.files import atomic_write, next_incarnation, private_dir

ANSWER_S: Final = 5.0
MOST_ORDERS: Final = 64
MOST_LOGS: Final = 4
ADDRESS: Final = "address"
ALIVE_S: Final = 5.0
"""How often the scheduler is told, once we are ready, that we do not hang."""
SAID_LOOKS: Final = 150
"""Between two lines about tokens that cannot be read, about a minute."""

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

        ready = asyncio.Event()

        def listening(port: int) -> None:
            if not table.port:
                atomic_write(folder / "port", f"{port}\n".encode())
            address = address_of(table, port)
            atomic_write(folder / ADDRESS, f"{address}\n".encode())
            on_ready({"ready": True, "port": port, "address": address})
            ready.set()
            _log.info("gateway.ready", address=address, tokens=len(book))

        ports = [table.port] if table.port else [*remembered_ports(folder / "port"), 0]
        parts = {
            "http": gateway.listener.run(ports, listening),
            "tokens": _keep(gateway, world),
            "alive": _say_alive(ready, on_ready),
        }
        if bridge is not None:
            parts["mqtt"] = bridge.run()
        await _together(parts)


async def _together(parts: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run them until cancelled. None of them ends by itself: one that does is said, ends the
    others, and its error is raised (RuntimeError without one), so that the process is started
    again."""
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        error = None if task.cancelled() else task.exception()
        _log.error("gateway.part_ended", part=task.get_name(), reason=_reason(error))
        if error is not None:
            raise error
    raise RuntimeError("a part of the gateway ended by itself")


async def _say_alive(ready: asyncio.Event, say: Callable[[dict[str, Any]], None]) -> None:
    await ready.wait()
    while True:
        await asyncio.sleep(ALIVE_S)
        say({"alive": True})


async def _keep(gateway: Gateway, world: World) -> None:
    """Look at the tokens again and again, whatever a look meets. Trouble is said once in
    ``SAID_LOOKS``; after ``STALE_LOOKS`` in a row no token counts until a look succeeds. Looks are
    counted and not time, so that a machine that was stopped costs nothing."""
    failed = looks = next_said = 0
    look: asyncio.Task[None] | None = None
    try:
        while True:
            await asyncio.sleep(TokenBook.SCAN_INTERVAL_S)
            look = look or asyncio.create_task(asyncio.to_thread(world.book.refresh))
            done, _ = await asyncio.wait({look}, timeout=TokenBook.SCAN_INTERVAL_S)
            looks += 1
            error = look.exception() if done else TimeoutError("the folder does not answer")
            look = None if done else look
            if error is None:
                if failed >= TokenBook.STALE_LOOKS:
                    _log.info("http.tokens_read_again", tokens=len(world.book))
                failed = 0
                await _hang_up(gateway, world)
                continue
            failed += 1
            stale = failed >= TokenBook.STALE_LOOKS
            if stale:
                world.book.forget()
            if looks > next_said or failed == TokenBook.STALE_LOOKS:
                next_said = looks + SAID_LOOKS
                reason = _reason(error)
                _log.error("http.tokens_unreadable", reason=reason, everybody_refused=stale)
    finally:
        if look is not None:
            look.cancel()


async def _hang_up(gateway: Gateway, world: World) -> None:
    """Forget whose token is gone."""
    names = world.book.names()
    gateway.rates.keep(names)
    try:
        await world.submitters.keep(names)
    except Exception:  # noqa: BLE001 - it costs that submitter's connection alone
        _log.exception("http.submitter_not_closed")


def _reason(error: BaseException | None) -> str:
    return "it ended" if error is None else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    service_command(GATEWAY, serve)()
