"""What docs/operations.md "Upgrading" promises, on a real scheduler's sockets: another build of the
same protocol works together with ours, another protocol is refused in words.

There is no protocol 0 to speak; what an older build of protocol 1 said is written out here."""

from pathlib import Path
from typing import Any

import golden
import msgpack
import msgspec
import pytest
from deployment import deployment
from publisher import Trainer
from service_world import POLICY, PlaneLink

from transport.envelope import KIND_OF, LIMITS, decode
from transport.keys import trainer_name
from transport.messages import (
    FEATURE_OFFERS,
    KINDS,
    PROTOCOL_VERSION,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    LeaseOffer,
    LeaseOffers,
    LeaseReply,
    Message,
    Plane,
    Refuse,
    VersionServing,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)
from transport.runs import PolicySpec, RunSpec, TaskSpec, WorkflowSpec

FIRST_HELLO = {
    "role": "agent",
    "incarnation": 1,
    "build": "0.0.1",
    "protocol": 1,
    "agent": {
        "slots": 4,
        "hardware": "x86_64 cpu",
        "engine": "fake",
        "workflows": {"single_turn": "0" * 64},
        "rewards": ["exact"],
    },
}
FIRST_TRAINER = {
    "role": "trainer",
    "incarnation": 1,
    "build": "0.0.1",
    "trainer": {"policy": POLICY, "checkpoint_step": 0, "checkpoint_version": 0},
}
FROM_THE_FUTURE = {"from_the_future": [1, {"a": None}]}


def frames(kind: type[Message], header: dict[str, Any], version: int = 1) -> list[bytes]:
    """As a program that shares nothing with ours but the page would write it."""
    return [bytes((version, KIND_OF[kind])), msgpack.packb(header)]


async def say(link: PlaneLink, raw: list[bytes]) -> None:
    await link.link.wait_connected()
    link.link.send(raw)


def newer(value: Any) -> Any:
    """``value`` with a field that nobody knows in every map that stands for a struct."""
    if isinstance(value, msgspec.Struct):
        fields = {name: newer(getattr(value, name)) for name in value.__struct_fields__}
        return {**FROM_THE_FUTURE, **fields}
    if isinstance(value, tuple | list):
        return [newer(part) for part in value]
    if isinstance(value, dict):
        return {key: newer(part) for key, part in value.items()}
    return value


