"""How long this machine's own work took in an emulation, from the scheduler's event log.

The simulator takes these as inputs (``with_service``): what it predicts is how a system of such
parts behaves over such links. Each is a mean over the run, network times taken out::

    train_s    the trainer's busy time of a step
    publish_s  from a step's report to its version's being announced as durable, less ``store_s``
    apply_s    from a version's announcement to the agent's word that it serves it, less the round
               trip, the fetch and the pause: planning, verifying, decoding, swapping
    swap_s     the engine's pause
    store_s    from a group's last token to the scheduler's knowing of its durable body, less half
               round trips, upload and ``SPOOL_S``

What always holds: a time of which nothing was seen is the scenario's.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from scheduler.core.events import Event, FromAgent, FromService, FromTrainer
from scheduler.event_log import RecordedTerm, recorded_terms, unpack_event
from sim.actors.agent import SPOOL_S
from sim.scenario import Scenario
from sim.topology import LOCAL_RTT_S
from sim.workload import Workload
from transport.messages import (
    LeaseReplies,
    LeaseReply,
    StepReport,
    TrajectoriesStored,
    VersionServing,
    VersionStored,
)


class ServiceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    train_s: float
    publish_s: float
    apply_s: float
    swap_s: float
    store_s: float
    delta_bytes: float
    body_bytes_per_token: float


def with_service(scenario: Scenario, service: ServiceTimes) -> Scenario:
    """The scenario with the service times of a machine instead of its own."""
    shapes = {
        name: msgspec.structs.replace(shape, train_s=None)
        for name, shape in scenario.policies.items()
    }
    if len({shape.train_s for shape in scenario.policies.values()}) > 1:
        shapes = dict(scenario.policies)  # one mean does not stand for several trainers
    workload = msgspec.structs.replace(
        scenario.workload,
        train_s=service.train_s,
        publish_s=service.publish_s,
        apply_s=service.apply_s,
        swap_s=service.swap_s,
        store_s=service.store_s,
        delta_bytes=round(service.delta_bytes),
        body_bytes_per_token=service.body_bytes_per_token,
    )
    return msgspec.structs.replace(scenario, policies=shapes, workload=workload)


def recorded_events(folder: Path) -> Iterator[tuple[Event, float]]:
    """Inputs of the scheduler's core with their times, of all lives in the log."""
    for term in recorded_terms(folder):
        for batch in RecordedTerm(term).batches():
            for now, packed in batch.inputs:
                yield unpack_event(packed), now


def service_times(
    events: Iterable[tuple[Event, float]], rtt_s: Mapping[str, float], scenario: Workload
) -> ServiceTimes:
    """Means over ``events``; ``rtt_s`` by agent. A version's first fetch by an agent is left out
    where nothing was fetched."""
    seen = _Seen(rtt_s)
    for event, now in events:
        match event:
            case FromTrainer(_, StepReport() as report):
                seen.stepped(report, now)
            case FromService(_, VersionStored() as stored):
                seen.stored(stored, now)
            case FromService(_, TrajectoriesStored() as bodies):
                seen.bodies(bodies, now)
            case FromAgent(name, VersionServing() as serving):
                seen.serving(name, serving, now)
            case FromAgent(_, LeaseReply() as reply):
                seen.accepted.setdefault(reply.attempt, now)
            case FromAgent(_, LeaseReplies(replies=replies)):
                for reply in replies:
                    seen.accepted.setdefault(reply.attempt, now)
            case _:
                pass
    store_s = max(0.0, _mean(seen.body_s, scenario.store_s + SPOOL_S) - SPOOL_S)
    publish_s = _mean(seen.publish_s, scenario.publish_s + store_s + LOCAL_RTT_S)
    return ServiceTimes(
        train_s=_mean(seen.train_s, scenario.train_s),
        publish_s=max(0.0, publish_s - store_s - LOCAL_RTT_S),
        apply_s=max(0.0, _mean(seen.apply_s, scenario.apply_s)),
        swap_s=_mean(seen.swap_s, scenario.swap_s),
        store_s=store_s,
        delta_bytes=_mean(seen.delta_bytes, scenario.delta_bytes),
        body_bytes_per_token=_mean(seen.bytes_per_token, scenario.body_bytes_per_token),
    )


class _Seen:
    """What was seen so far."""

    def __init__(self, rtt_s: Mapping[str, float]) -> None:
        self.accepted: dict[str, float] = {}
        self.train_s: list[float] = []
        self.publish_s: list[float] = []
        self.apply_s: list[float] = []
        self.swap_s: list[float] = []
        self.body_s: list[float] = []
        self.delta_bytes: list[float] = []
        self.bytes_per_token: list[float] = []
        self._rtt_s = rtt_s
        self._reported: dict[tuple[str, int], float] = {}
        self._stored: dict[tuple[str, int], float] = {}

    def stepped(self, report: StepReport, now: float) -> None:
        if self._reported.setdefault((report.policy, report.step), now) == now:
            self.train_s.append(report.busy_s)

    def stored(self, stored: VersionStored, now: float) -> None:
        key = (stored.policy, stored.version)
        if key in self._stored:
            return
        self._stored[key] = now
        reported_s = self._reported.get((stored.policy, stored.step))
        if reported_s is not None and stored.parent is not None:
            self.publish_s.append(now - reported_s)
            self.delta_bytes.append(float(stored.delta_bytes))

    def serving(self, agent: str, serving: VersionServing, now: float) -> None:
        stored_s = self._stored.get((serving.policy, serving.version))
        if stored_s is None or not serving.fetched_bytes or agent not in self._rtt_s:
            return
        took_s = now - stored_s - serving.fetch_s - serving.pause_s - self._rtt_s[agent]
        self.apply_s.append(took_s)
        self.swap_s.append(serving.pause_s)

    def bodies(self, bodies: TrajectoriesStored, now: float) -> None:
        for body in bodies.summaries:
            accepted_s = self.accepted.pop(body.attempt, None)
            tokens = sum(body.lengths) + body.prompt_tokens
            if accepted_s is not None and tokens:
                self.body_s.append(now - accepted_s - body.queued_s - body.generating_s)
                self.bytes_per_token.append(body.size_bytes / tokens)


def _mean(values: list[float], otherwise: float) -> float:
    return fmean(values) if values else otherwise
