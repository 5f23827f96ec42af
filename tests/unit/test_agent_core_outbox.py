"""The edge agent's spool and uplink decisions, as stories."""

import pytest
from agent_story import (
    Story,
    of,
    offer,
    one,
    said,
    summary,
    welcome,
)

from edge_agent.core.effects import (
    DropSpooled,
    OfferBodies,
    RemakeLink,
    ToTrajectoryLog,
)
from edge_agent.core.events import (
    BodyLost,
    FromTrajectoryLog,
    LinkDown,
    LinkUp,
    SendFailed,
    Tick,
)
from transport.envelope import BULK_FRAME_BYTES, KIND_OF
from transport.messages import (
    KNOWN_KINDS,
    AttemptFailed,
    BodyRef,
    ChunkRequest,
    GroupSummary,
    HeldAttempt,
    Hello,
    OfferedBody,
    Plane,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
)


def test_what_was_spooled_before_a_restart_is_offered_again_and_sent_at_once() -> None:
    story = Story(spooled=(summary(offer(1)),))
    effects = story.feed(Tick())
    (hello,) = said(Hello, effects)
    assert hello.agent is not None
    assert hello.agent.held == (HeldAttempt(attempt=offer(1).attempt, fence=(1, 1), spooled=True),)
    assert one(ToTrajectoryLog, effects).summary == summary(offer(1))


def test_the_window_bounds_bytes_and_messages_under_way() -> None:
    spooled = tuple(summary(offer(n)) for n in range(6))
    story = Story(spooled=spooled, upload_window_bytes=2500)
    assert len(of(ToTrajectoryLog, story.feed(Tick()))) == 2
    ack = TrajectoryAck(attempt=spooled[0].attempt, digest=spooled[0].digest)
    (sent,) = of(ToTrajectoryLog, story.feed(FromTrajectoryLog(message=ack)))
    assert sent.summary == spooled[2]
    assert len(of(ToTrajectoryLog, Story(spooled, upload_window_messages=3).feed(Tick()))) == 3
    assert len(of(ToTrajectoryLog, Story(spooled, upload_window_bytes=10).feed(Tick()))) == 1


def test_a_silent_log_gets_everything_again_over_a_new_link_ever_more_slowly() -> None:
    story = Story(spooled=(summary(offer(1)), summary(offer(2)))).up()
    times = []
    for _ in range(1200):
        if RemakeLink(plane=Plane.TRAJECTORIES) in (effects := story.wait(0.5)):
            times.append(story.now - 100.0)
            assert len(of(ToTrajectoryLog, effects)) == 2
    assert times == pytest.approx([30.0, 90.0, 210.0, 450.0], abs=0.6)
    ack = TrajectoryAck(attempt=offer(1).attempt, digest=summary(offer(1)).digest)
    story.feed(FromTrajectoryLog(message=ack))
    assert RemakeLink(plane=Plane.TRAJECTORIES) in story.wait(31.0)


def test_a_body_that_the_link_did_not_take_is_sent_a_little_later() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    put = TrajectoryPut(summary=summary(offer(1)))
    assert of(ToTrajectoryLog, story.feed(SendFailed(plane=Plane.TRAJECTORIES, message=put))) == []
    assert one(ToTrajectoryLog, story.wait(0.2)).summary == summary(offer(1))


def test_a_body_refused_by_a_link_that_is_down_waits_for_the_link_and_for_no_deadline() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    story.feed(LinkDown(plane=Plane.TRAJECTORIES))
    put = TrajectoryPut(summary=summary(offer(1)))
    story.feed(SendFailed(plane=Plane.TRAJECTORIES, message=put))
    story.wait(0.2)
    due = story.core.next_deadline()
    assert due is None or due > story.now
    up = story.feed(LinkUp(plane=Plane.TRAJECTORIES))
    assert one(ToTrajectoryLog, up).summary == summary(offer(1))


def test_a_refused_body_is_dropped_and_its_attempt_fails() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    refused = TrajectoryRefused(
        attempt=offer(1).attempt, digest=summary(offer(1)).digest, code="log.size", message="big"
    )
    effects = story.feed(FromTrajectoryLog(message=refused))
    assert len(of(DropSpooled, effects)) == 1
    assert said(AttemptFailed, effects)[0].code == "log.size"
    other = TrajectoryAck(attempt=offer(1).attempt, digest="another digest")
    story.feed(FromTrajectoryLog(message=other))
    assert story.core.status().counters["ack.unknown"] == 1


def test_a_body_lost_on_disk_fails_its_attempt() -> None:
    story = Story(spooled=(summary(offer(1)),)).up()
    digest = summary(offer(1)).digest
    other = BodyLost(attempt=offer(1).attempt, digest="other", code="store")
    assert story.feed(other) == []
    lost = BodyLost(attempt=offer(1).attempt, digest=digest, code="integrity.checksum")
    effects = story.feed(lost)
    assert one(DropSpooled, effects).digest == digest
    assert said(AttemptFailed, effects)[0].code == "integrity.checksum"


