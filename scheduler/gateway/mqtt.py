"""The MQTT bridge: the scheduler's state to a broker, and signed commands from it.

What always holds: the bridge is lossy and one-sided. It reads the status that the gateway has
anyway; a broker that is slow, away or full costs telemetry and nothing else. What waits to be sent
is bounded by the number of topics: of each only the latest is kept; what waits to be heard is
bounded too, and what comes beyond that is dropped. After a lost connection everything that brokers
keep is said again.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, NoReturn

import aiomqtt
import msgspec
import structlog

from scheduler.config import MqttTable
from scheduler.gateway.access import TokenBook
from scheduler.gateway.audit import Audit
from scheduler.gateway.calls import Line
from scheduler.gateway.feed import Feed
from scheduler.gateway.metrics import BridgeCounts
from scheduler.gateway.mqtt_access import broker_password, broker_tls
from scheduler.gateway.mqtt_given import GivenCommands
from scheduler.gateway.mqtt_orders import MqttOrders
from transport.errors import FarflowError
from transport.mqtt_topics import (
    OFFLINE,
    ONLINE,
    Publication,
    changes,
    commands_filter,
    discovery,
    parts_of,
    retained,
    telemetry,
)
from transport.runtime.clock import Clock
from transport.status import SchedulerStatus

CONNECT_S: Final = 10.0
"""How long a broker may take to answer."""
GOODBYE_S: Final = 1.0
FIRST_RETRY_S: Final = 1.0
STATE_S: Final = 2.0
"""How often a changed state is said."""
COUNTS_S: Final = 60.0
SELDOM_S: Final = 60.0
"""How often the client's own library may log the same."""
MAX_TOPICS: Final = 20_000
MAX_INCOMING: Final = 64
_UNKNOWN: Final = b"?"
"""What a broker may keep of a topic after a lost connection: equal to nothing that is ever said."""

_log = structlog.get_logger()
_client_log = logging.getLogger(f"{__name__}.client")
_client_log.setLevel(logging.WARNING)


