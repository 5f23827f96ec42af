"""Orders to agents, their logs, their age, and what a person sees of them."""

import pytest
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    make_ref,
    make_scene,
    make_summary,
    messages,
    released,
    replies,
)

from scheduler.core import requests
from scheduler.core.events import FromAgent, Tick
from transport.messages import (
    AgentLog,
    AgentLogRequest,
    AgentLogs,
    AgentLogsRequest,
    AgentOrder,
    CommandReply,
    DrainOrder,
    Goodbye,
    StatusRequest,
)


@pytest.fixture
def scene() -> Scene:
    scene = make_scene()
    scene.joined("a", slots=2)
    return scene


def ordered(scene: Scene, order: str, agent: str = "a", **changes) -> CommandReply:
    return scene.asked(AgentOrder(agent=agent, order=order, **changes))


def lived_on(scene: Scene, agent: str = "a") -> None:
    """A few heartbeats: placement may wait a moment for a better place."""
    for _ in range(4):
        scene.wait(2.0)
        scene.beats(agent)


def excluded(scene: Scene, agent: str = "a") -> Scene:
    ordered(scene, "quarantine", agent, reason="odd log-probabilities")
    return scene


def test_an_order_to_nobody_names_who_is_there(scene):
    reply = ordered(scene, "cordon", "nobody")
    assert (reply.ok, reply.code) == (False, "agent.unknown")
    assert "agents: a" in reply.message


def test_a_cordoned_agent_keeps_what_it_has_and_gets_no_more(scene):
    held = scene.live_offers("a")
    assert ordered(scene, "cordon").ok
    assert scene.agent().state == "cordoned"
    assert scene.live_offers("a") == held
    scene.accepted(held[0])
    scene.finished(held[0])
    assert len(scene.live_offers("a")) == len(held) - 1
    assert ordered(scene, "uncordon").ok
    assert (scene.agent().state, scene.agent().cordoned) == ("ready", False)
    lived_on(scene)
    assert len(scene.live_offers("a")) == len(held)


def test_an_order_that_changes_nothing_says_so(scene):
    """Neither a count, nor evidence, nor a write."""
    for order, said in (
        ("release", "nothing to do: a is not quarantined, and there is no evidence against it"),
        ("uncordon", "nothing to do: a is not cordoned"),
    ):
        assert ordered(scene, order) == CommandReply(ok=True, message=said)
        assert scene.counter(f"orders.{order}") == 0
    for order, said in (
        ("cordon", "nothing to do: a is cordoned already"),
        ("quarantine", "nothing to do: a is quarantined already: by op: no reason given"),
    ):
        assert ordered(scene, order) == CommandReply(ok=True)
        assert ordered(scene, order).message == said
        assert scene.counter(f"orders.{order}") == 1
    assert len(scene.agent().evidence) == 1


def test_a_command_that_changes_nothing_says_so(scene):
    nothing = f"nothing to do: run {RUN} is"
    assert scene.commanded("resume").message == f"{nothing} running already"
    assert scene.commanded("pause").message == ""
    assert scene.commanded("pause").message == f"{nothing} paused already"
    assert scene.commanded("stop").message == ""


@pytest.mark.parametrize("order", ["cordon", "quarantine"])
def test_a_run_says_that_all_its_agents_are_kept_away(scene, order):
    ordered(scene, order)
    assert scene.run().reason == f"no agent is ready (1 {order.removesuffix('e')}ed)"
    assert scene.core._ctx.ready_slots == 0


def test_a_cordon_survives_both_sides_restarts(scene):
    ordered(scene, "cordon")
    scene.restart()
    scene.joined("a", incarnation=2)
    assert scene.agent().state == "cordoned"
    assert not scene.live_offers("a")


def test_a_drain_order_is_repeated_until_the_agent_says_that_it_drains(scene):
    order = DrainOrder(deadline_s=90.0, reason="new disk")
    ordered(scene, "drain", deadline_s=90.0, reason="new disk")
    assert messages(scene.effects, DrainOrder, "a") == [order]
    assert scene.agent().state == "draining"
    assert messages(scene.beats("a"), DrainOrder) == [order]
    assert messages(scene.heard("a", draining=True, held=scene.held_by("a")), DrainOrder) == []
    assert messages(scene.heard("a", draining=True, held=scene.held_by("a")), DrainOrder) == []
    scene.feed(FromAgent("a", Goodbye(reason="drained")))
    assert scene.agent().state == "gone"


def test_a_draining_agent_gets_nothing_new_and_is_free_again_after_its_return(scene):
    ordered(scene, "drain")
    offer = scene.live_offers("a")[0]
    scene.accepted(offer)
    before = len(scene.live_offers("a"))
    scene.finished(offer)
    assert len(scene.live_offers("a")) == before - 1
    scene.feed(FromAgent("a", Goodbye(reason="drained")))
    scene.joined("a", incarnation=2)
    assert scene.agent().state == "ready"
    lived_on(scene)
    assert scene.live_offers("a")


