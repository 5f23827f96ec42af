"""The MQTT bridge of a real scheduler daemon with a real broker: what is said, what is obeyed."""

import asyncio
import hashlib
import json

import pytest
import pytest_asyncio
from click.testing import CliRunner
from gateway_world import GatewayWorld, gateway_world
from mosquitto import Broker, Listener, listening, mosquitto, needs_mosquitto
from service_world import WAIT_S

from farflow.mqtt_commands import mqtt_group
from scheduler.config import MqttTable
from tests.integration.test_gateway import run_spec
from transport.messages import DrainOrder, Goodbye, Heartbeat
from transport.mqtt_topics import MAX_COMMAND_BYTES, command_topic, signed_command
from transport.runtime.clock import SystemClock
from transport.status import GpuReading

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_mosquitto]

BASE = "farflow/test"
SHORT = {"base_topic": BASE, "interval_s": 1.0, "keepalive_s": 1, "retry_max_s": 0.5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(tmp_path_factory):
    """A broker, a world with agent ``a``, and somebody who listens."""
    folder = tmp_path_factory.mktemp("mqtt")
    async with mosquitto(folder) as broker:
        table = MqttTable(
            enabled=True, port=broker.port, commands=True, home_assistant=True, **SHORT
        )
        async with (
            gateway_world(folder, mqtt=table) as world,
            listening(broker.port) as listener,
        ):
            await world.join("a")
            await listener.is_kept(f"{BASE}/agents/a/state")
            yield broker, world, listener


@pytest.fixture
def broker(places) -> Broker:
    return places[0]


@pytest.fixture
def world(places) -> GatewayWorld:
    return places[1]


@pytest.fixture
def listener(places) -> Listener:
    return places[2]


def made(
    world: GatewayWorld, id: str, verb: str = "cordon", agent: str = "a", **changes
) -> tuple[str, bytes]:
    """Topic and payload of a command."""
    topic = command_topic(BASE, agent, verb)
    role = changes.pop("role", "operator")
    usual = {
        "id": id,
        "expires": SystemClock().wall_s() + 60.0,
        "token": {"operator": "ops", "viewer": "look", "submitter": "jobs"}[role],
        "secret": world.tokens[role],
        "reason": "a test",
    }
    return topic, signed_command(changes.pop("signed_for", topic), **{**usual, **changes})


# ---- what is said ------------------------------------------------------------------------------


async def test_what_is_kept_is_there_for_whoever_comes_later(broker, world):
    async with listening(broker.port) as late:
        await late.is_kept(f"{BASE}/status", b"online")
        facts = await late.shows(f"{BASE}/agents/a/state", hardware="cpu", slots=2)
        assert all(message.retain for message in late.said)
    assert facts["cordoned"] is False


@pytest.mark.slow
async def test_telemetry_comes_at_its_interval_and_is_not_kept(broker, world, listener):
    topic = f"{BASE}/agents/a/telemetry"

    def said() -> list[dict]:
        return [json.loads(m.payload) for m in listener.said if str(m.topic) == topic]

    gpu = GpuReading(name="H200", power_w=320.5)
    link = world.agents["a"]
    await link.send(Heartbeat(sequence=1, sent_s=0.0, tokens_generated=500, gpus=(gpu,)))
    await listener.until("power", lambda: any(one["gpus"] for one in said()))
    assert max(one["tokens_per_s"] for one in said()) > 0
    assert said()[-1]["gpus"][0]["power_w"] == 320.5
    before = len(said())
    began = asyncio.get_running_loop().time()
    await listener.until("telemetry", lambda: len(said()) >= before + 2)
    assert 0.5 < asyncio.get_running_loop().time() - began < 6.0
    async with listening(broker.port) as late:
        await late.is_kept(f"{BASE}/agents/a/state")
        assert topic not in late.kept


async def test_what_home_assistant_is_told_leads_to_what_is_said(broker, world, listener):
    about = json.loads(listener.kept["homeassistant/sensor/farflow_test_a/tokens/config"])
    await listener.is_kept(about["state_topic"])
    assert listener.kept[about["availability_topic"]] == b"online"
    assert about["value_template"] == "{{ value_json.tokens_per_s }}"
    assert "tokens_per_s" in json.loads(listener.kept[about["state_topic"]])


async def test_runs_policies_and_agents_are_said_and_taken_back(broker, world, listener):
    await world.join("b")
    over = [f"{BASE}/runs/sums/state", f"{BASE}/policies/sums/solver/version"]
    over.append(f"{BASE}/agents/b/state")
    async with world.world.operator() as operator:
        await operator.submit(run_spec(world, "sums"))
        await listener.shows(f"{BASE}/runs/sums/state", state="running")
        await listener.shows(f"{BASE}/policies/sums/solver/version", step=0)
        await listener.shows(f"{BASE}/agents/b/state", slots=2)
        await operator.command("sums", "pause")
        await listener.shows(f"{BASE}/runs/sums/state", state="paused")
        await operator.command("sums", "stop")
    await world.agents["b"].send(Goodbye(reason="a test"))
    await listener.until("taken back", lambda: not set(over) & listener.kept.keys())
    await listener.until(
        "described no more", lambda: not [t for t in listener.kept if "farflow_test_b/" in t]
    )


# ---- what is obeyed ----------------------------------------------------------------------------


async def test_signed_commands_are_carried_out_answered_recorded_and_shown(world, listener):
    state = f"{BASE}/agents/a/state"
    for verb, cordoned in (("cordon", True), ("resume", False)):
        topic, payload = made(world, f"real-{verb}", verb)
        await listener.client.publish(topic, payload, qos=1)
        assert await listener.reply(f"real-{verb}") == {
            "id": f"real-{verb}", "ok": True, "code": "", "message": ""}  # fmt: skip
        assert f"{topic}/reply" in listener.kept
        await listener.shows(state, cordoned=cordoned)
        begun, ended = [line for line in world.audit() if line["path"] == topic]
        assert (begun["what"], ended["what"]) == ("begun", "ended")
        assert (ended["token"], ended["role"], ended["method"]) == ("ops", "operator", "MQTT")
        assert ended["address"] == "mqtt:127.0.0.1"
        assert ended["body_sha256"] == hashlib.sha256(payload).hexdigest()
    async with world.world.operator() as operator:
        shown = (await operator.events(0, subject="a")).transitions
    told = [one for one in shown if one.facts.get("by") == "gateway/mqtt:ops"]
    assert [one.what for one in told] == ["ordered to cordon", "ordered to uncordon"]
    assert told[0].facts["reason"] == "a test"


async def test_the_command_lines_payload_counts_as_it_is_printed(world, listener, tmp_path):
    secret = tmp_path / "ops.secret"
    secret.write_text(world.tokens["operator"] + "\n")
    options = ["--base", BASE, "--token", "ops", "--secret-file", str(secret), "--json"]
    ran = CliRunner().invoke(mqtt_group, ["command", "a", "resume", *options])
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.output)
    await listener.client.publish(printed["topic"], printed["payload"].encode(), qos=1)
    reply = await listener.reply(json.loads(printed["payload"])["id"])
    assert (reply["ok"], reply["message"][:13]) == (True, "nothing to do")


