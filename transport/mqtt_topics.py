"""What farflow says and hears over MQTT: topics, payloads, and how a command proves who gives it.

    BASE/status                              online | offline (retained; the last will)
    BASE/agents/AGENT/state                  retained JSON: state, site, hardware, slots ...
    BASE/agents/AGENT/telemetry              JSON, lossy: tokens/s, lag, link, spool, GPUs ...
    BASE/runs/RUN/state                      retained JSON: state, cost, dead letters
    BASE/policies/RUN/POLICY/version         retained JSON: step, version, reward, accuracy
    BASE/agents/AGENT/command/VERB           a command (drain, cordon, resume)
    BASE/agents/AGENT/command/VERB/reply     what became of it

A command is JSON ``{"id", "expires", "token", "mac", "reason"}``: ``mac`` is the HMAC-SHA256 (RFC
2104), keyed with the SHA-256 of an HTTP token's secret, over topic, id, expiry and reason. So the
broker, and whoever reads along, can neither make one nor use one again for something else; it is
good once and until ``expires`` (Unix time in seconds, at most ``MAX_AHEAD_S`` from now).

Home Assistant's discovery: https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery
"""

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from transport.ids import is_name, policy_name
from transport.runs import HELD_OUT
from transport.status import AgentStatus, PolicyStatus, RunStatus, SchedulerStatus

ONLINE: Final = b"online"
OFFLINE: Final = b"offline"
MAX_COMMAND_BYTES: Final = 4096
MAX_AHEAD_S: Final = 300.0
VERBS: Final = ("drain", "cordon", "resume")
BASE_RULE: Final = "1 to 128 characters of A-Z, a-z, 0-9, '-', '_' and '/', no '/' at an end"
_BASE: Final = re.compile(r"(?=.{1,128}\Z)[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*")


