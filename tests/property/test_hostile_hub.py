"""Whatever frames a peer with a real key sends, on every plane, as every role: they are taken, or
refused with a stable code or a counter; nothing raises, the core stays sound, and a healthy peer is
served all the while.
"""

from pathlib import Path

import golden
import msgpack
import pytest
from chaos_gate import Gate, make_deployment
from core_builders import make_agent_hello
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.envelope import LIMITS, encode
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    WORK_PLANES,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    Message,
    Plane,
    Refuse,
    Role,
    Welcome,
)
from transport.permissions import may_send

PEERS = {
    "a": Role.AGENT,
    "b": Role.AGENT,
    "trainer-r-solver": Role.TRAINER,
    "trajectory-log": Role.SERVICE,
    "weight-store": Role.SERVICE,
    "operator": Role.OPERATOR,
    "viewer": Role.VIEWER,
    "relay": Role.RELAY,
    "submitter": Role.SUBMITTER,
}
GOLDEN = [encode(message, payload) for message, payload in golden.SAMPLES]
REFUSALS = {
    "received.malformed",
    "received.not_allowed",
    "received.other_version",
    "received.unknown_kind",
    "hello_required",
    "refused.agent.duplicate",
}
"""Counters, which are in the status of the scheduler."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "keys"
    return folder, make_deployment(folder)


def healthy(gate: Gate) -> None:
    """Somebody else gets its answers."""
    gate.push("healthy", encode(make_agent_hello(1)))
    assert any(isinstance(message, Welcome) for message in gate.heard("healthy"))
    assert gate.push("healthy", encode(Heartbeat(sequence=7, sent_s=1.0))) == "taken"
    [reply] = [one for one in gate.heard("healthy") if isinstance(one, HeartbeatReply)]
    assert reply.sequence == 7


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def hostile_frames(draw: st.DrawFn) -> list[bytes]:
    """Nothing, garbage, or a message that somebody has worked on."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    head = bytes([PROTOCOL_VERSION, kind])
    match draw(st.integers(0, 7)):
        case 0:
            return draw(st.lists(st.binary(max_size=40), max_size=5))
        case 1:
            return [head, draw(st.binary(max_size=120))]
        case 2:
            return [head, msgpack.packb(draw(values))]
        case 3:  # another version, or a kind that there is not
            return [bytes([draw(st.integers(0, 255)), draw(st.integers(0, 255))]), b"\x80"]
        case 4:  # too many frames
            frames = draw(st.sampled_from(GOLDEN))
            return [*frames, *[b"x"] * draw(st.integers(1, 20))]
        case 5:  # deeper than anybody may recurse
            return [head, b"\x91" * draw(st.integers(1, 5000)) + b"\xc0"]
        case 6:  # a length that is not there
            return [head, b"\xdf\xff\xff\xff\xff" + draw(st.binary(max_size=8))]
        case _:
            frames = draw(st.sampled_from(GOLDEN))
            header = msgpack.unpackb(frames[1])
            for name in header:
                if draw(st.integers(0, 3)) == 0:
                    header[name] = draw(values)
            return [frames[0], msgpack.packb(header), *frames[2:]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(PEERS)), hostile_frames()), max_size=12))
def test_any_frames_of_anybody_on_the_control_plane(deployment, said):
    gate = Gate(*deployment)
    for peer, frames in said:
        fate = gate.push(peer, frames)
        assert fate in REFUSALS | {"taken", "answered"}, (peer, frames)
        gate.scene.core.check()
    healthy(gate)


@pytest.mark.parametrize("plane", WORK_PLANES)
@pytest.mark.parametrize("peer", sorted(PEERS))
def test_every_kind_from_every_role_is_taken_or_refused_by_name(deployment, plane, peer):
    gate = Gate(*deployment, plane)
    for message, payload in golden.SAMPLES:
        gate.heard(peer)
        before = gate.hub.counters["received.not_allowed"]
        identity = gate.keys[peer].public_key
        arrival = gate.hub._check(peer.encode(), identity, encode(message, payload))
        allowed = may_send(PEERS[peer], plane, type(message))
        assert (arrival is not None) == allowed, type(message)
        assert gate.hub.counters["received.not_allowed"] == before + (not allowed)
        if not allowed and plane is not Plane.CONTROL:
            [refusal] = gate.heard(peer)
            assert isinstance(refusal, Refuse)
            assert refusal.code == "role.not_allowed"


