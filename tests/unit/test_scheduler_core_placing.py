"""Placing in the core: prefetch, recalls, second attempts, labels, code, explanations, history."""

from typing import Any

import pytest
from core_builders import RUN, SOLVER, Scene, make_ref, make_run, make_scene, messages

from scheduler.core import candidates
from scheduler.core.events import FromAgent
from scheduler.core.prefetch import MAX_PER_SLOT
from scheduler.core.recall import MAX_PER_JOB
from transport.messages import (
    ExplainRequest,
    HeldAttempt,
    LeaseOffer,
    LeaseRecall,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
)


def taught(scene: Scene, agent: str, token_s: float, tokens: int = 8) -> None:
    """The agent finishes one group at this speed."""
    offer = scene.live_offers(agent)[0]
    scene.accepted(offer)
    lengths = (tokens,) * (len(offer.items) * offer.group_size)
    scene.finished(offer, lengths=lengths, generating_s=tokens * token_s, queued_s=0.0)


def told(scene: Scene, agent: str, *, started: tuple[str, ...] = (), rtt_s: float = 0.02) -> None:
    """A heartbeat that says which of the agent's attempts have begun."""
    held = tuple(
        HeldAttempt(attempt=o.attempt, fence=o.fence, started=o.attempt in started)
        for o in scene.live_offers(agent)
    )
    scene.heard(agent, held=held, versions={SOLVER: make_ref(SOLVER, 0)}, rtt_s=rtt_s)


def verdicts(scene: Scene, job: str) -> dict[str, str]:
    ctx = scene.core._ctx
    return {c.agent: c.verdict for c in candidates.explain(ctx, ctx.tables.jobs[job])}


def backed_up(**changes: Any) -> Scene:
    """A slow agent runs one group and has one waiting; nobody else is there."""
    run = changes.pop("run", None) or make_run(policy={"batch_groups": 1, "max_policy_lag": 1})
    scene = make_scene(run=run, **changes)
    scene.joined("slow", slots=2, hardware="slow")
    first, second = scene.live_offers("slow")
    scene.accepted(first)
    scene.accepted(second)
    told(scene, "slow", started=(first.attempt,))
    return scene


def slow_for(scene: Scene, seconds: float) -> None:
    """What is in flight is expected to take so long."""
    ctx = scene.core._ctx
    for lease in ctx.leases.values():
        lease.mean_s = lease.longest_s = seconds
        ctx.agents[lease.agent].frees = None


# ---- prefetch ------------------------------------------------------------------------------------


def test_a_far_agent_with_short_jobs_holds_enough_to_bridge_its_round_trip():
    scene = make_scene(run=make_run(policy={"batch_groups": 40}))
    scene.joined("far", slots=4)
    told(scene, "far", rtt_s=0.4)
    live = scene.core._ctx.agents["far"]
    assert live.load == 6  # its slots and one group
    for _ in range(3):
        taught(scene, "far", 0.05)  # 0.4 s per sequence
    assert live.prefetch >= 4
    assert live.load >= 4 + live.prefetch - 1
    for _ in range(30):
        taught(scene, "far", 0.001)
    assert live.prefetch <= MAX_PER_SLOT * 4


def test_without_prefetch_nothing_is_held_beyond_the_slots():
    scene = make_scene(run=make_run(policy={"batch_groups": 40}), prefetch_groups=0)
    scene.joined("far", slots=4)
    told(scene, "far", rtt_s=3.0)
    for _ in range(5):
        taught(scene, "far", 0.001)
    assert scene.core._ctx.agents["far"].load == 4


# ---- recall --------------------------------------------------------------------------------------


