"""External jobs: submission, idempotence, quotas, deadlines, results, confirmation, restart."""

from typing import Any

import pytest
from core_builders import RUN, SOLVER, Scene, make_items, make_run, make_scene, released, replies

from scheduler.core import external
from transport.messages import (
    ExternalJob,
    Goodbye,
    Item,
    JobCancel,
    JobReceipt,
    JobSubmit,
    LeaseOffer,
    Results,
    ResultsRequest,
)

JUDGE = "judge"


def make_job(id: str = "j0", **changes: Any) -> ExternalJob:
    return ExternalJob(**{"id": id, "items": make_items(0, 1), "group_size": 2, **changes})


def submitted(scene: Scene, *jobs: ExternalJob, peer: str = JUDGE) -> tuple[JobReceipt, ...]:
    return scene.asked(JobSubmit(run=RUN, jobs=jobs or (make_job(),)), peer).receipts


def results(scene: Scene, after: int = 0, peer: str = JUDGE, **changes: Any) -> Results:
    return scene.asked(ResultsRequest(after=after, **changes), peer)


def cancelled(scene: Scene, *ids: str, peer: str = JUDGE) -> tuple[JobReceipt, ...]:
    return scene.asked(JobCancel(run=RUN, ids=ids), peer).receipts


def external_offers(scene: Scene) -> list[LeaseOffer]:
    return [offer for offer in scene.live_offers() if offer.kind == "external"]


@pytest.fixture
def scene() -> Scene:
    """A run without room for training jobs, so that only external ones are there."""
    scene = make_scene()
    scene.commanded("pause")
    return scene


@pytest.fixture
def busy() -> Scene:
    """An agent with one external job on it."""
    scene = make_scene()
    submitted(scene)
    scene.joined("a", slots=64)
    assert external_offers(scene)
    return scene


def test_a_job_is_placed_and_its_result_waits_for_its_submitter(busy):
    [offer] = external_offers(busy)
    assert (offer.job, offer.group_size, len(offer.items)) == ("r/x-judge.j0", 2, 1)
    busy.accepted(offer)
    busy.finished(offer, rewards=(0.5, 1.0))
    found = results(busy)
    [result] = found.results
    assert (result.number, result.run, result.id, result.state) == (1, RUN, "j0", "accepted")
    assert (result.rewards, result.lengths) == ((0.5, 1.0), (8, 8))
    assert (result.agent, result.attempts, result.versions) == ("a", 1, {SOLVER: (0, 0)})
    assert (found.last, found.open_jobs) == (1, 0)
    assert busy.books(kind="external").delivered == 1


def test_the_body_lives_until_the_result_is_confirmed(busy):
    [offer] = external_offers(busy)
    busy.accepted(offer)
    assert released(busy.finished(offer)) == []
    [result] = results(busy).results
    effects = busy.asks(ResultsRequest(after=1), JUDGE)
    assert released(effects) == [result.digest]
    assert replies(effects) == [Results(results=(), last=1, open_jobs=0)]
    assert not busy.core._ctx.tables.outcomes


def test_a_result_that_is_announced_again_changes_nothing(busy):
    [offer] = external_offers(busy)
    busy.accepted(offer)
    busy.finished(offer)
    assert released(busy.finished(offer)) == []
    assert results(busy).last == 1


def test_submitting_the_same_again_is_harmless_at_every_stage(busy):
    assert submitted(busy)[0].state == "known"
    [offer] = external_offers(busy)
    busy.accepted(offer)
    busy.finished(offer)
    assert submitted(busy)[0].state == "known"
    results(busy, after=1)
    assert submitted(busy)[0].state == "known"
    busy.restart()
    assert submitted(busy)[0].state == "known"
    assert busy.books(kind="external").submitted == 1


