"""The scheduler's core alone: no sockets, no disk, no clock but the bench's.

Times are CPU seconds of this thread, so that a busy machine does not count; the collector is set
as in the daemon (``scheduler.interpreter``). One event is one thing that the core is told: a job
submitted, an offer accepted, a result stored, a result confirmed or a heartbeat, however many of
them a message carries. Encoding the changed rows is part of it.
"""

import hashlib
import random
import resource
import time
from collections.abc import Callable, Iterator
from typing import Final

from bench.leases_load import PROMPT
from bench.leases_world import POLICY, RUN, run_spec
from scheduler.core.effects import Effect, Reply, Send
from scheduler.core.events import Event, FromAgent, FromOperator, FromService, Tick
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE, CoreSettings
from scheduler.core.state import Change, Row
from transport.messages import (
    AgentInventory,
    BodiesGone,
    BodiesReleased,
    ExternalJob,
    GroupSummary,
    Heartbeat,
    HeldAttempt,
    Hello,
    Item,
    JobSubmit,
    LeaseOffer,
    LeaseReplies,
    LeaseReply,
    Results,
    ResultsRequest,
    Role,
    RunSubmit,
    TrajectoriesStored,
    VersionRef,
    VersionStored,
)

SUBMITTER: Final = "load"
DIGEST: Final = "0" * 64
LEASES_S: Final = 5000.0
"""The rate at which the bench lets time pass, so that heartbeats come as often as they would."""

TURN_JOBS: Final = 50
"""Jobs, and later their replies and results, in one message: 10 ms of such a rate."""


class CoreWorld:
    """A core with ready agents; keeps offers that wait for an answer."""

    def __init__(
        self, agents: int, *, slots: int = 8, rows: list[Row] | None = None, max_jobs: int = 200_000
    ) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        self.events = 0
        settings = CoreSettings(
            max_queued_jobs=2 * max_jobs,  # one submitter may not have them all
            max_results_per_submitter=max_jobs,
            prompts_on_disk=True,
        )
        self.core = SchedulerCore(
            settings, term=1, rng=random.Random(1), build="bench", rows=rows or ()
        )
        self.offers: list[tuple[str, LeaseOffer]] = []
        self.held: dict[str, dict[str, LeaseOffer]] = {}
        self.released: list[str] = []
        self.confirmed = 0
        self.submitted = 0
        self.requests = 0
        self._requested = False
        self.on_changes: Callable[[list[Change]], None] | None = None
        self._names = [f"agent-{number:05d}" for number in range(agents)]
        self._versions = {POLICY: VersionRef(version=0, digest=DIGEST)}
        self._next_beat = 0
        scale = max(1.0, agents / settings.heartbeat_scale_agents)
        self._heartbeat_s = settings.heartbeat_s * scale
        if rows:
            return
        self.feed(self._asked(RunSubmit(run=run_spec("none"))))
        self.feed(FromService(service=WEIGHT_STORE, message=_first_version()))
        for name in self._names:
            self.held[name] = {}
            self.feed(FromAgent(agent=name, message=self._hello(slots)))
            self._beat(name)

    def feed(self, event: Event, events: int = 1) -> list[Effect]:
        """Handle one event and take the rows; only that is timed."""
        began = time.thread_time()
        effects = self.core.handle(event, self.now)
        changes = self.core.take_changes()
        self.cpu_s += time.thread_time() - began
        self.events += events
        if self.on_changes is not None:
            self.on_changes(changes)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaseOffer):
                self.offers.append((effect.peer, effect.message))
            elif isinstance(effect, Reply) and isinstance(effect.message, Results):
                self._take_results(effect.message)
            elif isinstance(effect, Send) and isinstance(effect.message, BodiesReleased):
                self.released += effect.message.digests
        return effects

    def submit(self, count: int) -> None:
        """New jobs in one message."""
        jobs = tuple(
            ExternalJob(id=f"job-{number}", items=(_item(number),))
            for number in range(self.submitted, self.submitted + count)
        )
        self.submitted += count
        self.feed(self._asked(JobSubmit(run=RUN, jobs=jobs)), count)

    def answer_offers(self) -> None:
        """Every agent accepts what it was offered."""
        offers, self.offers = self.offers, []
        by_agent: dict[str, list[LeaseOffer]] = {}
        for name, offer in offers:
            by_agent.setdefault(name, []).append(offer)
            self.held[name][offer.attempt] = offer
        for name, many in by_agent.items():
            replies = tuple(
                LeaseReply(attempt=o.attempt, fence=o.fence, accepted=True) for o in many
            )
            self.feed(FromAgent(agent=name, message=LeaseReplies(replies=replies)), len(many))

    def finish(self, count: int) -> None:
        """The oldest ``count`` results are stored, and read by the submitter."""
        done = [(name, offer) for name, offer in self._oldest(count)]
        for start in range(0, len(done), TURN_JOBS):
            summaries = tuple(_summary(name, o) for name, o in done[start : start + TURN_JOBS])
            message = TrajectoriesStored(summaries=summaries)
            self.feed(FromService(service=TRAJECTORY_LOG, message=message), len(summaries))
        if self.released:
            gone, self.released = tuple(self.released), []
            self.feed(FromService(service=TRAJECTORY_LOG, message=BodiesGone(digests=gone)), 0)
        if not self._requested:
            self._request()

    def pass_time(self, seconds: float) -> None:
        """Let time go by, with the fleet's heartbeats in it."""
        beats = int(seconds * len(self._names) / self._heartbeat_s)
        for _ in range(beats):
            self._beat(self._names[self._next_beat % len(self._names)])
            self._next_beat += 1
        self.now += seconds
        due = self.core.next_deadline()
        if due is not None and due <= self.now:
            self.feed(Tick())

    def _oldest(self, count: int) -> Iterator[tuple[str, LeaseOffer]]:
        for name, held in self.held.items():
            while held and count > 0:
                yield name, held.pop(next(iter(held)))
                count -= 1

    def _take_results(self, results: Results) -> None:
        self._requested = False
        if results.results:
            self.confirmed = results.results[-1].number
            self.events += len(results.results)

    def _request(self) -> None:
        self._requested = True
        message = ResultsRequest(after=self.confirmed, wait_s=5.0)
        self.feed(self._asked(message), 0)

    def _asked(self, message: RunSubmit | JobSubmit | ResultsRequest) -> FromOperator:
        self.requests += 1
        return FromOperator(peer=SUBMITTER, request=self.requests, message=message)

    def _hello(self, slots: int) -> Hello:
        inventory = AgentInventory(
            slots=slots,
            hardware="bench",
            engine="none",
            workflows={"single_turn": "1"},
            rewards=("exact",),
            versions=self._versions,
        )
        return Hello(role=Role.AGENT, incarnation=1, build="bench", agent=inventory)

    def _beat(self, name: str) -> None:
        offers = self.held[name].values()
        held = tuple(HeldAttempt(attempt=o.attempt, fence=o.fence) for o in offers)
        beat = Heartbeat(
            sequence=1, sent_s=0.0, held=held, versions=self._versions, running_sequences=len(held)
        )
        self.feed(FromAgent(agent=name, message=beat))


