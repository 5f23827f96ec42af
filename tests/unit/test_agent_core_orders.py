"""The edge agent's clock samples, and orders to drain or to show its log."""

import pytest
from agent_story import Story, of, offer, one, reason_for, said
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.clock_filter import ClockFilter
from edge_agent.core.effects import DropSpooled, Exit, SendLog
from edge_agent.core.events import DrainRequested, Measured, Tick
from transport.messages import (
    AgentLogRequest,
    AttemptFailed,
    DrainOrder,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
)


def test_the_round_trip_is_the_least_of_the_last_answered_heartbeats() -> None:
    story = Story().up()
    story.now += 0.1
    story.scheduler(HeartbeatReply(sequence=1, sent_s=-1e9))
    assert story.core.status().rtt_s == pytest.approx(0.1)
    (beat,) = said(Heartbeat, story.wait(2.0))
    assert beat.rtt_s == pytest.approx(0.1)
    story.now = beat.sent_s + 0.18
    story.scheduler(HeartbeatReply(sequence=beat.sequence, sent_s=0.0))
    assert story.core.status().rtt_s == pytest.approx(0.1)
    story.scheduler(HeartbeatReply(sequence=77, sent_s=0.0))
    assert story.core.status().rtt_s == pytest.approx(0.1)
    assert story.core.status().counters["heartbeat.unknown_reply"] == 1
    for _ in range(8):  # a longer path is believed once the short samples are old
        beat = said(Heartbeat, story.wait(2.0))[-1]
        story.now = beat.sent_s + 0.3
        story.scheduler(HeartbeatReply(sequence=beat.sequence, sent_s=0.0))
    assert story.core.status().rtt_s == pytest.approx(0.3)


def measured(wall_s: float | None) -> Measured:
    return Measured(
        tokens_generated=0,
        running_sequences=0,
        waiting_sequences=0,
        bytes_up=0,
        bytes_down=0,
        wall_s=wall_s,
    )


def test_clock_offset_and_round_trip_leave_out_the_time_that_the_scheduler_took() -> None:
    story = Story().up()
    ahead_s, wall_s = 2.5, 1_700_000_000.0
    story.feed(measured(wall_s))
    began = story.now
    (beat,) = said(Heartbeat, story.wait(2.0))
    assert beat.wall_s == pytest.approx(wall_s + beat.sent_s - began)
    assert beat.clock_offset_s is None
    received_s = beat.wall_s + 0.04 + ahead_s
    story.now = beat.sent_s + 0.08 + 7.0  # 7 s in the scheduler
    reply = HeartbeatReply(
        sequence=beat.sequence, sent_s=0.0, received_s=received_s, replied_s=received_s + 7.0
    )
    story.scheduler(reply)
    assert story.core.status().rtt_s == pytest.approx(0.08, abs=1e-5)
    beat = said(Heartbeat, story.wait(2.0))[0]
    assert beat.clock_offset_s == pytest.approx(ahead_s, abs=1e-5)
    # A reply that was held up on its way back is not believed, a step of our own clock is seen.
    received_s = beat.wall_s + 0.04 + ahead_s
    story.now = beat.sent_s + 1.0
    late = HeartbeatReply(
        sequence=beat.sequence, sent_s=0.0, received_s=received_s, replied_s=received_s + 0.01
    )
    story.scheduler(late)
    assert story.core.status().clock_offset_s == pytest.approx(ahead_s, abs=1e-5)
    story.feed(measured(wall_s + story.now - began + 60.0))
    assert story.core.status().clock_offset_s == pytest.approx(ahead_s - 60.0, abs=1e-5)


@pytest.mark.parametrize(
    ("received_s", "replied_s"),
    [
        (0.0, 0.0),
        (float("nan"), 1.0),
        (1e9, float("inf")),
        (float("inf"), float("inf")),
        (1e9, 1e9 - 1.0),
        (1e9, 1e9 + 5.0),
        (-5.0, -5.0),
    ],
)
def test_stamps_that_cannot_be_leave_an_upper_bound_of_the_round_trip(
    received_s: float, replied_s: float
) -> None:
    story = Story().up()
    story.feed(measured(1.7e9))
    story.now += 0.1
    reply = HeartbeatReply(sequence=1, sent_s=0.0, received_s=received_s, replied_s=replied_s)
    story.scheduler(reply)
    assert story.core.status().rtt_s == pytest.approx(0.1)
    assert story.core.status().clock_offset_s is None


