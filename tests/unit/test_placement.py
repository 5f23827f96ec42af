"""Placement rules: which agent, and when nobody."""

import random

import pytest

from scheduler.core.placement import (
    PROBE_AFTER_S,
    Candidate,
    FinishTime,
    JobView,
    PolicyView,
    make_rule,
)


def make_candidate(agent: str = "a", **changes) -> Candidate:
    return Candidate(
        **{
            "agent": agent,
            "slots": 8,
            "load": 0,
            "rtt_s": 0.05,
            "wait_s": 0.0,
            "token_s": 0.01,
            "up_byte_s": 0.0,
            "catch_up_s": 0.0,
            "lags": (0,),
            "idle_s": 1.0,
            **changes,
        }
    )


def make_policy(**changes) -> PolicyView:
    view = {
        "policy": "r/p",
        "bound": 1,
        "busy_s": 10.0,
        "batch": 1,
        "ready": 0,
        "in_flight": 0,
        "rate": None,
        "starved": False,
    }
    return PolicyView(**{**view, **changes})


def make_job(*policies: PolicyView, **changes) -> JobView:
    return JobView(
        **{
            "kind": "r|",
            "sequences": 8,
            "tokens_mean": 100.0,
            "tokens_longest": 200.0,
            "tokens_likely": 200.0,
            "body_bytes": 1e5,
            "policies": policies or (make_policy(),),
            **changes,
        }
    )


@pytest.fixture
def rule() -> FinishTime:
    return FinishTime(random.Random(0))


def chosen(rule, job, *candidates) -> str | None:
    choice = rule.choose(job, candidates, 0.0)
    return None if choice is None else choice.agent


def test_the_faster_agent_wins_although_it_is_farther_away(rule):
    near = make_candidate("near", rtt_s=0.01, token_s=0.04)
    far = make_candidate("far", rtt_s=0.4, token_s=0.01)
    assert chosen(rule, make_job(), near, far) == "far"


def test_a_busy_fast_agent_loses_to_an_idle_slow_one(rule):
    busy = make_candidate("busy", token_s=0.01, wait_s=4.0, load=32)
    idle = make_candidate("idle", token_s=0.02)
    assert chosen(rule, make_job(), busy, idle) == "idle"


def test_a_thin_uplink_and_missing_weights_cost_their_time(rule):
    thin = make_candidate("thin", up_byte_s=1e-4)
    behind = make_candidate("behind", catch_up_s=3.0)
    plain = make_candidate("plain", token_s=0.02)
    assert chosen(rule, make_job(), thin, behind, plain) == "plain"


def test_equal_agents_are_told_apart_by_name(rule):
    assert chosen(rule, make_job(), make_candidate("b"), make_candidate("a")) == "a"


def test_the_score_adds_up_and_can_be_read(rule):
    candidate = make_candidate(wait_s=1.0, up_byte_s=1e-5, catch_up_s=0.5)
    choice = rule.choose(make_job(), [candidate], 0.0)
    parts = dict(choice.score.parts)
    assert parts["wait_s"] == pytest.approx(1.0)
    assert parts["generate_s"] == pytest.approx(2.0)
    assert choice.score.cost == pytest.approx(0.05 + 1.0 + 2.0 + 1.0 + 0.5)
    assert str(choice.score).startswith("a cost=4.55 rtt_s=0.05 wait_s=1 ")


def test_no_candidate_gives_no_choice(rule):
    assert chosen(rule, make_job()) is None


@pytest.mark.parametrize(
    ("lag", "finish_s", "ahead", "bound", "accepted"),
    [
        (0, 40.0, 3, 3, True),  # min(40 / 12, 3) = 3 steps until it is trained on
        (1, 40.0, 3, 4, True),
        (1, 40.0, 3, 3, False),
        (1, 40.0, 0, 1, True),  # nothing to train on meanwhile: the head stands still
        (2, 1.0, 0, 1, False),
        (0, 1e6, 1, 0, False),
        (0, 5.0, 1, 1, True),
        (-1, 5.0, 1, 0, True),  # it begins only after the next version
    ],
)
def test_a_group_that_would_be_too_old_when_trained_on_is_refused(
    rule, lag, finish_s, ahead, bound, accepted
):
    policy = make_policy(bound=bound, busy_s=12.0, in_flight=ahead)
    job = make_job(policy, tokens_longest=0.0, tokens_likely=0.0)
    candidate = make_candidate(rtt_s=finish_s, lags=(lag,))
    assert (chosen(rule, job, candidate) is not None) is accepted


