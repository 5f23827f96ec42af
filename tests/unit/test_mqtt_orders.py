"""Signed commands without a broker: what is remembered, and what a full or lost disk changes."""

import logging
import shutil
from pathlib import Path

import pytest

from scheduler.gateway import mqtt_given, mqtt_orders
from scheduler.gateway.access import HttpRole, TokenBook, create_token
from scheduler.gateway.audit import Audit
from scheduler.gateway.calls import Line
from scheduler.gateway.mqtt import SELDOM_S, Seldom
from scheduler.gateway.mqtt_given import FILE_NAME, GivenCommands
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
        self.folder, self.wall_s = folder / "gateway", 1000.0
        self.folder.mkdir()
        self.book = TokenBook(keys)
        self.book.refresh()
        self.operator = Operator()
        self.begin()

    def begin(self) -> None:
        """A life of the gateway."""
        self.audit = Audit(self.record, 1, ManualClock())
        line = Line(self.operator, 4)  # type: ignore[arg-type]  # all that is asked of one
        kept = GivenCommands(self.folder)
        self.orders = MqttOrders(line, self.book, self.audit, kept, "broker", lambda: self.wall_s)

    async def again(self) -> None:
        """The gateway is started anew."""
        await self.close()
        self.begin()

    async def obey(self, token: str, id: str, expires: float = 1060.0, secret: str = "") -> Reply:
        secret = secret or self.secrets[token]
        payload = signed_command(TOPIC, id=id, expires=expires, token=token, secret=secret)
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


async def test_a_command_counts_once_also_over_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr(mqtt_given, "COMPACT_LINES", 3)
    box = Box(tmp_path)
    try:
        for number in range(5):  # more than are added before the file is written anew
            assert (await box.obey("ops", f"{number}")).ok
        for _ in range(2):
            await box.again()
            codes = {(await box.obey("ops", f"{number}")).code for number in range(5)}
            assert (codes, box.operator.orders) == ({"mqtt.repeated"}, 5)
        assert (await box.obey("ops", "new")).ok
        record = box.folder / FILE_NAME
        whole = record.read_bytes()
        record.write_bytes(whole[:-9])  # power loss: it was not on the disk, so not carried out
        await box.again()
        assert (await box.obey("ops", "newer")).ok
        await box.again()
        assert (await box.obey("ops", "newer")).code == "mqtt.repeated"
        assert (await box.obey("ops", "4")).code == "mqtt.repeated"
        box.wall_s = 1061.0
        await box.again()
        # What has expired is refused for that; of all of it one line is left.
        assert len(record.read_bytes().splitlines()) == 1
        assert (await box.obey("ops", "4")).code == "mqtt.expired"
    finally:
        await box.close()


@pytest.mark.parametrize("started_again", ["", "while it is wrong", "once it is right"])
async def test_a_clock_that_jumps_and_returns_repeats_no_command(tmp_path, started_again):
    box = Box(tmp_path)
    try:
        assert (await box.obey("ops", "one", expires=1250.0)).ok
        box.wall_s += 400.0  # a wrong answer of a time server, and another command meanwhile
        if started_again == "while it is wrong":
            await box.again()
        assert (await box.obey("ops", "two", expires=1650.0)).ok
        box.wall_s -= 390.0
        if started_again:
            await box.again()
        again = await box.obey("ops", "one", expires=1250.0)
        # One that was never forgotten is known: its line is in the file until that is written anew.
        kept = started_again == "once it is right"
        assert again.code == ("mqtt.repeated" if kept else "mqtt.expired")
        assert box.operator.orders == 2
        assert (await box.obey("ops", "three", expires=1260.0)).ok, "later ones count"
    finally:
        await box.close()


async def test_what_went_wrong_with_one_message_is_its_answer(tmp_path, monkeypatch):
    box = Box(tmp_path)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(box.book, "named", lambda name: 1 / 0)
            reply = await box.obey("ops", "one")
        assert (reply.ok, reply.code) == (False, "mqtt.failed")
        assert (await box.obey("ops", "one")).ok
    finally:
        await box.close()


def message(text: str) -> logging.LogRecord:
    return logging.LogRecord("mqtt", logging.WARNING, "", 0, text, None, None)


async def test_the_clients_library_says_the_same_once_a_minute_with_how_often():
    now_s = [5.0]
    seldom, full = Seldom(lambda: now_s[0]), "Message queue is full. Discarding message."
    said = [seldom.filter(message(full)) for _ in range(1000)]
    assert (said[0], sum(said)) == (True, 1)
    assert seldom.filter(message("another"))
    now_s[0] += SELDOM_S
    later = message(full)
    assert seldom.filter(later)
    assert later.getMessage() == f"{full} (and 999 more like it before)"


async def test_nothing_is_carried_out_where_what_was_is_not_known(tmp_path):
    box = Box(tmp_path)
    try:
        assert (await box.obey("ops", "one")).ok
        (box.folder / FILE_NAME).unlink()
        assert (await box.obey("ops", "two")).code == "store"  # nor where it cannot be kept
        (box.folder / FILE_NAME).mkdir()
        await box.again()
        refused = await box.obey("ops", "one")
        assert (refused.code, box.operator.orders) == ("store", 1)
    finally:
        await box.close()


async def test_earlier_lives_count_towards_what_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(mqtt_orders, "MAX_REMEMBERED", 4)
    box = Box(tmp_path)
    try:
        for number in range(3):
            assert (await box.obey("ops", f"{number}")).ok
        await box.again()
        codes = [(await box.obey("ops", f"n{number}")).code for number in range(2)]
        assert codes == ["", "mqtt.busy"]
        box.wall_s = 1061.0
        assert (await box.obey("ops", "later", expires=1100.0)).ok
    finally:
        await box.close()


async def test_a_stranger_is_not_told_which_tokens_there_are(tmp_path):
    box = Box(tmp_path)
    try:
        for expires in (1060.0, 999.0, 5000.0):
            there, not_there = [
                await box.obey(name, "x", expires, "guess") for name in ("ops", "nobody")
            ]
            assert there == not_there
            assert there.code == "mqtt.bad_signature"
        assert box.operator.orders == 0
    finally:
        await box.close()