@pytest.mark.parametrize("plane", WORK_PLANES)
def test_frames_above_the_planes_limits_are_refused_before_they_are_decoded(deployment, plane):
    gate = Gate(*deployment, plane)
    limits = LIMITS[plane]
    head = bytes([PROTOCOL_VERSION, next(k for k, v in KINDS.items() if v is Hello)])
    too_long = b"\x81\xa4role" + bytes(limits.header_bytes)
    identity = gate.keys["a"].public_key
    for number, frames in enumerate(([head, too_long], [head, b"\x80", b"x"], [head], []), 1):
        assert gate.hub._check(b"a", identity, frames) is None
        counters = gate.hub.counters
        assert counters["received.malformed"] + counters["received.not_allowed"] == number


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_protocol_version_is_told_what_to_do(deployment, version):
    gate = Gate(*deployment)
    assert gate.push("a", [bytes([version, 1]), b"\x80"]) == "received.other_version"
    [refusal] = gate.heard("a")
    assert isinstance(refusal, Refuse)
    assert refusal.code == "protocol.version"
    assert f"protocol {PROTOCOL_VERSION}" in refusal.message


# ---- whose word it is ----------------------------------------------------------------------------


def test_a_hello_that_was_heard_elsewhere_speaks_only_for_who_says_it(deployment):
    """``b`` repeats ``a``'s hello byte for byte: it is ``b``'s own, ``a`` is not touched."""
    gate = Gate(*deployment)
    recorded = encode(make_agent_hello(3))
    assert gate.push("a", recorded) == "taken"
    gate.heard("a")
    assert gate.push("b", recorded) == "taken"
    assert gate.heard("a") == []
    assert gate.push("a", encode(Heartbeat(sequence=1, sent_s=0.0))) == "taken"
    assert [type(one) for one in gate.heard("a")] == [HeartbeatReply]
    assert sorted(gate.scene.core._ctx.agents) == ["a", "b"]


def test_a_second_box_with_a_key_is_refused_and_the_first_goes_on(deployment):
    gate = Gate(*deployment)

    def hello(process: str) -> list[bytes]:
        message = make_agent_hello(3)
        return encode(Hello(**{**_fields(message), "process": process}))

    assert gate.push("a", hello("first"), b"one") == "taken"
    gate.heard(b"one")
    assert gate.push("a", hello("second"), b"two") == "refused.agent.duplicate"
    [refusal] = gate.heard(b"two")
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.retry_s is not None) == ("agent.duplicate", True)
    # What it says without a hello goes nowhere, and nothing of the first one's goes to it.
    assert gate.push("a", encode(Heartbeat(sequence=1, sent_s=0.0)), b"two") == "hello_required"
    assert [type(one) for one in gate.heard(b"two")] == [HelloRequired]
    assert gate.push("a", encode(Heartbeat(sequence=2, sent_s=0.0)), b"one") == "taken"
    assert [type(one) for one in gate.heard(b"one")] == [HeartbeatReply]


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.AGENT])
def test_a_key_cannot_take_another_role(deployment, role):
    gate = Gate(*deployment)
    hello = Hello(**{**_fields(make_agent_hello(1)), "role": role})
    assert gate.push("a", encode(hello)) == "answered"
    [refusal] = gate.heard("a")
    assert isinstance(refusal, Refuse)
    assert refusal.code == "role.mismatch"
    assert not gate.scene.core._ctx.agents


def _fields(message: Message) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_the_folder_of_keys_is_what_counts(deployment, tmp_path: Path):
    """A key that is not in the folder is not heard."""
    gate = Gate(*deployment)
    stranger = make_deployment(tmp_path / "other").agents["a"].public_key
    assert gate.hub._check(b"a", stranger, encode(make_agent_hello(1))) is None
    assert gate.hub.counters["received.unknown_key"] == 1
