"""Agents: joining, liveness, incarnations, eligibility and freshness."""

import pytest
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    make_ref,
    make_run,
    make_scene,
    messages,
)

from scheduler.core.events import AgentRevoked, FromAgent
from scheduler.core.status import nobody
from transport.messages import (
    AgentInventory,
    ExplainRequest,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    Ping,
    Refuse,
    Role,
    VersionRef,
    VersionServing,
    Welcome,
)


@pytest.fixture
def scene() -> Scene:
    return make_scene()


def test_an_agent_is_told_the_term_the_pace_and_what_to_host(scene):
    [welcome] = messages(scene.joined("a"), Welcome, "a")
    assert (welcome.term, welcome.heartbeat_s, welcome.lost_after_s) == (1, 2.0, 12.0)
    assert welcome.policies == (SOLVER,)


def test_a_large_fleet_is_told_to_beat_slower():
    scene = make_scene(heartbeat_scale_agents=2)
    for n in range(4):
        scene.joined(f"a{n}")
    [welcome] = messages(scene.joined("a9"), Welcome)
    assert (welcome.heartbeat_s, welcome.lost_after_s) == (5.0, 30.0)


def test_an_agent_without_weights_is_joining_and_gets_no_work(scene):
    scene.joined("a", versions={})
    assert scene.agent().state == "joining"
    assert not scene.live_offers()
    scene.serving(0)
    assert scene.agent().state == "ready"
    assert scene.live_offers()


def test_versions_of_policies_that_nobody_hosts_are_not_kept(scene):
    scene.joined("a", versions={SOLVER: 0, "x/y": 3})
    assert scene.agent().versions == {SOLVER: 0}


def test_an_older_incarnation_is_refused(scene):
    scene.joined("a", incarnation=2)
    [refuse] = messages(scene.joined("a", incarnation=1), Refuse, "a")
    assert refuse.code == "agent.superseded"
    assert scene.counter("refused.agent.superseded") == 1
    assert len(scene.live_offers("a")) == 3


@pytest.mark.parametrize("slots", [0, -3, 10**9])
def test_an_impossible_number_of_slots_is_refused(scene, slots):
    [refuse] = messages(scene.joined("a", slots=slots), Refuse)
    assert refuse.code == "hello.invalid"


def test_a_hello_of_another_role_or_protocol_is_refused(scene):
    for hello, code in [
        (Hello(role=Role.TRAINER, incarnation=1, build="b"), "hello.invalid"),
        (Hello(role=Role.AGENT, incarnation=1, build="b"), "hello.invalid"),
        (Hello(role=Role.AGENT, incarnation=1, build="b", protocol=7), "protocol.version"),
    ]:
        [refuse] = messages(scene.feed(FromAgent("a", hello)), Refuse)
        assert refuse.code == code


def test_three_missed_heartbeats_make_a_suspect_that_gets_no_work_but_loses_none(scene):
    scene.joined("a", slots=2)
    for offer in scene.live_offers():
        scene.accepted(offer)
    scene.wait(6.5)
    assert scene.agent().state == "suspect"
    assert len(scene.live_offers("a")) == 2
    scene.finished(scene.live_offers()[0])
    assert len(scene.live_offers("a")) == 1
    scene.beats()
    assert scene.agent().state == "ready"
    assert len(scene.live_offers("a")) >= 2


def test_silence_makes_an_agent_lost_within_the_promised_time(scene):
    scene.joined("a")
    scene.wait(11.9)
    assert scene.agent().state == "suspect"
    scene.wait(0.2)
    assert scene.agent().state == "lost"
    assert scene.counter("agents.lost.silent") == 1


def test_a_revoked_agent_is_lost_at_once_and_its_work_goes_elsewhere(scene):
    scene.joined("a")
    scene.joined("b")
    held = scene.live_offers("a")
    assert held
    for offer in held:
        scene.accepted(offer)
    scene.feed(AgentRevoked("a"))
    scene.feed(AgentRevoked("nobody"))
    assert scene.agent("a").state == "lost"
    assert scene.counter("agents.lost.revoked") == 1
    told = scene.asked(ExplainRequest(subject="a"))
    assert any("its key was revoked" in line for line in told.reasons)
    scene.feed(AgentRevoked("a"))
    assert scene.counter("agents.lost.revoked") == 1
    scene.joined("a", incarnation=2)  # by a new key
    assert scene.agent("a").state in ("joining", "ready")


def test_a_heartbeat_is_echoed_and_read(scene):
    scene.joined("a")
    effects = scene.heard(
        sequence=7,
        sent_s=1.25,
        rtt_s=0.2,
        tokens_generated=99,
        bytes_up=10,
        bytes_down=20,
        running_sequences=3,
        versions={SOLVER: make_ref(SOLVER, 0)},
    )
    [reply] = messages(effects, HeartbeatReply, "a")
    assert (reply.sequence, reply.sent_s, reply.unknown) == (7, 1.25, ())
    status = scene.agent()
    assert (status.rtt_s, status.tokens_generated, status.running_sequences) == (0.2, 99, 3)
    assert (status.bytes_up, status.bytes_down) == (10, 20)


