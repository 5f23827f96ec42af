"""Peers with real keys that say valid messages without any sense: no core raises, every invariant
holds after each of them, the rows are still all that a new life needs, and who behaves is served.
"""

import random

import msgspec
import pytest
from agent_story import Story, offer
from chaos_messages import Absurd, Names
from core_builders import (
    RUN,
    SOLVER,
    Scene,
    make_agent_hello,
    make_run,
    make_summary,
    messages,
    version_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_peers import POLICY as TRAINER_POLICY
from trainer_world import TrainerWorld

from cloud_trainer.core import events as trainer_on
from edge_agent.core import effects as agent_do
from edge_agent.core import events as agent_on
from scheduler.core.events import FromAgent, FromOperator, FromService, FromTrainer
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.envelope import encode
from transport.messages import (
    Goodbye,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    LeaseOffer,
    Message,
    Plane,
    Role,
    Welcome,
)
from transport.permissions import HUB_ROLE, PERMISSIONS

SEEDS = st.integers(0, 2**32 - 1)
SAID = {role: sorted(PERMISSIONS[role, Plane.CONTROL], key=lambda kind: kind.__name__) for role in (
    Role.AGENT, Role.TRAINER, Role.SERVICE, Role.OPERATOR, Role.SUBMITTER
)}  # fmt: skip
"""What each role may say to the scheduler."""

PEERS = {
    Role.AGENT: ("a", "b", "c"),
    Role.TRAINER: ("t", "t2"),
    Role.SERVICE: (TRAJECTORY_LOG, WEIGHT_STORE),
    Role.OPERATOR: ("op",),
    Role.SUBMITTER: ("s", "s2"),
}


def living_scene(seed: int) -> Scene:
    """A run that is under way."""
    scene = Scene(seed=seed, max_dead_letters=3, remembered_results=2, max_queued_jobs=50)
    scene.submitted(make_run(policy={"batch_groups": 2}))
    scene.trainer_joined()
    scene.version_stored(0)
    for name in ("a", "b"):
        scene.joined(name)
        scene.serving(0, name)
    scene.produced(scene.effects)
    return scene


def names_of(scene: Scene) -> Names:
    tables = scene.core._ctx.tables
    leases = [
        (record.id, record.fence, job.id) for job in tables.jobs.values() for record in job.attempts
    ]
    digests = [job.result.digest for job in tables.jobs.values() if job.result]
    texts = [RUN, SOLVER, "solver", "a", "b", "t", "s", "j1", "single_turn", "exact", "engine"]
    texts += [version_digest(SOLVER, n) for n in (0, 1)]
    texts += list(tables.jobs)[:5] + [attempt for attempt, _, _ in leases[:5]] + digests[:5]
    return Names(texts + list(tables.releases)[:3] + list(tables.dead)[:3], leases[:10])


def summary_of(offer: LeaseOffer, agent: str) -> GroupSummary:
    return make_summary(offer, agent, versions=dict.fromkeys(offer.policies.values(), (0, 0)))


def behave(scene: Scene, rng: random.Random) -> None:
    """Something that a sound peer does now, so that there is state to be disturbed."""
    offers = scene.live_offers()
    match rng.randrange(7):
        case 0:
            scene.wait(rng.choice([0.1, 1.0, 3.0, 13.0, 40.0]))
        case 1 if offers:
            scene.accepted(rng.choice(offers))
        case 2 if offers:
            won = rng.choice(offers)
            scene.stored(summary_of(won, scene.offered_to[won.attempt]))
        case 3:
            scene.beats(rng.choice(["a", "b"]))
        case 4:
            scene.produced(scene.effects[-20:])
        case 5:
            scene.restart()
        case _:
            scene.feed(FromAgent("a", make_agent_hello(rng.randint(1, 3))))


def told(scene: Scene, role: Role, peer: str, message: Message) -> None:
    match role:
        case Role.AGENT:
            scene.feed(FromAgent(peer, message))
        case Role.TRAINER:
            scene.feed(FromTrainer(peer, message))
        case Role.SERVICE:
            scene.feed(FromService(peer, message))
        case _:
            scene.requests += 1
            scene.feed(FromOperator(peer, scene.requests, message))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_the_scheduler_bears_whatever_its_peers_say(seed):
    rng = random.Random(seed)
    scene = living_scene(seed % 3)
    for _ in range(40):
        if rng.random() < 0.4:
            behave(scene, rng)
            continue
        role = rng.choice(list(SAID))
        message = Absurd(rng, names_of(scene)).message(rng.choice(SAID[role]))
        if message is not None:
            told(scene, role, rng.choice(PEERS[role]), message)
    for effect in scene.effects:
        if hasattr(effect, "message") and isinstance(effect.message, Message):
            encode(effect.message)
    scene.restart()
    scene.core.check()
    # Who behaves is served: a new agent gets its welcome.
    effects = scene.feed(FromAgent("newcomer", make_agent_hello(1)))
    assert messages(effects, Welcome, "newcomer")


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=1500, deadline=None)
@given(SEEDS)
def test_the_scheduler_bears_it_for_long(seed):
    test_the_scheduler_bears_whatever_its_peers_say.hypothesis.inner_test(seed)


@pytest.mark.parametrize("role", list(SAID))
def test_every_kind_that_a_role_may_say_gets_there(role):
    """The generator reaches every kind, or the test above says less than it seems to."""
    scene = living_scene(0)
    absurd = Absurd(random.Random(7), names_of(scene))
    unmade = [
        kind.__name__ for kind in SAID[role] if all(absurd.message(kind) is None for _ in range(20))
    ]
    assert unmade == []