class Seldom(logging.Filter):
    """Lets the same line through once in ``SELDOM_S``, with how many were withheld before it: the
    client logs every message that comes while its queue is full, and anybody can flood that."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s
        self._said: dict[str, tuple[float, int]] = {}
        """By the text before its values are put in, of which the library has few: when it was said
        last, and how often it was withheld since."""

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, text = self._now_s(), str(record.msg)
        at_s, withheld = self._said.get(text, (-SELDOM_S, 0))
        if now_s < at_s + SELDOM_S:
            self._said[text] = (at_s, withheld + 1)
            return False
        self._said[text] = (now_s, 0)
        if withheld:
            record.msg = f"{text} (and {withheld} more like it before)"
        return True


class MqttBridge:
    """``run`` until cancelled; ``counts`` says what it did."""

    def __init__(
        self,
        table: MqttTable,
        feed: Feed,
        orders: Line,
        book: TokenBook,
        audit: Audit,
        folder: Path,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Reads the password, the certificates, and which commands were taken in ``folder``; blocks
        a moment.

        Raises:
            ConfigError: a file does not load.
        """
        self._table = table
        self._feed = feed
        self._clock = clock
        self._rng = rng
        self._orders = MqttOrders(
            orders, book, audit, GivenCommands(folder), table.host, clock.wall_s
        )
        self._password = broker_password(table)
        self._tls = broker_tls(table)
        self._kept: dict[str, bytes] = {}
        """What the broker keeps of us, as far as this connection knows."""
        self._counted: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}
        self._left_out = 0
        self.counts = BridgeCounts()

    async def run(self) -> NoReturn:
        """Connect, serve, and again with back-off."""
        seldom = Seldom(self._clock.monotonic_s)
        _client_log.addFilter(seldom)
        first_s = retry_s = min(FIRST_RETRY_S, self._table.retry_max_s)
        counting = asyncio.create_task(self._log_counts())
        try:
            while True:
                before, began_s = self.counts.connections, self._clock.monotonic_s()
                try:
                    await self._serve()
                except Exception as error:  # noqa: BLE001 - it costs this connection alone
                    kind = type(error).__name__
                    reason = str(error)[:200] or kind
                    _log.warning("mqtt.lost", broker=self._table.host, reason=reason, error=kind)
                _end_if_cancelled()  # a broker that does not say goodbye is an error of its own
                lasted_s = self._clock.monotonic_s() - began_s
                if self.counts.connections > before and lasted_s > self._table.retry_max_s:
                    retry_s = first_s
                await asyncio.sleep(retry_s * self._rng.uniform(0.75, 1.25))
                retry_s = min(self._table.retry_max_s, 2 * retry_s)
        finally:
            _client_log.removeFilter(seldom)
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
            await self._orders.close()

    async def _serve(self) -> None:
        """One connection, until it is lost."""
        table = self._table
        status = f"{table.base_topic}/status"
        client = aiomqtt.Client(
            table.host,
            table.port,
            username=table.username or None,
            password=self._password,
            identifier=f"farflow-{table.base_topic.replace('/', '-')}"[:64],
            will=aiomqtt.Will(status, OFFLINE, qos=1, retain=True),
            timeout=CONNECT_S,
            keepalive=table.keepalive_s,
            tls_context=self._tls,
            max_queued_incoming_messages=MAX_INCOMING,
            logger=_client_log,
        )
        async with client:
            try:
                if table.commands:
                    await self._subscribe(client, commands_filter(table.base_topic))
                await client.publish(status, ONLINE, qos=1, retain=True)
                self._kept = dict.fromkeys(self._kept, _UNKNOWN)
                self.counts.connected = True
                self.counts.connections += 1
                _log.info("mqtt.connected", broker=table.host, base=table.base_topic)
                await self._talk(client)
            except asyncio.CancelledError:
                client.timeout = GOODBYE_S
                with contextlib.suppress(aiomqtt.MqttError):  # in order, so that there is no will
                    await client.publish(status, OFFLINE, qos=1, retain=True)
                raise
            finally:
                client.timeout = GOODBYE_S
                self.counts.connected = False

    async def _talk(self, client: aiomqtt.Client) -> None:
        """Say and hear, until either fails."""
        _end_if_cancelled()
        # No task group: that of Python 3.11 leaves its own cancellation counted.
        both = [asyncio.create_task(part) for part in (self._tell(client), self._hear(client))]
        pending = set(both)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            while pending:  # nor does the client's ``wait_for`` keep every cancellation
                for task in pending:
                    task.cancel()
                _, pending = await asyncio.wait(pending, timeout=GOODBYE_S)
        failed = [task.exception() for task in both if not task.cancelled()]
        raise next((error for error in failed if error), aiomqtt.MqttError("ended"))

    async def _log_counts(self) -> None:
        """Now and then, when something happened."""
        said = ""
        while True:
            await asyncio.sleep(COUNTS_S)
            facts = self.counts.facts()
            if str(facts) != said:
                said = str(facts)
                _log.info("mqtt.counts", **facts)

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
                wanted = self._wanted(status)
                await self._publish(client, list(changes(self._kept, wanted)))
                self._kept = wanted
                if now_s >= next_s:
                    next_s = now_s + self._table.interval_s
                    self._measure(status, now_s)
                    base = self._table.base_topic
                    await self._publish(client, telemetry(base, status, self._rates))
            await asyncio.sleep(min(STATE_S, self._table.interval_s))

    def _wanted(self, status: SchedulerStatus) -> dict[str, bytes]:
        """What the broker is to keep, by topic; of too much, what is over comes last."""
        now = retained(self._table.base_topic, status)
        if self._table.home_assistant:
            now |= discovery(self._table.base_topic, self._table.discovery_prefix, status)
        left_out = max(0, len(now) - MAX_TOPICS)
        if left_out:
            if not self._left_out:
                _log.warning("mqtt.too_many_topics", topics=len(now), most=MAX_TOPICS)
            now = dict(islice(sorted(now.items(), key=lambda one: not one[1]), MAX_TOPICS))
        self._left_out = left_out
        return now

    async def _publish(self, client: aiomqtt.Client, publications: Iterable[Publication]) -> None:
        """State with quality of service 1, numbers of the moment with 0. What was said is
        remembered only then, so that nothing is taken for said that is not."""
        for one in publications:
            await client.publish(
                one.topic, one.payload, qos=1 if one.retain else 0, retain=one.retain
            )
            self.counts.published += 1
            if one.retain:
                self._kept[one.topic] = one.payload

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

    async def _subscribe(self, client: aiomqtt.Client, topics: str) -> None:
        """A broker that lets us say but not hear costs the commands alone."""
        granted = await client.subscribe(topics, qos=1)
        if any(not isinstance(code, int) and code.is_failure for code in granted):
            remedy = "let this user read it, or set mqtt.commands = false"
            _log.warning("mqtt.commands_refused", topics=topics, remedy=remedy)

    async def _hear(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            topic, payload = str(message.topic), message.payload
            found = parts_of(self._table.base_topic, topic)
            if found is None or not isinstance(payload, bytes) or not payload:
                continue  # an empty one is how a retained one is taken back
            reply = await self._orders.obey(topic, *found, payload, retained=message.retain)
            self.counts.commands[reply.code or "ok"] += 1
            await client.publish(f"{topic}/reply", msgspec.json.encode(reply), qos=1)


def _end_if_cancelled() -> None:
    """Raises CancelledError where a cancellation was lost in an error or a result that came at the
    same moment."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