@pytest.mark.parametrize(
    ("lag", "finish_s", "accepted"),
    [(0, 20.0, True), (1, 20.0, False), (0, 30.0, False), (1, 5.0, True), (2, 5.0, False)],
)
def test_batches_that_go_out_before_a_group_is_back_count(rule, lag, finish_s, accepted):
    crowd = {"ready": 64, "running": 64, "in_flight": 100, "rate": 5.0}
    policy = make_policy(bound=2, batch=64, grant_s=9.0, interval_s=15.0, **crowd)
    job = make_job(policy, tokens_longest=0.0, tokens_likely=0.0)
    candidate = make_candidate(rtt_s=finish_s, lags=(lag,))
    assert (chosen(rule, job, candidate) is not None) is accepted


def test_a_batch_that_lacks_groups_does_not_go_out_without_them(rule):
    """Nothing is in flight, one group is missing, the bound is 0: it takes as long as it takes."""
    alone = {"ready": 63, "rate": 5.0, "grant_s": 1.0, "interval_s": 2.0}
    policy = make_policy(bound=0, batch=64, **alone)
    assert chosen(rule, make_job(policy), make_candidate(rtt_s=1e6)) == "a"


def test_only_groups_with_no_more_time_go_before_one_that_begins_behind_the_head(rule):
    crowd = {"bound": 2, "batch": 4, "ready": 6, "in_flight": 5, "busy_s": None}
    behind = make_candidate(lags=(1,))
    assert chosen(rule, make_job(make_policy(**crowd, earlier=((4, 3), (4, 0)))), behind) == "a"
    assert chosen(rule, make_job(make_policy(**crowd, earlier=((6, 3), (4, 0)))), behind) is None
    assert chosen(rule, make_job(make_policy(**crowd, earlier=((6, 3),))), make_candidate()) == "a"


def test_groups_that_come_back_later_do_not_go_first(rule):
    policy = make_policy(bound=1, batch=4, ready=4, in_flight=40, busy_s=None, rate=0.1)
    assert chosen(rule, make_job(policy), make_candidate()) == "a"
    late = make_candidate(rtt_s=50.0)
    assert chosen(rule, make_job(policy), late) is None


def test_a_few_very_long_answers_do_not_make_a_typical_group_too_old(rule):
    policy = make_policy(bound=1, busy_s=12.0, in_flight=2, rate=0.1)
    typical = make_job(policy, tokens_longest=5000.0, tokens_likely=1000.0)
    assert chosen(rule, typical, make_candidate()) == "a"
    assert (
        chosen(rule, make_job(policy, tokens_longest=5e3, tokens_likely=5e3), make_candidate())
        is None
    )


def test_before_the_trainers_pace_is_known_only_the_queue_counts(rule):
    policy = make_policy(busy_s=None, in_flight=1)
    assert chosen(rule, make_job(policy), make_candidate(rtt_s=1e6)) == "a"


def test_what_faster_agents_take_on_in_time_waits_for_them(rule):
    """24 slots of 12 s: 24 / 12 x (24 - 12) x 0.4 = 9.6 groups are kept from those of 24 s."""
    fast = ((12.0, 2.0, 24.0),)
    slow = make_candidate("slow", rtt_s=24.0)
    job = {"tokens_longest": 0.0, "tokens_likely": 0.0, "absorbers": fast}
    policy = make_policy(busy_s=None)
    assert chosen(rule, make_job(policy, queued=9, **job), slow) is None
    assert chosen(rule, make_job(policy, queued=10, **job), slow) == "slow"
    assert chosen(rule, make_job(policy, queued=9, patience_s=13.0, **job), slow) == "slow"
    assert chosen(rule, make_job(policy, queued=1, **job), make_candidate("x", rtt_s=12.1)) == "x"