def test_what_has_not_begun_is_taken_back_for_an_agent_that_would_be_done_clearly_earlier():
    scene = backed_up()
    waiting = scene.live_offers("slow")[1]
    slow_for(scene, 16.0)
    effects = scene.joined("fast", slots=4, hardware="fast")
    [recall] = messages(effects, LeaseRecall, "slow")
    assert recall == LeaseRecall(attempt=waiting.attempt, fence=waiting.fence)
    assert waiting in scene.live_offers("slow")  # it counts until it is given back
    effects = scene.declined(waiting, "recalled")
    [offer] = messages(effects, LeaseOffer, "fast")
    assert offer.job == waiting.job
    job = scene.core._ctx.tables.jobs[waiting.job]
    assert [record.outcome for record in job.history] == ["recalled"]
    assert (job.failures, job.losses, job.avoid) == (0, 0, [])
    assert scene.core._ctx.agents["slow"].blocked_until_s == 0.0
    assert scene.counter("attempts.recalled") == 1


def test_an_attempt_that_has_begun_is_kept():
    scene = backed_up()
    waiting = scene.live_offers("slow")[1]
    lease = scene.core._ctx.leases[waiting.attempt]
    lease.recall_s = scene.now
    scene.core._ctx.agents["slow"].waiting.clear()
    scene.core._ctx.backed_up.put("slow", False)
    scene.accepted(waiting)
    assert lease.started_s is not None
    assert scene.counter("attempts.recall_refused") == 1
    assert waiting in scene.live_offers("slow")


def test_an_agent_that_gives_back_what_nobody_asked_for_is_declining():
    scene = backed_up()
    waiting = scene.live_offers("slow")[1]
    scene.declined(waiting, "recalled")
    assert scene.counter("attempts.declined.recalled") == 1
    assert scene.core._ctx.agents["slow"].blocked_until_s > scene.now


def test_a_job_is_taken_back_only_so_often():
    scene = backed_up()
    ctx = scene.core._ctx
    waiting = scene.live_offers("slow")[1]
    job = ctx.tables.jobs[waiting.job]
    for _ in range(MAX_PER_JOB):
        [record] = job.attempts
        offer = scene.offers[record.id]
        if not ctx.leases[record.id].leased:
            scene.accepted(offer)
        ctx.leases[record.id].recall_s = scene.now
        ctx.agents["slow"].waiting.pop(record.id, None)
        ctx.backed_up.put("slow", bool(ctx.agents["slow"].waiting))
        scene.declined(offer, "recalled")
    [record] = job.attempts
    scene.accepted(scene.offers[record.id])
    slow_for(scene, 1600.0)
    assert not messages(scene.joined("fast", slots=4), LeaseRecall)


def test_replies_in_one_frame_are_taken_one_by_one():
    scene = make_scene()
    scene.joined("a", slots=4)
    offers = scene.live_offers()
    replies = tuple(
        LeaseReply(attempt=o.attempt, fence=o.fence, accepted=n > 0, reason="full")
        for n, o in enumerate(offers)
    )
    scene.feed(FromAgent("a", LeaseReplies(replies=replies)))
    ctx = scene.core._ctx
    assert [o.attempt in ctx.leases for o in offers] == [False, *[True] * (len(offers) - 1)]
    assert all(ctx.leases[o.attempt].leased for o in offers[1:])


# ---- second attempts -----------------------------------------------------------------------------


def tail(**run: Any) -> Scene:
    """The trainer waits for the last of eight groups, which a slow agent has; another is idle."""
    policy = {"batch_groups": 8, "max_policy_lag": 0}
    scene = make_scene(run=make_run(policy=policy, **run))
    scene.joined("slow", slots=16)
    scene.requested(1, groups=8)
    for offer in scene.live_offers():
        scene.accepted(offer)
    for offer in scene.live_offers()[:7]:
        scene.finished(offer)
    slow_for(scene, 60.0)
    return scene


def test_the_last_group_of_a_batch_gets_a_second_attempt_within_the_budget():
    scene = tail(hedge_share=0.2)
    [last] = scene.live_offers()
    effects = scene.joined("idle", slots=4)
    [second] = messages(effects, LeaseOffer, "idle")
    assert second.job == last.job
    ctx = scene.core._ctx
    assert 0 < ctx.tables.spends["r"].hedge_tokens <= 0.2 * ctx.tables.spends["r"].tokens
    assert scene.counter("placement.hedged") == 1
    scene.accepted(second)
    assert not messages(scene.wait(5.0), LeaseOffer)  # one is enough
    effects = scene.finished(second)
    assert [m.attempt for m in messages(effects, LeaseRevoke, "slow")] == [last.attempt]


