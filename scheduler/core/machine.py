"""The rollout scheduler's state machine.

What always holds (``check`` enforces it, the property test hunts it):

1. ``handle`` never raises on what a peer says; a refusal has a code and a counter.
2. Nothing is read but the arguments: equal events at equal times give equal effects, under any
   ``PYTHONHASHSEED``.
3. Rows taken with ``take_changes`` after any event are all that a restart needs.
4. Each event changes rows and marks what is due; then, in this order, policies drop what is too
   old and grant batches, runs evaluate, admit and finish, jobs are placed, bodies are released.
   This repeats until nothing is due.

    events --> agents trainers results requests --> attempts jobs accounting --> rows
                        |  due                      ^
                        v                           |
               consumption -> runs/evaluation/intake -> dispatch -> effects -> waits
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core import (
    agents,
    consumption,
    costs,
    curation,
    demand,
    dispatch,
    evaluation,
    external,
    intake,
    invariants,
    loading,
    partials,
    rechecks,
    requests,
    results,
    runs,
    status,
    trainers,
    waits,
)
from scheduler.core import attempts as attempts_module
from scheduler.core.accounting import open_copies
from scheduler.core.context import Context
from scheduler.core.effects import Effect
from scheduler.core.events import (
    AgentRevoked,
    Event,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    ItemsProduced,
    TaskSourceFailed,
    Tick,
    Verdicts,
)
from scheduler.core.histories import ItemHistory
from scheduler.core.settings import TRAJECTORY_LOG, CoreSettings
from scheduler.core.state import Change, Row
from transport.errors import InvariantViolation
from transport.messages import (
    BodiesGone,
    Goodbye,
    Hello,
    Item,
    Message,
    PartialStored,
    Ping,
    Pong,
    TrajectoriesStored,
    VersionStored,
    Welcome,
)
from transport.runs import RunSpec
from transport.status import DemandStatus, SchedulerStatus

if TYPE_CHECKING:
    import random

MAX_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is being made: its run, its item, and the ids of the policies that want it."""

    spec: RunSpec
    index: int
    family: str
    policies: tuple[str, ...]


