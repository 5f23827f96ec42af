"""A deployment in virtual time that anything may happen to: production cores, the production store
on disk, modelled engines, services and links.

What always holds: faults are drawn from the seed alone; after ``settle`` nothing is wrong with any
process or link, and ``problems`` says which promises were broken meanwhile: books that do not
balance, groups lost or trained on twice, submitters' jobs without exactly one result, anything
that is left over.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.virtual_chaos_actors import (
    ChaosAgent,
    ChaosLog,
    ChaosNetwork,
    ChaosStore,
    ChaosTrainer,
    Person,
    Submitter,
)
from bench.virtual_chaos_scheduler import Death, DurableScheduler, operator
from edge_agent.core.settings import AgentSettings
from scheduler.core import effects as do
from scheduler.core.events import FromAgent, FromTrainer
from scheduler.core.settings import CoreSettings
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.actors.services import ModelledVersion
from sim.fair_share import Pipe
from sim.kernel import Kernel
from sim.ledger import Ledger
from sim.scenario import MBIT
from sim.topology import star
from sim.workload import Draws, Workload, make_digest
from transport.ids import job_of, policy_id
from transport.messages import (
    AgentOrder,
    LeaseOffer,
    LeaseOffers,
    Plane,
    RunCommand,
    RunSubmit,
)
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.status import AccountingRow

RUN: Final = "chaos"
POLICIES: Final = ("solver", "judge")
BATCH: Final = 4
SITES: Final = {"near": 0.01, "far": 0.12, "edge": 0.3}
"""Round trips to the cloud in seconds."""

WORKLOAD: Final = Workload(
    mean_tokens=250.0,
    cv_tokens=0.7,
    max_new_tokens=1500,
    train_s=1.5,
    delta_bytes=2_000_000,
    full_bytes=16_000_000,
    publish_s=0.2,
)
FAULT_GAP_S: Final = 2.5
SETTLE_S: Final = 1800.0
DEATHS: Final[tuple[Death, ...]] = ("before commit", "torn commit", "after commit")


class Replacement:
    """A job whose only counted attempt was lost with its agent, until it is placed again."""

    def __init__(self, lost_s: float, agent: str, scheduler_life: int) -> None:
        self.lost_s = lost_s
        self.agent = agent
        self.scheduler_life = scheduler_life


class World:
    """``check_every``: the scheduler's invariants hold at every so-manieth event."""

    def __init__(self, folder: Path, *, seed: int, agents: int = 6, check_every: int = 50) -> None:
        self.kernel = Kernel()
        self.ledger = Ledger()
        self.rng = random.Random(seed * 7919 + 3)
        self.network = ChaosNetwork(
            self.kernel,
            star(SITES, centre="cloud", jitter_s=0.002),
            random.Random(seed * 7919 + 1),
            mischief=random.Random(seed * 7919 + 2),
        )
        self.faults: Counter[str] = Counter()
        self.replaced_s: list[float] = []
        self.problems: list[str] = []
        self._replacing: dict[str, Replacement] = {}
        self._nic = (Pipe("nic-up", 2000 * MBIT), Pipe("nic", 2000 * MBIT))
        self._check = check_every <= 50
        self.scheduler = DurableScheduler(
            folder,
            CoreSettings(prompts_on_disk=True),
            kernel=self.kernel,
            network=self.network,
            seed=seed,
            check_every=check_every,
            # Some agents understand several offers in one message.
            takes_many=lambda peer: peer.endswith(("0", "2", "4")),
            on_effect=self._leaves,
        )
        common = {"kernel": self.kernel, "network": self.network, "workload": WORKLOAD}
        self.log = ChaosLog(**common, ledger=self.ledger)
        self.store = ChaosStore(**common)
        self._cloud(SCHEDULER, self._at_scheduler)
        self._cloud(LOG, self.log.receive)
        self._cloud(STORE, self.store.receive)
        self._unheard: list[tuple[int, str, Any, Any]] = []
        self.trainers = [self._trainer(name) for name in POLICIES]
        self.agents = [self._agent(number, seed) for number in range(agents)]
        self.operator = Person("op", self.kernel, self.network)
        self.submitter = Submitter(
            "submitter",
            RUN,
            self.kernel,
            self.network,
            random.Random(seed * 7919 + 4),
            lambda digest: digest in self.log.bodies,
        )
        for person in (self.operator, self.submitter):
            self._cloud(person.name, person.receive)
            self.scheduler.know(person.name, operator)

    # ---- building ------------------------------------------------------------------------------

    def _cloud(self, name: str, receive: Any) -> None:
        self.network.add(name, "cloud", *self._nic, receive)

    def _trainer(self, name: str) -> ChaosTrainer:
        trainer = ChaosTrainer(
            f"trainer-{name}",
            policy_id(RUN, name),
            kernel=self.kernel,
            network=self.network,
            workload=WORKLOAD,
            ledger=self.ledger,
            train_s=WORKLOAD.train_s,
            check=self._check,
        )
        self._cloud(trainer.name, trainer.receive)
        self.scheduler.know(trainer.name, lambda who, message, _: FromTrainer(who, message))
        return trainer

    def _agent(self, number: int, seed: int) -> ChaosAgent:
        site = tuple(SITES)[number % len(SITES)]
        name = f"agent-{number}"
        agent = ChaosAgent(
            name,
            AgentSettings(
                slots=10,
                hardware="class-a" if number % 2 else "class-b",
                engine="sim",
                workflows={"single_turn": "sim"},
                rewards=("reasoning-gym",),
                drain_s=5.0,
            ),
            kernel=self.kernel,
            network=self.network,
            draws=Draws(WORKLOAD),
            ledger=self.ledger,
            tokens_per_s=60.0 if number % 2 else 40.0,
            policies=[policy_id(RUN, policy) for policy in POLICIES],
            seed=seed * 100_003 + number,
            check=self._check,
        )
        rate = (200.0 if site == "near" else 50.0) * MBIT
        self.network.add(
            name, site, Pipe(f"{name}-up", rate), Pipe(f"{name}-down", rate), agent.receive
        )
        self.scheduler.know(name, lambda who, message, _: FromAgent(who, message))
        return agent

    def begin(self) -> None:
        """Everybody is up and the run is submitted."""
        self.scheduler.start()
        self.log.start()
        self.store.start()
        for name in POLICIES:
            policy = policy_id(RUN, name)
            digest = make_digest(policy, 0)
            self.store.adopt(ModelledVersion(policy, 0, None, 0, digest, WORKLOAD.full_bytes))
        self.operator.ask(RunSubmit(run=self._spec()))
        for trainer in self.trainers:
            trainer.start()
        for agent in self.agents:
            agent.start()
        self.kernel.after(2.0, self.submitter.beat)
        self.run(15.0)

    def _spec(self) -> RunSpec:
        return RunSpec(
            name=RUN,
            policies={
                name: PolicySpec(
                    model="sim",
                    trainer="numpy",
                    steps=1_000_000,
                    batch_groups=BATCH,
                    max_policy_lag=3,
                    checkpoint_every=4,
                )
                for name in POLICIES
            },
            task=TaskSpec(source="reasoning-gym", dataset="chain_sum"),
            workflow=WorkflowSpec(
                policies=POLICIES, group_size=2, max_new_tokens=WORKLOAD.max_new_tokens
            ),
            evaluation=EvaluationSpec(items=8, every_versions=10, items_between=6, items_per_job=3),
        )

    def run(self, for_s: float) -> None:
        self.kernel.run(self.kernel.now + for_s)

    # ---- the scheduler's process ---------------------------------------------------------------

    def _at_scheduler(self, source: str, message: Any, extra: Any) -> None:
        if self.scheduler.alive:
            self.scheduler.receive(source, message, extra)
        elif len(self._unheard) < 200:
            # Senders' sockets keep what they could not deliver, and deliver it to the next life.
            self._unheard.append((self.network.life(source), source, message, extra))

    def kill_scheduler(self, how: Death, down_s: float) -> None:
        """Let it die with its next commit."""
        if not self.scheduler.alive:
            return

        def gone() -> None:
            self._unheard.clear()
            self.network.reset(SCHEDULER)
            self.kernel.after(down_s, self._scheduler_back)

        self.scheduler.doom(gone, how)

    def _scheduler_back(self, _: object = None) -> None:
        if self.scheduler.alive:
            return
        self.scheduler.start()
        unheard, self._unheard = self._unheard, []
        if self.rng.random() < 0.5:
            for life, source, message, extra in unheard:
                if life == self.network.life(source):
                    self.scheduler.receive(source, message, extra)
        else:
            for agent in self.agents:
                agent.notice(Plane.CONTROL)

    # ---- losses --------------------------------------------------------------------------------

    def crash_agent(self, agent: ChaosAgent) -> None:
        """Kill an agent, and note whose only counted attempt goes with it."""
        if self.scheduler.alive:
            ctx = self.scheduler.core._ctx
            for lease in ctx.leases.values():
                job = ctx.tables.jobs[lease.job]
                counted = [record for record in job.attempts if not record.stray]
                if lease.agent == agent.name and lease.counted and len(counted) == 1:
                    lost = Replacement(self.kernel.now, agent.name, self.scheduler.lives)
                    self._replacing.setdefault(lease.job, lost)
        agent.crash()

    def _leaves(self, effect: do.Effect) -> None:
        if not self._replacing or type(effect) is not do.Send:
            return
        match effect.message:
            case LeaseOffer() as offer:
                self._offered(offer)
            case LeaseOffers(offers=offers):
                for offer in offers:
                    self._offered(offer)
            case _:
                pass

    def _offered(self, offer: LeaseOffer) -> None:
        lost = self._replacing.pop(job_of(offer.attempt), None)
        if lost is not None and lost.scheduler_life == self.scheduler.lives:
            self.replaced_s.append(self.kernel.now - lost.lost_s)

    def not_replaced(self) -> list[str]:
        """Jobs that still wait for another attempt."""
        jobs = self.scheduler.core._ctx.tables.jobs
        return [
            f"{id} since {self.kernel.now - lost.lost_s:.1f} s"
            for id, lost in self._replacing.items()
            if id in jobs and jobs[id].state == "queued"
        ]

    # ---- the end -------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: train on for a few steps, deliver every result, stop, come to rest."""
        self.heal()
        goals = {trainer.policy: trainer.step + 3 for trainer in self.trainers}
        self._until(
            "three more steps of every trainer and every submitted job's result",
            lambda: (
                all(t.step >= goals[t.policy] for t in self.trainers)
                and not self.submitter.unanswered
            ),
        )
        self.operator.ask(RunCommand(run=RUN, command="stop"))
        self._until("the end of the run", lambda: RUN in self.scheduler.ended)
        self._until(
            "nothing left",
            lambda: (
                not self.scheduler.leaks()
                and not self.log.bodies
                and not any(a.spooled for a in self.agents)
            ),
        )
        self.run(20.0)
        self._audit()

    def heal(self) -> None:
        """Everybody is up and reachable, and may work."""
        self.network.mend()
        self._scheduler_back()
        for name, service in ((LOG, self.log), (STORE, self.store)):
            self.network.cut(name, is_cut=False)
            if not service.alive:
                self._service_back(name)
        for trainer in self.trainers:
            self.network.cut(trainer.name, is_cut=False)
            if not trainer.alive:
                trainer.start()
        for agent in self.agents:
            agent.resting = False
            self.network.cut(agent.name, is_cut=False)
            self.network.slow_down(agent.name, 0.0, 1.0)
            if agent.alive:
                agent.link_up()
            else:
                agent.start()
            for order in ("uncordon", "release"):
                self.operator.ask(AgentOrder(agent=agent.name, order=order))
        self.operator.ask(RunCommand(run=RUN, command="resume"))

    def _service_back(self, name: str) -> None:
        self.network.cut(name, is_cut=False)
        if name == LOG:
            self.log.back(self.rng)
        else:
            self.store.back()
        plane = Plane.TRAJECTORIES if name == LOG else Plane.WEIGHTS
        for agent in self.agents:
            agent.notice(plane)

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        until_s = self.kernel.now + SETTLE_S
        while not holds():
            if self.kernel.now >= until_s:
                self.problems.append(f"not within {SETTLE_S:.0f} s after the last fault: {what}")
                return
            self.run(1.0)

    def accounting(self) -> list[AccountingRow]:
        runs = self.scheduler.core.status(self.kernel.now).runs
        return [row for run in runs for row in run.accounting]

    def _audit(self) -> None:
        self.scheduler.core.check()
        self.problems += self.scheduler.problems + self.submitter.problems + self.scheduler.leaks()
        trained = {trainer.policy: trainer.lineage() for trainer in self.trainers}
        for row in self.accounting():
            name = f"{row.policy} {row.kind}"
            if row.balance:
                self.problems.append(f"{name}: balance {row.balance}")
            left = row.queued + row.in_flight + row.buffered + row.taken
            if left:
                self.problems.append(f"{name}: {left} groups never ended")
            if row.kind == "train" and row.trained != len(trained[row.policy]):
                counted = len(trained[row.policy])
                self.problems.append(f"{name}: {row.trained} trained, the lineage has {counted}")
            if row.kind == "train" and row.failed:
                self.problems.append(f"{name}: {row.failed} dead letters")
        for policy, jobs in trained.items():
            twice = [job for job, times in Counter(jobs).items() if times > 1]
            if twice:
                self.problems.append(f"{policy}: trained on twice: {twice[:5]}")
            if len(jobs) % BATCH or not jobs:
                self.problems.append(f"{policy}: {len(jobs)} groups in whole batches of {BATCH}")
        if self.ledger.twice:
            self.problems.append(f"{self.ledger.twice} bodies used twice in one lineage")
        if self.submitter.unanswered:
            self.problems.append(f"jobs without a result: {self.submitter.unanswered[:5]}")
        left_behind = {a.name: a.core.dump() for a in self.agents}
        for name, dump in left_behind.items():
            if dump["attempts"] or dump["spooled"]:
                self.problems.append(f"{name} still holds {dump['attempts']} {dump['spooled']}")
        if self.log.bodies:
            self.problems.append(f"{len(self.log.bodies)} bodies are kept for nobody")
