"""The MQTT bridge in trouble: brokers that go, hang, refuse or are none; its own death; TLS."""

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import signal
import ssl
import sys
from pathlib import Path

import pytest
from gateway_world import GatewayWorld, gateway_world
from mosquitto import listening, mosquitto, needs_mosquitto
from service_world import WAIT_S

from scheduler.config import MqttTable
from tests.integration.test_gateway_life import certificate, gateway_pid
from tests.integration.test_mqtt import BASE, SHORT, made

pytestmark = [pytest.mark.asyncio, needs_mosquitto]
PASSWORD = "correct horse"  # noqa: S105


def log_of(world: GatewayWorld) -> str:
    return (world.folder / "logs" / "gateway.log").read_text()


async def says(world: GatewayWorld, text: str, count: int = 1) -> None:
    """Once the gateway's log has a text so often."""
    try:
        async with asyncio.timeout(2 * WAIT_S):
            while log_of(world).count(text) < count:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"never: {text}; {log_of(world)[-2000:]}") from None


async def scheduler_answers(world: GatewayWorld) -> None:
    """Status and order, promptly."""
    async with world.world.operator(answer_s=5.0) as operator:
        await operator.status()
        for order in ("cordon", "uncordon"):
            assert await operator.order("a", order) == ""


@pytest.mark.slow
async def test_the_bridges_death_is_told_and_what_was_retained_is_not_obeyed_later(tmp_path):
    async with mosquitto(tmp_path) as broker:
        table = MqttTable(enabled=True, port=broker.port, commands=True, **SHORT)
        async with gateway_world(tmp_path, mqtt=table) as world, listening(broker.port) as listener:
            await world.join("a")
            await listener.is_kept(f"{BASE}/status", b"online")
            topic, payload = made(world, "kept")
            await listener.client.publish(topic, payload, qos=1, retain=True)
            assert (await listener.reply("kept"))["ok"], "it was there when it was given"
            back, resume = made(world, "back", "resume")
            await listener.client.publish(back, resume, qos=1)
            assert (await listener.reply("back"))["ok"]
            os.kill(gateway_pid(world), signal.SIGKILL)
            await listener.is_kept(f"{BASE}/status", b"offline")
            await listener.is_kept(f"{BASE}/status", b"online")
            assert (await listener.reply("kept", 2))["code"] == "mqtt.retained"
            await listener.shows(f"{BASE}/agents/a/state", cordoned=False)
            # In order it says so itself, whatever becomes of the will.
            await world.world.end(signal.SIGTERM)
            await listener.is_kept(f"{BASE}/status", b"offline")


@pytest.mark.slow
async def test_a_broker_that_was_away_is_told_everything_again(tmp_path):
    async with mosquitto(tmp_path) as broker:
        await broker.kill()
        table = MqttTable(enabled=True, port=broker.port, **SHORT)
        async with gateway_world(tmp_path, mqtt=table) as world:
            await world.join("a")
            await says(world, "mqtt.lost", 3)  # never there so far
            await scheduler_answers(world)
            for _ in range(2):
                await broker.start()
                async with listening(broker.port) as listener:
                    await listener.is_kept(f"{BASE}/status", b"online")
                    await listener.shows(f"{BASE}/agents/a/state", slots=2)
                    await listener.is_kept(f"{BASE}/agents/a/telemetry")
                    await broker.kill()
                    await scheduler_answers(world)
            await says(world, "mqtt.lost", log_of(world).count("mqtt.lost") + 4)
            lines = [json.loads(line) for line in log_of(world).splitlines()]
            lost = [one["timestamp"] for one in lines if one["event"] == "mqtt.lost"][-4:]
            times = [datetime.datetime.fromisoformat(one) for one in lost]
            gaps_s = [(b - a).total_seconds() for a, b in itertools.pairwise(times)]
            assert min(gaps_s) > 0.75 * SHORT["retry_max_s"], "it backs off"


@pytest.mark.slow
async def test_a_broker_that_hangs_is_left_and_told_everything_when_it_comes_to(tmp_path):
    async with mosquitto(tmp_path) as broker:
        table = MqttTable(enabled=True, port=broker.port, commands=True, **SHORT)
        async with gateway_world(tmp_path, mqtt=table) as world:
            await world.join("a")
            async with listening(broker.port, keepalive=60) as listener:
                await listener.shows(f"{BASE}/agents/a/state", cordoned=False)
                broker.signal(signal.SIGSTOP)
                await scheduler_answers(world)
                await says(world, "mqtt.lost")
                pid = gateway_pid(world)
                async with world.client("operator") as client:
                    async with client.get("/metrics") as answer:
                        assert "farflow_mqtt_connected 0" in await answer.text()
                    async with client.post("/v1/agents/a/cordon") as answer:
                        assert answer.status == 200
                await says(world, "mqtt.lost", 2)  # tried again: it takes connections, no more
                assert len(os.listdir(f"/proc/{pid}/fd")) < 100
                broker.signal(signal.SIGCONT)
                await listener.shows(f"{BASE}/agents/a/state", cordoned=True)
                await listener.is_kept(f"{BASE}/status", b"online")
            async with world.client("viewer") as client, client.get("/metrics") as answer:
                assert "farflow_mqtt_connected 1" in await answer.text()
            assert gateway_pid(world) == pid


