"""The agent core in the world: links, engine, spool, copies of weights and one timer.

What always holds: nothing is decided here; the event loop waits for no disk, hash or model; effects
are carried out in order, and an event that an effect causes at once is handled after the effects
before it; an error in handling one, wherever it was told from, ends the agent with that error
(``edge_agent.life``).
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import structlog

from edge_agent import metrics
from edge_agent.attempt_runner import AttemptRunner
from edge_agent.config import AgentConfig
from edge_agent.core.effects import (
    AbortAttempt,
    DropSpooled,
    Effect,
    Exit,
    OfferBodies,
    RemakeLink,
    RunAttempt,
    SendLog,
    ToScheduler,
    ToTrajectoryLog,
    ToWeightStore,
)
from edge_agent.core.events import (
    Event,
    FromScheduler,
    FromTrajectoryLog,
    FromWeightStore,
    LinkDown,
    LinkUp,
    Measured,
    PolicyLost,
    SendFailed,
    Tick,
)
from edge_agent.core.machine import AgentCore
from edge_agent.engine import Engine
from edge_agent.gpu import GpuWatch
from edge_agent.home import AgentHome
from edge_agent.installation import core_settings
from edge_agent.leftovers import discard_leftovers
from edge_agent.life import Life, drain_when_asked
from edge_agent.program_marks import ProgramMarks
from edge_agent.rewards import RewardPool
from edge_agent.uploader import Uploader
from edge_agent.weights_client import WeightEffect, WeightsClient
from edge_agent.workflow import SHIPPED, load_workflow
from edge_agent.workflows.program import offered_programs
from transport.chunk_parts import SourceId
from transport.envelope import CONTROL_FRAME_BYTES, KIB
from transport.errors import InvariantViolation, StoreError
from transport.messages import (
    WORK_PLANES,
    AgentLog,
    Chunk,
    Goodbye,
    Hello,
    LeaseReplies,
    LeaseReply,
    Message,
    NextServerKey,
    Plane,
    Refuse,
    Role,
    WeightsRequest,
    Welcome,
)
from transport.permissions import unknown_to
from transport.plane_links import PlaneLinks
from transport.runtime.build import installed_build
from transport.runtime.clock import Clock
from transport.runtime.log_ring import LogRing
from transport.source_links import ORIGIN, SourceLinks

_LOG_BYTES = CONTROL_FRAME_BYTES - 16 * KIB
"""What lines of log may take in one message; the rest is for what frames each of them."""

_log = structlog.get_logger()

MakeSources = Callable[
    [Callable[[SourceId, Chunk, list[bytes]], None], Callable[[SourceId, bool], None]], SourceLinks
]
"""Makes the connections that chunks come over; they tell the first of chunks, the second of coming
and going."""


class AgentShell:
    """One life of an agent, from the first hello to ``Exit``.

    Raises:
        ConfigError: a workflow of ``[agent]`` or a program cannot be offered.
    """

    def __init__(
        self,
        config: AgentConfig,
        home: AgentHome,
        engine: Engine,
        links: PlaneLinks,
        make_sources: MakeSources,
        clock: Clock,
        log_ring: LogRing,
    ) -> None:
        workflows = {name: load_workflow(name) for name in (*SHIPPED, *config.agent.workflows)}
        marks = ProgramMarks(home.folder)
        workflows |= offered_programs(config.agent.programs, marks)
        self.core = AgentCore(
            core_settings(config, workflows, engine),
            incarnation=home.incarnation,
            build=installed_build(),
            rng=random.Random(),  # noqa: S311 - spreads retries
            spooled=home.spooled,
            now=clock.monotonic_s(),
        )
        self._engine = engine
        self._links = links
        self._clock = clock
        self._log_ring = log_ring
        self._home = home
        self._trust = home.trust
        self._spool = home.spool
        self._rewards = RewardPool(config.agent.reward_timeout_s, marks=marks)
        self._uploader = Uploader(links, home.spool, self.feed)
        self._runner = AttemptRunner(
            engine,
            self._rewards,
            home.spool,
            workflows,
            clock=clock,
            timeout_s=config.agent.attempt_timeout_s,
            feed=self.feed,
            keeper=self._uploader.partials,
        )
        self._sources = make_sources(
            lambda source, chunk, payload: self._weights.arrived(source, chunk, payload),
            lambda source, up: self._weights.source_changed(source, up),
        )
        self._weights = WeightsClient(
            engine,
            home.copies,
            self._sources,
            clock=clock,
            rng=random.Random(),  # noqa: S311 - chooses cells to look at
            feed=self.feed,
            refresh_trust=home.trust.refresh,
            local_models=config.agent.local_models,
        )
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        engine.when_freed = self._sequences_ended
        engine.when_lost = lambda policy: self.feed(PolicyLost(policy=policy))
        self._gpus = GpuWatch()
        self._metrics_port = config.agent.metrics_port
        self._tasks: asyncio.TaskGroup | None = None
        self._life: Life | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Until the core says ``Exit``; ``stop`` asks it to drain, and a ``Stop`` that is asked for
        again, to leave at once. Returns the exit status."""
        life = self._life = Life(lambda: self._runner.running)
        _log.info("agent.started", incarnation=self.core.incarnation)
        try:
            ended = await self._live(life, stop)
        except asyncio.CancelledError as error:
            if (cancelled := life.why_cancelled()) is None:
                raise
            raise cancelled from error
        finally:
            self._handling = True  # also when we are cut off: nothing is handled any more
            if self._timer is not None:
                self._timer.cancel()
        if isinstance(ended, Exception):
            raise ended
        _log.info("agent.ended", reason=ended.reason, status=ended.status)
        return ended.status

    async def _live(self, life: Life, stop: asyncio.Event) -> Exit | Exception:
        """How it ended; an error out of a task of the group is raised, in a group."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            parts = (
                self._links.receive(Plane.CONTROL, self._from_scheduler),
                self._links.receive(Plane.TRAJECTORIES, self._from_log),
                self._links.receive(Plane.WEIGHTS, self._from_store),
                *(self._links.watch(plane, self._link_changed) for plane in WORK_PLANES),
                self._uploader.run(),
                self._sources.run(),
                self._gpus.run(),
                metrics.serve(self._metrics_port, self.core, self._engine, self._clock),
                drain_when_asked(stop, self._home.folder, self.feed),
                discard_leftovers(
                    self._home.copied, self.core, lambda it: self._weights.perform(it, tasks)
                ),
            )
            life.watch([tasks.create_task(part) for part in parts])
            self._on_timer()
            ended = await life.ended()
            await self._runner.close()
            await self._weights.close()
            await self._sources.close()
            await self._rewards.close()
        return ended

    def feed(self, event: Event) -> None:
        """Let the core handle an event and carry out what it wants."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        with self._fatal():
            while self._events:
                for effect in self.core.handle(self._events.popleft(), self._clock.monotonic_s()):
                    self._perform(effect)
            self._set_timer()
            self._handling = False

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error inside ends the agent, in order: the event loop only logs what a callback of its
        raises. No event is handled any more, as the core may be in the middle of one."""
        try:
            yield
        except Exception as error:
            self._handling = True
            if self._life is None:
                raise
            self._life.fail(error)

    # ---- what happens ------------------------------------------------------------------------

    def _from_scheduler(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Welcome):
            _log.info("agent.welcome", term=message.term, policies=message.policies)
            lacks = unknown_to(message.kinds, Role.AGENT)
            if lacks:
                _log.warning("agent.older_scheduler", lacks=lacks, remedy="upgrade its host first")
            self._uploader.partials.peer_knows(message.kinds)
        if self._trust.take(message):
            self._group.create_task(asyncio.to_thread(self._trust.keep), name="keep keys")
        if isinstance(message, NextServerKey):
            return
        if isinstance(message, Refuse):
            _log.warning("agent.refused", code=message.code, reason=message.message)
        self.feed(FromScheduler(message=message))

    def _from_log(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Refuse):
            _log.warning("agent.log_refused", code=message.code, reason=message.message)
        if not self._uploader.took(message, payload):
            self.feed(FromTrajectoryLog(message=message))

    def _from_store(self, message: Message, payload: list[bytes]) -> None:
        if isinstance(message, Chunk):
            self._weights.arrived(ORIGIN, message, payload)
        else:
            self.feed(FromWeightStore(message=message))

    def _link_changed(self, plane: Plane, up: bool) -> None:
        if plane is Plane.TRAJECTORIES:
            self._uploader.link_changed(up)
        elif plane is Plane.WEIGHTS:
            self._weights.source_changed(ORIGIN, up)
        self.feed(LinkUp(plane=plane) if up else LinkDown(plane=plane))

    def _on_timer(self) -> None:
        self._timer = None
        with self._fatal():
            self._measure()
            self.feed(Tick())

    def _sequences_ended(self) -> None:
        """Whoever waits for a slot may have one: once for all that end in this turn of the loop."""
        if self.core.wants_slot and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        with self._fatal():
            self._measure()

    def _measure(self) -> None:
        stats = self._engine.stats()
        self.feed(
            Measured(
                tokens_generated=stats.tokens_generated,
                running_sequences=stats.running,
                waiting_sequences=stats.waiting,
                bytes_up=self._links.bytes_up,
                bytes_down=self._links.bytes_down + self._sources.bytes_down,
                wall_s=self._clock.wall_s(),
                gpus=self._gpus.readings,
            )
        )

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock.monotonic_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    # ---- what is to be done ------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ToScheduler(message=message):
                self._tell(message)
            case ToWeightStore(message=WeightsRequest() as request):
                self._send(Plane.WEIGHTS, self._weights.requesting(request))
            case ToWeightStore(message=message):
                self._send(Plane.WEIGHTS, message)
            case ToTrajectoryLog(summary=summary):
                self._uploader.put(summary)
            case OfferBodies(summaries=summaries):
                self._uploader.offer(summaries)
            case RemakeLink(plane=plane):
                if plane is Plane.TRAJECTORIES:
                    self._uploader.clear()
                self._links.renew(plane)
            case RunAttempt():
                self._runner.start(effect, self._group)
            case AbortAttempt(attempt=attempt, fence=fence):
                self._runner.abort(attempt, fence)
            case DropSpooled(attempt=attempt, digest=digest):
                self._group.create_task(self._drop(attempt, digest))
            case _ if isinstance(effect, WeightEffect):
                self._weights.perform(effect, self._group)
            case SendLog(request=request, run=run, lines=lines):
                found = self._log_ring.recent(lines, run=run, max_bytes=_LOG_BYTES)
                self._tell(AgentLog(request=request, lines=found))
            case Exit():
                if self._life is not None:
                    self._life.end(effect)
            case _:
                raise InvariantViolation(f"unknown effect {type(effect).__name__}")

    @property
    def _group(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise InvariantViolation("the agent does not run")
        return self._tasks

    def _tell(self, message: Message) -> None:
        match message:
            case Hello():
                message = msgspec.structs.replace(message, process=self._home.process)
            case LeaseReply():
                _log_reply(message)
            case LeaseReplies(replies=replies):
                for reply in replies:
                    _log_reply(reply)
            case Goodbye():
                _log.info("agent.goodbye", reason=message.reason)
            case _:
                pass
        self._send(Plane.CONTROL, message)

    def _send(self, plane: Plane, message: Message) -> None:
        if not self._links.send(plane, message):
            self.feed(SendFailed(plane=plane, message=message))

    async def _drop(self, attempt: str, digest: str) -> None:
        self._uploader.dropped(digest)
        try:
            await asyncio.to_thread(self._spool.drop, digest)
        except StoreError as error:
            _log.warning("spool.not_dropped", attempt=attempt, reason=str(error))


def _log_reply(reply: LeaseReply) -> None:
    if reply.accepted:
        _log.debug("lease.accepted", attempt=reply.attempt)
    else:
        _log.info("lease.declined", attempt=reply.attempt, reason=reply.reason)
