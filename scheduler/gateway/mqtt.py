"""The MQTT bridge: the scheduler's state to a broker, and signed commands from it.

What always holds: the bridge is lossy and one-sided. It reads the status that the gateway has
anyway; a broker that is slow, away or full costs telemetry and nothing else. What waits to be sent
is bounded by the number of topics: of each only the latest is kept. A command counts only with a
valid signature of an operator's token, once, until it expires; it is recorded as one over HTTP is.
After a lost connection everything that brokers keep is said again.
"""

import asyncio
import random
import ssl
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

import aiomqtt
import msgspec
import structlog

from scheduler.config import MqttTable
from scheduler.gateway.access import HttpRole, HttpToken, TokenBook
from scheduler.gateway.audit import Asked, Audit
from scheduler.gateway.calls import Line
from scheduler.gateway.feed import Feed
from scheduler.operator import Order, RequestRefused
from transport.errors import ConfigError, FarflowError
from transport.mqtt_topics import (
    MAX_COMMAND_BYTES,
    OFFLINE,
    ONLINE,
    VERBS,
    Command,
    Publication,
    Reply,
    changes,
    command_fault,
    commands_filter,
    discovery,
    parts_of,
    retained,
    telemetry,
)
from transport.runtime.clock import Clock
from transport.runtime.files import read_limited
from transport.status import SchedulerStatus

CONNECT_S: Final = 10.0
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
KEEPALIVE_S: Final = 30
STATE_S: Final = 2.0
"""How often a changed state is said."""
MAX_TOPICS: Final = 20_000
MAX_IDS: Final = 4096
MAX_INCOMING: Final = 64
MAX_PASSWORD_BYTES: Final = 1024

_ORDERS: Final[dict[str, Order]] = {"drain": "drain", "cordon": "cordon", "resume": "uncordon"}
_log = structlog.get_logger()