@pytest.mark.parametrize("rtt_s", [float("nan"), -1.0, float("inf")])
def test_nonsense_measurements_teach_nothing(scene, rtt_s):
    scene.joined("a")
    scene.heard(rtt_s=rtt_s)
    assert scene.agent().rtt_s is None


def test_a_draining_agent_finishes_what_it_has_and_gets_no_more(scene):
    scene.joined("a")
    held = scene.held_by("a")
    scene.heard(held=held, draining=True, versions={SOLVER: make_ref(SOLVER, 0)})
    assert scene.agent().state == "draining"
    for offer in scene.live_offers():
        scene.finished(offer)
    assert not scene.live_offers()
    scene.beats()
    assert scene.agent().state == "ready"


def test_an_agent_that_says_goodbye_is_gone_at_once_and_its_work_goes_elsewhere(scene):
    scene.joined("a")
    scene.joined("b", slots=8)
    scene.feed(FromAgent("a", Goodbye(reason="drained")))
    assert scene.agent().state == "gone"
    assert {scene.offered_to[o.attempt] for o in scene.live_offers("b")} == {"b"}
    assert scene.books().in_flight == 4
    assert messages(scene.beats("a"), HelloRequired, "a")


def test_agents_that_stay_away_are_forgotten(scene):
    scene.joined("a")
    scene.commanded("stop")
    scene.checkpointed(0, final=True)
    scene.wait(scene.settings.forget_agent_s + 60.0)
    assert not scene.core.status(scene.now).agents
    assert "agent" not in {table for table, _ in scene.rows}


def test_unknown_messages_are_counted(scene):
    scene.joined("a")
    scene.feed(FromAgent("a", Ping(sequence=1, sent_s=0.0)))
    assert scene.counter("agents.unexpected_message") == 1


@pytest.mark.parametrize(
    "lacking",
    [
        {"workflows": {"other": "f"}},
        {"rewards": ("exact",)},
        {"versions": {}},
    ],
)
def test_work_goes_only_to_agents_that_can_do_it(scene, lacking):
    scene.joined("a", **lacking)
    assert not scene.live_offers()


def test_an_agent_whose_copy_is_not_the_published_one_gets_no_work(scene):
    bad = VersionRef(version=0, digest="something else")
    inventory = AgentInventory(
        slots=4,
        hardware="cpu",
        engine="fake",
        workflows={"single_turn": "f"},
        rewards=("reasoning-gym",),
        versions={SOLVER: bad},
    )
    hello = Hello(role=Role.AGENT, incarnation=1, build="b", agent=inventory)
    scene.feed(FromAgent("a", hello))
    assert not scene.live_offers()
    assert scene.counter("placement.refused_digest") == 1
    scene.serving(0)
    assert scene.live_offers()


def test_a_stale_agent_gets_no_work_until_it_has_newer_weights():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0}))
    scene.joined("a")
    scene.joined("b")
    for offer in scene.live_offers():
        scene.finished(offer)
    scene.requested(1)
    scene.stepped(1)
    scene.version_stored(1)
    scene.produced(scene.effects)
    assert not scene.live_offers()
    assert scene.counter("placement.refused_stale") > 0
    scene.serving(1, "b")
    assert {scene.offered_to[o.attempt] for o in scene.live_offers()} == {"b"}


def test_a_starved_policy_places_even_on_a_stale_agent_after_a_while():
    scene = make_scene(run=make_run(policy={"max_policy_lag": 0}))
    scene.joined("a")
    for offer in scene.live_offers():
        scene.finished(offer)
    scene.requested(1)
    scene.stepped(1)
    scene.produced(scene.effects)
    for _ in range(5):
        scene.beats()
        scene.wait(2.0)
    assert len(scene.live_offers()) == 1
    assert any("why=starved" in line for line in scene.core.story("r/t-000002"))


def test_learnt_rates_move_work_to_the_faster_agent():
    scene = make_scene(run=make_run(policy={"batch_groups": 8, "steps": 50}))
    scene.joined("slow", slots=2)
    scene.joined("zfast", slots=2)
    done = {"slow": 0, "zfast": 0}
    for _ in range(40):
        offers = scene.live_offers()
        if not offers:
            break
        offer = offers[-1]
        agent = scene.offered_to[offer.attempt]
        scene.accepted(offer)
        seconds = 8.0 if agent == "slow" else 0.2
        scene.finished(offer, generating_s=seconds)
        done[agent] += 1
        if scene.policy().buffered_groups >= 8:
            scene.requested(scene.policy().step + 1, head=scene.policy().step, groups=8)
            scene.stepped(scene.policy().step + 1)
            scene.version_stored(scene.policy().step)
            scene.produced(scene.effects[-8:])
            for name in ("slow", "zfast"):
                scene.serving(scene.policy().step, name)
    assert scene.agent("zfast").rate_tokens_s > 10 * scene.agent("slow").rate_tokens_s
    assert done["zfast"] > 2 * done["slow"]


