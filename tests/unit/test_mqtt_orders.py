"""Signed commands without a broker: what is remembered, and what a full or lost disk changes."""

import shutil
from pathlib import Path

import pytest

from scheduler.gateway import mqtt_orders
from scheduler.gateway.access import HttpRole, TokenBook, create_token
from scheduler.gateway.audit import Audit
from scheduler.gateway.calls import Line
from scheduler.gateway.mqtt_orders import MqttOrders
from transport.mqtt_topics import Reply, command_topic, signed_command
from transport.runtime.clock import ManualClock

TOPIC = command_topic("farflow", "a", "cordon")
pytestmark = pytest.mark.asyncio


class Operator:
    """Takes every order; with ``loses`` that folder is lost while it does."""

    def __init__(self) -> None:
        self.orders = 0
        self.loses: Path | None = None

    async def order(self, agent: str, order: str, **_: object) -> str:
        self.orders += 1
        if self.loses is not None:
            shutil.rmtree(self.loses)
        return ""


class Box:
    """Commands of an operator ``ops`` and a viewer ``look``."""

    def __init__(self, folder: Path) -> None:
        keys, self.record = folder / "keys", folder / "record"
        self.record.mkdir()
        self.secrets = {
            "ops": create_token(keys, "ops", HttpRole.OPERATOR),
            "look": create_token(keys, "look", HttpRole.VIEWER),
        }
        book = TokenBook(keys)
        book.refresh()
        self.operator = Operator()
        self.audit = Audit(self.record, 1, ManualClock())
        line = Line(self.operator, 4)  # type: ignore[arg-type]  # all that is asked of one
        self.orders = MqttOrders(line, book, self.audit, "broker", lambda: 1000.0)

    async def obey(self, token: str, id: str) -> Reply:
        payload = signed_command(
            TOPIC, id=id, expires=1060.0, token=token, secret=self.secrets[token], reason=""
        )
        return await self.orders.obey(TOPIC, "a", "cordon", payload, retained=False)

    async def close(self) -> None:
        await self.orders.close()
        self.audit.close()


async def test_what_was_carried_out_is_said_to_be_though_its_end_is_not_recorded(tmp_path):
    box = Box(tmp_path)
    try:
        box.operator.loses = box.record
        assert await box.obey("ops", "one") == Reply(id="one", ok=True)
        refused = await box.obey("ops", "two")  # what cannot be recorded is still not done
        assert (refused.ok, refused.code, box.operator.orders) == (False, "store", 1)
    finally:
        await box.close()


async def test_who_may_not_command_cannot_keep_those_who_may_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mqtt_orders, "MAX_REMEMBERED", 8)
    box = Box(tmp_path)
    try:
        codes = [(await box.obey("look", f"v{number}")).code for number in range(9)]
        assert set(codes) == {"mqtt.role", "mqtt.busy"}
        assert [(await box.obey("ops", f"o{number}")).ok for number in range(5)] == [True] * 4 + [
            False
        ]
    finally:
        await box.close()
