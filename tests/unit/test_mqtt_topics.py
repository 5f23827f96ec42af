"""What is said and heard over MQTT, without a broker."""

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.mqtt_topics import (
    MAX_AHEAD_S,
    Command,
    Publication,
    base_fault,
    changes,
    command_fault,
    command_topic,
    discovery,
    parts_of,
    retained,
    signed_command,
    telemetry,
)
from transport.status import (
    AgentStatus,
    GpuReading,
    PolicyStatus,
    RunStatus,
    SchedulerStatus,
)

BASE = "farflow/lab"
NOW_S = 1000.0


def agent(name: str, **fields) -> AgentStatus:
    usual = {
        "state": "ready",
        "slots": 8,
        "running_sequences": 4,
        "leases": 2,
        "rtt_s": 0.05,
        "rate_tokens_s": 50.0,
        "tokens_generated": 1000,
        "bytes_up": 10,
        "bytes_down": 20,
        "versions": {"sums/solver": 7},
        "digests": {},
        "groups_done": 5,
        "attempts_failed": 1,
        "hardware": "H200",
        "labels": {"region": "eu-west-3"},
    }
    return AgentStatus(name=name, **{**usual, **fields})


def status(*agents: AgentStatus, state: str = "running") -> SchedulerStatus:
    policy = PolicyStatus(
        policy="sums/solver",
        trainer="waiting",
        step=7,
        steps=100,
        head_version=9,
        head_digest="",
        checkpoint_step=5,
        buffered_groups=3,
        last_step=None,
        evaluations=(),
    )
    run = RunStatus(name="sums", state=state, reason="", policies=(policy,), accounting=())
    return SchedulerStatus(term=1, build="b", uptime_s=1.0, runs=(run,), agents=agents, counters={})


def test_what_a_broker_keeps_of_a_status():
    found = retained(BASE, status(agent("paris"), agent("left", state="gone")))
    assert found.pop("farflow/lab/agents/left/state") == b"", "of what is over nothing"
    assert sorted(found) == [
        "farflow/lab/agents/paris/state",
        "farflow/lab/policies/sums/solver/version",
        "farflow/lab/runs/sums/state",
    ]
    assert json.loads(found["farflow/lab/agents/paris/state"])["site"] == "eu-west-3"
    assert json.loads(found["farflow/lab/policies/sums/solver/version"])["version"] == 9
    assert set(retained(BASE, status(state="finished")).values()) == {b""}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.binary(min_size=1, max_size=2)),
    st.dictionaries(st.sampled_from("abcdef"), st.binary(min_size=1, max_size=2)),
)
def test_changes_bring_a_broker_from_one_state_to_the_other(before, now):
    kept = dict(before)
    for publication in changes(before, now):
        assert publication.retain
        if publication.payload:
            assert kept.get(publication.topic) != publication.payload, "nothing is said twice"
            kept[publication.topic] = publication.payload
        else:
            del kept[publication.topic]
    assert kept == now


def test_what_a_broker_may_keep_from_before_is_taken_back():
    over = retained(BASE, status(agent("paris", state="gone")))
    told = {one.topic: one.payload for one in changes({}, over)}
    assert told[f"{BASE}/agents/paris/state"] == b""
    assert f"{BASE}/agents/paris/state" not in {one.topic for one in changes(over, over)}


def test_telemetry_is_not_kept_and_says_what_gpus_say():
    gpu = GpuReading(name="H200", power_w=320.5, temperature_c=61.0)
    (one,) = telemetry(BASE, status(agent("paris", gpus=(gpu,))), {"paris": 123.44})
    assert one == Publication("farflow/lab/agents/paris/telemetry", one.payload, False)
    facts = json.loads(one.payload)
    assert facts["tokens_per_s"] == 123.4
    assert facts["versions_behind"] == 2
    assert facts["gpus"][0]["power_w"] == 320.5


def test_home_assistant_finds_sensors_of_topics_that_are_said():
    gpu = GpuReading(name="H200", power_w=320.5)
    world = status(agent("paris", gpus=(gpu,)), agent("rome"), agent("bari.1", state="gone"))
    found = discovery(BASE, "homeassistant", world)
    gone = [topic for topic in found if "bari_DOT_1/" in topic]
    assert len(gone) == 5, "also what it may have had"
    assert {found.pop(topic) for topic in gone} == {b""}
    said = {p.topic for p in telemetry(BASE, world, {})} | set(retained(BASE, world))
    ids = set()
    for topic, payload in found.items():
        about = json.loads(payload)
        assert topic.startswith("homeassistant/sensor/farflow_lab_")
        assert about["state_topic"] in said
        assert about["availability_topic"] == "farflow/lab/status"
        ids.add(about["unique_id"])
    assert len(ids) == len(found)
    assert any("paris/gpu_power" in topic for topic in found)
    assert not any("rome/gpu_power" in topic for topic in found)


@pytest.mark.parametrize("base", ["", "/a", "a/", "a//b", "a+b", "a/#", "ä", "a" * 129, "a b"])
def test_a_base_that_brokers_or_readers_would_misread_is_refused(base):
    assert base_fault(base)


def test_commands_go_to_one_agent_and_verb():
    topic = command_topic(BASE, "paris", "drain")
    assert parts_of(BASE, topic) == ("paris", "drain")
    strange = (f"{topic}/reply", "x/agents/paris/command/drain", f"{BASE}/agents/command/drain")
    long = (command_topic(BASE, "a" * 49, "drain"), command_topic(BASE, "paris", "d" * 49))
    for other in (*strange, *long, command_topic(BASE, "Paris", "drain")):
        assert parts_of(BASE, other) is None


# ---- signatures --------------------------------------------------------------------------------

SECRET = "a secret of an operator"  # noqa: S105
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
TOPIC = command_topic(BASE, "paris", "drain")


def signed(**fields) -> Command:
    usual = {"id": "1", "expires": NOW_S + 60, "token": "ops", "secret": SECRET, "reason": "night"}
    return msgspec.json.decode(signed_command(TOPIC, **{**usual, **fields}), type=Command)


def test_a_signed_command_counts_until_it_expires():
    command = signed()
    assert command_fault(TOPIC, command, DIGEST, NOW_S) == ""
    assert command_fault(TOPIC, command, DIGEST, NOW_S + 60) == "mqtt.expired"
    late = signed(expires=NOW_S + MAX_AHEAD_S + 1)
    assert command_fault(TOPIC, late, DIGEST, NOW_S) == "mqtt.expires_too_late"


@pytest.mark.parametrize(
    "changed",
    [{"id": "2"}, {"expires": NOW_S + 61}, {"reason": "day"}, {"mac": "0" * 64}, {"mac": "é" * 64}],
    ids=str,
)
def test_whoever_changes_a_command_does_not_have_its_signature(changed):
    command = msgspec.structs.replace(signed(), **changed)
    assert command_fault(TOPIC, command, DIGEST, NOW_S) == "mqtt.bad_signature"


def test_a_signature_is_of_one_topic_and_one_secret():
    other = command_topic(BASE, "rome", "drain")
    assert command_fault(other, signed(), DIGEST, NOW_S) == "mqtt.bad_signature"
    stranger = signed(secret="another")  # noqa: S106
    assert command_fault(TOPIC, stranger, DIGEST, NOW_S) == "mqtt.bad_signature"