def test_hardly_later_but_cheaper_wins_where_prices_are_known(rule):
    job = make_job(make_policy(busy_s=None))
    dear = make_candidate("dear", token_usd=3e-6)
    cheap = make_candidate("cheap", rtt_s=0.09, token_usd=1e-6)
    choice = rule.choose(job, [dear, cheap], 0.0)
    assert (choice.agent, choice.reason) == ("cheap", "cheapest")
    slow = make_candidate("slow", rtt_s=0.3, token_usd=1e-6)
    assert chosen(rule, job, dear, slow) == "dear"
    assert chosen(rule, job, make_candidate("unpriced"), cheap) == "unpriced"


def test_a_starved_policy_takes_the_least_stale_agent_rather_than_wait_for_ever(rule):
    job = make_job(make_policy(starved=True))
    stale = make_candidate("stale", lags=(5,))
    older = make_candidate("older", lags=(9,), token_s=0.001)
    choice = rule.choose(job, [older, stale], 0.0)
    assert (choice.agent, choice.reason) == ("stale", "starved")


def test_a_starved_policy_still_prefers_a_fresh_agent(rule):
    job = make_job(make_policy(starved=True))
    slow = make_candidate("slow", token_s=1.0)
    stale = make_candidate("stale", lags=(5,))
    assert chosen(rule, job, slow, stale) == "slow"


def test_one_policy_that_can_use_the_group_is_enough(rule):
    """Else a dead trainer, whose buffer is full, would keep the others' groups back for ever."""
    dead = make_policy(policy="r/q", bound=0)
    assert chosen(rule, make_job(make_policy(), dead), make_candidate(lags=(1, 1))) == "a"
    assert chosen(rule, make_job(dead, dead), make_candidate(lags=(1, 1))) is None


def test_a_long_unused_agent_is_probed_once_in_a_while_so_that_it_can_recover():
    rule = FinishTime(random.Random(1))
    best = make_candidate("best", idle_s=0.0)
    slow = make_candidate("slow", token_s=1.0, idle_s=PROBE_AFTER_S + 1)
    job = make_job(make_policy(busy_s=None))
    choices = [rule.choose(job, [best, slow], 0.0) for _ in range(2000)]
    probes = [choice for choice in choices if choice.agent == "slow"]
    assert 20 <= len(probes) <= 60
    assert {choice.reason for choice in probes} == {"probe"}


def test_a_probe_is_never_a_stale_agent():
    rule = FinishTime(random.Random(1))
    stale = make_candidate("stale", lags=(9,), idle_s=1e6)
    job = make_job()
    assert {chosen(rule, job, make_candidate(), stale) for _ in range(500)} == {"a"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("round-robin", "rested"), ("least-outstanding", "empty"), ("nearest", "near")],
)
def test_baselines_look_at_one_thing_only(name, expected):
    rule = make_rule(name, random.Random(0))
    candidates = [
        make_candidate("rested", idle_s=99.0, load=8, lags=(99,)),
        make_candidate("empty", load=0, rtt_s=1.0),
        make_candidate("near", rtt_s=0.001, load=8),
    ]
    assert chosen(rule, make_job(), *candidates) == expected


def test_least_outstanding_counts_per_slot():
    rule = make_rule("least-outstanding", random.Random(0))
    small = make_candidate("small", slots=2, load=2)
    large = make_candidate("large", slots=16, load=8)
    assert chosen(rule, make_job(), small, large) == "large"


def test_two_choices_takes_the_emptier_of_two_drawn_agents():
    rule = make_rule("two-choices", random.Random(0))
    candidates = [make_candidate(f"a{n}", load=n) for n in range(8)]
    chosen_agents = [chosen(rule, make_job(), *candidates) for _ in range(400)]
    assert "a7" not in chosen_agents
    assert len(set(chosen_agents)) == 7


def test_the_same_seed_makes_the_same_choices():
    candidates = [make_candidate(f"a{n}", load=n) for n in range(8)]
    runs = []
    for _ in range(2):
        rule = make_rule("two-choices", random.Random(7))
        runs.append([chosen(rule, make_job(), *candidates) for _ in range(50)])
    assert runs[0] == runs[1]