@given(
    ahead_s=st.floats(-1e6, 1e6),
    samples=st.lists(
        st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.floats(0.0, 60.0)), min_size=1
    ),
)
def test_the_offset_is_off_by_no_more_than_half_of_the_least_delay(
    ahead_s: float, samples: list[tuple[float, float, float]]
) -> None:
    clock, now = ClockFilter(), 50.0
    for up_s, down_s, held_s in samples:
        received_s = now + up_s + ahead_s + 2e6
        arrived_s = now + up_s + held_s + down_s
        clock.add(
            sent_s=now,
            arrived_s=arrived_s,
            received_s=received_s,
            replied_s=received_s + held_s,
        )
        now = arrived_s + 1.0
    delays = [up_s + down_s for up_s, down_s, _ in samples[-8:]]
    assert clock.rtt_s == pytest.approx(min(delays), abs=1e-6)
    assert clock.ahead_s is not None
    assert abs(clock.ahead_s - ahead_s - 2e6) <= min(delays) / 2 + 1e-3


# ---- orders --------------------------------------------------------------------------------


def test_an_order_to_drain_gives_its_own_time_and_hands_back_what_has_not_started() -> None:
    story = Story(drain_s=30.0).up(version=None)
    story.scheduler(offer(1))
    effects = story.scheduler(DrainOrder(deadline_s=5.0, reason="maintenance"))
    (failed,) = said(AttemptFailed, effects)
    assert (failed.code, failed.detail) == ("agent.draining", "maintenance")
    assert one(Exit, effects).status == 0
    assert one(Exit, effects).reason == "drained: maintenance"


@pytest.mark.parametrize(("deadline_s", "expected_s"), [(5.0, 5.0), (0.0, 30.0), (-1.0, 30.0)])
def test_an_order_to_drain_waits_for_what_runs_and_no_longer(
    deadline_s: float, expected_s: float
) -> None:
    story = Story(drain_s=30.0).up()
    story.scheduler(offer(1))
    story.scheduler(DrainOrder(deadline_s=deadline_s, reason="maintenance"))
    assert reason_for(story.scheduler(offer(2))) == "draining"
    assert of(Exit, story.wait(expected_s - 0.1)) == []
    effects = story.wait(0.2)
    assert len(said(AttemptFailed, effects)) == 1
    assert len(said(Goodbye, effects)) == 1
    assert one(Exit, effects).status == 0
    assert of(DropSpooled, effects) == []


def test_a_second_request_brings_the_end_forward_and_never_puts_it_off() -> None:
    story = Story(drain_s=30.0).up()
    story.scheduler(offer(1))
    story.feed(DrainRequested(reason="SIGTERM"))
    story.feed(DrainRequested(reason="again", deadline_s=600.0))
    story.feed(DrainRequested(reason="again", deadline_s=3.0))
    assert of(Exit, story.wait(2.9)) == []
    assert one(Exit, story.wait(0.2)).status == 0
    story = Story(drain_s=30.0).up()
    story.scheduler(offer(1))
    story.feed(DrainRequested(reason="SIGTERM"))
    assert one(Exit, story.feed(DrainRequested(reason="again", deadline_s=0.0))).status == 0


def test_a_request_for_the_log_is_handed_on_within_bounds() -> None:
    story = Story().up()
    effects = story.scheduler(
        AgentLogRequest(request=7, run="sums", lines=20),
        AgentLogRequest(request=8, run="x" * 5000, lines=-3),
        AgentLogRequest(request=9, run="", lines=10**9),
    )
    assert [(e.request, e.run[:5], e.lines) for e in of(SendLog, effects)] == [
        (7, "sums", 20),
        (8, "xxxxx", 1),
        (9, "", 2000),
    ]
    assert all(len(effect.run) <= 200 for effect in of(SendLog, effects))


def test_the_inventory_has_the_prices_of_the_box() -> None:
    story = Story(price_usd_hour=2.5, egress_usd_gb=0.09)
    (hello,) = said(Hello, story.feed(Tick()))
    assert hello.agent is not None
    assert (hello.agent.price_usd_hour, hello.agent.egress_usd_gb) == (2.5, 0.09)
