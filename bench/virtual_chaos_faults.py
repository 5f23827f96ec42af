"""What happens to the chaos world: one fault after another, without waiting for the last to heal.

Every fault is one of: a process dies (the scheduler before, within or after a commit; an agent with
or without its disk; a trainer; the trajectory log; the weight store) and comes back after a while;
a host or one pair of hosts is cut off; a link is slow; a connection is made anew; messages come
again or late; an operator orders something.
"""

import random
from collections.abc import Callable
from typing import Final

from bench.virtual_chaos_world import DEATHS, FAULT_GAP_S, RUN, World
from sim.actors.names import LOG, SCHEDULER, STORE
from transport.messages import AgentOrder, Plane, RunCommand

LONG_DOWN_S: Final = 600.0
"""A scheduler that somebody had to be woken for: every clock but the core's has gone on."""

Strike = Callable[[World, random.Random], bool]


def strike_many(world: World, faults: int) -> None:
    """Let so many faults happen, with submitters' jobs in between."""
    rng = world.rng
    names = [name for _, name, _ in FAULTS]
    weights = [weight for weight, _, _ in FAULTS]
    strikes = {name: strike for _, name, strike in FAULTS}
    while world.faults.total() < faults:
        world.run(rng.expovariate(1.0 / FAULT_GAP_S))
        [name] = rng.choices(names, weights)
        if strikes[name](world, rng):
            world.faults[name] += 1
        if rng.random() < 0.15:
            world.submitter.submit()
        if rng.random() < 0.02:
            world.submitter.cancel()
        if world.faults.total() % 60 == 0:
            world.run(30.0)  # so that there are steps and checkpoints to be lost


def lose_agents(world: World, kills: int) -> None:
    """Kill one agent after another while all else is well; each is back before the next goes."""
    for number in range(kills):
        agent = world.agents[number % len(world.agents)]
        world.run(world.rng.uniform(5.0, 10.0))
        world.crash_agent(agent)
        world.faults["agent killed"] += 1
        world.run(30.0)
        world.problems += [f"not placed again: {job}" for job in world.not_replaced()]
        agent.start()


def _down_s(rng: random.Random) -> float:
    """Mostly a supervisor's restart, sometimes long enough to be given up."""
    return min(60.0, rng.choice([0.3, 3.0, 15.0]) * rng.expovariate(1.0))


def _kill_scheduler(world: World, rng: random.Random) -> bool:
    if not world.scheduler.alive:
        return False
    down_s = LONG_DOWN_S if rng.random() < 0.03 else _down_s(rng)
    world.kill_scheduler(rng.choice(DEATHS), down_s)
    return True


def _kill_agent(world: World, rng: random.Random, *, wiped: bool) -> bool:
    agent = rng.choice(world.agents)
    if not agent.alive:
        return False
    world.crash_agent(agent)
    if wiped:
        agent.wipe()
    world.kernel.after(_down_s(rng), lambda _: None if agent.alive else agent.start())
    return True


def _kill_trainer(world: World, rng: random.Random) -> bool:
    trainer = rng.choice(world.trainers)
    if not trainer.alive:
        return False
    trainer.crash()
    world.kernel.after(_down_s(rng), lambda _: None if trainer.alive else trainer.start())
    return True


def _kill_service(world: World, rng: random.Random) -> bool:
    name = rng.choice([LOG, STORE])
    service = world.log if name == LOG else world.store
    if not service.alive:
        return False
    service.die()
    world.network.end_process(name)

    def back(_: object) -> None:
        if not service.alive:
            world._service_back(name)

    world.kernel.after(_down_s(rng), back)
    return True


def _cut(world: World, rng: random.Random) -> bool:
    """A host is cut off; its links may or may not notice."""
    who = rng.choice([*world.agents, *world.trainers])
    noticed = rng.random() < 0.5
    world.network.cut(who.name)

    def back(_: object) -> None:
        world.network.cut(who.name, is_cut=False)
        if noticed and who in world.agents:
            who.link_up()

    world.kernel.after(_down_s(rng), back)
    return True


def _cut_pair(world: World, rng: random.Random) -> bool:
    """One plane of one peer is down."""
    who = rng.choice([*world.agents, *world.trainers]).name
    other = rng.choice([SCHEDULER, LOG, STORE])
    pair = (who, other) if who < other else (other, who)
    world.network.broken[pair] = world.kernel.now + _down_s(rng)
    return True


def _cut_service(world: World, rng: random.Random) -> bool:
    """A service does not reach the scheduler."""
    name = rng.choice([LOG, STORE])
    world.network.broken[min(name, SCHEDULER), max(name, SCHEDULER)] = world.kernel.now + _down_s(
        rng
    )
    return True


def _slow(world: World, rng: random.Random) -> bool:
    name = rng.choice(world.agents).name
    world.network.slow_down(name, rng.uniform(0.2, 4.0), rng.choice([1.0, 0.1, 0.01]))
    world.kernel.after(_down_s(rng), lambda _: world.network.slow_down(name, 0.0, 1.0))
    return True


def _renew(world: World, rng: random.Random) -> bool:
    agent = rng.choice(world.agents)
    other, plane = rng.choice(
        [(SCHEDULER, Plane.CONTROL), (LOG, Plane.TRAJECTORIES), (STORE, Plane.WEIGHTS)]
    )
    world.network.renew(agent.name, other)
    agent.notice(plane)
    return True


def _mischief(world: World, rng: random.Random, *, late: bool) -> bool:
    hosts = [SCHEDULER, SCHEDULER, LOG, STORE]
    hosts += [peer.name for peer in [*world.agents, *world.trainers]] + [world.submitter.name]
    table = world.network.late if late else world.network.twice
    table[rng.choice(hosts)] = world.kernel.now + rng.uniform(2.0, 20.0)
    return True


def _order(world: World, rng: random.Random) -> bool:
    agent = rng.choice(world.agents).name
    order = rng.choice(["drain", "cordon", "quarantine"])
    world.operator.ask(AgentOrder(agent=agent, order=order))

    def undo(_: object) -> None:
        for back in ("uncordon", "release"):
            world.operator.ask(AgentOrder(agent=agent, order=back))

    world.kernel.after(rng.uniform(1.0, 20.0), undo)
    return True


def _pause(world: World, rng: random.Random) -> bool:
    world.operator.ask(RunCommand(run=RUN, command="pause"))
    world.kernel.after(
        rng.uniform(0.5, 8.0), lambda _: world.operator.ask(RunCommand(run=RUN, command="resume"))
    )
    return True


FAULTS: Final[tuple[tuple[float, str, Strike], ...]] = (
    (3.0, "scheduler killed", _kill_scheduler),
    (3.0, "agent killed", lambda w, r: _kill_agent(w, r, wiped=False)),
    (1.0, "agent killed, disk lost", lambda w, r: _kill_agent(w, r, wiped=True)),
    (2.0, "trainer killed", _kill_trainer),
    (2.0, "service killed", _kill_service),
    (2.0, "host cut off", _cut),
    (2.0, "one plane cut off", _cut_pair),
    (1.0, "service cut off from the scheduler", _cut_service),
    (1.5, "link slow", _slow),
    (1.5, "connection made anew", _renew),
    (2.0, "messages twice", lambda w, r: _mischief(w, r, late=False)),
    (2.0, "messages late", lambda w, r: _mischief(w, r, late=True)),
    (0.7, "operator's order", _order),
    (0.3, "run paused", _pause),
)
