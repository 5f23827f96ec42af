"""Offers on their way out: together per peer, in order, with their prompts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.effects import Effect, Reply, Send
from scheduler.offers import OFFERS_BYTES, gathered, prompts_wanted
from transport.envelope import CONTROL_FRAME_BYTES, LIMITS, decode, encode
from transport.messages import (
    CommandReply,
    Item,
    LeaseOffer,
    LeaseOffers,
    LeaseRevoke,
    Message,
    Plane,
    RewardSpec,
)

ITEM = Item(index=1, prompt="1 + 1 =", answer="2", family="sums")


def offer(number: int, items: tuple[Item, ...] = (ITEM,), **changes: object) -> LeaseOffer:
    return LeaseOffer(
        **{
            "attempt": f"r/x-s.{number}#1",
            "fence": (1, number),
            "job": f"r/x-s.{number}",
            "kind": "external",
            "items": items,
            "group_size": 1,
            "workflow": "single_turn",
            "settings": {"turns": [1, {"a": None}]},
            "policies": {"solver": "r/solver"},
            "reward": RewardSpec(name="exact"),
            "max_new_tokens": 8,
            "temperature": 1.0,
            "seed": number,
            "lease_s": 120.0,
            **changes,
        }
    )


def on_the_wire(effects: list[Effect]) -> list[tuple[str, list[Message]]]:
    """What each peer decodes, frame by frame."""
    found = []
    for effect in effects:
        assert isinstance(effect, Send)
        message, _ = decode(
            encode(effect.message, limits=LIMITS[Plane.CONTROL]), LIMITS[Plane.CONTROL]
        )
        found.append(
            (effect.peer, list(message.offers) if isinstance(message, LeaseOffers) else [message])
        )
    return found


def test_offers_of_one_commit_to_one_peer_are_one_frame():
    effects = [Send("a", offer(1)), Send("b", offer(2)), Send("a", offer(3))]
    leaving = gathered(effects, {}, lambda peer: True)
    assert on_the_wire(leaving) == [("a", [offer(1), offer(3)]), ("b", [offer(2)])]


def test_a_peer_that_does_not_say_the_feature_gets_single_offers():
    effects = [Send("a", offer(1)), Send("a", offer(2))]
    assert gathered(effects, {}, lambda peer: False) == effects


def test_nothing_to_the_same_peer_is_overtaken():
    revoke = LeaseRevoke(attempt="r/x-s.1#1", fence=(1, 1), reason="job_over")
    effects = [Send("a", offer(1)), Send("a", revoke), Send("a", offer(2))]
    leaving = gathered(effects, {}, lambda peer: True)
    assert on_the_wire(leaving) == [("a", [offer(1)]), ("a", [revoke]), ("a", [offer(2)])]


def test_frames_stay_below_the_bound():
    long = Item(index=1, prompt="x" * 50_000, answer="")
    effects: list[Effect] = [Send("a", offer(n, (long,))) for n in range(10)]
    frames = gathered(effects, {}, lambda peer: True)
    assert [len(offers) for _, offers in on_the_wire(frames)] == [3, 3, 3, 1]
    single = Item(index=1, prompt="x" * (OFFERS_BYTES + 10_000), answer="")
    assert len(on_the_wire(gathered([Send("a", offer(1, (single,)))], {}, lambda peer: True))) == 1
    assert OFFERS_BYTES < CONTROL_FRAME_BYTES


@pytest.mark.parametrize("many", [True, False])
def test_prompts_come_in_from_the_disk_byte_by_byte(many):
    items = (ITEM, Item(index=2, prompt="ünïcode \x00", answer="", meta='{"a": 1}'))
    stand_in = (Item(index=1, prompt="1 +", answer=""), Item(index=2, prompt="ü", answer=""))
    stood_for = offer(1, stand_in)
    effects: list[Effect] = [
        Send("a", stood_for, "key"),
        Send("a", offer(2)),
        Send("b", stood_for, "key"),
    ]
    assert prompts_wanted(effects) == ["key"]
    leaving = gathered(effects, {"key": msgspec.msgpack.encode(items)}, lambda peer: many)
    decoded = [(peer, one) for peer, offers in on_the_wire(leaving) for one in offers]
    assert decoded == [("a", offer(1, items)), ("a", offer(2)), ("b", offer(1, items))]


def test_an_offer_whose_job_ended_in_the_same_commit_is_left_out():
    revoke = LeaseRevoke(attempt="r/x-s.1#1", fence=(1, 1), reason="job_over")
    effects: list[Effect] = [Send("a", offer(1), "gone"), Send("a", revoke)]
    assert gathered(effects, {}, lambda peer: True) == [Send("a", revoke)]


KINDS = st.sampled_from(["offer", "revoke", "reply"])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), KINDS), max_size=40),
    st.frozensets(st.sampled_from("abc")),
)
def test_every_peer_hears_the_same_in_the_same_order(said, takes):
    effects: list[Effect] = []
    for number, (peer, kind) in enumerate(said):
        if kind == "offer":
            effects.append(Send(peer, offer(number)))
        elif kind == "revoke":
            effects.append(Send(peer, LeaseRevoke(attempt="x", fence=(1, number), reason="")))
        else:
            effects.append(Reply(peer, number, CommandReply(ok=True)))
    leaving = gathered(effects, {}, takes.__contains__)
    assert [e for e in leaving if isinstance(e, Reply)] == [
        e for e in effects if isinstance(e, Reply)
    ]
    sends = [e for e in leaving if isinstance(e, Send)]
    for peer in "abc":
        expected = [e.message for e in effects if isinstance(e, Send) and e.peer == peer]
        heard = [one for name, many in on_the_wire(sends) for one in many if name == peer]
        assert heard == expected