def leases(world: CoreWorld, count: int) -> tuple[float, float]:
    """Run ``count`` leases from submission to confirmation; CPU seconds per event and per lease."""
    world.cpu_s, world.events = 0.0, 0
    for _ in range(count // TURN_JOBS):
        world.submit(TURN_JOBS)
        world.answer_offers()
        world.pass_time(TURN_JOBS / LEASES_S)
        world.finish(TURN_JOBS)
    return world.cpu_s / world.events, world.cpu_s / count


def decision_s(world: CoreWorld, count: int) -> float:
    """CPU seconds per job from its submission to its offer, agents having room."""
    spent_s = 0.0
    for _ in range(count // TURN_JOBS):
        world.cpu_s = 0.0
        world.submit(TURN_JOBS)
        spent_s += world.cpu_s
        assert len(world.offers) == TURN_JOBS
        world.answer_offers()
        world.pass_time(TURN_JOBS / LEASES_S)
        world.finish(TURN_JOBS)
    return spent_s / (count // TURN_JOBS * TURN_JOBS)


def queue(world: CoreWorld, count: int) -> float:
    """Submit so many jobs; what each of them costs in resident bytes."""
    world.submit(100)
    before = _resident_bytes()
    for _ in range(count // 100 - 1):
        world.submit(100)
        world.now += 0.02
    return (_resident_bytes() - before) / (count - 100)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _first_version() -> VersionStored:
    return VersionStored(
        policy=POLICY, version=0, parent=None, step=0, digest=DIGEST, delta_bytes=0, full_bytes=1000
    )


def _item(number: int) -> Item:
    return Item(index=number, prompt=f"{number}: {PROMPT}", answer="5")


def _summary(agent: str, offer: LeaseOffer) -> GroupSummary:
    return GroupSummary(
        attempt=offer.attempt,
        fence=offer.fence,
        job=offer.job,
        digest=hashlib.sha256(offer.attempt.encode()).hexdigest(),
        size_bytes=1000,
        rewards=(1.0,),
        lengths=(32,),
        versions={POLICY: (0, 0)},
        prompt_tokens=8,
        queued_s=0.0,
        generating_s=0.25,
        agent=agent,
    )
