"""What a trainer does next: one policy, one step at a time, along one lineage.

What always holds:

1. At most one step runs; steps rise by one; a step is only ever run on the groups that the
   scheduler granted for it, and no job is trained on for the first time twice along a lineage.
2. A version number is the highest ever given plus one and is never given again; its parent is the
   version that the step started from; weights that are not finite get no version. Who begins
   below the highest number publishes the checkpoint's weights once more, above it: agents only
   move to higher numbers, so nothing else leads them away from versions that were given up.
3. Fewer than ``max_undurable`` versions are on their way to the weight store when a step starts.
4. A checkpoint counts once its state and the files of its version are durable; it is reported once
   the weight store has that version. A restart begins at a checkpoint that counts.
5. Everything that the scheduler must know is standing or repeated: ``Hello``, ``BatchRequest``,
   the reports of steps that no later grant has confirmed, the final report. A live trainer that
   says hello again goes on where it is; only a new incarnation starts from its checkpoint. A
   request that its link did not take is made again within ``max_resend_s``.

    joining -> loading -> waiting <-> fetching -> stepping -> waiting
                             |                                            any -> exited
                             +-> finishing -> done
"""

from typing import Any

from cloud_trainer.core import effects as do
from cloud_trainer.core import events as on
from cloud_trainer.core import invariants
from cloud_trainer.core.backoff import Backoff
from cloud_trainer.core.batch import Batch, refusals
from cloud_trainer.core.checkpointing import Checkpoints
from cloud_trainer.core.effects import Effect, LineageStep
from cloud_trainer.core.ending import Ending
from cloud_trainer.core.events import Event
from cloud_trainer.core.journal import Journal
from cloud_trainer.core.orders import Orders
from cloud_trainer.core.phase import Phase
from cloud_trainer.core.publishing import Publications
from cloud_trainer.core.reports import StepReports
from cloud_trainer.core.session import SchedulerSession
from cloud_trainer.core.settings import CoreSettings, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from transport import messages as wire
from transport.messages import GroupRef, Message

NON_FINITE = "trainer.nonfinite"