def sums(folder: Path) -> RunSpec:
    items = folder / "items.jsonl"
    items.write_text(
        "".join(f'{{"prompt": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(50))
    )
    return RunSpec(
        name="sums",
        policies={"solver": PolicySpec(model="model", batch_groups=2)},
        task=TaskSpec(source="jsonl", path=str(items), reward="exact"),
        workflow=WorkflowSpec(policies=("solver",), group_size=2),
    )


@pytest.mark.asyncio
async def test_an_older_build_of_this_protocol_is_served(tmp_path: Path) -> None:
    """An agent and a trainer that know required fields only and no feature get work, one offer a
    message."""
    async with deployment(tmp_path) as world, world.operator() as operator:
        await operator.submit(sums(tmp_path))
        publisher = Trainer(tmp_path)
        trainer, agent = world.link(trainer_name(POLICY)), world.link("a")
        await say(trainer, frames(Hello, FIRST_TRAINER))
        await trainer.expect(Welcome)
        await say(agent, frames(Hello, FIRST_HELLO))
        [welcome] = await agent.expect(Welcome)
        assert isinstance(welcome, Welcome)
        assert welcome.heartbeat_s == 0.2
        await say(agent, frames(Heartbeat, {"sequence": 7, "sent_s": 1.5}))
        [reply] = await agent.expect(HeartbeatReply)
        assert isinstance(reply, HeartbeatReply)
        assert (reply.sequence, reply.sent_s) == (7, 1.5)

        weights = world.link("a", Plane.WEIGHTS)
        await say(weights, frames(WeightsRequest, {"policy": POLICY, "have_version": None}))
        await publisher.publish(world.link(trainer_name(POLICY), Plane.WEIGHTS), publisher.first)
        await weights.expect(WeightsPlan)
        serving = {"policy": POLICY, "version": 0, "digest": publisher.first.manifest.digest}
        await say(agent, frames(VersionServing, {**serving, "pause_s": 0.0}))
        [first, second] = await agent.expect(LeaseOffer, 2)
        assert isinstance(first, LeaseOffer)
        taken = {"attempt": first.attempt, "fence": list(first.fence), "accepted": True}
        await say(agent, frames(LeaseReply, taken))
        assert not [m for m, _ in agent.received if isinstance(m, LeaseOffers | Refuse)]
        assert first != second
        status = await operator.status()
        assert [(a.name, a.state, a.slots) for a in status.agents] == [("a", "ready", 4)]


@pytest.mark.asyncio
async def test_a_newer_build_of_this_protocol_is_served(tmp_path: Path) -> None:
    """It says fields, features and kinds that we do not know, and goes without what we lack."""
    unknown_kind = next(kind for kind in range(255, 0, -1) if kind not in KINDS)
    hello = {
        **FIRST_HELLO,
        **FROM_THE_FUTURE,
        "build": "99.0.0",
        "features": [FEATURE_OFFERS, "mind-reading"],
        "agent": {**FIRST_HELLO["agent"], **FROM_THE_FUTURE},  # type: ignore[dict-item]
    }
    async with deployment(tmp_path) as world:
        agent = world.link("a")
        await say(agent, [bytes((1, unknown_kind)), msgpack.packb(FROM_THE_FUTURE)])
        await say(agent, frames(Hello, hello))
        [welcome] = await agent.expect(Welcome)
        assert isinstance(welcome, Welcome)
        assert "mind-reading" not in welcome.features
        assert set(welcome.kinds) == set(KINDS), "what it may say, before it says it"
        await say(agent, frames(Heartbeat, {**FROM_THE_FUTURE, "sequence": 1, "sent_s": 0.5}))
        await agent.expect(HeartbeatReply)
        assert not [m for m, _ in agent.received if isinstance(m, HelloRequired | Refuse)]
        # Nobody hears of what it said on the control plane: a refusal would end it there.
        for plane in (Plane.TRAJECTORIES, Plane.WEIGHTS):
            link = world.link("a", plane)
            await say(link, [bytes((1, unknown_kind)), msgpack.packb(FROM_THE_FUTURE)])
            [refusal] = await link.expect(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code == "protocol.kind"
            assert f"0x{unknown_kind:02x} is unknown" in refusal.message
            assert "upgrade the scheduler's host" in refusal.message


@pytest.mark.asyncio
async def test_another_protocol_is_refused_with_both_numbers_and_a_remedy(tmp_path: Path) -> None:
    async with deployment(tmp_path) as world:
        for plane in (Plane.CONTROL, Plane.TRAJECTORIES, Plane.WEIGHTS):
            link = world.link("a", plane)
            await say(link, frames(Hello, FIRST_HELLO, version=PROTOCOL_VERSION + 1))
            [refusal] = await link.expect(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code == "protocol.version"
            for word in (f"protocol {PROTOCOL_VERSION + 1}", f"protocol {PROTOCOL_VERSION}"):
                assert word in refusal.message
            assert "install" in refusal.message
        # the frame is of ours, the peer says that it goes by another
        link = world.link("b")
        await say(link, frames(Hello, {**FIRST_HELLO, "protocol": PROTOCOL_VERSION + 1}))
        [refusal] = await link.expect(Refuse)
        assert isinstance(refusal, Refuse)
        assert refusal.code == "protocol.version"
        assert "install the same farflow" in refusal.message
        # and the connection is good for one that was upgraded meanwhile
        await say(link, frames(Hello, {**FIRST_HELLO, "incarnation": 2}))
        await link.expect(Welcome)


@pytest.mark.parametrize("sample", golden.SAMPLES, ids=lambda s: type(s[0]).__name__)
def test_unknown_fields_are_ignored_at_any_depth(sample: tuple[Message, tuple[bytes, ...]]) -> None:
    message, payload = sample
    raw = [*frames(type(message), newer(message)), *payload]
    again, _ = decode(raw, LIMITS[Plane.WEIGHTS])
    assert again == message