def test_an_order_to_drain_goes_out_again_after_a_reconnect(scene):
    ordered(scene, "drain")
    effects = scene.joined("a", held=scene.held_by("a"))
    assert len(messages(effects, DrainOrder, "a")) == 1
    assert scene.agent().state == "draining"


def test_an_order_to_drain_outlives_the_scheduler(scene):
    ordered(scene, "drain")
    scene.restart()
    effects = scene.joined("a", held=scene.held_by("a"))
    assert len(messages(effects, DrainOrder, "a")) == 1
    assert scene.agent().state == "draining"


def test_an_order_to_drain_that_was_not_heard_is_for_the_next_process_too(scene):
    """The box was to be emptied; that its process died and was started again changes nothing."""
    ordered(scene, "drain", deadline_s=7.0)
    effects = scene.joined("a", incarnation=2)
    assert [order.deadline_s for order in messages(effects, DrainOrder, "a")] == [7.0]
    assert scene.agent().state == "draining"
    scene.restart()
    assert messages(scene.joined("a", incarnation=3), DrainOrder, "a")


@pytest.mark.parametrize("end", ["confirmed", "goodbye", "lost"])
def test_an_order_to_drain_ends_with_the_life_that_followed_it_or_was_lost(scene, end):
    ordered(scene, "drain")
    if end == "confirmed":
        scene.heard("a", draining=True, held=scene.held_by("a"))
    elif end == "goodbye":
        scene.feed(FromAgent("a", Goodbye(reason="drained")))
    else:
        scene.wait(13.0)
        assert scene.agent().state == "lost"
    assert not messages(scene.joined("a", incarnation=2), DrainOrder, "a")
    assert scene.agent().state == "ready"


def test_a_lost_agent_that_was_only_cut_off_still_drains(scene):
    ordered(scene, "drain")
    scene.wait(13.0)
    assert messages(scene.joined("a"), DrainOrder, "a")


def test_an_agent_that_drains_gets_no_offer_when_it_says_hello_again(scene):
    """Neither after our restart nor over a new connection; it would only decline."""
    scene.heard("a", draining=True)
    for restarts in (False, True):
        if restarts:
            scene.restart()
        before = len(scene.offers)
        scene.joined("a")
        lived = scene.agent().state
        scene.wait(1.0)
        assert (lived, len(scene.offers)) == ("draining", before)
    scene.heard("a", draining=False, versions={SOLVER: make_ref(SOLVER, 0)})
    assert scene.agent().state == "ready"


def test_an_agent_that_has_not_reconnected_yet_is_told_to_drain_when_it_has(scene):
    scene.restart()
    assert scene.agent().state == "reconnecting"
    reply = ordered(scene, "drain")
    assert (reply.ok, reply.message) == (True, "it is told as soon as it has reconnected")
    scene.restart()
    assert len(messages(scene.joined("a"), DrainOrder, "a")) == 1
    assert scene.agent().state != "ready"


def test_two_processes_with_one_incarnation_are_two_lives(scene):
    """A box that was wiped, with a clock that stands still: what the first held is gone."""
    scene.joined("b", slots=2)
    scene.joined("a", slots=2, process="one", held=scene.held_by("a"))
    held = scene.live_offers("a")
    for offer in held:
        scene.accepted(offer)
    scene.joined("a", slots=2, process="one", held=scene.held_by("a"))
    assert scene.counter("attempts.failed.agent.restarted") == 0
    assert [o.attempt for o in scene.live_offers("a")] == [o.attempt for o in held]
    scene.joined("a", slots=2, process="two")
    assert not {o.attempt for o in held} & {o.attempt for o in scene.live_offers("a")}


def test_an_agent_that_is_away_cannot_be_told_to_drain(scene):
    scene.wait(13.0)
    assert scene.agent().state == "lost"
    assert ordered(scene, "drain").code == "agent.away"


def test_a_quarantined_agent_is_not_counted_on_and_its_results_are_not_accepted(scene):
    held = scene.live_offers("a")
    for offer in held:
        scene.accepted(offer)
    excluded(scene)
    status = scene.agent()
    assert status.state == "quarantined"
    assert "odd log-probabilities" in status.quarantined
    assert scene.books().in_flight == 0
    scene.joined("b", slots=8)
    assert {offer.job for offer in scene.live_offers("b")} >= {offer.job for offer in held}
    digest = make_summary(held[0], "a", versions={}).digest
    assert released(scene.finished(held[0])) == [digest]
    assert scene.counter("results.quarantined") == 1
    assert scene.books().buffered == 0