BIG = 100_000


def big(number: int, size_bytes: int = BIG) -> GroupSummary:
    return summary(offer(number), size_bytes)


def test_large_bodies_are_offered_together_and_do_not_count_in_the_window() -> None:
    story = Story(spooled=(big(1), summary(offer(2)), big(3)), upload_window_bytes=1000)
    effects = story.feed(Tick())
    assert one(OfferBodies, effects).summaries == (big(1), big(3))
    assert one(ToTrajectoryLog, effects).summary == summary(offer(2))
    assert story.core.status().unacked_bytes == 2 * BIG + 1000
    assert len(of(OfferBodies, Story(tuple(map(big, range(5))), upload_offers=2).feed(Tick()))) == 1


def test_one_message_acknowledges_many_bodies_in_order_and_ignores_strangers() -> None:
    spooled = (big(1), summary(offer(2)), big(3))
    story = Story(spooled=spooled).up()
    refs = [BodyRef(attempt=s.attempt, digest=s.digest) for s in (spooled[2], spooled[0])]
    stranger = BodyRef(attempt=spooled[1].attempt, digest="another")
    effects = story.feed(FromTrajectoryLog(message=TrajectoryAcks(bodies=(*refs, stranger))))
    assert [drop.digest for drop in of(DropSpooled, effects)] == [r.digest for r in refs]
    assert story.core.status().spooled == 1
    assert story.core.status().counters["ack.unknown"] == 1


def test_a_request_for_a_chunk_is_a_sign_of_life_and_silence_offers_again() -> None:
    story = Story(spooled=(big(1),)).up()
    for _ in range(4):
        story.wait(20.0)
        request = ChunkRequest(digest=big(1).digest, indices=(0,))
        assert RemakeLink(plane=Plane.TRAJECTORIES) not in story.feed(
            FromTrajectoryLog(message=request)
        )
    effects = story.wait(31.0)
    assert RemakeLink(plane=Plane.TRAJECTORIES) in effects
    assert one(OfferBodies, effects).summaries == (big(1),)


def test_a_new_link_gets_every_offer_again_and_a_refused_one_a_little_later() -> None:
    story = Story(spooled=(big(1), big(2))).up()
    story.feed(LinkDown(plane=Plane.TRAJECTORIES))
    up = story.feed(LinkUp(plane=Plane.TRAJECTORIES))
    assert len(one(OfferBodies, up).summaries) == 2
    message = TrajectoryOffer(
        bodies=(OfferedBody(summary=big(1), chunk_bytes=65_536, chunk_digests=()),)
    )
    assert story.feed(SendFailed(plane=Plane.TRAJECTORIES, message=message)) == []
    assert one(OfferBodies, story.wait(0.2)).summaries == (big(1),)


# ---- a log of an older build -----------------------------------------------------------------

OLDER = bytes(sorted(set(KNOWN_KINDS) - {KIND_OF[TrajectoryOffer]}))


def older(kinds: bytes = OLDER, spooled: tuple[GroupSummary, ...] = ()) -> Story:
    story = Story(spooled=spooled).up()
    story.scheduler(welcome(kinds=kinds), offer(1))
    return story


@pytest.mark.parametrize("kinds", [b"", KNOWN_KINDS])
def test_a_log_that_knows_offers_or_does_not_say_gets_them(kinds: bytes) -> None:
    effects = older(kinds).spool(offer(1), BULK_FRAME_BYTES + 1)
    assert one(OfferBodies, effects).summaries == (big(1, BULK_FRAME_BYTES + 1),)


def test_a_log_too_old_for_offers_gets_bodies_whole() -> None:
    effects = older().spool(offer(1), BULK_FRAME_BYTES)
    assert one(ToTrajectoryLog, effects).summary == big(1, BULK_FRAME_BYTES)
    assert not of(OfferBodies, effects)


@pytest.mark.parametrize("first", ["spooled", "welcome"])
def test_what_a_log_too_old_for_offers_cannot_take_fails_and_fills_no_spool(first: str) -> None:
    """Said at once, with a remedy, instead of being offered for ever."""
    huge = big(1, BULK_FRAME_BYTES + 1)
    if first == "spooled":
        story = Story(spooled=(huge,)).up()
        effects = story.scheduler(welcome(kinds=OLDER))
    else:
        story = older()
        effects = story.spool(offer(1), huge.size_bytes)
    assert one(DropSpooled, effects).digest == huge.digest
    [failed] = said(AttemptFailed, effects)
    assert failed.code == "upload.too_large"
    assert "upgrade the scheduler's host" in failed.detail
    assert story.core.status().spooled == 0
