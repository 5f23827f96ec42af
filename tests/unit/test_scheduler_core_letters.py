"""Dead letters, events and explanations: what an operator can look at, and try again."""

import msgspec
import pytest
from core_builders import RUN, SOLVER, Scene, make_run, make_scene, replies

from scheduler.core import reasons, waits
from transport.envelope import CONTROL_FRAME_BYTES
from transport.messages import (
    CommandReply,
    DeadLettersRequest,
    Events,
    EventsRequest,
    ExplainRequest,
    Explanation,
    ExternalJob,
    Item,
    JobReplay,
    JobSubmit,
    LeaseOffer,
    ResultsRequest,
)


def dying(**settings) -> Scene:
    """Every first failure is the last."""
    scene = make_scene(run=make_run(max_attempts=1), **settings)
    scene.joined("a", slots=64)
    return scene


def killed(scene: Scene, count: int = 1, code: str = "workflow.error") -> list[LeaseOffer]:
    offers = scene.live_offers("a")[:count]
    for offer in offers:
        scene.accepted(offer)
        scene.failed(offer, code)
    return offers


def letters(scene: Scene, **request):
    return scene.asked(DeadLettersRequest(**request))


def explained(scene: Scene, subject: str) -> Explanation:
    return scene.asked(ExplainRequest(subject=subject))


def told(scene: Scene, **request) -> Events:
    return scene.asked(EventsRequest(**request))


# ---- dead letters ------------------------------------------------------------------------------


def test_a_job_that_is_given_up_is_a_letter_with_its_attempts():
    scene = dying()
    [offer] = killed(scene)
    [letter] = letters(scene).letters
    assert (letter.job, letter.run, letter.kind, letter.reason) == (
        offer.job,
        RUN,
        "train",
        "attempts",
    )
    assert letter.prompt == offer.items[0].prompt
    [record] = letter.attempts
    assert (record.attempt, record.agent, record.outcome) == (offer.attempt, "a", "failed")
    assert "workflow.error" in record.detail
    assert scene.run().dead_letters == 1


def test_letters_are_listed_in_pages_and_by_run():
    scene = dying()
    for _ in range(2):
        killed(scene, 2)
        scene.produced(scene.effects)
    first = letters(scene, limit=3)
    assert (len(first.letters), first.more) == (3, True)
    rest = letters(scene, limit=3, after=first.letters[-1].job)
    assert (len(rest.letters), rest.more) == (1, False)
    assert len(letters(scene, run=RUN).letters) == 4
    assert letters(scene, run="other").code == "run.unknown"


def test_only_so_many_letters_are_kept_and_the_oldest_go_first():
    scene = dying(max_dead_letters=2)
    dead = []
    for _ in range(4):
        scene.wait(0.5)
        dead += killed(scene)
        scene.produced(scene.effects)
    assert [letter.job for letter in letters(scene).letters] == [o.job for o in dead[2:]]
    assert scene.counter("dead_letters.dropped") == 2
    scene.restart()
    assert list(scene.core._ctx.tables.dead) == [o.job for o in dead[2:]]


def test_a_replayed_training_job_is_the_same_job_with_new_copies():
    scene = dying()
    scene.commanded("pause")  # no other group takes its quota meanwhile
    [offer] = killed(scene)
    before = scene.books()
    assert scene.asked(JobReplay(run=RUN)).ok
    scene.commanded("resume")
    again = next(o for o in scene.live_offers("a") if o.job == offer.job)
    assert (again.items, again.seed) == (offer.items, offer.seed)
    assert again.attempt != offer.attempt
    books = scene.books()
    assert (books.balance, books.requeued) == (0, 1)
    assert books.submitted > before.submitted
    scene.accepted(again)
    scene.finished(again)
    assert scene.books().buffered == 1


def test_a_letter_that_has_no_quota_now_stays_a_letter():
    scene = dying()
    killed(scene)
    scene.produced(scene.effects)
    reply = scene.asked(JobReplay(run=RUN))
    assert (reply.ok, reply.code) == (False, "quota.policy")
    assert len(letters(scene).letters) == 1


def test_a_replay_that_dies_again_is_one_letter_with_its_whole_history():
    scene = dying()
    scene.commanded("pause")
    [offer] = killed(scene)
    assert scene.asked(JobReplay(jobs=(offer.job,))).ok
    scene.commanded("resume")
    again = next(o for o in scene.live_offers("a") if o.job == offer.job)
    scene.accepted(again)
    scene.failed(again, "workflow.error")
    letter = next(x for x in letters(scene).letters if x.job == offer.job)
    assert [r.attempt for r in letter.attempts] == [offer.attempt, again.attempt]