def test_no_second_attempt_without_budget():
    scene = tail(hedge_share=0.01)
    assert not messages(scene.joined("idle", slots=4), LeaseOffer)
    assert scene.counter("placement.hedge_budget") > 0


def test_no_second_attempt_on_the_agent_that_has_the_job_or_before_the_tail():
    scene = tail(hedge_share=1.0)
    assert not messages(scene.wait(10.0), LeaseOffer, "slow")
    scene = make_scene(run=make_run(policy={"batch_groups": 8, "max_policy_lag": 0}))
    scene.joined("slow", slots=16)
    scene.requested(1, groups=8)
    for offer in scene.live_offers()[:4]:
        scene.finished(offer)
    assert not messages(scene.joined("idle", slots=4), LeaseOffer)


# ---- who may -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("require", "expected"),
    [
        ({"region": ("eu", "uk")}, {"b"}),
        ({"hardware": ("h100",)}, {"a"}),
        ({"agent": ("b",)}, {"b"}),
        ({"engine": ("fake",), "region": ("us",)}, {"a"}),
        ({"region": ("us",), "hardware": ("cpu",)}, set()),
        ({"site": ("x",)}, set()),
    ],
)
def test_a_run_goes_only_to_agents_with_its_labels(require, expected):
    scene = make_scene(run=make_run(require=require))
    scene.joined("a", labels={"region": "us", "engine": "lies"}, hardware="h100")
    scene.joined("b", labels={"region": "eu"})
    assert {scene.offered_to[o.attempt] for o in scene.live_offers()} == expected


def test_the_groups_of_a_run_come_from_one_code():
    scene = make_scene()
    scene.joined("a", slots=2)
    scene.joined("b", slots=64, workflows={"single_turn": "changed"})
    assert {scene.offered_to[o.attempt] for o in scene.live_offers()} == {"a"}
    job = scene.live_offers()[0].job
    assert verdicts(scene, job)["b"] == "other code of workflow single_turn"


def test_when_no_agent_has_that_code_any_more_the_run_goes_on_with_another():
    scene = make_scene()
    scene.joined("a", slots=2)
    scene.joined("a", incarnation=2, slots=2, workflows={"single_turn": "changed"})
    assert not scene.live_offers()
    scene.wait(5.0)
    assert scene.live_offers("a")
    assert scene.counter("placement.code_changed") == 1


def test_explain_says_of_every_agent_what_keeps_it_from_a_job():
    scene = make_scene(run=make_run(require={"region": ("eu",)}))
    eu = {"region": "eu"}
    scene.joined("chosen", slots=2, labels=eu, hardware="h")
    scene.joined("abroad", labels={"region": "us"})
    scene.joined("bare", labels=eu, versions={})
    scene.joined("deaf", labels=eu, rewards=())
    scene.joined("possible", slots=64, labels=eu)
    scene.core._ctx.tables.agents["possible"].cordoned = False
    job = scene.live_offers("chosen")[0].job
    said = verdicts(scene, job)
    assert said["chosen"] == "chosen"
    assert said["abroad"] == "label region"
    assert said["bare"] == "joining"
    assert said["deaf"] == "no reward reasoning-gym"
    assert said["possible"] == "possible"
    ctx = scene.core._ctx
    found = candidates.explain(ctx, ctx.tables.jobs[job])
    assert [c.agent for c in found][:2] == ["chosen", "possible"]
    assert found[1].cost_s == pytest.approx(sum(v for k, v in found[1].parts.items() if k != "lag"))


