"""An edge agent: its production core, a service-time model for its engine, a spool, a weight copy.

Carries out the core's effects as ``edge_agent.shell`` does, with modelled durations; decides
nothing. A crash keeps what is on disk, the spool and the last committed copy, unless the disk goes
as well (``wipe``).
"""

import math
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from edge_agent.core import effects as do
from edge_agent.core import events as on
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from sim.actors.engine import Engine, Group
from sim.actors.modelled import Spooled
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.actors.weight_copies import WeightCopies
from sim.faults import Fault
from sim.kernel import WALL_START_S, Alarm, Kernel
from sim.ledger import Ledger
from sim.network import Network
from sim.workload import Draws, make_digest
from transport.errors import InvariantViolation
from transport.messages import (
    AgentLog,
    GroupSummary,
    Message,
    OfferedBody,
    Plane,
    TrajectoryOffer,
    TrajectoryPut,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SPOOL_S = 0.01
"""Packing a body and making it durable in the spool."""

CLOSING_S = 2.0
"""From an agent's goodbye until its connections are closed; it asks so much less than its machine's
notice for draining."""

CHUNK_BYTES = 1 << 20

PLANE_HOSTS = {Plane.CONTROL: SCHEDULER, Plane.TRAJECTORIES: LOG, Plane.WEIGHTS: STORE}


class AgentActor:
    """One agent under one name, over its lives."""

    def __init__(
        self,
        name: str,
        settings: AgentSettings,
        *,
        kernel: Kernel,
        network: Network,
        draws: Draws,
        ledger: Ledger,
        tokens_per_s: float,
        policies: list[str],
        seed: int,
        check: bool,
    ) -> None:
        self.name = name
        self.engine = Engine(
            kernel,
            ledger,
            slots=settings.slots,
            tokens_per_s=tokens_per_s,
            first_token_s=draws.workload.first_token_s,
            generated=self._generated,
            freed=self._sequences_ended,
            holds_slots=draws.workload.tool_slot == "held",
        )
        self.alive = False
        self.core: AgentCore
        # Polls that would bring no news are left out: most of a large fleet's events were those.
        self._slot_poll_s = settings.slot_poll_s
        self._settings = msgspec.structs.replace(settings, slot_poll_s=math.inf)
        self._unsaid = False  # sequences have ended that the core does not know of
        self._kernel = kernel
        self._network = network
        self._draws = draws
        self._ledger = ledger
        self._seed = seed
        self._check = check
        self._incarnation = 0
        self._number = 0
        self._spool: dict[str, Spooled] = {}
        self._weights = WeightCopies(
            self,
            self.engine,
            kernel=kernel,
            network=network,
            workload=draws.workload,
            ledger=ledger,
            policies=policies,
        )
        self._events: deque[on.Event] = deque()
        self._handling = False
        self._closing = False
        self._ahead_s = 0.0  # of its wall clock
        self._alarm = Alarm(kernel, self._tick)
        self._perform: dict[type[do.Effect], Callable[..., None]] = {
            do.ToScheduler: self._to_scheduler,
            do.ToTrajectoryLog: self._to_log,
            do.OfferBodies: self._offer_bodies,
            do.SendLog: self._send_log,
            do.ToWeightStore: self._to_store,
            do.RemakeLink: self._remake_link,
            do.RunAttempt: self._run_attempt,
            do.AbortAttempt: self._abort_attempt,
            do.DropSpooled: self._drop_spooled,
            do.Exit: self._exit,
            **self._weights.perform,
        }

    @property
    def lives(self) -> int:
        """How often it was started."""
        return self._incarnation

    @property
    def _wall_s(self) -> float:
        """What its wall clock shows."""
        return self._kernel.now + WALL_START_S + self._ahead_s

    # ---- life ----------------------------------------------------------------------------------

    def start(self, _: object = None) -> None:
        """Begin a life with what is on disk."""
        if self._closing:
            self._closing = False
            self._network.reset(self.name)
        self._incarnation += 1
        # As the production daemon counts its lives: by the clock where the disk was lost.
        self._number = max(self._number + 1, int(self._wall_s))
        self.alive = True
        self.core = AgentCore(
            self._settings,
            incarnation=self._number,
            build="sim",
            rng=random.Random(self._seed * 1009 + self._incarnation),  # noqa: S311
            spooled=[kept.summary for kept in self._spool.values()],
            now=self._kernel.now,
        )
        self._tick()

    def strike(self, fault: Fault) -> None:
        """Suffer what happens to the machine; what does not fit how it is now has no effect."""
        match fault.what:
            case "crash":
                if self.alive or self._closing:
                    self.crash()
                if fault.wiped:
                    self.wipe()
            case "return" if not self.alive:
                self.start()
            case "restore":
                self.link_up()
            case "notice" if self.alive:
                self.warn(fault.amount)
            case "slow":
                self.engine.slow_down(fault.amount)
            case "skew":
                self._ahead_s = fault.amount
            case _:
                pass

    def crash(self) -> None:
        """Die at once."""
        self._network.reset(self.name)
        self._closing = False
        self._end()

    def wipe(self) -> None:
        """Its disk is gone, while it does not run; the initial models are in its image."""
        self._number = 0
        self._spool.clear()
        self._weights.wipe()

    def warn(self, notice_s: float) -> None:
        """Its machine will be taken away in ``notice_s``: what a supervisor's SIGTERM does."""
        within_s = max(0.0, notice_s - CLOSING_S)
        self.feed(on.DrainRequested(reason="preempted", deadline_s=within_s))

    def _end(self) -> None:
        self.alive = False
        self.engine.stop()
        self._weights.crash()
        self._events.clear()
        self._alarm.set(None)

    def link_up(self) -> None:
        """All connections were made anew."""
        if self.alive:
            for plane in PLANE_HOSTS:
                self.feed(on.LinkUp(plane=plane))

    def receive(self, source: str, message: Message, _: object) -> None:
        if not self.alive:
            return
        if source == SCHEDULER:
            self.feed(on.FromScheduler(message=message))
        elif source == LOG:
            self.feed(on.FromTrajectoryLog(message=message))
        else:
            self.feed(on.FromWeightStore(message=message))

    def feed(self, event: on.Event) -> None:
        """Let the core handle an event and carry out what it wants."""
        if self._handling:
            self._events.append(event)
            return
        self._handling = True
        core, now, perform = self.core, self._kernel.now, self._perform
        while True:
            for effect in core.handle(event, now):
                perform[type(effect)](effect)
            if self._check:
                core.check()
            if not self._events:
                break
            event = self._events.popleft()
        self._handling = False
        due_s = core.next_deadline() if self.alive else None
        if self._unsaid and due_s is not None and core.wants_slot:
            due_s = min(due_s, now + self._slot_poll_s)
        self._alarm.set(due_s)

    def _sequences_ended(self) -> None:
        if self.alive and self.core.wants_slot:
            self._tick()
        else:
            self._unsaid = True

    def _tick(self) -> None:
        if self.alive:
            engine, self._unsaid = self.engine, False
            # Whatever an event says, the core does all that is due: no ``Tick`` is needed after it.
            self.feed(
                on.Measured(
                    tokens_generated=engine.tokens_generated,
                    running_sequences=engine.running,
                    waiting_sequences=engine.waiting,
                    bytes_up=0,
                    bytes_down=0,
                    wall_s=self._wall_s,
                )
            )

    def later(self, delay_s: float, event: on.Event) -> None:
        """Feed ``event`` after a while, if this life still lasts."""
        life = self._incarnation

        def happen(_: object) -> None:
            if self.alive and self._incarnation == life:
                self.feed(event)

        self._kernel.after(delay_s, happen)

    def _exit(self, effect: do.Exit) -> None:
        """Stop working; what was said still leaves before the connections close."""
        self._end()
        self._closing = True
        life = self._incarnation

        def closed(_: object) -> None:
            if self._closing and self._incarnation == life:
                self._closing = False
                self._network.reset(self.name)

        self._kernel.after(CLOSING_S, closed)

    # ---- links ---------------------------------------------------------------------------------

    def _to_scheduler(self, effect: do.ToScheduler) -> None:
        self._network.send(self.name, SCHEDULER, effect.message)

    def _to_store(self, effect: do.ToWeightStore) -> None:
        self._network.send(self.name, STORE, effect.message)

    def _to_log(self, effect: do.ToTrajectoryLog) -> None:
        summary = effect.summary
        kept = self._spool.get(summary.attempt)
        if kept is None:
            raise InvariantViolation(f"{self.name}: {summary.attempt} is not in the spool")
        self._network.send(
            self.name,
            LOG,
            TrajectoryPut(summary=summary),
            payload_bytes=summary.size_bytes,
            extra=kept,
        )

    def _offer_bodies(self, effect: do.OfferBodies) -> None:
        kept = tuple(self._spool[summary.attempt] for summary in effect.summaries)
        bodies = tuple(
            OfferedBody(
                summary=body.summary,
                chunk_bytes=CHUNK_BYTES,
                chunk_digests=(b"\0" * 16,) * -(-body.summary.size_bytes // CHUNK_BYTES),
            )
            for body in kept
        )
        self._network.send(self.name, LOG, TrajectoryOffer(bodies=bodies), extra=kept)

    def _send_log(self, effect: do.SendLog) -> None:
        self._network.send(self.name, SCHEDULER, AgentLog(request=effect.request, lines=()))

    def _remake_link(self, effect: do.RemakeLink) -> None:
        host = PLANE_HOSTS[effect.plane]
        self._network.renew(self.name, host)
        self.later(3 * self._network.delay_s(self.name, host), on.LinkUp(plane=effect.plane))

    # ---- attempts ------------------------------------------------------------------------------

    def _run_attempt(self, effect: do.RunAttempt) -> None:
        lengths = self._draws.lengths(effect.offer)
        if self._ledger.recorder is not None:
            self._ledger.recorder.accepted(self.name, effect.offer, sum(lengths), effect.queued_s)
        self.engine.start(effect, lengths, self._draws.turns(effect.offer, lengths))

    def _abort_attempt(self, effect: do.AbortAttempt) -> None:
        self.engine.abort(effect.attempt, effect.fence)

    def _generated(self, group: Group) -> None:
        offer = group.offer
        tokens = sum(group.lengths)
        summary = GroupSummary(
            attempt=offer.attempt,
            fence=offer.fence,
            job=offer.job,
            digest=make_digest(self.name, self._incarnation, offer.attempt, offer.fence),
            size_bytes=round(
                (tokens + self._draws.workload.prompt_tokens)
                * self._draws.workload.body_bytes_per_token
            ),
            rewards=self._draws.rewards(offer),
            lengths=tuple(group.lengths),
            versions={
                policy: (oldest, max(oldest, self.engine.versions.get(policy, oldest)))
                for policy, oldest in group.oldest.items()
            },
            prompt_tokens=self._draws.workload.prompt_tokens,
            queued_s=group.queued_s,
            # As the production shell measures it: waiting for a slot counts as generating.
            generating_s=self._kernel.now - group.started_s,
        )
        if self._ledger.recorder is not None:
            self._ledger.recorder.generated((offer.attempt, offer.fence), summary.digest)
        self.feed(on.GroupGenerated(attempt=offer.attempt, fence=offer.fence))
        life = self._incarnation

        def spooled(_: object) -> None:
            self._ledger.body_made(tokens)
            if self._incarnation != life or not self.alive:
                # Died in the middle of writing: nobody will ever see it.
                self._ledger.body_gone(summary.digest, tokens)
                return
            self._spool[summary.attempt] = Spooled(
                summary, tokens, group.started_s - group.queued_s
            )
            self.feed(on.GroupSpooled(summary=summary))

        self._kernel.after(SPOOL_S, spooled)

    def _drop_spooled(self, effect: do.DropSpooled) -> None:
        kept = self._spool.get(effect.attempt)
        if kept is not None and kept.summary.digest == effect.digest:
            del self._spool[effect.attempt]
