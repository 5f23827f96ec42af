"""What the two service processes beside the scheduler have in common.

What always holds: a service is known to the scheduler by its own key and announces itself until it
is welcome; it says one line on standard output once it can be reached; it stops when it is told
to, when its standard input ends, or when the disk refuses (status 1): what cannot be kept must not
be promised.
"""

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog

from scheduler.config import SchedulerConfig
from scheduler.control_link import ControlLink
from transport.errors import StoreError
from transport.keys import KeyPair
from transport.links import Network
from transport.messages import Message, Plane
from transport.plane_hub import Arrival, PlaneHub, reachable, server_key
from transport.plane_links import link_options
from transport.runtime.build import build_id
from transport.runtime.clock import Clock
from transport.runtime.files import (
    FolderLock,
    lock_folder,
    next_incarnation,
    private_dir,
)
from transport.runtime.metrics_http import serve_metrics
from transport.telemetry import Sample, page

T = TypeVar("T")

EXIT_FAILED: Final = 1
CLAIM_S: Final = 10.0
CLAIM_AGAIN_S: Final = 0.05
_log = structlog.get_logger()


class Service(Protocol):
    """One plane's work; all methods are called on the loop and must not block."""

    counters: Counter[str]

    def arrived(self, arrival: Arrival) -> None: ...

    async def has_room(self) -> None:
        """Returns when more may be received."""
        ...

    def welcomed(self) -> None:
        """The scheduler knows us (again): announce what it has not confirmed."""
        ...

    def from_scheduler(self, message: Message) -> None: ...

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs in the background until cancelled, by name. A ``StoreError`` out of one ends
        the process."""
        ...

    async def close(self) -> None: ...


class Surroundings(NamedTuple):
    """What a service works with. ``tell`` gives a message to the scheduler, False when it cannot
    take it now."""

    config: SchedulerConfig
    folder: Path
    hub: PlaneHub
    clock: Clock
    rng: random.Random
    tell: Callable[[Message], bool]


class Worker:
    """One thread for blocking work, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, functools.partial(call, *args))

    def close(self) -> None:
        """Wait for what is running; nothing further is done."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def run_service(
    name: str,
    plane: Plane,
    config: SchedulerConfig,
    open_service: Callable[[Surroundings], Service],
    *,
    port: int,
    network: Network,
    clock: Clock,
    rng: random.Random,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
) -> int:
    """Run a service until ``stop`` and return its exit status. ``open_service`` may block: it runs
    before anybody is connected.

    Raises:
        ConfigError: keys or addresses are wrong.
        StoreError: the folder cannot be used.
    """
    folder = private_dir(Path(config.scheduler.folder) / name)
    with await claim(folder, stop):
        transport = config.transport
        own_key = KeyPair.load(Path(transport.keys) / f"{name}.toml")
        hub_key = server_key(transport)
        hub = PlaneHub(network, plane, transport, port=port, port_file=folder / "port", clock=clock)
        control_options = link_options(transport, Plane.CONTROL)
        service: Service | None = None

        def welcomed() -> None:
            if service is not None:
                service.welcomed()

        def from_scheduler(message: Message) -> None:
            if service is not None:
                service.from_scheduler(message)

        control = ControlLink(
            f"tcp://{reachable(transport.host)}:{transport.control_port}",
            lambda endpoint: network.link(
                endpoint, control_options, key=own_key, server_key=hub_key.public_key
            ),
            incarnation=next_incarnation(folder, clock.wall_s()),
            build=build_id(),
            clock=clock,
            rng=rng,
            on_welcome=welcomed,
            on_message=from_scheduler,
        )
        try:
            service = open_service(Surroundings(config, folder, hub, clock, rng, control.send))
            on_ready({"ready": True, "port": hub.port})
            _log.info("service.ready", port=hub.port)
            port = _metrics_port(config, plane)
            return await _run_parts(stop, hub, control, service, port)
        finally:
            if service is not None:
                await service.close()
            await hub.close()


async def claim(folder: Path, stop: asyncio.Event) -> FolderLock:
    """The folder's lock. A predecessor whose parent was killed ends within moments, and must have
    let go of the port before we listen.

    Raises:
        StoreError: it does not end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CLAIM_S
    while True:
        try:
            return lock_folder(folder)
        except StoreError:
            if loop.time() >= deadline or stop.is_set():
                raise
            await asyncio.sleep(CLAIM_AGAIN_S)


def _metrics_port(config: SchedulerConfig, plane: Plane) -> int:
    """The trajectory log's is the one that is set, the weight store's the next."""
    first = config.scheduler.services_metrics_port
    return first and first + (plane is Plane.WEIGHTS)


async def _run_parts(
    stop: asyncio.Event, hub: PlaneHub, control: ControlLink, service: Service, metrics_port: int
) -> int:
    parts = [
        asyncio.create_task(part, name=name)
        for name, part in {
            "receive": _receive(hub, service),
            "keys": hub.keep_refreshing(),
            "control": control.run(),
            **service.parts(),
        }.items()
    ]
    serving = asyncio.create_task(_serve_metrics(metrics_port, service))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stopping, serving, *parts):
            task.cancel()
        outcomes = await asyncio.gather(*parts, serving, return_exceptions=True)
    status = 0
    for outcome in outcomes:
        if isinstance(outcome, StoreError):
            _log.error("service.store_failed", reason=str(outcome))
            status = EXIT_FAILED
        elif isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return status


async def _serve_metrics(port: int, service: Service) -> None:
    await serve_metrics(
        port,
        lambda: page("service", {"farflow_service_happened_total": _happened(service)}),
        "scheduler.services_metrics_port",
    )


def _happened(service: Service) -> list[Sample]:
    return [((name,), count) for name, count in sorted(service.counters.items())]


async def _receive(hub: PlaneHub, service: Service) -> None:
    while True:
        for arrival in await hub.recv():
            service.arrived(arrival)
        await service.has_room()
