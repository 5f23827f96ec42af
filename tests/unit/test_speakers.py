"""Which process speaks with an agent's key."""

import msgspec
import pytest

from scheduler.speakers import FIRST_HEARTBEAT_S, QUIET_HEARTBEATS, Speakers, duplicate
from transport.messages import Hello, Role

QUIET_S = QUIET_HEARTBEATS * FIRST_HEARTBEAT_S


def hello(process: str = "p", incarnation: int = 1) -> Hello:
    return Hello(role=Role.AGENT, incarnation=incarnation, build="b", process=process)


@pytest.fixture
def speakers() -> Speakers:
    made = Speakers()
    made.took("a", b"one", hello(), 0.0)
    return made


def test_the_first_and_the_same_process_may_always_speak(speakers):
    assert Speakers().other_route("a", hello(), 0.0) is None
    assert speakers.other_route("a", hello(), 0.0) is None
    assert speakers.other_route("a", hello(incarnation=9), 0.0) is None
    assert speakers.other_route("b", hello("q"), 0.0) is None


def test_another_process_waits_until_the_first_is_silent(speakers):
    route, left_s = speakers.other_route("a", hello("q", incarnation=2), 1.0)
    assert (route, left_s) == (b"one", QUIET_S - 1.0)
    speakers.heard("a", 4.0)
    assert speakers.other_route("a", hello("q"), QUIET_S) == (b"one", 4.0)
    assert speakers.other_route("a", hello("q"), 4.0 + QUIET_S) is None
    refusal = duplicate("a", left_s)
    assert (refusal.code, refusal.retry_s) == ("agent.duplicate", left_s)
    assert "farflow agent enrol" in refusal.message


def test_silence_is_counted_in_the_heartbeats_that_it_was_told(speakers):
    speakers.beats("a", 0.5)
    assert speakers.other_route("a", hello("q"), 1.0) == (b"one", 0.5)
    assert speakers.other_route("a", hello("q"), 1.5) is None
    speakers.beats("unknown", 1.0)
    speakers.heard("unknown", 1.0)
    assert "unknown" not in speakers


def test_boxes_of_one_image_are_told_apart_even_with_the_same_incarnation(speakers):
    assert speakers.other_route("a", hello("q", incarnation=1), 1.0) is not None


def test_an_older_agent_is_told_by_its_incarnation(speakers):
    old = msgspec.structs.replace(hello(), process="")
    speakers.took("a", b"two", old, 0.0)
    assert speakers.other_route("a", old, 1.0) is None
    assert speakers.other_route("a", msgspec.structs.replace(old, incarnation=2), 1.0) is not None
    assert speakers.names() == ["a"]