class SchedulerCore:
    """Feed events with ``handle``; store ``take_changes`` before executing the effects.

    ``rows`` are (table, key, MessagePack) as last stored. After construction ``next_deadline`` is
    ``now``: the first ``handle`` (a ``Tick`` at the latest) restarts the task sources of live
    runs. ``now`` goes on from the last life's value and never back.
    """

    def __init__(
        self,
        settings: CoreSettings,
        *,
        term: int,
        rng: "random.Random",
        build: str,
        rows: Iterable[Row] = (),
        now: float = 0.0,
    ) -> None:
        """Raises ``StoreError`` for a row that is unknown or does not decode."""
        self._ctx = Context(settings, term=term, rng=rng, build=build, now=now)
        self._booted = False
        loading.load(self._ctx, rows)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; what comes back is to be done in order, after the commit."""
        ctx = self._ctx
        ctx.now = max(ctx.now, now)
        if not self._booted:
            self._booted = True
            loading.boot(ctx)
        match event:
            case FromAgent(agent=name, message=message):
                agents.message(ctx, name, message)
            case AgentRevoked(agent=name):
                agents.revoked(ctx, name)
            case FromTrainer(trainer=name, message=message):
                trainers.message(ctx, name, message)
            case FromService(service=name, message=message, verdicts=verdicts):
                self._service(name, message, verdicts)
            case FromOperator():
                requests.answer(ctx, event)
            case ItemsProduced(kind="train"):
                runs.items_produced(ctx, event.run, event.start, event.items, event.verdicts)
            case ItemsProduced():
                run = ctx.tables.runs.get(event.run)
                if run is not None and run.live:
                    evaluation.items_produced(ctx, run, event.evaluation, event.start, event.items)
            case TaskSourceFailed(run=name, code=code, message=text):
                runs.source_failed(ctx, name, code, text)
            case Tick():
                self._tick()
        self._settle()
        waits.answer_ready(ctx)
        effects, ctx.effects = ctx.effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due."""
        return self._ctx.timers.next_due() if self._booted else self._ctx.now

    def take_changes(self) -> list[Change]:
        """Rows changed since the last call, None for a deleted one; O(changed)."""
        return self._ctx.tables.take_changes()

    def dump(self) -> list[Row]:
        """Every row: what a new life could be made of."""
        return self._ctx.tables.dump()

    def status(self, now: float) -> SchedulerStatus:
        return status.build(self._ctx, now)

    def demand(self) -> tuple[DemandStatus, ...]:
        """How many more slots would help each running run, and why not when none would."""
        return demand.demands(self._ctx)

    def open_group(self, job: str) -> OpenGroup | None:
        """What data functions may know of a training job that has no result yet."""
        found = self._ctx.tables.jobs.get(job)
        if found is None or found.kind != "train" or found.state == "done" or not found.items:
            return None
        spec, item = self._ctx.tables.runs[found.run].spec, found.items[0]
        return OpenGroup(spec, item.index, item.family, tuple(open_copies(found)))

    def run_spec(self, run: str) -> RunSpec | None:
        """A live run as it was submitted."""
        return self._ctx.tables.runs[run].spec if run in self._ctx.runs else None

    def histories(self, run: str, item: Item) -> tuple[ItemHistory | None, ItemHistory | None]:
        """What came of an item of a run, and of its family, so far; not to be changed."""
        own = curation.find(self._ctx, run, curation.item_key(item))
        return own, curation.find(self._ctx, run, curation.family_key(item.family))

    def check(self) -> None:
        """All invariants, O(everything); raises ``InvariantViolation`` with the story."""
        invariants.check(self._ctx)

    def story(self, id: str) -> list[str]:
        """What happened lately to a job, attempt, agent, policy, run or evaluation."""
        return self._ctx.story(id)

    # ---- services --------------------------------------------------------------

    def _service(self, name: str, message: Message, verdicts: tuple[Verdicts, ...]) -> None:
        ctx = self._ctx
        match message:
            case Hello():
                welcome = Welcome(
                    term=ctx.term,
                    heartbeat_s=ctx.settings.heartbeat_s,
                    lost_after_s=ctx.settings.lost_after_s,
                    incarnation=message.incarnation,
                )
                ctx.send(name, welcome)
                if name == TRAJECTORY_LOG:
                    if ctx.runs:
                        ctx.log_back_s = ctx.now
                    results.repeat_releases(ctx, name)
                    rechecks.show(ctx, name)
            case Ping(sequence=sequence, sent_s=sent_s):
                ctx.send(name, Pong(sequence=sequence, sent_s=sent_s))
            case TrajectoriesStored():
                results.stored(ctx, name, message, verdicts)
            case PartialStored():
                partials.stored(ctx, message)
            case BodiesGone():
                results.bodies_gone(ctx, name, message)
            case VersionStored():
                trainers.version_stored(ctx, name, message)
            case Goodbye():
                ctx.note(name, "goodbye")
            case _:
                ctx.count("services.unexpected_message")

    # ---- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        timers = self._ctx.timers
        while (due := timers.pop(self._ctx.now)) is not None:
            self._timer(*due)

    def _timer(self, kind: str, id: str) -> None:
        ctx = self._ctx
        match kind:
            case "agent":
                agents.liveness_due(ctx, id)
            case "attempt":
                agents.attempt_due(ctx, id)
            case "job":
                job = ctx.tables.jobs.get(id)
                if job is not None:
                    attempts_module.settle(ctx, job)
            case "expire":
                external.deadline_due(ctx, id)
            case "wait":
                waits.due(ctx, int(id))
            case "unblock":
                agents.unblock_due(ctx, id)
            case "forget":
                agents.forget_due(ctx, id)
            case "admit" | "cancel":
                ctx.due_runs[id] = None
            case "trainer":
                trainers.liveness_due(ctx, id)
            case "produce" if id in ctx.evaluations:
                evaluation.produce_due(ctx, id)
            case "produce":
                intake.produce_due(ctx, id)
            case "release":
                results.repeat_releases(ctx, TRAJECTORY_LOG)
            case _:
                self._sweep()

    def _sweep(self) -> None:
        """What depends on time or on all agents, once per heartbeat while there are runs."""
        ctx = self._ctx
        costs.accrue(ctx, ctx.now - ctx.swept_s)
        ctx.swept_s = ctx.now
        dispatch.watch(ctx)
        for id, live in ctx.policies.items():
            live.lengths.look(ctx.now)
            if live.unplaced:
                consumption.give_up_unplaced(ctx, ctx.tables.policies[id])
        for name in ctx.runs:
            evaluation.restart_unservable(ctx, ctx.tables.runs[name])
        if any(len(queue) for queue in ctx.queues.values()):
            ctx.dispatch_due = True
        if ctx.runs:
            ctx.timers.set("sweep", "", ctx.now + ctx.settings.heartbeat_s)

    def _settle(self) -> None:
        ctx = self._ctx
        for _ in range(MAX_ROUNDS):
            if ctx.due_policies:
                due, ctx.due_policies = ctx.due_policies, {}
                for id in due:
                    if id in ctx.policies:
                        consumption.advance(ctx, ctx.tables.policies[id])
            elif ctx.due_runs:
                due, ctx.due_runs = ctx.due_runs, {}
                for name in due:
                    if name in ctx.runs:
                        runs.advance(ctx, ctx.tables.runs[name])
            elif ctx.dispatch_due:
                dispatch.place(ctx)
            else:
                break
        else:
            raise InvariantViolation("nothing comes to rest: " + "; ".join(_last(ctx)))
        if ctx.new_releases:
            released, ctx.new_releases = ctx.new_releases, []
            results.send_releases(ctx, TRAJECTORY_LOG, released)


def _last(ctx: Context) -> list[str]:
    return [f"{subject} {what}" for _, subject, what, _ in list(ctx.entries)[-20:]]
