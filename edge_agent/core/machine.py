"""The edge agent's decisions: what to run, what to send, which weights to use.

What always holds (``check`` enforces what can be seen from inside, the property test the rest):
an accepted attempt ends exactly once, as a spooled result that was acknowledged or refused, as a
reported failure, or because the scheduler wants it no more; an attempt starts only when all its
policies have verified weights in the engine, and a pinned one only at exactly its version, which
then stays until its last token; nothing leaves the spool without a word from the log or the
scheduler; work goes on while the scheduler is away; bad remote input is counted and never raises.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from edge_agent.core.attempts import (
    Attempt,
    Attempts,
    AttemptState,
    fault_of,
    pins_of,
    sequences_of,
)
from edge_agent.core.effects import (
    AbortAttempt,
    DropSpooled,
    Effect,
    Exit,
    RunAttempt,
    ToScheduler,
)
from edge_agent.core.events import (
    AttemptCrashed,
    CopyDiscarded,
    CopyOpened,
    DrainRequested,
    Event,
    FromScheduler,
    FromTrajectoryLog,
    FromWeightStore,
    GroupGenerated,
    GroupSpooled,
    Measured,
    PlanStaged,
    SendFailed,
    StageFailed,
    SwapFailed,
    Tick,
    WeightsSwapped,
)
from edge_agent.core.ladder import Ladder, Stage
from edge_agent.core.outbox import Outbox
from edge_agent.core.session import Session, SessionState
from edge_agent.core.settings import AgentSettings
from transport.errors import InvariantViolation
from transport.ids import Fence
from transport.messages import (
    AgentInventory,
    AttemptFailed,
    Goodbye,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    Hello,
    HelloRequired,
    HostedPolicies,
    LeaseOffer,
    LeaseReply,
    LeaseRevoke,
    Message,
    Plane,
    Refuse,
    Role,
    TrajectoryAck,
    TrajectoryPut,
    TrajectoryRefused,
    VersionRef,
    WeightsPlan,
    Welcome,
)

if TYPE_CHECKING:
    from random import Random

_MAX_ENDED = 4096
_MAX_STORY = 2048


class AgentSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sees of an agent."""

    session: str
    draining: bool
    waiting: int
    running: int
    scoring: int
    spooled: int
    spool_bytes: int
    unacked_bytes: int
    rtt_s: float | None
    policies: dict[str, tuple[str, int | None]]
    counters: dict[str, int]


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
        self._incarnation = incarnation
        self._build = build
        self._rng = rng
        self._session = Session(settings, now)
        self._attempts = Attempts()
        self._outbox = Outbox(settings, spooled)
        self._ladders: dict[str, Ladder] = {}
        self._ended: OrderedDict[str, Fence] = OrderedDict()
        self._measured = Measured(
            tokens_generated=0,
            running_sequences=0,
            waiting_sequences=0,
            bytes_up=0,
            bytes_down=0,
        )
        self._largest_body = 0
        self._drain_until_s: float | None = None
        self._drain_reason = ""
        self._exited = False
        self._counters: Counter[str] = Counter()
        self._story: deque[tuple[str, str]] = deque(maxlen=_MAX_STORY)

    # ---- the interface of a core -----------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; the effects are to be carried out in order."""
        if self._exited:
            return []
        effects = self._dispatch(event, now)
        effects += self._advance(now)
        return effects

    def next_deadline(self) -> float | None:
        """When to feed ``Tick`` if nothing else happens before."""
        if self._exited:
            return None
        due = [self._session.deadline(), self._outbox.deadline(), self._drain_until_s]
        due += [ladder.deadline() for ladder in self._ladders.values()]
        due += [
            attempt.accepted_s + self._settings.attempt_timeout_s
            for attempt in self._attempts
            if attempt.state is AttemptState.WAITING
        ]
        return min((at for at in due if at is not None), default=None)

    def status(self) -> AgentSnapshot:
        count = Counter(attempt.state for attempt in self._attempts)
        return AgentSnapshot(
            session=self._session.state.value,
            draining=self._draining,
            waiting=count[AttemptState.WAITING],
            running=count[AttemptState.RUNNING],
            scoring=count[AttemptState.SCORING],
            spooled=len(self._outbox),
            spool_bytes=self._outbox.size_bytes,
            unacked_bytes=self._outbox.unacked_bytes,
            rtt_s=self._session.rtt_s,
            policies={
                name: (ladder.stage.value, ladder.version)
                for name, ladder in self._ladders.items()
            },
            counters=dict(self._counters),
        )

    def dump(self) -> dict[str, Any]:
        """The whole state as plain values, for comparing two cores."""
        return {
            "status": msgspec.to_builtins(self.status()),
            "attempts": [
                (held.name, held.fence, held.state.value, held.accepted_s, held.pinned)
                for held in self._attempts
            ],
            "spooled": [msgspec.to_builtins(summary) for summary in self._outbox.summaries()],
            "ladders": {
                name: (ladder.stage.value, ladder.version, ladder.target, ladder.failures)
                for name, ladder in self._ladders.items()
            },
            "deadline": self.next_deadline(),
        }

    def story(self, name: str) -> list[str]:
        """What happened to an attempt or policy, as far as it is remembered."""
        return [text for subject, text in self._story if subject == name]

    def check(self) -> None:
        """Raise ``InvariantViolation`` when the state contradicts itself."""
        settings = self._settings
        sequences = self._attempts.sequences(AttemptState.WAITING, AttemptState.RUNNING)
        if sequences > settings.slots + settings.prefetch_sequences and len(self._attempts) > 1:
            raise InvariantViolation(f"{sequences} sequences are more than accepted")
        for held in self._attempts:
            if self._outbox.find(held.name) is not None:
                raise InvariantViolation(f"{held.name} is held and spooled: {self.story(held.name)}")
            for policy, version in held.pinned.items():
                ladder = self._ladders.get(policy)
                if held.state is AttemptState.RUNNING and (
                    ladder is None or ladder.version != version
                ):
                    raise InvariantViolation(
                        f"{held.name} runs, pinned to {version}: {self.story(held.name)}"
                    )
        if self._outbox.size_bytes != sum(s.size_bytes for s in self._outbox.summaries()):
            raise InvariantViolation("the spool's size does not add up")

    # ---- events ------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case FromScheduler(message=message):
                self._session.heard(now)
                return self._from_scheduler(message, now)
            case FromTrajectoryLog(message=message):
                return self._from_trajectory_log(message, now)
            case FromWeightStore(message=WeightsPlan() as plan):
                ladder = self._ladders.get(plan.policy)
                return ladder.planned(plan) if ladder is not None else self._odd(plan)
            case FromWeightStore(message=message):
                return self._odd(message)
            case GroupGenerated(attempt=name, fence=fence):
                held = self._attempts.find(name, fence)
                if held is not None and held.state is AttemptState.RUNNING:
                    held.state = AttemptState.SCORING
            case GroupSpooled(summary=summary):
                return self._spooled(summary)
            case AttemptCrashed(attempt=name, fence=fence, code=code, detail=detail):
                held = self._attempts.find(name, fence)
                return [] if held is None else self._fail(held, code, detail)
            case SendFailed(plane=plane, message=message):
                self._send_failed(plane, message, now)
            case Measured():
                self._measured = event
            case DrainRequested(reason=reason):
                return self._drain(reason, now)
            case Tick():
                pass
            case _:
                return self._weights(event, now)
        return []

    def _from_scheduler(self, message: Message, now: float) -> list[Effect]:
        match message:
            case LeaseOffer():
                return self._offered(message, now)
            case HeartbeatReply():
                if not self._session.replied(message, now):
                    self._counters["heartbeat.unknown_reply"] += 1
                effects: list[Effect] = []
                for name in message.unknown:
                    effects += self._forget(name, "unwanted")
                return effects
            case LeaseRevoke(attempt=name, fence=fence, reason=reason):
                held = self._attempts.find(name)
                spooled = self._outbox.find(name)
                known = held.fence if held else spooled.fence if spooled else None
                if known is None or fence < known:
                    self._counters["revoke.unknown"] += 1
                    return []
                return self._forget(name, f"revoked: {reason}")
            case Welcome():
                return self._session.welcomed(message, now) + self._host(message.policies)
            case HostedPolicies(policies=policies):
                return self._host(policies)
            case HelloRequired():
                self._session.hello_required(now)
            case Goodbye():
                # It said so itself: its successor will not know us.
                self._session.hello_required(now)
            case Refuse(code=code, message=text):
                if not self._session.refused(message, now):
                    return self._exit(f"refused: {code}: {text}", 1)
            case _:
                return self._odd(message)
        return []

    def _from_trajectory_log(self, message: Message, now: float) -> list[Effect]:
        match message:
            case TrajectoryAck(attempt=name, digest=digest) | TrajectoryRefused(
                attempt=name, digest=digest
            ):
                summary = self._outbox.find(name)
                if summary is None or summary.digest != digest:
                    self._counters["ack.unknown"] += 1
                    return []
                effects = self._drop(summary, "stored", now)
                if isinstance(message, TrajectoryRefused):
                    effects.append(self._report(name, summary.fence, message.code, message.message))
                return effects
            case _:
                return self._odd(message)

    def _weights(self, event: Event, now: float) -> list[Effect]:
        match event:
            case CopyOpened(policy=policy, version=version, digest=digest):
                ladder = self._ladders.get(policy)
                return [] if ladder is None else ladder.opened(version, digest, now)
            case PlanStaged(policy=policy, ticket=ticket):
                ladder = self._ladders.get(policy)
                return [] if ladder is None else ladder.staged(ticket)
            case StageFailed(policy=policy, ticket=ticket, code=code, detail=detail):
                ladder = self._ladders.get(policy)
                self._note(policy, f"stage failed: {code}: {detail}")
                self._counters["weights.stage_failed"] += 1
                return [] if ladder is None else ladder.stage_failed(ticket, code, now)
            case WeightsSwapped(policy=policy, version=version):
                ladder = self._ladders.get(policy)
                self._note(policy, f"serving {version}")
                return [] if ladder is None else ladder.swapped(event, now)
            case SwapFailed(policy=policy, ticket=ticket, code=code, detail=detail):
                ladder = self._ladders.get(policy)
                self._note(policy, f"swap failed: {code}: {detail}")
                self._counters["weights.swap_failed"] += 1
                effects = [] if ladder is None else ladder.swap_failed(ticket)
                if effects:
                    # Nobody knows what the engine holds now: what runs on it is worth nothing.
                    for held in self._attempts.of_policy(policy):
                        if held.state is not AttemptState.SCORING:
                            effects += self._fail(held, "weights.unverified", code)
                return effects
            case CopyDiscarded(policy=policy):
                ladder = self._ladders.get(policy)
                if ladder is None:
                    return []
                if not ladder.hosted:
                    del self._ladders[policy]
                    return []
                return ladder.discarded(now)
            case _:
                raise InvariantViolation(f"unknown event {type(event).__name__}")

    # ---- attempts ----------------------------------------------------------------------------

    def _offered(self, offer: LeaseOffer, now: float) -> list[Effect]:
        effects: list[Effect] = []
        held = self._attempts.find(offer.attempt)
        spooled = self._outbox.find(offer.attempt)
        known = held.fence if held else spooled.fence if spooled else None
        if known == offer.fence:
            return [self._reply(offer, "")]
        if known is not None and known > offer.fence:
            return [self._reply(offer, "stale_fence")]
        if known is not None:
            effects += self._forget(offer.attempt, "superseded")
        reason = self._objection(offer)
        effects.append(self._reply(offer, reason))
        if reason:
            self._counters[f"declined.{reason}"] += 1
            self._note(offer.attempt, f"declined: {reason}")
        else:
            self._attempts.add(Attempt(offer=offer, accepted_s=now, pinned=pins_of(offer)))
            self._note(offer.attempt, "accepted")
        return effects

    def _objection(self, offer: LeaseOffer) -> str:
        """Why not to accept a new offer, or nothing."""
        settings = self._settings
        if self._draining:
            return "draining"
        if self._ended.get(offer.attempt) == offer.fence:
            return "finished"
        if fault_of(offer):
            return "malformed"
        if offer.workflow not in settings.workflows:
            return "workflow_unknown"
        if offer.reward.name not in settings.rewards:
            return "reward_unknown"
        ladders = [self._ladders.get(policy) for policy in sorted(offer.policies.values())]
        if any(ladder is None or not ladder.hosted for ladder in ladders):
            return "policy_unknown"
        if any(ladder is not None and ladder.healing for ladder in ladders):
            return "weights_unavailable"
        if any(self._ladders[policy].passes(at) for policy, at in pins_of(offer).items()):
            return "version_passed"
        reserved = self._largest_body * (len(self._attempts) + 1)
        if self._outbox.size_bytes + reserved > settings.spool_bytes:
            return "spool_full"
        busy = self._attempts.sequences(AttemptState.WAITING, AttemptState.RUNNING)
        room = settings.slots + settings.prefetch_sequences
        if busy and busy + sequences_of(offer) > room:
            return "full"
        if len(self._attempts) + len(self._outbox) >= settings.max_held:
            return "full"
        return ""

    def _reply(self, offer: LeaseOffer, reason: str) -> Effect:
        reply = LeaseReply(
            attempt=offer.attempt, fence=offer.fence, accepted=not reason, reason=reason
        )
        return ToScheduler(message=reply)

    def _spooled(self, summary: GroupSummary) -> list[Effect]:
        held = self._attempts.find(summary.attempt, summary.fence)
        if held is None:
            # Aborted while its result was being written: the scheduler wants it no more.
            other = self._outbox.find(summary.attempt)
            if other is not None and other.digest == summary.digest:
                return []
            return [DropSpooled(attempt=summary.attempt, digest=summary.digest)]
        self._attempts.remove(held)
        self._outbox.add(summary)
        self._largest_body = max(self._largest_body, summary.size_bytes)
        self._note(summary.attempt, "spooled")
        return []

    def _fail(self, held: Attempt, code: str, detail: str) -> list[Effect]:
        effects: list[Effect] = []
        if held.state is not AttemptState.WAITING:
            effects.append(AbortAttempt(attempt=held.name, fence=held.fence))
        self._attempts.remove(held)
        self._end(held.name, held.fence, f"failed: {code}")
        return [*effects, self._report(held.name, held.fence, code, detail)]

    def _report(self, name: str, fence: Fence, code: str, detail: str) -> Effect:
        self._counters["attempts.failed"] += 1
        return self._session.report(
            AttemptFailed(attempt=name, fence=fence, code=code, detail=detail[:500])
        )

    def _forget(self, name: str, why: str) -> list[Effect]:
        """Drop everything about an attempt, wherever it stands."""
        held = self._attempts.find(name)
        if held is not None:
            self._attempts.remove(held)
            self._end(name, held.fence, why)
            if held.state is AttemptState.WAITING:
                return []
            return [AbortAttempt(attempt=name, fence=held.fence)]
        summary = self._outbox.find(name)
        return [] if summary is None else self._drop(summary, why, None)

    def _drop(self, summary: GroupSummary, why: str, now: float | None) -> list[Effect]:
        self._outbox.remove(summary.attempt, now)
        self._end(summary.attempt, summary.fence, why)
        return [DropSpooled(attempt=summary.attempt, digest=summary.digest)]

    def _end(self, name: str, fence: Fence, why: str) -> None:
        self._ended[name] = fence
        self._note(name, why)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    # ---- everything that follows by itself -----------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        if self._exited:
            return []
        effects: list[Effect] = []
        for held in self._attempts:
            effects += self._start_or_give_up(held, now)
        for ladder in tuple(self._ladders.values()):
            if not ladder.hosted and not self._attempts.of_policy(ladder.policy):
                effects += ladder.release()
            effects += ladder.hold(self._attempts.bound(ladder.policy), now)
            effects += ladder.advance(now)
        effects += self._outbox.advance(now)
        effects += self._session.silent(now)
        if self._session.hello_due(now):
            effects.append(ToScheduler(message=self._hello()))
        repeated = self._session.heartbeat_due(now)
        if repeated is not None:
            effects += [*repeated, ToScheduler(message=self._heartbeat(now))]
        if self._draining:
            effects += self._leave_when_done(now)
        return effects

    def _start_or_give_up(self, held: Attempt, now: float) -> list[Effect]:
        if held.state is not AttemptState.WAITING:
            return []
        ladders = [self._ladders[policy] for policy in held.policies]
        if any(ladder.healing for ladder in ladders):
            return self._fail(held, "weights_unavailable", "the agent lost its copy")
        if now >= held.accepted_s + self._settings.attempt_timeout_s:
            return self._fail(held, "weights.timeout", "waited too long for its weights")
        if not all(ladder.ready for ladder in ladders):
            return []
        for policy, version in held.pinned.items():
            ladder = self._ladders[policy]
            if ladder.version != version or ladder.stage is Stage.SWAPPING:
                return []
        held.state = AttemptState.RUNNING
        self._note(held.name, "started")
        return [RunAttempt(offer=held.offer, queued_s=now - held.accepted_s)]

    def _host(self, policies: tuple[str, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for ladder in self._ladders.values():
            ladder.hosted = ladder.policy in policies
        for policy in policies:
            if policy not in self._ladders:
                self._ladders[policy] = Ladder(policy, self._settings, self._rng)
                effects += self._ladders[policy].open()
        return effects

    def _drain(self, reason: str, now: float) -> list[Effect]:
        if self._draining:
            return []
        self._drain_until_s = now + self._settings.drain_s
        self._drain_reason = reason
        effects: list[Effect] = []
        for held in self._attempts:
            if held.state is AttemptState.WAITING:
                effects += self._fail(held, "agent.draining", reason)
        return effects

    def _leave_when_done(self, now: float) -> list[Effect]:
        late = self._drain_until_s is not None and now >= self._drain_until_s
        effects: list[Effect] = []
        if late:
            for held in self._attempts:
                effects += self._fail(held, "agent.draining", self._drain_reason)
        if late or not (len(self._attempts) or len(self._outbox)):
            effects += self._exit(f"drained: {self._drain_reason}", 0)
        return effects

    def _exit(self, reason: str, status: int) -> list[Effect]:
        self._exited = True
        goodbye = Goodbye(reason=reason[:200])
        return [ToScheduler(message=goodbye), Exit(reason=reason, status=status)]

    def _send_failed(self, plane: Plane, message: Message, now: float) -> None:
        self._counters[f"send_failed.{plane.value}"] += 1
        if isinstance(message, TrajectoryPut):
            self._outbox.not_sent(message.summary.attempt, now)
        elif isinstance(message, AttemptFailed):
            self._session.report_lost(message)

    @property
    def _draining(self) -> bool:
        return self._drain_until_s is not None

    def _odd(self, message: Message) -> list[Effect]:
        self._counters[f"unexpected.{type(message).__name__}"] += 1
        return []

    def _note(self, subject: str, text: str) -> None:
        self._story.append((subject, text))

    # ---- messages about ourselves ----------------------------------------------------------------

    def _held(self) -> tuple[HeldAttempt, ...]:
        spooled = [
            HeldAttempt(attempt=summary.attempt, fence=summary.fence, spooled=True)
            for summary in self._outbox.summaries()
        ]
        return (*self._attempts.inventory(), *spooled)

    def _versions(self) -> dict[str, VersionRef]:
        serving = {name: ladder.serving() for name, ladder in self._ladders.items()}
        return {name: ref for name, ref in serving.items() if ref is not None}

    def _hello(self) -> Hello:
        settings = self._settings
        return Hello(
            role=Role.AGENT,
            incarnation=self._incarnation,
            build=self._build,
            agent=AgentInventory(
                slots=settings.slots,
                hardware=settings.hardware,
                engine=settings.engine,
                workflows=settings.workflows,
                rewards=settings.rewards,
                held=self._held(),
                versions=self._versions(),
                labels=settings.labels,
            ),
        )

    def _heartbeat(self, now: float) -> Heartbeat:
        return Heartbeat(
            sequence=self._session.sequence,
            sent_s=now,
            held=self._held(),
            running_sequences=self._measured.running_sequences,
            waiting_sequences=self._measured.waiting_sequences,
            tokens_generated=self._measured.tokens_generated,
            versions=self._versions(),
            rtt_s=self._session.rtt_s,
            spool_bytes=self._outbox.size_bytes,
            bytes_up=self._measured.bytes_up,
            bytes_down=self._measured.bytes_down,
            draining=self._draining,
        )