async def test_a_drain_reaches_the_agent_and_what_the_scheduler_refuses_is_answered(
    world, listener
):
    await world.join("b")
    topic, payload = made(world, "drain", "drain", "b")
    await listener.client.publish(topic, payload, qos=1)
    assert (await listener.reply("drain"))["ok"]
    [order] = await world.agents["b"].expect(DrainOrder)
    assert order.reason == "a test"
    topic, payload = made(world, "nobody", "drain", "nobody")
    await listener.client.publish(topic, payload, qos=1)
    refused = await listener.reply("nobody")
    assert (refused["ok"], refused["code"]) == (False, "agent.unknown")
    assert world.audit()[-1]["code"] == "agent.unknown"


async def test_one_that_comes_twice_is_answered_alike_and_carried_out_once(world, listener):
    topic, payload = made(world, "twice")
    other, again = made(world, "twice", "resume")  # the same id, another command
    for said in (payload, payload):
        await listener.client.publish(topic, said, qos=1)
    assert await listener.reply("twice") == await listener.reply("twice", 2)
    await listener.client.publish(other, again, qos=1)
    assert (await listener.reply("twice", 3))["ok"]
    await listener.client.publish(topic, payload, qos=1)  # who reads along says it again
    assert (await listener.reply("twice", 4))["ok"]
    async with world.world.operator() as operator:
        agents = (await operator.status()).agents
        shown = (await operator.events(0, subject="a")).transitions
    assert not next(agent for agent in agents if agent.name == "a").cordoned
    told = [one.what for one in shown if one.facts.get("by") == "gateway/mqtt:ops"]
    assert told[-2:] == ["ordered to cordon", "ordered to uncordon"]
    lines = [one for one in world.audit() if one["path"] == topic and one["what"] == "begun"]
    assert len([o for o in lines if o["body_sha256"] == hashlib.sha256(payload).hexdigest()]) == 1


