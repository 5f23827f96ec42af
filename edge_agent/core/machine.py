"""The edge agent's decisions: what to run, what to send, which weights to use.

What always holds: time and randomness come in from outside; bad remote input is counted and never
raises; work goes on while the scheduler is away; after ``Exit`` nothing happens any more. The parts
state their own rules: ``session`` (being known), ``work`` (attempts and spool), ``weights``.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from edge_agent.core.attempts import AttemptState
from edge_agent.core.effects import Effect, Exit, SendLog, ToScheduler
from edge_agent.core.events import (
    AttemptCrashed,
    BodyLost,
    DrainRequested,
    Event,
    FromScheduler,
    FromTrajectoryLog,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    LinkDown,
    LinkUp,
    Measured,
    SendFailed,
    SwapFailed,
    Tick,
    VerifyFailed,
)
from edge_agent.core.journal import Journal
from edge_agent.core.leaving import Leaving
from edge_agent.core.session import Session
from edge_agent.core.settings import AgentSettings
from edge_agent.core.snapshot import AgentSnapshot
from edge_agent.core.weights import Weights
from edge_agent.core.work import Work
from transport.messages import (
    FEATURE_ANSWER,
    FEATURE_OFFERS,
    FEATURE_TEMPLATE,
    MAX_ID_LENGTH,
    AgentInventory,
    AgentLogRequest,
    AttemptFailed,
    ChunkRequest,
    DrainOrder,
    Goodbye,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    HostedPolicies,
    LeaseOffer,
    LeaseOffers,
    LeaseRecall,
    LeaseReplies,
    LeaseReply,
    LeaseRevoke,
    Message,
    Plane,
    Refuse,
    Role,
    TrajectoryAck,
    TrajectoryAcks,
    TrajectoryOffer,
    TrajectoryPut,
    TrajectoryRefused,
    WeightsPlan,
    Welcome,
)

if TYPE_CHECKING:
    from random import Random

_MAX_REASON = 200
_MAX_LOG_LINES = 2000


class AgentCore:
    """One agent's life of one incarnation; ``spooled`` are the results found on disk."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        incarnation: int,
        build: str,
        rng: "Random",
        spooled: Iterable[GroupSummary] = (),
        now: float = 0.0,
    ) -> None:
        self._settings = settings
        self.incarnation = incarnation
        self._build = build
        self._journal = Journal()
        self._session = Session(settings, rng, now)
        self._weights = Weights(settings, self._journal, rng)
        self._work = Work(settings, self._session, self._weights, self._journal, spooled)
        self._measured = Measured(
            tokens_generated=0,
            running_sequences=0,
            waiting_sequences=0,
            bytes_up=0,
            bytes_down=0,
        )
        self._leaving = Leaving(settings, self._work)
        self._exited = False

    @property
    def wants_slot(self) -> bool:
        """Whether to say ``Measured`` as soon as sequences have left the engine."""
        return self._work.wants_slot

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; the effects are to be carried out in order."""
        if self._exited:
            return []
        effects = self._dispatch(event, now)
        if not self._exited:
            effects += self._advance(now)
        return effects

    def next_deadline(self) -> float | None:
        """When to feed ``Tick`` if nothing else happens before; None after the end."""
        if self._exited:
            return None
        work, attempts = self._work, self._work.attempts
        soonest_s = self._session.deadline()
        due = [work.deadline(), work.outbox.deadline(), self._leaving.until_s]
        for ladder in self._weights:
            leaving = ladder.linger_until_s is not None
            due.append(ladder.deadline(in_use=leaving and attempts.use(ladder.policy)))
        return min([soonest_s, *[at_s for at_s in due if at_s is not None]])

    def status(self) -> AgentSnapshot:
        work = self._work
        states = Counter(held.state for held in work.attempts)
        return AgentSnapshot(
            session=self._session.state.value,
            draining=work.draining,
            waiting=states[AttemptState.WAITING],
            running=states[AttemptState.RUNNING],
            scoring=states[AttemptState.SCORING],
            spooled=len(work.outbox),
            spool_bytes=work.outbox.size_bytes,
            unacked_bytes=work.outbox.unacked_bytes,
            rtt_s=self._session.clock.rtt_s,
            clock_offset_s=self._session.clock_offset_s,
            policies={
                ladder.policy: (ladder.stage.value, ladder.version) for ladder in self._weights
            },
            counters=self._journal.counters(),
        )

    def dump(self) -> dict[str, Any]:
        """The whole state as plain values: two cores that dump alike behave alike."""
        return {
            "status": msgspec.to_builtins(self.status()),
            "attempts": [
                (held.name, held.fence, held.state.value, held.accepted_s, held.pinned)
                for held in self._work.attempts
            ],
            "spooled": [msgspec.to_builtins(one) for one in self._work.outbox.summaries()],
            "weights": [
                (ladder.policy, ladder.stage.value, ladder.target, ladder.failures, ladder.upto)
                for ladder in self._weights
            ],
            "deadline": self.next_deadline(),
        }

    def story(self, subject: str) -> list[str]:
        """What happened to an attempt or a policy, as far as it is remembered."""
        return self._journal.story(subject)

    def check(self) -> None:
        """Raise ``InvariantViolation``, with the story, when the state contradicts itself."""
        self._work.check()

    # ---- events ------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case FromScheduler(message=message):
                self._session.heard(now)
                return self._from_scheduler(message, now)
            case Measured(wall_s=wall_s):
                self._measured = event
                self._work.measured(event.running_sequences + event.waiting_sequences)
                self._session.read_wall(wall_s, now)
            case FromTrajectoryLog(message=TrajectoryAck() | TrajectoryRefused() as message):
                return self._work.acknowledged(message, now)
            case FromTrajectoryLog(message=TrajectoryAcks(bodies=bodies)):
                acks = (TrajectoryAck(attempt=one.attempt, digest=one.digest) for one in bodies)
                return [effect for ack in acks for effect in self._work.acknowledged(ack, now)]
            case FromTrajectoryLog(message=ChunkRequest()):
                self._work.outbox.progressed(now)
                return []
            case FromWeightStore(message=WeightsPlan() as plan):
                return self._weights.planned(plan)
            case FromTrajectoryLog(message=message) | FromWeightStore(message=message):
                return self._unexpected(message)
            case GroupGenerated(attempt=name, fence=fence):
                self._work.generated(name, fence)
            case GroupSpooled(summary=summary):
                return self._work.spooled(summary)
            case BodyLost():
                return self._work.lost(event)
            case AttemptCrashed(attempt=name, fence=fence, code=code, detail=detail):
                return self._work.crashed(name, fence, code, detail)
            case SwapFailed(policy=policy, code=code) | VerifyFailed(policy=policy, code=code):
                effects = self._weights.handle(event, now)
                if effects:
                    # Nobody knows what the engine holds now: what it draws is worth nothing.
                    effects += self._work.fail_policy(policy, "weights.unverified", code)
                return effects
            case LinkUp(plane=plane):
                return self._link_up(plane, now)
            case LinkDown(plane=plane):
                if plane is not Plane.CONTROL:
                    self._session.plane_down(plane)
                if plane is Plane.TRAJECTORIES:
                    self._work.outbox.link_down()
            case SendFailed():
                self._send_failed(event, now)
            case DrainRequested(reason=reason, deadline_s=deadline_s):
                return self._leaving.drain(reason, deadline_s, now)
            case Tick():
                pass
            case _:
                return self._weights.handle(event, now)
        return []

    def _from_scheduler(self, message: Message, now: float) -> list[Effect]:
        match message:
            case LeaseOffer():
                return self._work.offered(message, now)
            case LeaseOffers(offers=offers):
                return self._offered(offers, now)
            case LeaseRecall():
                return self._work.recalled(message)
            case HeartbeatReply():
                return self._replied(message, now)
            case LeaseRevoke(attempt=name, fence=fence, reason=reason):
                known = self._work.fence_of(name)
                if known is not None and fence >= known:
                    return self._work.forget(name, f"revoked: {reason[:_MAX_REASON]}")
                self._journal.count("revoke.unknown")
            case Welcome() | Refuse() if message.incarnation not in (0, self.incarnation):
                self._journal.count("answer.of_another_life")
            case Welcome():
                effects = self._session.welcomed(message, now)
                effects += self._work.peer_knows(message.kinds)
                self._weights.upto = message.upto
                self._weights.pace(self._session.heartbeat_s)
                return effects + self._weights.host(message.policies, now)
            case HostedPolicies(policies=policies):
                return self._weights.host(policies, now)
            case DrainOrder(deadline_s=deadline_s, reason=reason):
                within_s = deadline_s if deadline_s > 0.0 else None
                return self._leaving.drain(reason[:_MAX_REASON], within_s, now)
            case AgentLogRequest(request=request, run=run, lines=lines):
                lines = max(1, min(lines, _MAX_LOG_LINES))
                return [SendLog(request=request, run=run[:MAX_ID_LENGTH], lines=lines)]
            case HelloRequired() | Goodbye():
                # After a goodbye the scheduler's next life will not know us either.
                self._session.hello_required(now)
            case Refuse(code=code, message=text):
                if not self._session.refused(message, now):
                    return self._exit(f"refused: {code}: {text}"[:_MAX_REASON], 1)
            case _:
                return self._unexpected(message)
        return []

    def _offered(self, offers: tuple[LeaseOffer, ...], now: float) -> list[Effect]:
        """One after the other; the replies leave in one frame."""
        effects = [effect for offer in offers for effect in self._work.offered(offer, now)]
        said = [effect.message for effect in effects if isinstance(effect, ToScheduler)]
        replies = tuple(message for message in said if isinstance(message, LeaseReply))
        effects = [effect for effect in effects if not isinstance(effect, ToScheduler)]
        return (
            [*effects, ToScheduler(message=LeaseReplies(replies=replies))] if replies else effects
        )

    def _replied(self, message: HeartbeatReply, now: float) -> list[Effect]:
        if not self._session.replied(message, now):
            self._journal.count("heartbeat.unknown_reply")
        else:
            self._weights.upto = message.upto
        effects: list[Effect] = []
        for name in message.unknown:
            effects += self._work.forget(name, "unknown to the scheduler")
        return effects

    def _unexpected(self, message: Message) -> list[Effect]:
        self._journal.count(f"unexpected.{type(message).__name__}")
        return []

    def _send_failed(self, event: SendFailed, now: float) -> None:
        self._journal.count(f"send_failed.{event.plane.value}")
        match event.message:
            case TrajectoryPut(summary=summary):
                self._work.outbox.not_sent(summary.attempt, now)
            case TrajectoryOffer(bodies=bodies):
                for body in bodies:
                    self._work.outbox.not_sent(body.summary.attempt, now)
            case AttemptFailed() as report:
                self._session.report_lost(report)
            case _:
                pass  # repeated by itself (hello, heartbeat, request) or missed by its receiver

    def _link_up(self, plane: Plane, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._session.plane_up(plane)
        if plane is Plane.CONTROL:
            self._session.link_up(now)
        elif plane is Plane.TRAJECTORIES:
            self._work.outbox.link_up()
        else:
            for ladder in self._weights:
                effects += ladder.link_up(now)
        return effects

    # ---- what follows by itself ----------------------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        effects = self._work.advance(now)
        attempts, weights = self._work.attempts, self._weights
        for ladder in weights:
            if ladder.expired(now) and not attempts.use(ladder.policy):
                effects += ladder.release()
            upto = weights.bound(ladder.policy, attempts.bound(ladder.policy))
            if upto != ladder.upto:
                effects += ladder.hold(upto, now)
            effects += ladder.advance(now)
        effects += self._work.outbox.advance(now)
        effects += self._session.silent(now)
        if self._session.hello_due(now):
            effects.append(ToScheduler(message=self._hello()))
        repeated = self._session.heartbeat_due(now)
        if repeated is not None:
            effects += [*repeated, ToScheduler(message=self.heartbeat(now))]
        handed_back = self._leaving.done(now)
        if handed_back is not None:
            effects += handed_back + self._exit(f"drained: {self._leaving.reason}", 0)
        return effects

    def _exit(self, reason: str, status: int) -> list[Effect]:
        self._exited = True
        return [ToScheduler(message=Goodbye(reason=reason)), Exit(reason=reason, status=status)]

    # ---- messages about ourselves ----------------------------------------------------------------

    def _hello(self) -> Hello:
        settings = self._settings
        return Hello(
            role=Role.AGENT,
            incarnation=self.incarnation,
            build=self._build,
            features=(FEATURE_OFFERS, FEATURE_TEMPLATE, FEATURE_ANSWER),
            agent=AgentInventory(
                slots=settings.slots,
                hardware=settings.hardware,
                engine=settings.engine,
                workflows=settings.workflows,
                rewards=settings.rewards,
                held=self._work.held(),
                versions=self._weights.serving(),
                labels=settings.labels,
                bases=settings.bases,
                rechecks=True,
                recheck_kinds=settings.recheck_kinds,
                price_usd_hour=settings.price_usd_hour,
                egress_usd_gb=settings.egress_usd_gb,
            ),
        )

    def heartbeat(self, now: float) -> Heartbeat:
        """The next sign of life, as it would be now."""
        return Heartbeat(
            sequence=self._session.sequence,
            sent_s=now,
            held=self._work.held(),
            running_sequences=self._measured.running_sequences,
            waiting_sequences=self._measured.waiting_sequences,
            tokens_generated=self._measured.tokens_generated,
            versions=self._weights.serving(),
            rtt_s=self._session.clock.rtt_s,
            spool_bytes=self._work.outbox.size_bytes,
            bytes_up=self._measured.bytes_up,
            bytes_down=self._measured.bytes_down,
            draining=self._work.draining,
            wall_s=self._session.wall_s(now),
            clock_offset_s=self._session.clock_offset_s,
            gpus=self._measured.gpus,
        )