def test_an_external_letter_is_replayed_with_a_second_result():
    scene = dying()
    job = ExternalJob(id="j0", items=(Item(index=0, prompt="?", answer="!"),), deadline_s=5.0)
    scene.asked(JobSubmit(run=RUN, jobs=(job,)), "judge")
    offer = next(o for o in scene.live_offers("a") if o.kind == "external")
    for other in scene.live_offers("a"):
        scene.accepted(other)
    scene.failed(offer, "workflow.error")
    scene.wait(10.0)  # its deadline is over
    scene.beats("a")
    assert scene.asked(JobReplay(jobs=(offer.job,))).ok
    again = next(o for o in scene.live_offers("a") if o.kind == "external")
    scene.accepted(again)
    scene.finished(again)
    results = scene.asked(ResultsRequest(after=0), "judge").results
    assert [(r.number, r.state) for r in results] == [(1, "failed"), (2, "accepted")]
    books = scene.books(kind="external")
    assert (books.submitted, books.failed, books.delivered, books.requeued) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (JobReplay(), "replay.which"),
        (JobReplay(jobs=("r/t-999999",)), "job.unknown"),
    ],
)
def test_a_replay_of_nothing_says_so(message, code):
    assert dying().asked(message).code == code


def test_letters_of_a_run_that_is_over_can_be_read_and_not_replayed():
    scene = dying()
    [offer] = killed(scene)
    scene.commanded("stop")
    assert letters(scene).letters[0].job == offer.job
    assert scene.asked(JobReplay(run=RUN)).code == "run.finished"


# ---- events ------------------------------------------------------------------------------------


def test_events_come_in_order_and_none_twice():
    scene = make_scene()
    first = told(scene, after=0)
    assert [t.subject for t in first.transitions][:1] == [RUN]
    numbers = [t.number for t in first.transitions]
    assert numbers == sorted(set(numbers))
    assert first.last == numbers[-1]
    scene.joined("a")
    more = told(scene, after=first.last)
    assert [t.number for t in more.transitions] == list(range(first.last + 1, more.last + 1))
    assert ("a", "hello") in [(t.subject, t.what) for t in more.transitions]


def test_a_page_is_limited_and_goes_on_where_it_ended():
    scene = make_scene()
    scene.joined("a")
    everything = told(scene, after=0)
    found, after = [], 0
    while page := told(scene, after=after, limit=2).transitions:
        found += page
        after = page[-1].number
    assert tuple(found) == everything.transitions


def test_events_of_one_subject_include_what_names_it():
    scene = make_scene()
    scene.joined("a")
    scene.joined("b")
    events = told(scene, after=0, subject="a")
    assert events.transitions
    assert all(t.subject == "a" or "a" in t.facts.values() for t in events.transitions)
    assert {t.what for t in events.transitions} >= {"hello", "offered"}


def test_forgotten_transitions_are_counted_as_missed():
    scene = make_scene(story_length=5)
    scene.joined("a")
    events = told(scene, after=0)
    assert len(events.transitions) == 5
    assert events.missed > 0
    assert told(scene, after=events.last).missed == 0


def test_a_request_waits_for_the_next_event_of_its_subject():
    scene = make_scene()
    request = EventsRequest(wait_s=10.0, subject="b")
    assert replies(scene.asks(request)) == []
    assert replies(scene.joined("a")) == []
    [events] = replies(scene.joined("b"))
    assert events.transitions[0].what == "hello"
    assert replies(scene.wait(20.0)) == []


def test_a_request_that_waited_in_vain_says_where_to_go_on():
    scene = make_scene()
    scene.asks(EventsRequest(wait_s=1.0, subject="nobody"))
    [events] = replies(scene.wait(1.5))
    assert events.transitions == ()
    assert events.last == told(scene, after=None).last


def test_numbers_grow_over_a_restart():
    scene = make_scene()
    before = told(scene, after=0).last
    scene.restart()
    scene.joined("a")
    events = told(scene, after=before)
    assert events.transitions[0].number > before
    assert events.missed == 0


def test_only_so_many_requests_wait(monkeypatch):
    monkeypatch.setattr(waits, "MAX_WAITING", 2)
    scene = make_scene()
    request = EventsRequest(wait_s=10.0, subject="nobody")
    assert [len(replies(scene.asks(request))) for _ in range(3)] == [0, 0, 1]
    assert scene.counter("requests.too_many") == 1


# ---- explanations ------------------------------------------------------------------------------


def test_a_queued_job_says_that_there_is_nobody():
    scene = make_scene()
    job = next(iter(scene.core._ctx.tables.jobs))
    found = explained(scene, job)
    assert (found.kind, found.state) == ("job", "queued")
    assert found.reasons == ("queued: there is no agent",)


