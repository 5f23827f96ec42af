"""One simulation: build the world of a scenario and a seed, run it, say what came out.

What always holds: everything random comes from the seed; the fleet, the lengths of sequences and
the faults do not depend on the placement rule; after a run the books balance (``Result.problems``).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_agent.core.settings import AgentSettings
from scheduler.core.events import FromAgent, FromTrainer
from scheduler.core.settings import PlacementName
from sim.actors.agent import AgentActor
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.actors.scheduler import SchedulerActor
from sim.actors.services import ModelledVersion, TrajectoryLogActor, WeightStoreActor
from sim.actors.trainer import TrainerActor
from sim.fair_share import Pipe
from sim.faults import Fault, all_faults
from sim.kernel import History, Kernel
from sim.ledger import Ledger, Step
from sim.measures import Measures, measure
from sim.network import Host, Network
from sim.recording import AgentFacts, Recorder, Recording
from sim.scenario import RUN, AgentPlan, PolicyShape, Scenario
from sim.workload import Draws, Steps, make_digest
from transport.errors import ConfigError
from transport.ids import policy_id
from transport.status import AccountingRow

if TYPE_CHECKING:
    from transport.status import SchedulerStatus


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation gave. ``steps_hour`` is over all measured steps of the slowest policy,
    from time 0; ``finished`` false: ``limit_s`` came first. ``idle_share`` is of all slots' time.
    ``digest`` is empty unless history was kept."""

    scenario: str
    placement: str
    seed: int
    finished: bool
    virtual_s: float
    steps: dict[str, int]
    steps_hour: float
    wasted_share: float
    wasted_token_share: float
    idle_share: float
    lag_mean: float
    waiting_share: float
    turnaround_p50_s: float
    turnaround_p95_s: float
    accounting: tuple[AccountingRow, ...]
    counters: dict[str, int]
    events: int
    scheduler_events: int
    messages: int
    lost_messages: int
    digest: str
    problems: tuple[str, ...]


