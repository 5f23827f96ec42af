"""Attempts from offer to end: admission, start, failure, spool, acknowledgement.

What always holds: an accepted attempt ends exactly once, as a spooled result that was acknowledged
or refused, as a reported failure, or because the scheduler wants it no more; it starts only when
all its policies have verified weights in the engine, and a pinned one only at exactly its version,
and when a slot is free, in the order of the offers; until then the scheduler may have it back. An
end is remembered for a while, so that a late copy of an offer does not run again.

Whether a slot is free: siblings end one by one, which only the engine sees. So sequences that were
started count until the engine says what it holds. While an attempt waits for nothing but a slot
(``wants_slot``) the engine is asked whenever sequences have left it, and every ``slot_poll_s``.
"""

from collections import OrderedDict
from collections.abc import Iterable

from edge_agent.core.attempts import (
    Attempt,
    Attempts,
    AttemptState,
    fault_of,
    pins_of,
    sequences_of,
)
from edge_agent.core.effects import AbortAttempt, DropSpooled, Effect, RunAttempt, ToScheduler
from edge_agent.core.events import BodyLost
from edge_agent.core.journal import Journal
from edge_agent.core.ladder import Stage
from edge_agent.core.outbox import Outbox
from edge_agent.core.session import Session
from edge_agent.core.settings import AgentSettings
from edge_agent.core.weights import Weights
from transport.envelope import BULK_FRAME_BYTES
from transport.errors import InvariantViolation
from transport.ids import Fence
from transport.messages import (
    AttemptFailed,
    GroupSummary,
    HeldAttempt,
    LeaseOffer,
    LeaseRecall,
    LeaseReply,
    TrajectoryAck,
    TrajectoryRefused,
)
from transport.texts import cut

_MAX_ENDED = 4096
_MAX_CODE = 100
_MAX_DETAIL = 500