@pytest.mark.slow
async def test_a_hanging_broker_does_not_hold_up_the_end(tmp_path):
    async with mosquitto(tmp_path) as broker:
        table = MqttTable(enabled=True, port=broker.port, **{**SHORT, "keepalive_s": 60})
        async with gateway_world(tmp_path, mqtt=table) as world:
            await says(world, "mqtt.connected")
            broker.signal(signal.SIGSTOP)
            began = asyncio.get_running_loop().time()
            assert await world.world.end(signal.SIGTERM) == 0
            assert asyncio.get_running_loop().time() - began < 8.0


@pytest.mark.slow
async def test_tls_with_an_authority_of_ones_own_and_a_password(tmp_path):
    made_file, key = certificate(tmp_path)
    passwords = tmp_path / "passwords"
    tool = await asyncio.create_subprocess_exec(
        "mosquitto_passwd", "-b", "-c", str(passwords), "farflow", PASSWORD
    )
    assert await tool.wait() == 0
    secret = tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    lines = (
        "allow_anonymous false",
        f"password_file {passwords}",
        f"certfile {made_file}",
        f"keyfile {key}",
    )
    trusting = ssl.create_default_context(cafile=str(made_file))
    usual = {"enabled": True, "tls": True, "username": "farflow", **SHORT}
    async with mosquitto(tmp_path, "\n".join(lines)) as broker:
        usual |= {"port": broker.port, "password_file": str(secret)}
        table = MqttTable(ca_file=str(made_file), **usual)
        async with gateway_world(tmp_path, mqtt=table) as world:
            await world.join("a")
            own = {"tls_context": trusting, "username": "farflow", "password": PASSWORD}
            async with listening(broker.port, **own) as listener:
                await listener.is_kept(f"{BASE}/status", b"online")
                await listener.is_kept(f"{BASE}/agents/a/state")
        wrong = tmp_path / "wrong"
        wrong.write_text("something else")
        for table, reason in (
            (MqttTable(**usual), "CERTIFICATE_VERIFY_FAILED"),
            (
                MqttTable(ca_file=str(made_file), **{**usual, "password_file": str(wrong)}),
                "Not authorized",
            ),
        ):
            folder = tmp_path / reason.split()[0]
            folder.mkdir()
            async with gateway_world(folder, mqtt=table) as world:
                await world.join("a")
                await says(world, reason)
                await scheduler_answers(world)
                assert "mqtt.connected" not in log_of(world)
                assert PASSWORD not in log_of(world)


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A broker as far as it takes to refuse every subscription, which Mosquitto's own lists of
    access do not (MQTT 3.1.1, section 3)."""
    with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            kind = (await reader.readexactly(1))[0]
            size = shift = 0
            while True:
                byte = (await reader.readexactly(1))[0]
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            body = await reader.readexactly(size)
            match kind >> 4:
                case 1:  # CONNECT
                    writer.write(b"\x20\x02\x00\x00")
                case 3 if kind & 2:  # PUBLISH with quality of service 1
                    start = 2 + int.from_bytes(body[:2])
                    writer.write(b"\x40\x02" + body[start : start + 2])
                case 8:  # SUBSCRIBE
                    writer.write(b"\x90\x03" + body[:2] + b"\x80")
                case 12:  # PINGREQ
                    writer.write(b"\xd0\x00")


@pytest.mark.slow
async def test_a_broker_that_refuses_the_subscription_is_named_and_told_the_rest(tmp_path):
    async with await asyncio.start_server(deaf, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        table = MqttTable(enabled=True, port=port, commands=True, **SHORT)
        async with gateway_world(tmp_path, mqtt=table) as world:
            await world.join("a")
            await says(world, "mqtt.commands_refused")
            await says(world, "mqtt.connected")
            async with world.client("viewer") as client, client.get("/metrics") as answer:
                assert "farflow_mqtt_connected 1" in await answer.text()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["mqtt.username=u", "mqtt.password_file=FOLDER/none"], "mqtt.password_file"),
        (["mqtt.username=u", "mqtt.password_file=FOLDER/empty"], "mqtt.password_file"),
        (["mqtt.tls=true", "mqtt.ca_file=FOLDER/empty"], "mqtt.ca_file"),
        pytest.param(["mqtt.base_topic=a/#"], "mqtt", marks=pytest.mark.slow),
        pytest.param(["http.enabled=false"], "http.enabled", marks=pytest.mark.slow),
        pytest.param(
            ["mqtt.host=broker.example", "mqtt.username=u", "mqtt.password_file=FOLDER/empty"],
            "set tls = true",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
async def test_what_cannot_work_ends_the_daemon_at_its_start(tmp_path: Path, settings, field):
    (tmp_path / "empty").write_text("")
    program = "from scheduler.cli import scheduler_group; scheduler_group()"
    options = ["mqtt.enabled=true", f"scheduler.folder={tmp_path}/s", "http.enabled=true"]
    options += [one.replace("FOLDER", str(tmp_path)) for one in settings]
    arguments = [part for one in options for part in ("--set", one)]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", program, "run", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: child.returncode is None and child.kill())
        async with asyncio.timeout(WAIT_S):
            _, said = await child.communicate()
    assert child.returncode == 78, said.decode()
    assert field in said.decode()
    assert len(said.decode().strip().splitlines()) == 1
