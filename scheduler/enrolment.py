"""Lets new agents in: the only listener that takes keys that nobody knows.

What always holds: it listens only while some token is open; a stranger can say one small message,
``EnrolRequest``, and whatever else it says costs it the connection and a counter; how many
connections there are, how long each lives, how much it sends and how often anybody comes is bounded
in all and per address; whether a key is let in is decided in a thread, one after the other, and is
on the disk before it is said. It has a socket, and with real links an I/O thread, of its own, so
that strangers do not delay the other planes.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from scheduler.service import Worker
from scheduler.tokens import Enrolled, TokenStore
from transport.certificates import load_root
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import (
    ConfigError,
    LinkClosed,
    LinkError,
    ProtocolError,
    StoreError,
    VersionRefused,
)
from transport.keys import Peer
from transport.links import Hub, Inbound, LinkOptions, Network
from transport.messages import (
    PROTOCOL_VERSION,
    EnrolReply,
    EnrolRequest,
    Message,
    Plane,
    Refuse,
    Role,
)
from transport.permissions import may_send
from transport.plane_hub import listen, server_key
from transport.runtime.clock import Clock
from transport.runtime.settings import TransportConfig

PLANE: Final = Plane.ENROLMENT
LOOK_S: Final = 0.5
"""How soon a first token opens the listener."""
BIND_AGAIN_S: Final = 10.0
MAX_WAITING: Final = 128
BUSY_S: Final = 3.0

OPTIONS: Final = LinkOptions.for_plane(PLANE)._replace(
    window_messages=4,
    handshake_s=5.0,
    max_connections=256,
    connection_s=15.0,
    connection_bytes=32 * 1024,
)

_log = structlog.get_logger()


class Rates(NamedTuple):
    """How often strangers may come, per second and at once."""

    all_per_s: float = 25.0
    all_burst: float = 200.0
    address_per_s: float = 2.0
    address_burst: float = 20.0
    addresses: int = 4096


RATES: Final = Rates()


class RateLimit:
    """Token buckets, one for all and one per address; the addresses heard last are remembered."""

    def __init__(self, rates: Rates, clock: Clock) -> None:
        self._rates = rates
        self._clock = clock
        now = clock.monotonic_s()
        self._all = (rates.all_burst, now)
        self._addresses: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.put_off = 0

    def admit(self, address: str) -> bool:
        """Whether a connection from ``address`` may go on now."""
        rates, now = self._rates, self._clock.monotonic_s()
        own = self._addresses.pop(address, (rates.address_burst, now))
        left = _refilled(own, rates.address_per_s, rates.address_burst, now)
        in_all = _refilled(self._all, rates.all_per_s, rates.all_burst, now)
        # Who is over its own rate does not use up that of the others.
        admitted = left >= 1.0 and in_all >= 1.0
        self._addresses[address] = (left - admitted, now)
        self._all = (in_all - admitted, now)
        while len(self._addresses) > rates.addresses:
            self._addresses.popitem(last=False)
        self.put_off += not admitted
        return admitted


class Enrolment:
    """The enrolment plane of one scheduler. ``ports`` gives the other planes' ports by name, or
    None while they are not known yet."""

    def __init__(
        self,
        network: Network,
        transport: TransportConfig,
        *,
        port_file: Path,
        clock: Clock,
        ports: Callable[[], Mapping[str, int] | None],
        rates: Rates = RATES,
        options: LinkOptions = OPTIONS,
    ) -> None:
        self._network = network
        self._transport = transport
        self._port_file = port_file
        self._clock = clock
        self._ports = ports
        self._options = options
        # The one that the planes have: a file that is replaced counts from the next start on.
        self._server = server_key(transport)
        self._tokens = TokenStore(Path(transport.keys))
        self._limit = RateLimit(rates, clock)
        self._hub: Hub | None = None
        self._waiting: asyncio.Queue[tuple[Hub, Inbound, EnrolRequest]] = asyncio.Queue(MAX_WAITING)
        self._answered: OrderedDict[bytes, None] = OrderedDict()
        self._worker = Worker("enrolment")
        self._no_bind_before_s = 0.0
        self._counters: Counter[str] = Counter()

    @property
    def port(self) -> int:
        """Where it listens now; 0 while it does not."""
        return 0 if self._hub is None else self._hub.port

    @property
    def counters(self) -> dict[str, int]:
        """By stable name: who was let in, refused, cut off, put off by a rate."""
        found = {f"enrolment.{name}": self._counters[name] for name in sorted(self._counters)}
        if self._limit.put_off:
            found["enrolment.put_off"] = self._limit.put_off
        return found

    async def run(self) -> None:
        """Open and close the listener as tokens come and go, until cancelled."""
        serving: asyncio.Task[None] | None = None
        deciding = asyncio.create_task(self._decide(), name="enrolment decisions")
        try:
            while True:
                wanted = await self._worker.run(self._any_open, self._clock.wall_s())
                if wanted and self._hub is None:
                    hub = self._hub = self._opened()
                    if hub is not None:
                        _log.info("enrolment.open", port=hub.port)
                        serving = asyncio.create_task(self._serve(hub), name="enrolment")
                elif not wanted and self._hub is not None:
                    await self._shut()
                for task in (deciding, serving):
                    if task is not None and task.done() and not task.cancelled():
                        task.result()
                await asyncio.sleep(LOOK_S)
        finally:
            deciding.cancel()
            await self._shut()
            await asyncio.gather(
                *(t for t in (deciding, serving) if t is not None), return_exceptions=True
            )
            await asyncio.to_thread(self._worker.close)

    def _any_open(self, wall_s: float) -> bool:
        try:
            return self._tokens.any_open(wall_s)
        except OSError as error:
            _log.warning("tokens.not_read", reason=str(error))
            return False

    def _opened(self) -> Hub | None:
        now = self._clock.monotonic_s()
        if now < self._no_bind_before_s:
            return None
        transport = self._transport

        def bind(endpoint: str) -> Hub:
            return self._network.hub(
                endpoint,
                self._options,
                key=self._server,
                authorise=_anybody,
                admit=self._limit.admit,
            )

        try:
            return listen(bind, transport.host, transport.enrolment_port, self._port_file)
        except (ConfigError, StoreError) as error:
            # The deployment works without it: agents that are in stay in.
            self._no_bind_before_s = now + BIND_AGAIN_S
            _log.error("enrolment.not_open", reason=str(error), remedy="transport.enrolment_port")
            return None

    async def _shut(self) -> None:
        """``port`` tells of a listener until it takes nobody any more."""
        hub = self._hub
        if hub is not None:
            try:
                await hub.close()
            finally:
                self._hub = None
            _log.info("enrolment.closed")

    async def _serve(self, hub: Hub) -> None:
        while True:
            try:
                batch = await hub.recv()
            except LinkClosed:
                return
            for inbound in batch:
                self._arrived(hub, inbound)

    def _arrived(self, hub: Hub, inbound: Inbound) -> None:
        if inbound.route in self._answered:
            self._cut(hub, inbound, "cut.second_message")
            return
        self._answered[inbound.route] = None
        while len(self._answered) > 2 * max(self._options.max_connections, 1):
            self._answered.popitem(last=False)
        try:
            if not may_send(Role.AGENT, PLANE, peek(inbound.frames)):
                self._cut(hub, inbound, "cut.not_allowed")
                return
            message, _ = decode(inbound.frames, LIMITS[PLANE])
        except VersionRefused as error:
            text = f"{error}; install a farflow that speaks protocol {PROTOCOL_VERSION}"
            self._say(hub, inbound, Refuse(code=error.code, message=text))
            return
        except ProtocolError:
            self._cut(hub, inbound, "cut.malformed")
            return
        if not isinstance(message, EnrolRequest):
            self._cut(hub, inbound, "cut.not_allowed")
            return
        if message.protocol != PROTOCOL_VERSION:
            text = f"protocol {message.protocol}, the scheduler speaks {PROTOCOL_VERSION}"
            self._say(hub, inbound, Refuse(code="protocol.version", message=text))
            return
        try:
            self._waiting.put_nowait((hub, inbound, message))
        except asyncio.QueueFull:
            busy = Refuse(code="enrol.busy", message="too many at once", retry_s=BUSY_S)
            self._say(hub, inbound, busy)

    async def _decide(self) -> None:
        while True:
            hub, inbound, request = await self._waiting.get()
            self._say(hub, inbound, await self._answer(inbound.identity, request))

    async def _answer(self, public_key: str, request: EnrolRequest) -> Message:
        ports = self._ports()
        if ports is None:
            return Refuse(code="enrol.not_ready", message="still starting", retry_s=BUSY_S)
        try:
            outcome = await self._worker.run(
                self._tokens.redeem,
                request.token,
                request.secret,
                public_key,
                request.name,
                self._clock.wall_s(),
            )
            root = load_root(Path(self._transport.keys))
        except (StoreError, ConfigError, OSError) as error:
            _log.error("enrolment.failed", reason=str(error))
            return Refuse(
                code="enrol.store",
                message="the scheduler cannot write it down now; see its log",
                retry_s=BUSY_S,
            )
        if not isinstance(outcome, Enrolled):
            _log.warning("enrolment.refused", code=outcome.code, key=public_key)
            return Refuse(code=outcome.code, message=outcome.message)
        _log.info("enrolment.done", name=outcome.name, key=public_key, fresh=outcome.fresh)
        self._counters["fresh" if outcome.fresh else "repeated"] += 1
        return EnrolReply(
            name=outcome.name,
            role=outcome.role,
            control_port=ports["control"],
            trajectories_port=ports["trajectories"],
            weights_port=ports["weights"],
            server_key=self._server.public_key,
            root_key="" if root is None else root.verify_key,
        )

    def _say(self, hub: Hub, inbound: Inbound, message: Message) -> None:
        if isinstance(message, Refuse):
            self._counters[f"refused.{message.code}"] += 1
        try:
            hub.send(inbound.route, encode(message, limits=LIMITS[PLANE]))
        except LinkError as error:
            _log.debug("enrolment.not_sent", reason=str(error))

    def _cut(self, hub: Hub, inbound: Inbound, counter: str) -> None:
        self._counters[counter] += 1
        _log.warning("enrolment.cut", why=counter, key=inbound.identity)
        hub.disconnect(inbound.identity)


def _refilled(bucket: tuple[float, float], per_s: float, most: float, now: float) -> float:
    left, at_s = bucket
    return min(most, left + per_s * (now - at_s))


def _anybody(public_key: str) -> Peer | None:
    """Every key may speak here; what it is allowed to become, its token says."""
    return Peer(name="stranger", role=Role.AGENT)
