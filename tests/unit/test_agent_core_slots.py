"""When the edge agent begins attempts, and what the scheduler may have back of them."""

import msgspec
import pytest
from agent_story import Story, of, offer, said

from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import GroupGenerated, Measured, Tick
from transport.messages import Heartbeat, LeaseOffers, LeaseRecall, LeaseReplies, LeaseReply


def test_an_attempt_begins_when_a_slot_is_free_and_says_so_in_heartbeats() -> None:
    story = Story().up()
    effects = story.scheduler(offer(1), offer(2), offer(3))
    assert [run.offer.attempt for run in of(RunAttempt, effects)] == [
        offer(1).attempt,
        offer(2).attempt,
    ]
    (beat, *_) = said(Heartbeat, story.wait(2.1))
    assert [entry.started for entry in beat.held] == [True, True, False]
    effects = story.feed(GroupGenerated(attempt=offer(1).attempt, fence=(1, 1)))
    assert [run.offer.attempt for run in of(RunAttempt, effects)] == [offer(3).attempt]


def test_slots_that_siblings_have_left_are_filled_once_the_engine_says_so() -> None:
    story = Story().up()
    story.scheduler(offer(1), offer(2), offer(3), offer(4))
    busy = Measured(
        tokens_generated=0, running_sequences=8, waiting_sequences=0, bytes_up=0, bytes_down=0
    )
    assert of(RunAttempt, story.feed(busy, Tick())) == []
    assert story.core.wants_slot
    assert story.core.next_deadline() == pytest.approx(story.now + 1.0)
    free = msgspec.structs.replace(busy, running_sequences=7)
    effects = story.feed(free)
    assert [run.offer.attempt for run in of(RunAttempt, effects)] == [offer(3).attempt]


def test_a_waiting_attempt_is_given_back_and_a_begun_one_is_kept() -> None:
    story = Story().up()
    story.scheduler(offer(1), offer(2), offer(3))
    recall = LeaseRecall(attempt=offer(3).attempt, fence=(1, 3))
    (reply,) = said(LeaseReply, story.scheduler(recall))
    assert (reply.accepted, reply.reason) == (False, "recalled")
    (kept,) = said(LeaseReply, story.scheduler(LeaseRecall(attempt=offer(1).attempt, fence=(1, 1))))
    assert (kept.accepted, kept.reason) == (True, "")
    assert said(LeaseReply, story.scheduler(recall)) == []
    (late,) = said(LeaseReply, story.scheduler(offer(3)))
    assert late.reason == "finished"


def test_offers_in_one_frame_are_answered_in_one_frame_in_order() -> None:
    story = Story().up()
    effects = story.scheduler(LeaseOffers(offers=(offer(1), offer(2, workflow="w"), offer(3))))
    (replies,) = said(LeaseReplies, effects)
    assert [(r.fence, r.accepted, r.reason) for r in replies.replies] == [
        ((1, 1), True, ""),
        ((1, 2), False, "workflow_unknown"),
        ((1, 3), True, ""),
    ]
    assert said(LeaseReply, effects) == []
    assert len(of(RunAttempt, effects)) == 2