class MqttBridge:
    """``run`` until cancelled."""

    def __init__(
        self,
        table: MqttTable,
        feed: Feed,
        orders: Line,
        book: TokenBook,
        audit: Audit,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Reads the password and the certificates; blocks a moment.

        Raises:
            ConfigError: a file does not load.
        """
        self._table = table
        self._feed = feed
        self._orders = orders
        self._book = book
        self._audit = audit
        self._clock = clock
        self._rng = rng
        self._password = _password(table.password_file)
        self._tls = _tls(table)
        self._kept: dict[str, bytes] = {}
        """What the broker keeps of us, as far as this connection knows."""
        self._answered: OrderedDict[str, Reply] = OrderedDict()
        self._counted: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}
        self.connected = False
        self.published = 0

    async def run(self) -> NoReturn:
        """Connect, serve, and again with back-off."""
        retry_s = FIRST_RETRY_S
        while True:
            began_s = self._clock.monotonic_s()
            try:
                await self._serve()
            except (aiomqtt.MqttError, OSError, TimeoutError) as error:
                _log.warning("mqtt.not_connected", broker=self._table.host, reason=str(error)[:200])
            finally:
                self.connected = False
            if self._clock.monotonic_s() - began_s > LAST_RETRY_S:
                retry_s = FIRST_RETRY_S
            await asyncio.sleep(retry_s * self._rng.uniform(0.75, 1.25))
            retry_s = min(LAST_RETRY_S, 2 * retry_s)

    async def _serve(self) -> None:
        """One connection, until it is lost."""
        table = self._table
        client = aiomqtt.Client(
            table.host,
            table.port,
            username=table.username or None,
            password=self._password,
            identifier=f"farflow-{table.base_topic.replace('/', '-')}"[:64],
            will=aiomqtt.Will(f"{table.base_topic}/status", OFFLINE, qos=1, retain=True),
            timeout=CONNECT_S,
            keepalive=KEEPALIVE_S,
            tls_context=self._tls,
            max_queued_incoming_messages=MAX_INCOMING,
        )
        async with client:
            if table.commands:
                await client.subscribe(commands_filter(table.base_topic), qos=1)
            await client.publish(f"{table.base_topic}/status", ONLINE, qos=1, retain=True)
            self._kept = {}
            self.connected = True
            _log.info("mqtt.connected", broker=table.host, base=table.base_topic)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._tell(client))
                    tasks.create_task(self._hear(client))
            except* (aiomqtt.MqttError, OSError, TimeoutError) as lost:
                raise aiomqtt.MqttError(str(lost.exceptions[0])) from lost

    # ---- what is said ------------------------------------------------------------------------

    async def _tell(self, client: aiomqtt.Client) -> None:
        next_s = 0.0
        while True:
            now_s = self._clock.monotonic_s()
            try:
                status = (await self._feed.status()).status
            except FarflowError as error:
                _log.info("mqtt.no_status", reason=str(error))
            else:
                await self._publish(client, self._state(status))
                if now_s >= next_s:
                    next_s = now_s + self._table.interval_s
                    self._measure(status, now_s)
                    await self._publish(
                        client, telemetry(self._table.base_topic, status, self._rates)
                    )
            await asyncio.sleep(STATE_S)

    def _state(self, status: SchedulerStatus) -> list[Publication]:
        now = retained(self._table.base_topic, status)
        if self._table.home_assistant:
            now |= discovery(self._table.base_topic, self._table.discovery_prefix, status)
        if len(now) > MAX_TOPICS:
            _log.warning("mqtt.too_many_topics", topics=len(now), most=MAX_TOPICS)
            now = dict(list(now.items())[:MAX_TOPICS])
        return list(changes(self._kept, now))

    async def _publish(self, client: aiomqtt.Client, publications: Iterable[Publication]) -> None:
        """State with quality of service 1, numbers of the moment with 0. What was said is
        remembered only then, so that nothing is taken for said that is not."""
        for one in publications:
            await client.publish(
                one.topic, one.payload, qos=1 if one.retain else 0, retain=one.retain
            )
            self.published += 1
            if one.retain and one.payload:
                self._kept[one.topic] = one.payload
            elif one.retain:
                self._kept.pop(one.topic, None)

    def _measure(self, status: SchedulerStatus, now_s: float) -> None:
        """Tokens per second of every agent since the last time."""
        counted: dict[str, tuple[float, int]] = {}
        self._rates = {}
        for agent in status.agents:
            before_s, tokens = self._counted.get(agent.name, (now_s, agent.tokens_generated))
            made = max(0, agent.tokens_generated - tokens)  # a new incarnation counts anew
            if now_s > before_s:
                self._rates[agent.name] = made / (now_s - before_s)
            counted[agent.name] = (now_s, agent.tokens_generated)
        self._counted = counted

    # ---- what is heard -----------------------------------------------------------------------

    async def _hear(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic, payload = str(message.topic), message.payload
            found = parts_of(self._table.base_topic, topic)
            if found is None or message.retain or not isinstance(payload, bytes):
                continue  # a retained command would be given again to everybody who comes
            reply = await self._obey(topic, *found, payload)
            await client.publish(f"{topic}/reply", msgspec.json.encode(reply), qos=1)

    async def _obey(self, topic: str, agent: str, verb: str, payload: bytes) -> Reply:
        try:
            if len(payload) > MAX_COMMAND_BYTES:
                raise msgspec.ValidationError(f"longer than {MAX_COMMAND_BYTES} bytes")
            command = msgspec.json.decode(payload, type=Command)
        except msgspec.DecodeError as error:
            return Reply(id="", ok=False, code="mqtt.malformed", message=str(error)[:200])
        token = self._book.named(command.token)
        fault = "mqtt.unknown_token"
        if token is not None:
            fault = command_fault(topic, command, token.secret_sha256, self._clock.wall_s())
        if fault:  # not remembered: whoever has no token must not use up another one's id
            return await self._refused(topic, command, token, fault)
        known = self._answered.get(command.id)
        if known is not None:  # delivered twice
            return known
        reply = await self._carried_out(topic, agent, verb, command, token)
        self._answered[command.id] = reply
        while len(self._answered) > MAX_IDS:
            self._answered.popitem(last=False)
        return reply

    def _asked(self, topic: str, command: Command, token: HttpToken | None) -> Asked:
        return Asked(
            token=command.token,
            role="" if token is None else token.role.value,
            address=f"mqtt:{self._table.host}",
            method="MQTT",
            path=topic,
        )

    async def _refused(
        self, topic: str, command: Command, token: HttpToken | None, code: str
    ) -> Reply:
        reply = Reply(id=command.id, ok=False, code=code, message="not carried out")
        try:
            await self._audit.refused(self._asked(topic, command, token), 0, code)
        except FarflowError as error:
            _log.warning("mqtt.not_recorded", reason=str(error))
        return reply

    async def _carried_out(
        self, topic: str, agent: str, verb: str, command: Command, token: HttpToken | None
    ) -> Reply:
        if token is None or token.role is not HttpRole.OPERATOR:
            return await self._refused(topic, command, token, "mqtt.role")
        if verb not in VERBS:
            return await self._refused(topic, command, token, "mqtt.unknown_command")
        try:
            begun = await self._audit.begin(self._asked(topic, command, token))
            code, message = "", ""
            try:
                async with self._orders.turn() as operator:
                    message = await operator.order(
                        agent, _ORDERS[verb], reason=command.reason, by=f"mqtt:{command.token}"
                    )
            except RequestRefused as error:
                code, message = "refused", str(error)
            except Exception as error:  # noqa: BLE001 - it is answered, whatever went wrong
                code, message = "mqtt.failed", f"{type(error).__name__}: {error}"
            await self._audit.end(begun, 0, code)
        except FarflowError as error:
            return Reply(id=command.id, ok=False, code=error.code, message=str(error)[:300])
        return Reply(id=command.id, ok=not code, code=code, message=message[:300])


def _password(path: str) -> str | None:
    if not path:
        return None
    try:
        found = read_limited(Path(path), MAX_PASSWORD_BYTES)
    except (FileNotFoundError, FarflowError) as error:
        raise ConfigError(f"mqtt.password_file: {path} cannot be read: {error}") from error
    return found.decode("utf-8", "replace").strip()


def _tls(table: MqttTable) -> ssl.SSLContext | None:
    if not table.tls:
        return None
    try:
        return ssl.create_default_context(cafile=table.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"mqtt.ca_file: {table.ca_file}: {error}; name a PEM file") from error