REFUSED = {
    "mqtt.bad_signature": {"secret": "x" * 43},
    "mqtt.expired": {"expires": 1.0},
    "mqtt.expires_too_late": {"expires": 1e10},
    "mqtt.role": {"role": "viewer"},
    "mqtt.unknown_command": {"verb": "explode"},
}


async def test_what_does_not_count_is_refused_with_its_code_and_does_nothing(
    broker, world, listener
):
    counted = f"{BASE}/agents/a/state"
    before, lines = listener.kept[counted], len(world.audit())
    for code, changes in REFUSED.items():
        topic, payload = made(world, code, **changes)
        await listener.client.publish(topic, payload, qos=1)
        reply = await listener.reply(code)
        assert (reply["ok"], reply["code"]) == (False, code)
        assert reply["message"]
    moved, payload = made(world, "moved", signed_for=command_topic(BASE, "b", "cordon"))
    await listener.client.publish(moved, payload, qos=1)
    assert (await listener.reply("moved"))["code"] == "mqtt.bad_signature"
    topic, payload = made(world, "stranger", **{"token": "nobody"})
    await listener.client.publish(topic, payload, qos=1)  # who guesses names is told no more
    assert (await listener.reply("stranger"))["code"] == "mqtt.bad_signature"
    submitter, payload = made(world, "jobs", role="submitter")
    await listener.client.publish(submitter, payload, qos=1)
    assert (await listener.reply("jobs"))["code"] == "mqtt.role"
    # Whoever has no token leaves no line; who may not has one.
    codes = [line["code"] for line in world.audit()[lines:]]
    assert sorted(codes) == ["mqtt.role", "mqtt.role", "mqtt.unknown_command"]
    _, good = made(world, "")
    wrong = [b"{", b"\xff" * 9, good, b"x" * (MAX_COMMAND_BYTES + 1), b"[]", b"0",
             good[:-1] + b',"more":1}', good.replace(b'"reason"', b'"reas\xff"')]  # fmt: skip
    for number, payload in enumerate(wrong, 1):
        await listener.client.publish(command_topic(BASE, "a", "cordon"), payload, qos=1)
        assert (await listener.reply("", number))["code"] == "mqtt.malformed"
    for agent, verb in (("A!", "drain"), ("a" * 60, "drain"), ("a", "d" * 60)):
        topic = command_topic(BASE, agent, verb)
        await listener.client.publish(topic, good, qos=1)  # nobody's: unanswered
    topic, payload = made(world, "last", role="viewer")
    await listener.client.publish(topic, payload, qos=1)
    await listener.reply("last")
    assert len(listener.replies("")) == len(wrong)
    assert listener.kept[counted] == before
    async with world.client("viewer") as client, client.get("/metrics") as answer:
        page = await answer.text()
    assert "farflow_mqtt_connected 1" in page
    assert f'farflow_mqtt_commands_total{{code="mqtt.malformed"}} {len(wrong)}' in page
    assert 'farflow_mqtt_commands_total{code="ok"}' in page


@pytest.mark.slow
async def test_more_commands_than_can_wait_are_dropped_and_the_bridge_goes_on(world, listener):
    flood = [made(world, f"flood-{n}", "resume") for n in range(300)]
    await asyncio.gather(*(listener.client.publish(t, p, qos=0) for t, p in flood))
    topic, payload = made(world, "after the flood")
    resumed, last = made(world, "last of all", "resume")

    async def answered() -> None:
        while not listener.replies("after the flood"):
            await listener.client.publish(topic, payload, qos=1)
            await asyncio.sleep(0.2)

    await asyncio.wait_for(answered(), WAIT_S)
    await listener.client.publish(resumed, last, qos=1)
    assert (await listener.reply("last of all"))["ok"]
    obeyed = [n for n in range(300) if listener.replies(f"flood-{n}")]
    assert obeyed
    assert all(listener.replies(f"flood-{n}")[0]["ok"] for n in obeyed)