class Publication(NamedTuple):
    """One message to a broker; an empty retained one makes the broker forget the topic."""

    topic: str
    payload: bytes
    retain: bool


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in a command's payload. ``mac`` is in hexadecimal digits."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    expires: Annotated[float, Meta(ge=0.0, le=1e11)]
    token: Annotated[str, Meta(min_length=1, max_length=48)]
    mac: Annotated[str, Meta(min_length=64, max_length=64)]
    reason: Annotated[str, Meta(max_length=300)] = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command."""

    id: str
    ok: bool
    code: str = ""
    message: str = ""


def base_fault(base: str) -> str:
    """What is wrong with the first part of all topics, or nothing."""
    return "" if _BASE.fullmatch(base) else f"must be {BASE_RULE}"


# ---- what is said ------------------------------------------------------------------------------


def retained(base: str, status: SchedulerStatus) -> dict[str, bytes]:
    """What a broker is to keep of a status, by topic; nothing (``b""``) of what is over, which it
    may keep from before."""
    found: dict[str, bytes] = {}
    for agent in status.agents:
        gone = agent.state == "gone"
        found[f"{base}/agents/{agent.name}/state"] = b"" if gone else _json(_agent_state(agent))
    for run in status.runs:
        over = run.state == "finished"
        found[f"{base}/runs/{run.name}/state"] = b"" if over else _json(_run_state(run))
        for policy in run.policies:
            topic = f"{base}/policies/{run.name}/{policy_name(policy.policy)}/version"
            found[topic] = b"" if over else _json(_policy_state(policy))
    return found


def changes(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> Iterator[Publication]:
    """What brings a broker that keeps ``before`` to keep ``now``."""
    for topic, payload in now.items():
        if before.get(topic) != payload:
            yield Publication(topic, payload, True)
    for topic in before:
        if topic not in now:
            yield Publication(topic, b"", True)


def telemetry(
    base: str, status: SchedulerStatus, rates: Mapping[str, float]
) -> Iterator[Publication]:
    """Numbers of the moment; ``rates`` are tokens per second by agent."""
    heads = {p.policy: p.head_version for run in status.runs for p in run.policies}
    for agent in status.agents:
        if agent.state == "gone":
            continue
        behind = [heads[p] - v for p, v in agent.versions.items() if p in heads]
        facts: dict[str, Any] = {
            "tokens_per_s": round(rates.get(agent.name, 0.0), 1),
            "running_sequences": agent.running_sequences,
            "leases": agent.leases,
            "versions_behind": max(behind, default=None),
            "rtt_s": agent.rtt_s,
            "up_bytes_per_s": agent.up_bytes_s,
            "down_bytes_per_s": agent.down_bytes_s,
            "spool_bytes": agent.spool_bytes,
            "gpus": [msgspec.to_builtins(gpu) for gpu in agent.gpus],
        }
        yield Publication(f"{base}/agents/{agent.name}/telemetry", _json(facts), False)


def _agent_state(agent: AgentStatus) -> dict[str, Any]:
    return {
        "state": agent.state,
        "cordoned": agent.cordoned,
        "quarantined": agent.quarantined,
        "site": agent.labels.get("site", agent.labels.get("region", "")),
        "hardware": agent.hardware,
        "slots": agent.slots,
        "price_usd_hour": agent.price_usd_hour,
    }


def _run_state(run: RunStatus) -> dict[str, Any]:
    return {
        "state": run.state,
        "reason": run.reason,
        "cost_usd": round(run.cost_usd, 4),
        "dead_letters": run.dead_letters,
    }


def _policy_state(policy: PolicyStatus) -> dict[str, Any]:
    done = [e for e in policy.evaluations if e.done and e.name == HELD_OUT]
    last = policy.last_step
    return {
        "trainer": policy.trainer,
        "step": policy.step,
        "steps": policy.steps,
        "version": policy.head_version,
        "reward": None if last is None else last.reward_mean,
        "accuracy": done[-1].accuracy if done else None,
    }


def discovery(base: str, prefix: str, status: SchedulerStatus) -> dict[str, bytes]:
    """Retained descriptions by which Home Assistant finds the agents' sensors, by topic; nothing
    (``b""``) for agents that are gone."""
    node = base.replace("/", "_")
    found: dict[str, bytes] = {}
    sensors: tuple[tuple[str, str, str, dict[str, str]], ...] = (
        ("state", "state", "{{ value_json.state }}", {}),
        ("tokens", "telemetry", "{{ value_json.tokens_per_s }}", {"unit_of_measurement": "tok/s"}),
        ("behind", "telemetry", "{{ value_json.versions_behind }}", {}),
        (
            "gpu_power",
            "telemetry",
            "{{ value_json.gpus | map(attribute='power_w') | select('number') | sum }}",
            {"unit_of_measurement": "W", "device_class": "power"},
        ),
        (
            "gpu_temperature",
            "telemetry",
            "{{ value_json.gpus | map(attribute='temperature_c') | select('number') | max }}",
            {"unit_of_measurement": "°C", "device_class": "temperature"},
        ),
    )
    for agent in status.agents:
        gone = agent.state == "gone"
        device = {"identifiers": [f"{node}_{agent.name}"], "name": f"farflow {agent.name}"}
        for name, topic, template, more in sensors:
            if name.startswith("gpu") and not agent.gpus and not gone:
                continue
            about = {
                "name": name.replace("_", " "),
                "unique_id": f"{node}_{agent.name}_{name}",
                "state_topic": f"{base}/agents/{agent.name}/{topic}",
                "value_template": template,
                "availability_topic": f"{base}/status",
                "device": {**device, "model": agent.hardware or "edge agent"},
                **more,
            }
            found[_config_topic(prefix, node, agent.name, name)] = b"" if gone else _json(about)
    return found


def _config_topic(prefix: str, node: str, agent: str, sensor: str) -> str:
    """Home Assistant takes no '.' there; names of agents have no capitals."""
    return f"{prefix}/sensor/{node}_{agent.replace('.', '_DOT_')}/{sensor}/config"


def _json(facts: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(facts)


# ---- what is heard -----------------------------------------------------------------------------


def commands_filter(base: str) -> str:
    """What to subscribe to."""
    return f"{base}/agents/+/command/+"


def command_topic(base: str, agent: str, verb: str) -> str:
    return f"{base}/agents/{agent}/command/{verb}"


def parts_of(base: str, topic: str) -> tuple[str, str] | None:
    """Agent and verb of a command's topic; None when it is none, or too long to be answered."""
    start, parts = f"{base}/agents/", topic.split("/")
    if not topic.startswith(start) or len(parts) < 3 or parts[-2] != "command":
        return None
    agent, verb = parts[-3], parts[-1]
    if not is_name(agent) or not is_name(verb) or topic != command_topic(base, agent, verb):
        return None
    return agent, verb


def signature(topic: str, id: str, expires: float, reason: str, secret_sha256: str) -> str:
    """The ``mac`` of a command; ``secret_sha256`` in hexadecimal digits."""
    said = msgspec.json.encode([topic, id, expires, reason])
    return hmac.new(bytes.fromhex(secret_sha256), said, hashlib.sha256).hexdigest()


def signed_command(
    topic: str, *, id: str, expires: float, token: str, secret: str, reason: str = ""
) -> bytes:
    """A command's payload, by the holder of an HTTP token's ``secret``."""
    digest = hashlib.sha256(secret.encode()).hexdigest()
    mac = signature(topic, id, expires, reason, digest)
    return msgspec.json.encode(Command(id=id, expires=expires, token=token, mac=mac, reason=reason))


def command_fault(topic: str, command: Command, secret_sha256: str, wall_s: float) -> str:
    """Why a command does not count, or nothing."""
    mac = signature(topic, command.id, command.expires, command.reason, secret_sha256)
    # As bytes: of text that is not ASCII compare_digest raises TypeError.
    if not hmac.compare_digest(mac.encode(), command.mac.encode("utf-8", "replace")):
        return "mqtt.bad_signature"
    if command.expires <= wall_s:
        return "mqtt.expired"
    if command.expires > wall_s + MAX_AHEAD_S:
        return "mqtt.expires_too_late"
    return ""
