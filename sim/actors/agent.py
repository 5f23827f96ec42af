"""An edge agent: its production core, a service-time model for its engine, a spool, a weight copy.

Carries out the core's effects as ``edge_agent.shell`` does, with modelled durations; decides
nothing. A crash keeps what is on disk: the spool and the last committed copy.
"""

import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from edge_agent.core import effects as do
from edge_agent.core import events as on
from edge_agent.core.machine import AgentCore
from edge_agent.core.settings import AgentSettings
from sim.actors.engine import Engine, Group
from sim.actors.modelled import ModelledPlan, Spooled
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.kernel import Alarm, Kernel
from sim.ledger import Ledger
from sim.network import Flow, Network
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
    VersionRef,
    WeightsPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SPOOL_S = 0.01
"""Packing a body and making it durable in the spool."""

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
            holds_slots=draws.workload.tool_slot == "held",
        )
        self.alive = False
        self.core: AgentCore
        self._settings = settings
        self._kernel = kernel
        self._network = network
        self._draws = draws
        self._ledger = ledger
        self._seed = seed
        self._check = check
        self._incarnation = 0
        # The initial model was matched with a local folder (DESIGN 8): nobody fetches it.
        self._copies = {
            policy: VersionRef(version=0, digest=make_digest(policy, 0)) for policy in policies
        }
        self._spool: dict[str, Spooled] = {}
        self._fetching: dict[str, tuple[int, Flow | None, float]] = {}
        self._staged: dict[str, tuple[int, str, int, float]] = {}
        self._events: deque[on.Event] = deque()
        self._handling = False
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
            do.OpenCopy: self._open_copy,
            do.FetchPlan: self._fetch_plan,
            do.CancelFetch: self._cancel_fetch,
            do.SwapWeights: self._swap_weights,
            do.VerifyWeights: self._verify_weights,
            do.DiscardCopy: self._discard_copy,
            do.Exit: self._exit,
        }

    @property
    def lives(self) -> int:
        """How often it was started."""
        return self._incarnation

    # ---- life ----------------------------------------------------------------------------------

    def start(self, _: object = None) -> None:
        """Begin a life with what is on disk."""
        self._incarnation += 1
        self.alive = True
        self.core = AgentCore(
            self._settings,
            incarnation=self._incarnation,
            build="sim",
            rng=random.Random(self._seed * 1009 + self._incarnation),  # noqa: S311
            spooled=[kept.summary for kept in self._spool.values()],
            now=self._kernel.now,
        )
        self.feed(on.Tick())

    def crash(self) -> None:
        """Die at once."""
        self.alive = False
        self._network.reset(self.name)
        self.engine.stop()
        self._fetching.clear()
        self._staged.clear()
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
        self._alarm.set(core.next_deadline() if self.alive else None)

    def _tick(self) -> None:
        if self.alive:
            engine = self.engine
            # Whatever an event says, the core does all that is due: no ``Tick`` is needed after it.
            self.feed(
                on.Measured(
                    tokens_generated=engine.tokens_generated,
                    running_sequences=engine.running,
                    waiting_sequences=engine.waiting,
                    bytes_up=0,
                    bytes_down=0,
                )
            )

    def _later(self, delay_s: float, event: on.Event) -> None:
        """Feed ``event`` after a while, if this life still lasts."""
        life = self._incarnation

        def happen(_: object) -> None:
            if self.alive and self._incarnation == life:
                self.feed(event)

        self._kernel.after(delay_s, happen)

    def _exit(self, effect: do.Exit) -> None:
        self.crash()

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
        self._later(3 * self._network.delay_s(self.name, host), on.LinkUp(plane=effect.plane))

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

    # ---- weights -------------------------------------------------------------------------------

    def _open_copy(self, effect: do.OpenCopy) -> None:
        ref = self._copies.get(effect.policy)
        if ref is None:
            self.feed(on.CopyOpened(policy=effect.policy, version=None))
            return
        self.engine.versions[effect.policy] = ref.version
        self.feed(on.CopyOpened(policy=effect.policy, version=ref.version, digest=ref.digest))

    def _fetch_plan(self, effect: do.FetchPlan) -> None:
        policy, ticket, plan = effect.policy, effect.ticket, effect.plan
        began_s = self._kernel.now
        life = self._incarnation
        size_bytes = sum(_modelled(plan, n).size_bytes for n in range(len(plan.steps)))
        digest, follows = _modelled(plan, -1).digest, _modelled(plan, -1).follows
        self._fetching[policy] = (ticket, None, began_s)
        if self._ledger.recorder is not None:
            self._ledger.recorder.fetching(self.name, policy, plan.version, size_bytes)

        def current() -> bool:
            fetching = self._fetching.get(policy)
            alive = self.alive and self._incarnation == life
            return alive and fetching is not None and fetching[0] == ticket

        def asked(_: object) -> None:
            if current():
                flow = self._network.transfer(
                    STORE, self.name, size_bytes, arrived, follows=follows
                )
                self._fetching[policy] = (ticket, flow, began_s)

        def arrived() -> None:
            if current():
                del self._fetching[policy]
                took_s = self._kernel.now - began_s
                self._staged[policy] = (plan.version, digest, size_bytes, took_s)
                if self._ledger.recorder is not None:
                    self._ledger.recorder.arrived(self.name, policy)
                self._later(
                    self._draws.workload.apply_s, on.PlanStaged(policy=policy, ticket=ticket)
                )

        if follows:
            asked(None)
            return
        # The chunks are asked for: half a round trip passes before the first one leaves.
        self._kernel.after(self._network.delay_s(self.name, STORE), asked)

    def _cancel_fetch(self, effect: do.CancelFetch) -> None:
        fetching = self._fetching.get(effect.policy)
        if fetching is not None and fetching[0] == effect.ticket:
            del self._fetching[effect.policy]
            if fetching[1] is not None:
                self._network.cancel(fetching[1])

    def _swap_weights(self, effect: do.SwapWeights) -> None:
        policy = effect.policy
        version, digest, size_bytes, took_s = self._staged.pop(policy)
        pause_s = self._draws.workload.swap_s if policy in self.engine.versions else 0.0
        self.engine.pause(pause_s)
        life = self._incarnation

        def swapped(_: object) -> None:
            if not self.alive or self._incarnation != life:
                return
            self._copies[policy] = VersionRef(version=version, digest=digest)
            self.engine.versions[policy] = version
            if self._ledger.recorder is not None:
                self._ledger.recorder.swapped(self.name, policy, version)
            self.feed(
                on.WeightsSwapped(
                    policy=policy,
                    ticket=effect.ticket,
                    version=version,
                    digest=digest,
                    pause_s=pause_s,
                    fetched_bytes=size_bytes,
                    fetch_s=took_s,
                    rate_bytes_s=size_bytes / max(took_s, 1e-9),
                )
            )

        self._kernel.after(pause_s, swapped)

    def _verify_weights(self, effect: do.VerifyWeights) -> None:
        self.feed(on.WeightsVerified(policy=effect.policy, ticket=effect.ticket))

    def _discard_copy(self, effect: do.DiscardCopy) -> None:
        self._copies.pop(effect.policy, None)
        self._staged.pop(effect.policy, None)
        if effect.unload:
            self.engine.versions.pop(effect.policy, None)
        self.feed(on.CopyDiscarded(policy=effect.policy))


def _modelled(plan: WeightsPlan, step: int) -> ModelledPlan:
    return msgspec.msgpack.decode(plan.steps[step].manifest, type=ModelledPlan)