@pytest.mark.parametrize("stage", ["open", "unconfirmed", "confirmed", "after a restart"])
def test_the_same_id_with_something_else_is_a_conflict(busy, stage):
    if stage != "open":
        cancelled(busy, "j0")
    if stage in ("confirmed", "after a restart"):
        results(busy, after=1)
    if stage == "after a restart":
        busy.restart()
    [receipt] = submitted(busy, make_job(priority=1))
    assert (receipt.state, receipt.code) == ("refused", "job.conflict")


def test_two_submitters_do_not_share_ids(scene):
    assert submitted(scene)[0].state == "queued"
    assert submitted(scene, peer="other")[0].state == "queued"
    cancelled(scene, "j0")
    assert results(scene, peer="other") == Results(results=(), last=0, open_jobs=1)
    assert [r.state for r in results(scene).results] == ["cancelled"]


def test_only_so_many_confirmed_results_are_remembered():
    scene = make_scene(remembered_results=2)
    scene.commanded("pause")
    jobs = [make_job(f"j{n}") for n in range(4)]
    submitted(scene, *jobs)
    cancelled(scene, *(job.id for job in jobs))
    results(scene, after=4)
    assert [r.state for r in submitted(scene, *jobs)] == ["queued", "queued", "known", "known"]


def test_numbers_go_on_and_results_are_paged(scene):
    jobs = [make_job(f"j{n}") for n in range(5)]
    submitted(scene, *jobs)
    cancelled(scene, *(job.id for job in jobs))
    first = results(scene, limit=2)
    assert [r.number for r in first.results] == [1, 2]
    rest = results(scene, after=2)
    assert [r.number for r in rest.results] == [3, 4, 5]
    assert results(scene, after=5).last == 5