def test_a_queued_job_says_why_each_agent_is_none():
    scene = make_scene()
    scene.joined("a", versions={})
    scene.joined("b", workflows={})
    job = next(iter(scene.core._ctx.tables.jobs))
    found = explained(scene, job)
    assert found.reasons[0] == "queued: no agent can take it"
    assert {c.agent for c in found.candidates} == {"a", "b"}
    assert any("no workflow single_turn" in c.verdict for c in found.candidates)


def test_a_job_in_flight_says_where_and_how_it_was_scored():
    scene = make_scene()
    scene.joined("a", slots=2)
    offer = scene.live_offers("a")[0]
    assert explained(scene, offer.job).state == "leased"
    scene.accepted(offer)
    scene.wait(1.0)
    found = explained(scene, offer.job)
    assert found.state == "leased"
    assert "in flight for 1.0 s" in found.reasons[0]
    assert found.candidates[0].verdict == "chosen"
    assert any("offered" in line for line in found.history)
    held = tuple(msgspec.structs.replace(h, started=True) for h in scene.held_by("a"))
    scene.heard("a", held=held, versions=scene.core._ctx.tables.agents["a"].versions)
    assert explained(scene, offer.job).state == "running"
    attempt = explained(scene, offer.attempt)
    assert (attempt.kind, attempt.state) == ("attempt", "running")
    scene.finished(offer)
    found = explained(scene, offer.job)
    assert found.state == "returned"
    assert "buffered" in found.reasons[0]


def test_a_job_that_waits_for_its_next_try_says_how_long():
    scene = make_scene(retry_backoff_s=5.0, seed=3)
    scene.joined("a", slots=2)
    offer = scene.live_offers("a")[0]
    scene.accepted(offer)
    scene.failed(offer, "workflow.error")
    found = explained(scene, offer.job)
    assert found.reasons[0].startswith("queued: tried again in")
    assert any("failed 1 of at most 5 times, lost never" in reason for reason in found.reasons)
    assert any("was failed (workflow.error)" in line for line in found.history)
    assert explained(scene, offer.attempt).state == "failed"


def test_a_policy_says_how_much_of_its_quota_is_used():
    scene = make_scene()
    found = explained(scene, SOLVER)
    assert found.kind == "policy"
    assert "waits for quota: 4 of 4 groups are under way" in found.reasons


def test_a_run_says_why_nothing_moves():
    scene = make_scene()
    assert "queued: no agent is ready" in explained(scene, RUN).reasons
    scene.commanded("pause")
    assert any(f"`farflow run resume {RUN}`" in reason for reason in explained(scene, RUN).reasons)


@pytest.mark.parametrize("asked", [DeadLettersRequest(run="nosuch"), JobReplay(run="nosuch")])
def test_a_run_that_never_was_is_an_error_not_an_empty_list(asked):
    reply = make_scene().asked(asked)
    assert (reply.ok, reply.code) == (False, "run.unknown")
    assert "farflow run ls" in reply.message


def test_counts_in_reasons_are_english():
    assert [reasons.times(count) for count in range(4)] == ["never", "once", "twice", "3 times"]


def test_an_agent_says_why_it_gets_nothing():
    scene = make_scene()
    scene.joined("a", versions={})
    found = explained(scene, "a")
    assert (found.kind, found.state) == ("agent", "joining")
    assert "it serves no version yet" in found.reasons


def test_what_is_over_is_told_from_memory():
    scene = dying()
    [dead, done] = scene.live_offers("a")[:2]
    for offer in (dead, done):
        scene.accepted(offer)
    scene.failed(dead, "workflow.error")
    assert explained(scene, dead.job).state == "dead letter"
    scene.finished(done)
    scene.commanded("stop")
    scene.checkpointed(0, 0, final=True)
    assert explained(scene, done.job).state == "cancelled"
    reply = scene.asked(ExplainRequest(subject="who?"))
    assert isinstance(reply, CommandReply)
    assert reply.code == "subject.unknown"


def test_an_explanation_fits_a_frame_whatever_its_texts():
    scene = make_scene(check=False, shortlist=1024)
    for n in range(300):
        scene.joined(f"a{n}", slots=1, labels={f"k{n}" * 30: "v" * 150})
    for _ in range(400):
        scene.core._ctx.note("a0", "é" * 500, fact="é" * 2000)
    job = next(iter(scene.core._ctx.tables.jobs))
    for subject in (job, "a0", RUN, SOLVER):
        size_bytes = len(msgspec.msgpack.encode(explained(scene, subject)))
        assert size_bytes < CONTROL_FRAME_BYTES - 1024


def test_a_job_says_which_limit_of_its_run_it_waits_for():
    scene = make_scene(run=make_run(max_sequences_in_flight=2))
    scene.joined("a", slots=64)
    queued = [j for j in scene.core._ctx.tables.jobs.values() if j.state == "queued"]
    found = explained(scene, queued[0].id)
    assert found.reasons == ("queued: 2 sequences are in flight, max_sequences_in_flight is 2",)