class Work:
    """Everything that the agent holds for the scheduler."""

    def __init__(
        self,
        settings: AgentSettings,
        session: Session,
        weights: Weights,
        journal: Journal,
        spooled: Iterable[GroupSummary],
    ) -> None:
        self._settings = settings
        self._session = session
        self._weights = weights
        self._journal = journal
        self._ended: OrderedDict[str, Fence] = OrderedDict()
        self._largest_body_bytes = 0
        self._in_engine = 0
        self._poll_s: float | None = None
        self.attempts = Attempts()
        self.outbox = Outbox(settings, spooled)
        self.draining = False

    @property
    def idle(self) -> bool:
        return not (len(self.attempts) or len(self.outbox))

    def held(self) -> tuple[HeldAttempt, ...]:
        spooled = (
            HeldAttempt(attempt=summary.attempt, fence=summary.fence, spooled=True)
            for summary in self.outbox.summaries()
        )
        return (*self.attempts.inventory(), *spooled)

    def fence_of(self, name: str) -> Fence | None:
        """The fence of an attempt that is held or spooled."""
        held = self.attempts.find(name)
        if held is not None:
            return held.fence
        summary = self.outbox.find(name)
        return None if summary is None else summary.fence

    # ---- beginning -----------------------------------------------------------------------------

    def offered(self, offer: LeaseOffer, now: float) -> list[Effect]:
        """Accept or decline; an offer that is held already is accepted again."""
        known = self.fence_of(offer.attempt)
        if known == offer.fence:
            return [_reply(offer, "")]
        if known is not None and known > offer.fence:
            return [_reply(offer, "stale_fence")]
        effects = [] if known is None else self.forget(offer.attempt, "superseded")
        reason = self._objection(offer)
        if reason:
            self._journal.count(f"declined.{reason}")
            self._journal.note(offer.attempt, f"declined: {reason}")
        else:
            self._journal.count("accepted")
            self._journal.note(offer.attempt, "accepted")
            self.attempts.add(Attempt(offer=offer, accepted_s=now, pinned=pins_of(offer)))
        return [*effects, _reply(offer, reason)]

    def recalled(self, message: LeaseRecall) -> list[Effect]:
        """Give an attempt back that has not begun; one that has is kept. Nothing is said of what is
        not here: it was failed or delivered, and the scheduler is about to hear so."""
        if self.fence_of(message.attempt) != message.fence:
            self._journal.count("recall.unknown")
            return []
        held = self.attempts.find(message.attempt, message.fence)
        begun = held is None or held.state is not AttemptState.WAITING
        reply = LeaseReply(
            attempt=message.attempt,
            fence=message.fence,
            accepted=begun,
            reason="" if begun else "recalled",
        )
        if not begun:
            self._journal.count("recalled")
            self.forget(message.attempt, "recalled")
        return [ToScheduler(message=reply)]

    def _objection(self, offer: LeaseOffer) -> str:
        """Why not to accept a new offer, or nothing."""
        settings = self._settings
        if self.draining:
            return "draining"
        if self._ended.get(offer.attempt) == offer.fence:
            return "finished"
        if fault_of(offer):
            return "malformed"
        if offer.workflow not in settings.workflows:
            return "workflow_unknown"
        if offer.reward.name not in settings.rewards:
            return "reward_unknown"
        return self._weights_objection(offer) or self._room_objection(sequences_of(offer))

    def _weights_objection(self, offer: LeaseOffer) -> str:
        for policy in sorted(set(offer.policies.values())):
            ladder = self._weights.find(policy)
            if ladder is None or not ladder.hosted:
                return "policy_unknown"
            if ladder.healing:
                return "weights_unavailable"
            pinned = pins_of(offer).get(policy)
            if pinned is not None and ladder.passes(pinned):
                return "version_passed"
        return ""

    def _room_objection(self, sequences: int) -> str:
        settings = self._settings
        # What is under way will need room in the spool too: as much each as the largest so far.
        reserved_bytes = self._largest_body_bytes * (len(self.attempts) + 1)
        if self.outbox.size_bytes + reserved_bytes > settings.spool_bytes:
            return "spool_full"
        if sequences > settings.max_attempt_sequences:
            return "too_large"
        busy = self.attempts.sequences(AttemptState.WAITING, AttemptState.RUNNING)
        if busy and busy + sequences > settings.slots + settings.prefetch_sequences:
            return "full"
        if len(self.attempts) + len(self.outbox) >= settings.max_held:
            return "full"
        return ""

    def advance(self, now: float) -> list[Effect]:
        """Start what can start; give up what waited for its weights too long or in vain."""
        effects: list[Effect] = []
        self._poll_s = None
        for held in self.attempts.waiting():
            effects += self._start_or_give_up(held, now)
        return effects

    @property
    def wants_slot(self) -> bool:
        """Whether an attempt waits for nothing but a slot."""
        return self._poll_s is not None

    def measured(self, in_engine: int) -> None:
        """Sequences that run in the engine or wait there for a slot."""
        self._in_engine = in_engine

    def _slot_is_free(self) -> bool:
        started = self.attempts.sequences(AttemptState.RUNNING)
        return min(started, self._in_engine) < self._settings.slots

    def _start_or_give_up(self, held: Attempt, now: float) -> list[Effect]:
        ladders = [ladder for ladder in self._weights.of(held.policies) if ladder.hosted]
        if len(ladders) < len(held.policies):
            return self.fail(held, "policy_unknown", "the policy is hosted here no more")
        if any(ladder.healing for ladder in ladders):
            return self.fail(held, "weights_unavailable", "the agent's copy is being healed")
        if now >= held.accepted_s + self._settings.attempt_timeout_s:
            return self.fail(held, "weights.timeout", "waited too long for its weights")
        for ladder in ladders:
            pinned = held.pinned.get(ladder.policy)
            if not ladder.ready:
                return []
            if pinned is not None and (ladder.version != pinned or ladder.stage is Stage.SWAPPING):
                return []
        if not self._slot_is_free():
            self._poll_s = now + self._settings.slot_poll_s
            return []
        self._in_engine += held.sequences
        held.state = AttemptState.RUNNING
        self._journal.note(held.name, "started")
        return [RunAttempt(offer=held.offer, queued_s=now - held.accepted_s)]

    def deadline(self) -> float | None:
        waiting = self.attempts.waiting()
        if not waiting:
            return None
        # Oldest first, and a clock never goes back.
        due_s = waiting[0].accepted_s + self._settings.attempt_timeout_s
        return due_s if self._poll_s is None else min(due_s, self._poll_s)

    # ---- progress and end ----------------------------------------------------------------------

    def generated(self, name: str, fence: Fence) -> None:
        held = self.attempts.find(name, fence)
        if held is not None and held.state is AttemptState.RUNNING:
            held.state = AttemptState.SCORING
            self._journal.note(name, "generated")

    def spooled(self, summary: GroupSummary) -> list[Effect]:
        held = self.attempts.find(summary.attempt, summary.fence)
        if held is None:
            if self.outbox.find(summary.attempt) == summary:
                return []
            # Aborted while its result was being written: nobody wants it.
            return [DropSpooled(attempt=summary.attempt, digest=summary.digest)]
        self.attempts.remove(held)
        self.outbox.add(summary)
        self._largest_body_bytes = max(self._largest_body_bytes, summary.size_bytes)
        self._journal.note(summary.attempt, "spooled")
        return self._give_up_undeliverable()

    def peer_knows(self, kinds: bytes) -> list[Effect]:
        """Which kinds of messages the cloud side knows (``Welcome.kinds``)."""
        self.outbox.peer_knows(kinds)
        return self._give_up_undeliverable()

    def _give_up_undeliverable(self) -> list[Effect]:
        """Rather than to fill the spool: what an older log cannot take, no agent can give it."""
        effects: list[Effect] = []
        for summary in self.outbox.undeliverable():
            effects += self._drop(summary, "the log is too old for it")
            text = (
                f"a body of {summary.size_bytes} bytes: the trajectory log is of an older farflow"
                f" and takes {BULK_FRAME_BYTES} at most; upgrade the scheduler's host"
            )
            code = "upload.too_large"
            effects.append(self._report(summary.attempt, summary.fence, code, text))
        return effects

    def lost(self, event: BodyLost) -> list[Effect]:
        """A result is gone from the disk: the attempt fails after all."""
        summary = self.outbox.find(event.attempt)
        if summary is None or summary.digest != event.digest:
            return []
        effects = self._drop(summary, f"lost: {event.code}")
        return [*effects, self._report(event.attempt, summary.fence, event.code, event.detail)]

    def crashed(self, name: str, fence: Fence, code: str, detail: str) -> list[Effect]:
        held = self.attempts.find(name, fence)
        if held is None:
            return []
        self.attempts.remove(held)
        self._end(name, fence, f"failed: {code}")
        return [self._report(name, fence, code, detail)]

    def fail(self, held: Attempt, code: str, detail: str) -> list[Effect]:
        """End a held attempt by our own decision."""
        effects: list[Effect] = []
        if held.state is not AttemptState.WAITING:
            effects.append(AbortAttempt(attempt=held.name, fence=held.fence))
        return effects + self.crashed(held.name, held.fence, code, detail)

    def fail_policy(self, policy: str, code: str, detail: str) -> list[Effect]:
        """End every attempt that still needs this policy's weights."""
        effects: list[Effect] = []
        for held in self.attempts:
            if policy in held.policies and held.state is not AttemptState.SCORING:
                effects += self.fail(held, code, detail)
        return effects

    def acknowledged(self, message: TrajectoryAck | TrajectoryRefused, now: float) -> list[Effect]:
        """The log's last word on a body."""
        summary = self.outbox.find(message.attempt)
        if summary is None or summary.digest != message.digest:
            self._journal.count("ack.unknown")
            return []
        self.outbox.progressed(now)
        if isinstance(message, TrajectoryAck):
            self._journal.count("acknowledged")
            return self._drop(summary, "acknowledged")
        effects = self._drop(summary, f"refused: {message.code}")
        return [
            *effects,
            self._report(summary.attempt, summary.fence, message.code, message.message),
        ]

    def forget(self, name: str, why: str) -> list[Effect]:
        """Drop an attempt that the scheduler wants no more, wherever it stands."""
        held = self.attempts.find(name)
        if held is not None:
            self.attempts.remove(held)
            self._end(name, held.fence, why)
            if held.state is AttemptState.WAITING:
                return []
            return [AbortAttempt(attempt=name, fence=held.fence)]
        summary = self.outbox.find(name)
        return [] if summary is None else self._drop(summary, why)

    def _drop(self, summary: GroupSummary, why: str) -> list[Effect]:
        self.outbox.remove(summary.attempt)
        self._end(summary.attempt, summary.fence, why)
        return [DropSpooled(attempt=summary.attempt, digest=summary.digest)]

    def _report(self, name: str, fence: Fence, code: str, detail: str) -> Effect:
        self._journal.count("failed")
        return self._session.report(
            AttemptFailed(
                attempt=name,
                fence=fence,
                code=cut(code, _MAX_CODE),
                detail=cut(detail, _MAX_DETAIL),
            )
        )

    def _end(self, name: str, fence: Fence, why: str) -> None:
        self._ended[name] = fence
        self._journal.note(name, why)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def check(self) -> None:
        """Raise ``InvariantViolation`` when attempts, spool and weights contradict each other."""
        settings = self._settings
        busy = [held for held in self.attempts if held.state is not AttemptState.SCORING]
        sequences = sum(held.sequences for held in busy)
        if len(busy) > 1 and sequences > settings.slots + settings.prefetch_sequences:
            raise InvariantViolation(f"{sequences} sequences are held in {len(busy)} attempts")
        for held in self.attempts:
            if self.outbox.find(held.name) is not None:
                self._violation(held, "is held and spooled")
            for ladder in self._weights.of(held.policies):
                pinned = held.pinned.get(ladder.policy)
                if held.state is AttemptState.RUNNING and pinned not in (None, ladder.version):
                    self._violation(held, f"runs at {ladder.version}, pinned to {pinned}")
        self.outbox.check()

    def _violation(self, held: Attempt, what: str) -> None:
        story = "; ".join(self._journal.story(held.name))
        raise InvariantViolation(f"{held.name} {what}: {story}")


def _reply(offer: LeaseOffer, reason: str) -> Effect:
    reply = LeaseReply(attempt=offer.attempt, fence=offer.fence, accepted=not reason, reason=reason)
    return ToScheduler(message=reply)