# ---- agents and trainers -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_an_agent_bears_whatever_comes_over_its_planes(seed):
    rng = random.Random(seed)
    story = Story().up()
    held = [offer(n) for n in (1, 2)]
    story.scheduler(*held)
    names = Names(
        ["arithmetic/solver", "arithmetic", "single_turn", "exact"],
        [(one.attempt, one.fence, one.job) for one in held],
    )
    events = {
        Plane.CONTROL: agent_on.FromScheduler,
        Plane.TRAJECTORIES: agent_on.FromTrajectoryLog,
        Plane.WEIGHTS: agent_on.FromWeightStore,
    }
    for _ in range(30):
        plane = rng.choice(list(events))
        kinds = sorted(PERMISSIONS[HUB_ROLE[plane], plane], key=lambda kind: kind.__name__)
        message = Absurd(rng, names).message(rng.choice(kinds), plane)
        if message is None or isinstance(message, Goodbye):
            continue
        effects = story.feed(events[plane](message=message))
        if any(isinstance(effect, agent_do.Exit) for effect in effects):
            return  # refused for good, or drained at once
        if rng.random() < 0.3:
            story.wait(rng.choice([0.5, 3.0, 20.0]))
    story.wait(30.0)
    msgspec.msgpack.encode(story.core.dump())


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_trainer_bears_whatever_comes_over_its_planes(seed):
    rng = random.Random(seed)
    world = TrainerWorld()
    world.start()
    names = Names([TRAINER_POLICY, "run", "solver", "0" * 64])
    events = {
        Plane.CONTROL: trainer_on.FromScheduler,
        Plane.TRAJECTORIES: trainer_on.FromTrajectoryLog,
        Plane.WEIGHTS: trainer_on.FromWeightStore,
    }
    core = world.core
    now = 0.0
    for _ in range(30):
        plane = rng.choice(list(events))
        kinds = sorted(PERMISSIONS[HUB_ROLE[plane], plane], key=lambda kind: kind.__name__)
        message = Absurd(rng, names).message(rng.choice(kinds), plane)
        if message is None:
            continue
        core.handle(events[plane](message=message), now)
        core.check()
        now += rng.choice([0.0, 0.5, 3.0])
        core.handle(trainer_on.Tick(), now)
        core.check()


# ---- stolen identity -----------------------------------------------------------------------------


def test_an_agent_that_names_the_attempts_of_another_changes_nothing_of_them():
    """Lease, failure, result and heartbeat of ``a``'s attempt, said by ``b``."""
    scene = living_scene(0)
    victim = next(one for one in scene.live_offers() if scene.offered_to[one.attempt] == "a")
    scene.accepted(victim)
    before = scene.core._ctx.leases[victim.attempt]
    rng = random.Random(1)
    names = Names([SOLVER], [(victim.attempt, victim.fence, victim.job)])
    thief = Absurd(rng, names)
    said = 0
    for kind in SAID[Role.AGENT]:
        if kind in (Hello, Goodbye):
            continue
        for _ in range(40):
            message = thief.message(kind)
            if message is not None:
                scene.feed(FromAgent("b", message))
                said += 1
    assert said > 100
    assert scene.core._ctx.leases[victim.attempt] is before
    assert before.agent == "a"
    [record] = [
        record
        for record in scene.core._ctx.tables.jobs[victim.job].attempts
        if record.id == victim.attempt
    ]
    assert not record.stray
    # The log says by its key who sent a body: with another's name it is nobody's result.
    stolen = summary_of(victim, "b")
    scene.stored(msgspec.structs.replace(stolen, digest="0" * 64))
    assert scene.core._ctx.tables.jobs[victim.job].result is None
    assert scene.counter("results.late") == 1
    scene.stored(summary_of(victim, "a"))
    assert scene.core._ctx.tables.jobs[victim.job].result is not None


def test_what_is_listed_again_while_another_runs_on_the_same_agent_is_not_counted_on():
    """It said goodbye, got the job a second time, and lists the first attempt after all."""
    scene = Scene()
    scene.submitted(make_run())
    scene.trainer_joined()
    scene.version_stored(0)
    scene.joined("a")
    scene.serving(0, "a")
    scene.produced(scene.effects)
    first = scene.live_offers("a")[0]
    scene.accepted(first)
    scene.feed(FromAgent("a", Goodbye(reason="so long")))
    scene.joined("a")
    scene.serving(0, "a")
    [second] = [one for one in scene.live_offers("a") if one.job == first.job and one != first]
    scene.accepted(second)
    held = tuple(HeldAttempt(attempt=one.attempt, fence=one.fence) for one in (first, second))
    [reply] = messages(scene.heard("a", held=held), HeartbeatReply, "a")
    assert reply.unknown == ()
    counted = {
        record.id: not record.stray for record in scene.core._ctx.tables.jobs[first.job].attempts
    }
    assert counted == {first.attempt: False, second.attempt: True}
    # Whichever comes first is the result.
    scene.stored(summary_of(first, "a"))
    assert scene.core._ctx.tables.jobs[first.job].result is not None


def test_a_hello_again_and_again_is_harmless():
    scene = living_scene(0)
    held = scene.held_by("a")
    before = dict(scene.core._ctx.leases)
    for _ in range(50):
        effects = scene.joined("a", held=held)
        assert messages(effects, Welcome, "a")
    assert scene.core._ctx.leases.keys() >= before.keys()
    scene.feed(FromAgent("a", Heartbeat(sequence=1, sent_s=0.0, held=held)))
    assert len(scene.core._ctx.agents) == 2
