"""Signed commands that came over MQTT: whether they count, what becomes of them.

What always holds: a command counts only with a valid signature of an operator's token, until it
expires; a second one of the same token, topic and id gets the first one's answer and is not carried
out again, nor after a restart (``mqtt_given``) or a jump of the clock: what expires no later than
something that was forgotten has expired, whatever the clock says. It is recorded as one over HTTP
is, and like there nothing is recorded of who has no token: whoever can write to the broker must not
push others' lines out of the record. Who has no token is not told which there are.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from scheduler.gateway.access import HttpRole, HttpToken, TokenBook
from scheduler.gateway.audit import Asked, Audit
from scheduler.gateway.calls import Line
from scheduler.gateway.mqtt_given import GivenCommands, Key
from scheduler.operator import Order, RequestRefused
from transport.errors import FarflowError, LinkError, StoreError
from transport.mqtt_topics import MAX_COMMAND_BYTES, VERBS, Command, Reply, command_fault

MAX_REMEMBERED: Final = 4096
SHOWN: Final = 300

_ORDERS: Final[dict[str, Order]] = {"drain": "drain", "cordon": "cordon", "resume": "uncordon"}
_NOBODYS: Final = secrets.token_hex(32)
"""In place of the secret of a token that is not there: the same work and the same answer."""
_FAULTS: Final = {
    "mqtt.bad_signature": "not signed with the secret of a token of this name, or changed since",
}
_REPEATED: Final = (
    "taken before the bridge was started again, and not carried out once more; `farflow events`"
    " shows what became of it"
)

_log = structlog.get_logger()


class MqttOrders:
    """``obey`` one command after the other. ``broker`` is shown in the record, ``kept`` outlives
    us; ``wall_s`` tells the time since 1970. Making one blocks a moment."""

    def __init__(
        self,
        orders: Line,
        book: TokenBook,
        audit: Audit,
        kept: GivenCommands,
        broker: str,
        wall_s: Callable[[], float],
    ) -> None:
        self._orders = orders
        self._book = book
        self._audit = audit
        self._broker = broker
        self._wall_s = wall_s
        self._given: dict[Key, tuple[float, asyncio.Task[Reply]]] = {}
        """Commands that count and did not expire, with when they do."""
        self._kept = kept
        self._earlier = kept.load(wall_s())
        """Likewise, of lives before this one."""

    async def obey(
        self, topic: str, agent: str, verb: str, payload: bytes, *, retained: bool
    ) -> Reply:
        """What became of a command, whatever is wrong with it or with us. One that is being carried
        out is carried on with when this is cancelled."""
        try:
            return await self._obey(topic, agent, verb, payload, retained=retained)
        except Exception as error:  # noqa: BLE001 - one message never ends what hears all of them
            _log.exception("mqtt.failed", topic=topic[:SHOWN])
            return Reply(id="", ok=False, code="mqtt.failed", message=_shown(error))

    async def _obey(
        self, topic: str, agent: str, verb: str, payload: bytes, *, retained: bool
    ) -> Reply:
        try:
            if len(payload) > MAX_COMMAND_BYTES:
                raise msgspec.ValidationError(f"longer than {MAX_COMMAND_BYTES} bytes")
            command = msgspec.json.decode(payload, type=Command)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Reply(id="", ok=False, code="mqtt.malformed", message=str(error)[:SHOWN])
        if retained:  # it would be given again to everybody who comes
            return _no(command, "mqtt.retained", "send it without the retain flag")
        token = self._book.named(command.token)
        secret_sha256 = _NOBODYS if token is None else token.secret_sha256
        fault = command_fault(topic, command, secret_sha256, self._wall_s())
        if not fault and command.expires <= self._kept.forgotten:
            fault = "mqtt.expired"
        if fault or token is None:  # not remembered: a stranger must not use up another one's id
            fault = fault or "mqtt.bad_signature"
            return _no(command, fault, _FAULTS.get(fault, "not carried out"))
        key = (token.name, topic, command.id)
        if key in self._earlier:
            return _no(command, "mqtt.repeated", _REPEATED)
        if key not in self._given:
            self._forget()
            # Those who may give none fill no more than half.
            most = MAX_REMEMBERED // (1 if token.role is HttpRole.OPERATOR else 2)
            if len(self._given) + len(self._earlier) >= most:
                return _no(command, "mqtt.busy", "too many commands that have not expired; wait")
            asked = self._asked(topic, token, payload)
            work = self._carried_out(asked, key, agent, verb, command, token)
            self._given[key] = (command.expires, asyncio.create_task(work))
        return await asyncio.shield(self._given[key][1])

    async def close(self) -> None:
        """Give up what is not done; idempotent."""
        tasks = [task for _, task in self._given.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kept.close()

    def _forget(self) -> None:
        """What has expired is refused for that."""
        now_s = self._wall_s()
        self._earlier = self._kept.unexpired(self._earlier, now_s)
        given = {key: expires for key, (expires, _) in self._given.items()}
        self._given = {key: self._given[key] for key in self._kept.unexpired(given, now_s)}

    def _all(self) -> dict[Key, float]:
        """What must not be carried out again."""
        self._forget()
        return {**self._earlier, **{key: expires for key, (expires, _) in self._given.items()}}

    def _asked(self, topic: str, token: HttpToken, payload: bytes) -> Asked:
        return Asked(
            token=token.name,
            role=token.role.value,
            address=f"mqtt:{self._broker}",
            method="MQTT",
            path=topic[:SHOWN],
            body_sha256=hashlib.sha256(payload).hexdigest(),
        )

    async def _carried_out(
        self, asked: Asked, key: Key, agent: str, verb: str, command: Command, token: HttpToken
    ) -> Reply:
        try:
            if token.role is not HttpRole.OPERATOR:
                text = f"token {token.name} has role {token.role.value}; this takes an operator's"
                return await self._refused(asked, _no(command, "mqtt.role", text))
            if verb not in VERBS:
                text = f"commands are {', '.join(VERBS)}"
                return await self._refused(asked, _no(command, "mqtt.unknown_command", text))
            await self._kept.add(key, command.expires, self._all())
            begun = await self._audit.begin(asked)
        except FarflowError as error:  # it cannot be recorded, so it is not done
            return _no(command, error.code, str(error))
        reply = await self._ordered(agent, verb, command)
        try:
            await self._audit.end(begun, 0, reply.code)
        except StoreError as error:  # it was done all the same
            _log.error("mqtt.not_recorded", reason=str(error))
        return reply

    async def _refused(self, asked: Asked, reply: Reply) -> Reply:
        await self._audit.refused(asked, 0, reply.code)
        return reply

    async def _ordered(self, agent: str, verb: str, command: Command) -> Reply:
        by = f"mqtt:{command.token}"
        try:
            async with self._orders.turn() as operator:
                said = await operator.order(agent, _ORDERS[verb], reason=command.reason, by=by)
        except RequestRefused as error:
            code, _, text = str(error).partition(": ")
            return _no(command, code, text or code)
        except LinkError as error:
            return _no(command, "scheduler.unreachable", f"{error}; send it again with a new id")
        except Exception as error:  # noqa: BLE001 - it is answered, whatever went wrong
            return _no(command, "mqtt.failed", _shown(error))
        return Reply(id=command.id, ok=True, message=said[:SHOWN])


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:SHOWN]


def _no(command: Command, code: str, text: str) -> Reply:
    return Reply(id=command.id, ok=False, code=code, message=text[:SHOWN])