class Simulation:
    """A world at time 0. ``check`` verifies every core after each of its events; ``plans`` takes
    the place of the scenario's fleet, ``draws`` of its lengths and rewards, ``faults`` of its
    faults (an agent whose first one is a return starts with it). ``recording`` is empty unless
    ``record``. ``on_second`` is called once per virtual second."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        placement: PlacementName = "finish-time",
        seed: int = 0,
        check: bool = False,
        history: bool = False,
        record: bool = False,
        plans: Sequence[AgentPlan] | None = None,
        draws: Draws | None = None,
        faults: Sequence[Fault] | None = None,
    ) -> None:
        self.scenario = scenario
        self.placement = placement
        self.seed = seed
        self.kernel = Kernel()
        self.ledger = Ledger()
        self.history = History() if history else None
        rng = random.Random(seed * 7919 + 1)  # noqa: S311
        self.network = Network(self.kernel, scenario.topology(), rng, self.history, scenario)
        self.plans = scenario.fleet(seed) if plans is None else list(plans)
        self.on_second: Callable[[], None] | None = None
        self._planned = None if faults is None else sorted(faults)
        self._draws = Draws(scenario.workload) if draws is None else draws
        self._hosts: dict[str, Host] = {}
        self._nic = (
            Pipe("nic-up", scenario.nic_rate),
            Pipe("nic", scenario.nic_rate),
        )
        workload = scenario.workload
        self.scheduler = SchedulerActor(
            scenario.core_settings(placement),
            kernel=self.kernel,
            network=self.network,
            items_s=workload.items_s,
            seed=seed,
            check=check,
            data_modules=scenario.data_modules,
        )
        self.log = TrajectoryLogActor(
            kernel=self.kernel, network=self.network, workload=workload, ledger=self.ledger
        )
        self._steps = Steps(workload)
        self.store = WeightStoreActor(
            kernel=self.kernel, network=self.network, workload=workload, deltas=self._steps
        )
        for name, receive in (
            (SCHEDULER, self.scheduler.receive),
            (LOG, self.log.receive),
            (STORE, self.store.receive),
        ):
            self.network.add(name, scenario.cloud, *self._nic, receive)
        self.trainers = {
            name: self._trainer(name, shape, check) for name, shape in scenario.policies.items()
        }
        self.agents = {
            plan.name: self._agent(index, check) for index, plan in enumerate(self.plans)
        }
        if record:
            self.ledger.recorder = self._recorder()
            self.store.on_durable = self.ledger.recorder.published
        self._targets = {
            policy: scenario.steps
            for name in scenario.policies
            if name not in scenario.faults.dead_trainers or scenario.faults.trainer_down_s > 0.0
            for policy in [policy_id(RUN, name)]
        }

    def run(self) -> Result:
        """Raises ConfigError when the scheduler refuses the run."""
        self.log.start()
        self.store.start()
        for name in self.scenario.policies:
            policy = policy_id(RUN, name)
            digest = make_digest(policy, 0)
            full = self.scenario.workload.full_bytes
            self.store.adopt(ModelledVersion(policy, 0, None, 0, digest, full))
        reply = self.scheduler.submit(self.scenario.run_spec(self.seed))
        if not reply.ok:
            raise ConfigError(f"scenario {self.scenario.name}: {reply.code}: {reply.message}")
        for trainer in self.trainers.values():
            self.kernel.at(0.0, trainer.start)
        faults = self._faults() if self._planned is None else self._planned
        lives = ("crash", "return")
        first = {fault.host: fault.what for fault in reversed(faults) if fault.what in lives}
        for fault in faults:
            if fault.what == "skew" and fault.at_s <= 0.0:
                self._fault(fault)  # before anybody looks at a clock
        for number, agent in enumerate(self.agents.values()):
            if first.get(agent.name) != "return":
                self.kernel.at(0.001 * number, agent.start)
        for fault in faults:
            if fault.what != "skew" or fault.at_s > 0.0:
                self.kernel.at(fault.at_s, self._fault, fault)
        self.kernel.after(1.0, self._watch)
        if self.ledger.recorder is not None:
            self.ledger.recorder.watch(self.agents)
        self.kernel.run(self.scenario.limit_s)
        return self._result()

    @property
    def steps_made(self) -> int:
        """Of the policy that has made fewest."""
        steps = self.ledger.steps
        return min((len(steps.get(policy, ())) for policy in self._targets), default=0)

    @property
    def recording(self) -> Recording | None:
        """What was recorded until now."""
        recorder = self.ledger.recorder
        return None if recorder is None else recorder.result(self.agents)

    def measures(self) -> Measures:
        """What an emulation of the same scenario is compared by."""
        names = self.scenario.policies
        return measure(
            self.scheduler.steps,
            next(run for run in self._status().runs if run.name == RUN),
            most={policy_id(RUN, name): self.scenario.steps for name in names},
            batch_groups={policy_id(RUN, name): s.batch_groups for name, s in names.items()},
        )

    def link_bytes(self, agent: str) -> tuple[int, int]:
        """Bytes that an agent's access link carried, up and down."""
        return self._hosts[agent].bytes_up, self._hosts[agent].bytes_down

    def problems(self) -> list[str]:
        """Where the books of scheduler, services and engines contradict each other."""
        found = [
            f"{row.policy} {row.kind}: balance {row.balance}"
            for row in self._accounting()
            if row.balance
        ]
        ledger = self.ledger
        known = ledger.made_groups - ledger.wasted_groups - ledger.trained_groups
        held = sum(digest not in ledger.trained for digest in self.log.bodies)
        if known < held:
            found.append(f"{held} bodies are held, {known} can be")
        if ledger.twice:
            found.append(f"{ledger.twice} groups were trained on twice")
        return found

    # ---- building ------------------------------------------------------------------------------

    def _trainer(self, name: str, shape: PolicyShape, check: bool) -> TrainerActor:
        workload = self.scenario.workload
        actor = TrainerActor(
            f"trainer-{name}",
            policy_id(RUN, name),
            kernel=self.kernel,
            network=self.network,
            workload=workload,
            ledger=self.ledger,
            train_s=workload.train_s if shape.train_s is None else shape.train_s,
            train_cv=workload.train_cv if shape.train_cv is None else shape.train_cv,
            seed=self.seed,
            deltas=self._steps,
            check=check,
        )
        self.network.add(actor.name, self.scenario.cloud, *self._nic, actor.receive)
        self.scheduler.know(actor.name, FromTrainer)
        return actor

    def _agent(self, index: int, check: bool) -> AgentActor:
        plan = self.plans[index]
        policies: list[str] = [policy_id(RUN, name) for name in self.scenario.policies]
        settings = AgentSettings(
            slots=plan.slots,
            hardware=plan.hardware,
            engine="sim",
            workflows={"single_turn": "sim"},
            rewards=("reasoning-gym",),
            labels={"region": plan.site},
            price_usd_hour=plan.usd_hour,
        )
        actor = AgentActor(
            plan.name,
            settings,
            kernel=self.kernel,
            network=self.network,
            draws=self._draws,
            ledger=self.ledger,
            tokens_per_s=plan.tokens_per_s,
            policies=policies,
            seed=self.seed * 100_003 + index,
            check=check,
        )
        up, down = Pipe(f"{plan.name}-up", plan.up), Pipe(plan.name, plan.down)
        host = self.network.add(plan.name, plan.site, up, down, actor.receive)
        self._hosts[plan.name] = host
        self.scheduler.know(plan.name, FromAgent)
        return actor

    def _recorder(self) -> Recorder:
        topology, cloud = self.scenario.topology(), self.scenario.cloud
        facts = [
            AgentFacts(
                plan.name,
                plan.site,
                plan.slots,
                plan.tokens_per_s,
                plan.up,
                plan.down,
                topology.rtt_s(plan.site, cloud),
            )
            for plan in self.plans
        ]
        ledger = self.ledger

        def tokens() -> tuple[int, int, int]:
            wasted = ledger.wasted_tokens + ledger.aborted_tokens
            return ledger.trained_tokens, wasted, ledger.drawn_tokens

        return Recorder(
            self.kernel,
            cloud=cloud,
            agents=facts,
            bounds={
                policy_id(RUN, name): shape.max_policy_lag
                for name, shape in self.scenario.policies.items()
            },
            link_bytes=self.link_bytes,
            tokens=tokens,
        )

    def _faults(self) -> list[Fault]:
        places = [(plan.name, plan.site) for plan in self.plans]
        scenario = self.scenario
        return all_faults(
            scenario.faults, places, list(scenario.policies), self.seed, scenario.limit_s
        )

    def _fault(self, fault: Fault) -> None:
        actors: dict[str, AgentActor | TrainerActor] = {
            **self.agents,
            **{trainer.name: trainer for trainer in self.trainers.values()},
        }
        actor = actors[fault.host]
        if fault.what in ("cut", "restore"):
            self.network.cut(fault.host, is_cut=fault.what == "cut")
        actor.strike(fault)

    # ---- the end -------------------------------------------------------------------------------

    def _watch(self, _: object) -> None:
        steps = self.ledger.steps
        if self.on_second is not None:
            self.on_second()
        if all(_reached(steps.get(policy, []), most) for policy, most in self._targets.items()):
            self.kernel.stop()
        else:
            self.kernel.after(1.0, self._watch)

    def _accounting(self) -> tuple[AccountingRow, ...]:
        return tuple(row for run in self._status().runs for row in run.accounting)

    def _status(self) -> "SchedulerStatus":
        return self.scheduler.core.status(self.kernel.now)

    def _result(self) -> Result:
        ledger, now = self.ledger, self.kernel.now
        most = self.scenario.steps
        measured = {
            policy: [step for step in ledger.steps.get(policy, []) if step.step <= most]
            for policy in self._targets
        }
        finished = all(_reached(steps, most) for steps in measured.values())
        rates = [
            3600.0 * steps[-1].step / steps[-1].at_s if steps else 0.0
            for steps in measured.values()
        ]
        steps = [step for found in measured.values() for step in found]
        lags = [lag for step in steps for lag in step.lags]
        slot_s = now * sum(plan.slots for plan in self.plans)
        turnaround = sorted(ledger.turnaround_s)
        return Result(
            scenario=self.scenario.name,
            placement=self.placement,
            seed=self.seed,
            finished=finished,
            virtual_s=now,
            steps={policy: found[-1].step if found else 0 for policy, found in measured.items()},
            steps_hour=min(rates, default=0.0),
            wasted_share=ledger.wasted_share,
            wasted_token_share=ledger.wasted_token_share,
            idle_share=1.0 - sum(a.engine.busy_s for a in self.agents.values()) / max(slot_s, 1e-9),
            lag_mean=sum(lags) / max(1, len(lags)),
            waiting_share=sum(step.waiting_s for step in steps) / max(now * len(measured), 1e-9),
            turnaround_p50_s=_percentile(turnaround, 0.5),
            turnaround_p95_s=_percentile(turnaround, 0.95),
            accounting=self._accounting(),
            counters=dict(self._status().counters),
            events=self.kernel.events,
            scheduler_events=self.scheduler.handled,
            messages=self.network.sent,
            lost_messages=self.network.lost,
            digest="" if self.history is None else self.history.digest(),
            problems=tuple(self.problems()),
        )


def simulate(
    scenario: Scenario, placement: PlacementName, seed: int, *, history: bool = False
) -> Result:
    """Run a scenario under one rule and seed."""
    return Simulation(scenario, placement=placement, seed=seed, history=history).run()


def _reached(steps: list["Step"], most: int) -> bool:
    return bool(steps) and steps[-1].step >= most


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