class TrainerCore:
    """The trainer of one policy as a pure state machine.

    ``trained`` are the jobs of the lineage up to ``position``, from the checkpoint.
    """

    def __init__(
        self,
        settings: CoreSettings,
        position: StartPosition,
        *,
        trained: TrainedJobs | None = None,
    ) -> None:
        self.phase = Phase.JOINING
        self.step = position.step
        self.head_version = position.version
        self.highest_version = max(position.highest_version, position.version)
        self.journal = Journal()
        self.counters = self.journal.counters
        self.publications = Publications(settings)
        self.checkpoints = Checkpoints(settings.policy, position.step, position.version)
        self.session = SchedulerSession(settings, self.checkpoints.inventory)
        self.batch: Batch | None = None
        self.running: tuple[GroupRef, ...] = ()
        self.trained = TrainedJobs() if trained is None else trained
        self.most_undurable = max(settings.max_undurable, len(position.pending) + 1)
        self._settings = settings
        self._pending = position.pending
        self._orders = Orders(settings.policy)
        self._ending = Ending(self.checkpoints, self.publications, grace_s=settings.leave_grace_s)
        self._again: int | None = None
        self._resend = Backoff(settings.resend_s, settings.max_resend_s)
        self._reports = StepReports(settings.policy)
        self._repeat_due = 0.0

    # ---- the calls of a core ---------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; what comes back is to be done in order."""
        if self.phase is Phase.EXITED:
            return []
        effects: list[Effect] = []
        match event:
            case on.FromScheduler(message=message):
                self._from_scheduler(message, now, effects)
            case on.FromTrajectoryLog(message=message):
                self._from_log(message, now, effects)
            case on.FromWeightStore(message=message):
                effects += self.publications.heard(message, now)
            case on.BodyChecked():
                self._body_checked(event, now)
            case on.ModelReady():
                self._model_ready(now, effects)
            case on.StepFinished():
                self._step_finished(event, now, effects)
            case on.VersionReady(version=version, offer=offer):
                if self.publications.ready(version, offer) and version == self._again:
                    self.checkpoints.version = version
            case on.CheckpointWritten(step=step):
                self.checkpoints.written(step)
            case on.CheckpointCommitted(step=step):
                if self.checkpoints.committed(step):
                    self.journal.note(now, f"checkpoint of step {step} counts")
            case on.ModelExported():
                self._ending.exported()
            case on.NotSent(message=message):
                self._not_sent(message, now)
            case on.StopRequested():
                self._orders.leaving = True
                self.journal.note(now, "asked to leave")
            case on.Tick():
                pass
            case _:
                self.journal.count("event.unknown")
        if not self._ended(effects, now):
            self._advance(now, effects)
            self._ended(effects, now)
        return effects

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due."""
        if self.phase is Phase.EXITED:
            return None
        dues = [self.session.next_deadline(), self.publications.next_deadline(), self._ending.due]
        if self.session.joined and self._repeats():
            dues.append(self._repeat_due)
        if self.batch is not None:
            dues.append(self.batch.next_deadline())
        return min((due for due in dues if due is not None), default=None)

    def check(self) -> None:
        """All invariants; raises ``InvariantViolation`` with the story."""
        invariants.check(self)

    def story(self, word: str) -> list[str]:
        """What happened lately to a job, step or version; everything for the empty word."""
        return self.journal.story(word)

    def dump(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "joined": self.session.joined,
            "step": self.step,
            "head_version": self.head_version,
            "highest_version": self.highest_version,
            "checkpoint_step": self.checkpoints.step,
            "undurable": self.publications.undurable,
            "refused": {} if self.batch is None else dict(self.batch.refused),
            "counters": dict(sorted(self.counters.items())),
        }

    # ---- events ----------------------------------------------------------------------------

    def _from_scheduler(self, message: Message, now: float, effects: list[Effect]) -> None:
        self.session.heard(now)
        match message:
            case wire.Welcome() | wire.Refuse() if not self.session.asked_for(message):
                self.journal.count("answer.of_another_life")
            case wire.Welcome():
                self._welcomed(message, now, effects)
            case wire.Refuse(retry_s=None, code=code):
                status = 0 if code == "run.finished" else 1
                effects.append(do.Exit(status=status, code=code, message=message.message))
            case wire.Refuse(code=code, retry_s=retry_s):
                self.journal.count(f"refused.{code}")
                self.session.refused(retry_s or 0.0, now)
            case wire.HelloRequired():
                self.session.hello_required(now)
            case wire.BatchGrant():
                self._granted(message, now, effects)
            case wire.RunState(run=run, state=state) if self._orders.concerns(run):
                self._run_state(state, now, effects)
            case wire.Pong():
                pass
            case _:
                self.journal.count("message.unexpected")

    def _welcomed(self, message: wire.Welcome, now: float, effects: list[Effect]) -> None:
        first = self._orders.run is None
        problem = self._orders.welcomed(message)
        if problem is not None:
            effects.append(do.Exit(status=1, code=problem[0], message=problem[1]))
            return
        self.session.welcomed(message, now)
        self.highest_version = max(self.highest_version, message.highest_version)
        self._repeat_due = now
        self.journal.note(now, f"welcomed in term {message.term}")
        if first and self._orders.run is not None:
            self.phase = Phase.LOADING
            effects.append(do.LoadModel(run=self._orders.run))

    def _run_state(self, state: str, now: float, effects: list[Effect]) -> None:
        self.journal.note(now, f"run is {state}")
        self._orders.state(state)
        if state == "finished" and self.phase is Phase.DONE:
            effects.append(do.Exit(status=0, code="run.finished", message="the run is finished"))

    def _granted(self, grant: wire.BatchGrant, now: float, effects: list[Effect]) -> None:
        expected = self.phase in (Phase.WAITING, Phase.FETCHING) and not self._orders.ending(
            self.step
        )
        mine = grant.policy == self._settings.policy and grant.step == self.step + 1
        if not (expected and mine and grant.groups):
            self.journal.count("grant.ignored")
            return
        self._reports.granted(grant.step)
        self._resend.reset()
        if self.batch is None:
            self.batch = Batch(self._settings, grant.step)
            self.phase = Phase.FETCHING
        effects += self.batch.adopt(grant.groups, self.trained)
        self._repeat_due = now + self._settings.request_every_s
        jobs = " ".join(ref.job for ref in grant.groups)
        self.journal.note(now, f"step {grant.step} granted: {jobs}")

    def _from_log(self, message: Message, now: float, effects: list[Effect]) -> None:
        if not isinstance(message, wire.Body):
            self.journal.count("message.unexpected")
        elif self.batch is not None and self.batch.arrived(message, now):
            effects.append(do.CheckBody(digest=message.digest))

    def _body_checked(self, event: on.BodyChecked, now: float) -> None:
        if event.code:
            self.journal.count(event.code)
        if self.batch is not None:
            self.batch.checked(event, now)

    def _not_sent(self, message: Message, now: float) -> None:
        if isinstance(message, wire.BatchRequest):
            self._repeat_due = min(self._repeat_due, now + self._resend.next_s())
        elif isinstance(message, wire.BodyRequest) and self.batch is not None:
            self.batch.not_sent(message.digests, now)

    def _model_ready(self, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.LOADING:
            return
        self.phase = Phase.WAITING
        self._repeat_due = now
        self._reports.waiting(now)
        for p in self._pending:
            self.publications.add(p.version, whole=p.whole)
            effects.append(
                do.BuildVersion(version=p.version, parent=p.parent, step=p.step, whole=p.whole)
            )
        if self.highest_version > self.head_version:
            parent = self._next_version(effects, again=True)
            self._again = self.head_version
            self.journal.note(
                now, f"version {parent} published again as version {self.head_version}"
            )

    def _next_version(self, effects: list[Effect], *, again: bool = False) -> int:
        """The weights of now get the next number, which is the new head; returns its parent."""
        self.highest_version += 1
        parent, self.head_version = self.head_version, self.highest_version
        self.publications.add(self.head_version, whole=False)
        effects.append(
            do.BuildVersion(version=self.head_version, parent=parent, step=self.step, again=again)
        )
        return parent

    def _step_finished(self, event: on.StepFinished, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.STEPPING or event.step != self.step + 1:
            self.journal.count("step.unexpected")
            return
        groups, self.running = self.running, ()
        if not event.finite:
            self._lose_step(groups, now, effects)
            return
        self.step = event.step
        jobs = tuple(ref.job for ref in groups if not ref.replay)
        for job in jobs:
            self.trained.add(job)
        self.checkpoints.trained.append(LineageStep(self.step, jobs))
        parent = self._next_version(effects)
        if self._orders.checkpoint_due(self.step) and not self.checkpoints.busy:
            effects.append(self.checkpoints.write(self.step, self.head_version))
        report = self._reports.add(
            event, version=self.head_version, held=parent, groups=groups, now=now
        )
        effects.append(do.RecordStep(report=report))
        if self.session.joined:
            effects += self._reports.take(now)
        self.phase, self._repeat_due = Phase.WAITING, now
        self.journal.note(now, f"step {self.step} done as version {self.head_version} on {parent}")

    def _lose_step(self, groups: tuple[GroupRef, ...], now: float, effects: list[Effect]) -> None:
        # The same groups could well do it again, so they are given back for good.
        self.journal.count(NON_FINITE)
        if self.session.joined:
            codes = dict.fromkeys((ref.job for ref in groups), NON_FINITE)
            effects += refusals(self._settings.policy, self.step + 1, groups, codes)
        text = f"step {self.step + 1} gave weights that are not finite; nothing was published"
        effects.append(do.Rollback(code=NON_FINITE, message=text))

    # ---- progress --------------------------------------------------------------------------

    def _advance(self, now: float, effects: list[Effect]) -> None:
        """Do whatever the state allows now; harmless to call at any time."""
        if self.phase is Phase.EXITED:
            return
        effects += self.session.poll(now)
        effects += self.publications.poll(now)
        effects += self.checkpoints.poll(self.publications)
        if self.session.joined:
            effects += self.checkpoints.reports(self.publications)
        if self.batch is not None:
            self._advance_batch(self.batch, now, effects)
        if self._orders.leaving and self.phase is not Phase.STEPPING:
            self._advance_leaving(now, effects)
            return
        if self.phase is Phase.WAITING and self._orders.ending(self.step):
            self.phase = Phase.FINISHING
        if self.phase is Phase.FINISHING:
            effects += self._ending.finish(self.step, self.head_version)
            if self._ending.finished(self.step):
                self.phase, self._repeat_due = Phase.DONE, now
        if self.session.joined and self._repeats() and now >= self._repeat_due:
            self._repeat_due = now + self._settings.request_every_s
            self._repeat(now, effects)

    def _advance_batch(self, batch: Batch, now: float, effects: list[Effect]) -> None:
        if self._orders.ending(self.step):
            effects += batch.drop()
            self.batch, self.phase = None, Phase.WAITING
            return
        fresh = batch.newly_bad()
        if fresh:
            for code in fresh.values():
                self.journal.count(code)
            self._repeat_due = now
        effects += batch.poll(now)
        if batch.complete and self._may_step():
            self.batch, self.running, self.phase = None, batch.groups, Phase.STEPPING
            self._reports.started(now)
            effects.append(do.RunStep(step=batch.step, groups=batch.groups))
            self.journal.note(now, f"step {batch.step} started")

    def _may_step(self) -> bool:
        if self._orders.paused or len(self.publications.undurable) >= self._settings.max_undurable:
            return False
        # Its checkpoint would be due while the one before is still being written.
        return not (self.checkpoints.busy and self._orders.checkpoint_due(self.step + 1))

    def _advance_leaving(self, now: float, effects: list[Effect]) -> None:
        effects += self._ending.save(self.step, self.head_version)
        if not self._ending.may_leave(self.step, now):
            return
        if self.session.joined:
            effects.append(do.ToScheduler(message=wire.Goodbye(reason="stopped")))
        text = f"left after step {self.step}"
        effects.append(do.Exit(status=0, code="stopped", message=text))

    def _repeats(self) -> bool:
        """Whether there is something that we keep telling the scheduler."""
        if self.phase is Phase.WAITING:
            return not self._orders.paused and not self._orders.ending(self.step)
        if self.batch is not None:
            return any(ref.job in self.batch.refused for ref in self.batch.groups)
        return self.phase is Phase.DONE

    def _repeat(self, now: float, effects: list[Effect]) -> None:
        policy = self._settings.policy
        effects += self._reports.take(now)
        if self.phase is Phase.DONE:
            final = wire.CheckpointReport(
                policy=policy, step=self.step, version=self.head_version, final=True
            )
            effects.append(do.ToScheduler(message=final))
            return
        if self.batch is not None:
            effects += self.batch.refusals()
        request = wire.BatchRequest(
            policy=policy,
            step=self.step + 1,
            groups=self._orders.spec.batch_groups,
            head_version=self.head_version,
        )
        effects.append(do.ToScheduler(message=request))

    def _ended(self, effects: list[Effect], now: float) -> bool:
        """Whether an effect ends this core; nothing follows it."""
        for index, effect in enumerate(effects):
            if isinstance(effect, do.Rollback | do.Exit):
                self.phase = Phase.EXITED
                self.journal.note(now, effect.message)
                del effects[index + 1 :]
        return self.phase is Phase.EXITED