def test_a_reader_that_is_ahead_of_a_restored_store_confirms_nothing(scene):
    submitted(scene)
    cancelled(scene, "j0")
    found = results(scene, after=7)
    assert (found.results, found.last) == ((), 1)
    assert [r.id for r in results(scene).results] == ["j0"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"group_size": 1024, "items": make_items(0, 2)}, "group_size"),
        ({"items": (Item(index=0, prompt="x" * 200_000, answer=""),)}, "items"),
        ({"pinned": {"nobody": 0}}, "pinned"),
        ({"pinned": {"other/solver": 0}}, "pinned"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_field_to_change(scene, change, names):
    [receipt] = submitted(scene, make_job(**change))
    assert (receipt.state, receipt.code) == ("refused", "job.invalid")
    assert receipt.message.startswith(names)
    assert scene.counter("refused.job.invalid") == 1


def test_a_run_that_is_unknown_or_over_takes_no_jobs(scene):
    [receipt] = scene.asked(JobSubmit(run="no", jobs=(make_job(),)), JUDGE).receipts
    assert (receipt.code, "live runs: r" in receipt.message) == ("run.unknown", True)
    scene.commanded("stop")
    assert submitted(scene, make_job("late"))[0].code == "run.finished"


def test_external_jobs_have_a_bound_of_their_own():
    scene = make_scene(max_queued_jobs=6)
    jobs = [make_job(f"j{n}") for n in range(8)]
    codes = [receipt.code for receipt in submitted(scene, *jobs)]
    assert codes == [""] * 5 + ["quota.share"] * 3  # the sixth is for somebody else
    others = scene.asked(JobSubmit(run="r", jobs=tuple(jobs)), "somebody else").receipts
    assert [receipt.code for receipt in others] == ["", *["quota.queued"] * 7]
    before = scene.books().submitted
    scene.joined("a", slots=64)
    for offer in scene.live_offers():
        scene.accepted(offer)
    assert before > 0  # training goes on beside them


def test_results_that_nobody_fetches_stop_the_submitter():
    scene = make_scene(max_results_per_submitter=2)
    scene.commanded("pause")
    submitted(scene, make_job("j0"), make_job("j1"))
    cancelled(scene, "j0", "j1")
    assert submitted(scene, make_job("j2"))[0].code == "quota.results"
    results(scene, after=1)
    assert submitted(scene, make_job("j2"))[0].state == "queued"


def test_texts_and_sequences_that_are_held_are_bounded_too(monkeypatch):
    monkeypatch.setattr(external, "MAX_CHARACTERS", 1000)
    monkeypatch.setattr(external, "MAX_SEQUENCES_HELD", 10)
    scene = make_scene()
    scene.commanded("pause")
    long = (Item(index=0, prompt="x" * 1000, answer=""),)
    states = [submitted(scene, make_job(f"s{n}", group_size=4))[0].code for n in range(3)]
    assert states == ["", "", "quota.results"]
    cancelled(scene, "s0", "s1")
    codes = [submitted(scene, make_job(f"t{n}", items=long))[0].code for n in range(2)]
    assert codes == ["", "quota.queued"]


def test_one_submitter_cannot_have_all_the_room_for_texts(monkeypatch):
    """As with jobs: alone it gets four fifths, and the next one of what is left. Also after a
    restart, and jobs that are over give their room back."""
    monkeypatch.setattr(external, "MAX_CHARACTERS", 1000)
    scene = make_scene()
    scene.commanded("pause")

    def one(n: int, who: str = JUDGE) -> tuple[str, str]:
        items = (Item(index=0, prompt="x" * 100, answer=""),)
        job = make_job(f"{who}{n}", items=items)
        [receipt] = scene.asked(JobSubmit(run="r", jobs=(job,)), who).receipts
        return receipt.code, receipt.message

    codes = [one(n)[0] for n in range(10)]
    assert codes == [""] * 8 + ["quota.share"] * 2
    scene.restart()
    code, message = one(8)
    assert (code, "texts" in message, "cancel" in message) == ("quota.share", True, True)
    assert one(0, "other")[0] == ""
    assert one(8)[0] == "quota.share"
    cancelled(scene, f"{JUDGE}0")
    assert [one(n)[0] for n in (8, 9)] == ["", "quota.share"]


def test_a_job_expires_at_its_deadline_wherever_it_is(busy):
    submitted(busy, make_job("late", deadline_s=5.0))
    busy.wait(4.0)
    assert results(busy).last == 0
    busy.wait(1.5)
    [result] = results(busy).results
    assert (result.id, result.state, result.code) == ("late", "expired", "deadline")
    assert busy.books(kind="external").expired == 1


def test_a_deadline_survives_a_restart(scene):
    submitted(scene, make_job(deadline_s=5.0))
    scene.restart()
    scene.wait(6.0)
    assert [r.state for r in results(scene).results] == ["expired"]


def test_cancelling_revokes_what_is_under_way(busy):
    [offer] = external_offers(busy)
    busy.accepted(offer)
    assert cancelled(busy, "j0", "nothing")[0].state == "known"
    assert external_offers(busy) == []
    assert cancelled(busy, "nothing")[0].code == "job.unknown"
    assert "cancelled before" in cancelled(busy, "j0")[0].message
    busy.finished(offer)  # it was too late
    assert [r.state for r in results(busy).results] == ["cancelled"]


def test_jobs_of_a_run_that_stops_end_as_cancelled_results(busy):
    submitted(busy, make_job("j1"))
    busy.commanded("stop")
    assert [r.state for r in results(busy).results] == ["cancelled", "cancelled"]
    assert busy.books(kind="external").balance == 0


def test_a_job_goes_on_after_a_restart(busy):
    [offer] = external_offers(busy)
    busy.accepted(offer)
    busy.restart()
    busy.joined("a", slots=64, held=busy.held_by("a"))
    busy.finished(offer)
    assert [r.state for r in results(busy).results] == ["accepted"]


def test_a_request_waits_for_the_first_result(busy):
    [offer] = external_offers(busy)
    busy.accepted(offer)
    assert replies(busy.asks(ResultsRequest(after=0, wait_s=30.0), JUDGE)) == []
    [found] = replies(busy.finished(offer))
    assert [r.id for r in found.results] == ["j0"]
    assert replies(busy.wait(60.0)) == []


def test_a_request_that_waited_in_vain_is_answered_empty(scene):
    submitted(scene)
    assert replies(scene.asks(ResultsRequest(after=0, wait_s=3.0), JUDGE)) == []
    assert replies(scene.wait(2.9)) == []
    assert replies(scene.wait(0.2)) == [Results(results=(), last=0, open_jobs=1)]


def test_a_pinned_job_waits_for_its_version_and_goes_with_the_pin():
    scene = make_scene()
    scene.joined("a", slots=64)
    submitted(scene, make_job(pinned={"solver": 1}))
    assert external_offers(scene) == []
    scene.version_stored(1)
    scene.beats("a")
    [offer] = external_offers(scene)
    assert offer.pinned == {SOLVER: 1}


def test_own_limits_go_into_the_offer_and_bound_the_result(scene):
    scene.commanded("resume")
    submitted(scene, make_job(max_new_tokens=4, temperature=0.25))
    scene.joined("a", slots=64)
    [offer] = external_offers(scene)
    assert (offer.max_new_tokens, offer.temperature) == (4, 0.25)
    scene.accepted(offer)
    scene.finished(offer, lengths=(5, 4))
    assert scene.counter("results.invalid") == 1
    [again] = external_offers(scene)
    scene.accepted(again)
    scene.finished(again, lengths=(4, 4))
    assert [r.state for r in results(scene).results] == ["accepted"]


def test_they_need_no_trained_policy_and_no_quota_of_one():
    run = make_run(policy={"steps": 1, "max_policy_lag": 0})
    scene = make_scene(run=run)
    submitted(scene, *(make_job(f"j{n}") for n in range(20)))
    scene.joined("a", slots=200)
    assert len(external_offers(scene)) == 20
    assert scene.books().submitted == 2


def test_a_job_that_fails_everywhere_is_a_failed_result_and_a_dead_letter():
    scene = make_scene(run=make_run(max_attempts=1))
    submitted(scene)
    scene.joined("a", slots=64)
    [offer] = external_offers(scene)
    scene.accepted(offer)
    scene.failed(offer, "workflow.error")
    [result] = results(scene).results
    assert (result.state, result.code) == ("failed", "attempts")
    assert scene.run().dead_letters == 1


def test_a_job_that_no_agent_can_take_hides_nobody_elses():
    scene = make_scene()
    submitted(scene, make_job("mars", require={"region": ("mars",)}), peer="impatient")
    submitted(scene, *(make_job(f"j{n}") for n in range(3)))
    scene.joined("a", slots=64)
    assert {offer.job for offer in external_offers(scene)} == {
        "r/x-judge.j0",
        "r/x-judge.j1",
        "r/x-judge.j2",
    }


def test_a_pin_that_cannot_come_is_refused_and_one_that_may_is_not(scene):
    [gone, soon] = submitted(
        scene, make_job("gone", pinned={"solver": 999_999}), make_job("soon", pinned={"solver": 3})
    )
    assert (gone.state, gone.code) == ("refused", "job.invalid")
    assert "999999" in gone.message
    assert soon.state == "queued"


@pytest.mark.parametrize("verb", ["stop", "abandon"])
def test_a_run_that_ends_gives_up_many_jobs_a_few_at_a_time(scene, monkeypatch, verb):
    monkeypatch.setattr(external, "CANCEL_AT_ONCE", 3)
    submitted(scene, *(make_job(f"j{n}") for n in range(10)))
    scene.trainer_says(Goodbye(reason="gone"))
    scene.commanded(verb)
    assert (scene.run().state, scene.run().external_open) == ("stopping", 7)
    assert submitted(scene, make_job("late"))[0].code == "run.finished"
    scene.wait(0.0015)
    assert scene.run().external_open == 4
    scene.restart()
    scene.wait(0.1)
    assert (scene.run().state, scene.run().external_open) == ("finished", 0)
    assert [r.state for r in results(scene, limit=20).results] == ["cancelled"] * 10
    assert scene.books(SOLVER, "external").balance == 0