def test_what_a_quarantined_agent_holds_is_counted_on_again_after_its_release(scene):
    held = scene.live_offers("a")
    for offer in held:
        scene.accepted(offer)
    excluded(scene)
    scene.beats("a")
    assert scene.books().in_flight == 0
    assert ordered(scene, "release").ok
    assert scene.live_offers("a") == held  # nothing new before it has said what it holds
    scene.beats("a")
    assert scene.books().in_flight == len(held)
    scene.finished(held[0])
    assert scene.counter("results.accepted") == 1
    assert scene.agent().evidence == ()


def test_a_quarantine_survives_restarts_and_a_long_absence():
    scene = make_scene(forget_agent_s=60.0)
    scene.joined("a", slots=2)
    excluded(scene)
    scene.feed(FromAgent("a", Goodbye(reason="off")))
    scene.wait(200.0)
    scene.restart()
    scene.joined("a", incarnation=2)
    assert scene.agent().state == "quarantined"
    assert not scene.live_offers("a")


def test_an_agents_log_is_fetched_through_the_scheduler(scene):
    effects = scene.asks(AgentLogsRequest(agent="a", run=RUN, lines=7))
    [wanted] = messages(effects, AgentLogRequest, "a")
    assert (wanted.run, wanted.lines, replies(effects)) == (RUN, 7, [])
    other = FromAgent("b", AgentLog(request=wanted.request, lines=("no",)))
    scene.joined("b")
    assert replies(scene.feed(other)) == []
    answer = scene.feed(FromAgent("a", AgentLog(request=wanted.request, lines=("x", "y"))))
    assert replies(answer) == [AgentLogs(agent="a", lines=("x", "y"))]
    again = scene.feed(FromAgent("a", AgentLog(request=wanted.request, lines=("x",))))
    assert replies(again) == []


def test_a_log_that_does_not_come_is_refused_after_a_while(scene):
    scene.asks(AgentLogsRequest(agent="a"))
    [reply] = replies(scene.wait(16.0))
    assert reply.code == "agent.silent"
    assert scene.asked(AgentLogsRequest(agent="a")).code == "agent.silent"  # suspect, then lost
    assert scene.asked(AgentLogsRequest(agent="nobody")).code == "agent.unknown"


def test_a_status_is_asked_for_in_pages(scene):
    for name in ("c", "b", "d"):
        scene.joined(name)
    status = scene.asked(StatusRequest(agents_after="b")).status
    assert [agent.name for agent in status.agents] == ["c", "d"]
    assert [run.name for run in status.runs] == [RUN]


def test_asking_for_a_status_changes_no_row():
    for scene in (Scene(), make_scene()):  # also before anything was counted
        scene.feed(Tick())
        before = dict(scene.rows)
        assert scene.asked(StatusRequest()).status.term == 1
        assert scene.rows == before


def test_a_page_has_a_bound_and_says_how_many_agents_it_left_out(scene, monkeypatch):
    monkeypatch.setattr(requests, "AGENTS_PER_STATUS", 2)
    for name in ("c", "b", "d"):
        scene.joined(name)
    status = scene.asked(StatusRequest()).status
    assert [agent.name for agent in status.agents] == ["a", "b"]
    assert status.counters["status.agents_left_out"] == 2
    assert (
        "status.agents_left_out" not in scene.asked(StatusRequest(agents_after="b")).status.counters
    )


def test_a_status_shows_what_an_agent_said_of_itself():
    scene = make_scene()
    scene.joined("a", labels={"site": "home"}, price_usd_hour=1.5, hardware="h100")
    scene.heard("a", clock_offset_s=-0.25, versions={}, held=scene.held_by("a"))
    status = scene.agent()
    assert (status.hardware, status.labels, status.price_usd_hour) == (
        "h100",
        {"site": "home"},
        1.5,
    )
    assert status.clock_offset_s == -0.25


def test_a_hoarded_attempt_gets_a_sibling_and_may_still_win(scene):
    scene = make_scene(attempt_max_s=100.0)
    scene.joined("a", slots=2)
    offer = scene.live_offers("a")[0]
    for _ in range(49):
        scene.wait(2.0)
        scene.beats("a")
    assert scene.counter("attempts.stray.lapsed") == 0
    for _ in range(10):
        scene.wait(2.0)
        scene.beats("a")
    assert scene.counter("attempts.stray.lapsed") >= 1
    assert offer.attempt in [o.attempt for o in scene.live_offers("a")]
    scene.finished(offer)
    assert scene.counter("results.accepted") == 1


def test_an_attempts_age_counts_over_a_restart():
    scene = make_scene(attempt_max_s=100.0)
    scene.joined("a", slots=2)
    for _ in range(30):
        scene.wait(2.0)
        scene.beats("a")
    scene.restart()
    scene.joined("a", slots=2, held=scene.held_by("a"), versions={SOLVER: 0})
    for _ in range(25):
        scene.wait(2.0)
        scene.beats("a")
    assert scene.counter("attempts.stray.lapsed") >= 1