def test_an_agent_with_a_streak_of_failures_gets_a_break():
    scene = make_scene(retry_backoff_s=1.0, run=make_run(max_attempts=50), seed=5)
    scene.joined("a")
    for _ in range(3):
        scene.failed(scene.live_offers()[0], code="engine.generation")
    held = len(scene.live_offers())
    scene.wait(0.0)
    assert len(scene.live_offers()) == held
    for _ in range(4):
        scene.beats()
        scene.wait(1.0)
    assert len(scene.live_offers()) == 3


def test_a_job_that_fails_everywhere_gives_no_agent_a_break():
    scene = make_scene(retry_backoff_max_s=1.0, run=make_run(max_attempts=50), seed=5)
    for name in ("a", "b"):
        scene.joined(name, slots=64)
    core = scene.core._ctx
    bad = scene.live_offers()[0].job
    for _ in range(10):
        offer = next(offer for offer in scene.live_offers() if offer.job == bad)
        scene.failed(offer, code="workflow.exception")
        for name in ("a", "b"):
            scene.beats(name)
        scene.wait(3.0)
    assert core.tables.jobs[bad].failures == 10
    assert sorted(core.agents[name].failures for name in ("a", "b")) == [0, 1]


def test_a_job_is_bounded_however_its_agents_vanish():
    scene = make_scene(run=make_run(max_attempts=1))
    for incarnation in range(1, 12):
        scene.joined("a", incarnation=incarnation, slots=8)
    assert scene.books().failed >= 4
    assert scene.counter("failed.losses") >= 4
    assert scene.books().balance == 0


def test_labels_and_names_of_an_agent_are_bounded(scene):
    labels = {f"k{n}": "v" for n in range(500)}
    scene.joined("a", labels=labels, hardware="h" * 500)
    row = scene.core._ctx.tables.agents["a"]
    assert (len(row.labels), len(row.hardware)) == (64, 64)


def test_duplicates_of_everything_an_agent_says_change_nothing(scene):
    scene.joined("a")
    offer = scene.live_offers()[0]
    held = (HeldAttempt(attempt=offer.attempt, fence=offer.fence),)
    refs = {SOLVER: make_ref(SOLVER, 0)}
    said = [
        Heartbeat(sequence=1, sent_s=0.0, held=held, versions=refs),
        VersionServing(policy=SOLVER, version=0, digest=refs[SOLVER].digest, pause_s=0.0),
    ]
    scene.accepted(offer)
    for message in said:
        scene.feed(FromAgent("a", message))
    before = (scene.books(), scene.agent(), scene.rows.copy())
    for message in said:
        scene.feed(FromAgent("a", message))
    scene.accepted(offer)
    assert (scene.books(), scene.agent(), scene.rows) == before


def test_the_status_says_why_nobody_takes_the_waiting_jobs():
    scene = make_scene(run=make_run(workflow={"reference": "nope"}))
    assert scene.core.status(scene.now).runs[0].reason == "no agent is ready"
    scene.joined("a")
    assert scene.core.status(scene.now).runs[0].reason == "no agent offers workflow nope"
    scene.joined("b", workflows={"nope": "f"}, rewards=("exact",))
    assert scene.core.status(scene.now).runs[0].reason == "no agent offers reward reasoning-gym"
    scene.joined("c", workflows={"nope": "f"})
    assert scene.live_offers("c")
    assert scene.core.status(scene.now).runs[0].reason == ""


def test_the_status_says_that_agents_wait_for_the_first_weights():
    """Agents are there and healthy: it is the trainer that is missing."""
    scene = Scene()
    scene.submitted(make_run())
    scene.joined("a", versions={})
    scene.joined("b", versions={})
    run = scene.core._ctx.tables.runs[RUN]
    assert "first weights" in scene.run().reason
    assert nobody(scene.core._ctx, run) == (
        f"no agent is ready (2 joining): the first weights of {SOLVER} are not there yet;"
        " its trainer publishes them (is it running?)"
    )
    scene.version_stored(0)
    assert nobody(scene.core._ctx, run) == "no agent is ready (2 joining)"


def test_an_agent_without_leases_runs_nothing_whatever_its_last_heartbeat_said():
    scene = make_scene()
    scene.joined("a", slots=8)
    scene.heard("a", running_sequences=8, held=scene.held_by("a"))
    assert scene.agent().running_sequences == 8
    scene.feed(FromAgent("a", Goodbye(reason="off")))
    assert (scene.agent().state, scene.agent().running_sequences) == ("gone", 0)
