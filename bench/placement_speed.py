"""How fast the simulator and the scheduler's core are, in events per second of this process's CPU
time, on one core.

kernel events        everything: the kernel, the network, the codec and all cores
no cores             the same without cores: two hosts that answer each other
scheduler core       alone, on the events that it got in that simulation, rows taken after each
decision             with many ready agents, everything that leads to an offer included
"""

import math
import random
import time
from typing import Any

from bench.report import Row
from scheduler.core.effects import Effect, ProduceItems, Send
from scheduler.core.events import (
    Event,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    ItemsProduced,
)
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import WEIGHT_STORE, CoreSettings
from sim.fair_share import Pipe
from sim.kernel import Kernel
from sim.network import Network
from sim.run import Simulation
from sim.scenario import PolicyShape, Scenario
from sim.topology import star
from sim.workload import make_digest, make_items
from transport.messages import (
    AgentInventory,
    Hello,
    LeaseOffer,
    LeaseOffers,
    Message,
    Ping,
    Role,
    RunSubmit,
    TrainerInventory,
    VersionRef,
    VersionStored,
)

KERNEL_EVENTS_S, CORE_EVENTS_S = 100_000.0, 50_000.0
CORE_RATIO = 0.4
DECISION_S = 150e-6
ECHOES = 100_000


def bare_rate() -> float:
    """Messages per second between two hosts: kernel, network and codec without any core."""
    kernel = Kernel()
    network = Network(kernel, star({"edge": 0.1}, centre="cloud", jitter_s=0.001), random.Random(0))

    def receive(name: str) -> Any:
        def echo(source: str, message: Message, _: object) -> None:
            if network.sent < ECHOES:
                network.send(name, source, message)

        return echo

    for name in ("cloud", "edge"):
        network.add(name, name, Pipe("up", 1e9), Pipe("down", 1e9), receive(name))
    for number in range(50):
        network.send("cloud", "edge", Ping(sequence=number, sent_s=0.0))
    began_s = time.process_time()
    kernel.run(1e9)
    return kernel.events / (time.process_time() - began_s)


def speed_rows(scenario: Scenario, repeats: int = 1) -> list[Row]:
    """Kernel events per second of CPU, and the scheduler core alone on the same events; the best of
    ``repeats`` each, since others' work on the machine only ever makes them slower."""
    took_s, alone_s = math.inf, math.inf
    events = handled = 0
    for _ in range(repeats):
        simulation = Simulation(scenario, seed=0)
        recorded: list[tuple[Event, float]] = []
        simulation.scheduler.recorded = recorded
        began_s = time.process_time()
        result = simulation.run()
        took_s = min(took_s, time.process_time() - began_s)
        events, handled = result.events, len(recorded)
        core = SchedulerCore(
            scenario.core_settings("finish-time"),
            term=1,
            rng=random.Random(0),
            build="sim",
        )
        began_s = time.process_time()
        for event, now in recorded:
            core.handle(event, now)
            core.take_changes()
        alone_s = min(alone_s, time.process_time() - began_s)
    kernel_rate, core_rate = events / took_s, handled / alone_s
    ratio = kernel_rate / core_rate
    return [
        Row(
            metric="kernel events, all cores' work in them",
            value=kernel_rate,
            unit="events/s of CPU",
            reference=f"the scheduler's core alone, {core_rate:.0f} events/s",
            ratio=ratio,
            target=f">= {KERNEL_EVENTS_S:.0f}, >= {CORE_RATIO} of the core's",
            ok=kernel_rate >= KERNEL_EVENTS_S and ratio >= CORE_RATIO,
        ),
        Row(
            metric="kernel events, no cores: network and codec",
            value=bare_rate(),
            unit="events/s of CPU",
        ),
        Row(
            metric="scheduler core alone, the same events again",
            value=core_rate,
            unit="events/s of CPU",
            target=f">= {CORE_EVENTS_S:.0f}",
            ok=core_rate >= CORE_EVENTS_S,
        ),
        Row(
            metric="part of the simulation's CPU time that is the scheduler's core",
            value=alone_s / took_s,
            unit="share",
        ),
    ]


def decision_row(agents: int) -> Row:
    """CPU time per placement decision with ``agents`` ready agents, everything that leads to the
    offer included: taking in the item, making the job, choosing, the offer."""
    core = SchedulerCore(CoreSettings(), term=1, rng=random.Random(0), build="bench")
    shape = PolicyShape(batch_groups=1024, max_policy_lag=4)
    scenario = Scenario(name="decision", sites={"s": 50.0}, policies={"policy": shape})
    digest = make_digest("sim/policy", 0)
    effects = _feed(core, FromOperator("op", 1, RunSubmit(run=scenario.run_spec(0))), 0.0)
    stored = VersionStored(
        policy="sim/policy",
        version=0,
        parent=None,
        step=0,
        digest=digest,
        delta_bytes=1,
        full_bytes=1,
    )
    effects += _feed(core, FromService(WEIGHT_STORE, stored), 0.0)
    inventory = TrainerInventory(policy="sim/policy", checkpoint_step=0, checkpoint_version=0)
    trainer = Hello(role=Role.TRAINER, incarnation=1, build="b", trainer=inventory)
    effects += _feed(core, FromTrainer("t", trainer), 0.0)
    rng = random.Random(1)
    for number in range(agents):
        hello = Hello(
            role=Role.AGENT,
            incarnation=1,
            build="b",
            agent=AgentInventory(
                slots=rng.choice((4, 8, 16)),
                hardware=f"class-{rng.randrange(8)}",
                engine="sim",
                workflows={"single_turn": "sim"},
                rewards=("reasoning-gym",),
                versions={"sim/policy": VersionRef(version=0, digest=digest)},
            ),
        )
        effects += _feed(core, FromAgent(f"a{number:05d}", hello), 0.0)
    took_s, offers = 0.0, 0
    while asked := [effect for effect in effects if isinstance(effect, ProduceItems)]:
        items = make_items(asked[-1].start, asked[-1].count)
        began_s = time.process_time()
        effects = _feed(
            core, ItemsProduced(asked[-1].run, asked[-1].kind, asked[-1].start, items), 1.0
        )
        took_s += time.process_time() - began_s
        offers += sum(_offers(effect) for effect in effects)
    decision_s = took_s / max(1, offers)
    return Row(
        metric=f"decision at {agents} agents ({offers} offers)",
        value=1e6 * decision_s,
        unit="us of CPU",
        target=f"<= {1e6 * DECISION_S:.0f}",
        ok=offers > 1000 and decision_s <= DECISION_S,
    )


def _feed(core: SchedulerCore, event: Event, now: float) -> list[Effect]:
    effects = core.handle(event, now)
    core.take_changes()
    return effects


def _offers(effect: Effect) -> int:
    if not isinstance(effect, Send):
        return 0
    if isinstance(effect.message, LeaseOffers):
        return len(effect.message.offers)
    return int(isinstance(effect.message, LeaseOffer))