def test_one_agents_stale_copy_and_full_slots_are_named():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0, "batch_groups": 3}))
    scene.joined("full", slots=2)
    waiting = [j.id for j in scene.core._ctx.tables.jobs.values() if j.state == "queued"]
    assert verdicts(scene, waiting[0]) == {"full": "full"}
    for _ in range(3):
        scene.finished(scene.live_offers()[0])
    scene.requested(1, groups=3)
    scene.stepped(1)
    scene.version_stored(1)
    scene.produced(scene.effects)
    waiting = [j.id for j in scene.core._ctx.tables.jobs.values() if j.state == "queued"]
    assert verdicts(scene, waiting[0]) == {"full": "too stale by 1"}


# ---- history and overtaken groups ----------------------------------------------------------------


def test_ends_of_attempts_are_remembered_boundedly():
    scene = make_scene(run=make_run(max_attempts=100))
    scene.joined("a", slots=2)
    job = scene.core._ctx.tables.jobs[scene.live_offers()[0].job]
    for _ in range(20):
        [record] = job.attempts
        scene.failed(scene.offers[record.id], "weights.timeout")
        told(scene, "a")
    assert len(job.history) == 16
    assert {(r.agent, r.outcome) for r in job.history} == {("a", "failed")}
    assert job.history[-1].detail == "weights.timeout"
    assert job.history[0].attempt == f"{job.id}#5"


def test_a_group_whose_first_tokens_are_too_old_is_stopped():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0, "batch_groups": 1}))
    scene.joined("a", slots=8)
    [offer] = scene.live_offers()
    scene.accepted(offer)
    told(scene, "a", started=(offer.attempt,))
    effects = scene.requested(2, head=1)  # the trainer is ahead of what we knew
    assert [m.attempt for m in messages(effects, LeaseRevoke, "a")] == [offer.attempt]
    assert scene.counter("expired.overtaken") == 1
    assert scene.books().expired == 1


def test_a_group_that_may_have_begun_later_is_not_stopped():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0, "batch_groups": 1}))
    scene.joined("a", slots=8)
    [offer] = scene.live_offers()
    scene.accepted(offer)
    told(scene, "a")
    scene.requested(2, head=1)
    assert scene.live_offers() == [offer]


ADAPTER = {"settings": {"lora": {"publish": "adapter"}}}


def test_an_adapter_goes_to_agents_that_say_that_they_have_its_model():
    scene = make_scene(run=make_run(policy=ADAPTER))
    scene.joined("bare")
    scene.joined("bases_of_others", bases=("x/solver", "critic"))
    scene.joined("by_name", slots=2, bases=("solver",))
    scene.joined("by_id", slots=2, bases=(SOLVER,))
    assert {scene.offered_to[o.attempt] for o in scene.live_offers()} == {"by_name", "by_id"}
    said = verdicts(scene, scene.live_offers()[0].job)
    for name in ("bare", "bases_of_others"):
        assert said[name] == f"no model for the adapter of {SOLVER} (agent.local_models)"
        why = scene.asked(ExplainRequest(subject=name)).reasons
        assert any(
            "agent.local_models" in line and 'agent.engine = "torch"' in line for line in why
        )


def test_a_run_says_that_nobody_has_the_model_of_its_adapter():
    scene = make_scene(run=make_run(policy=ADAPTER))
    scene.version_stored(0)
    scene.joined("bare", versions={})
    words = f"none of them has the model for the adapter of {SOLVER} (agent.local_models)"
    assert any(words in line for line in scene.asked(ExplainRequest(subject=RUN)).reasons)
    scene.joined("fit", versions={}, bases=("solver",))
    assert not any(words in line for line in scene.asked(ExplainRequest(subject=RUN)).reasons)


@pytest.mark.parametrize(
    "policy",
    [
        {"settings": {"lora": {"rank": 4}}},
        {"settings": {"lora": "adapter"}},
        {"settings": {"lora": {"publish": "adapter"}}, "trainer": "numpy"},
    ],
)
def test_what_is_not_published_as_an_adapter_needs_no_model(policy):
    scene = make_scene(run=make_run(policy=policy))
    scene.joined("bare")
    assert scene.live_offers("bare")
