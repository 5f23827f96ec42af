"""Whose turn it is: priorities, shares, quotas.

A source is a ready queue: the training jobs of a run, its submitters' jobs, or an evaluation. The
next placement goes to the source with the smallest

    (- priority, class, tenant's sequences in flight / its share, run's / its share, name)

so that runs of equal priority hold sequences in proportion to their tenants' shares, and within a
tenant to their own. Evaluations and submitters' jobs come first, up to a part of the ready slots
(``CLASS_SHARE``), so that they are not starved; beyond it they get only what training leaves, so
that they do not starve it.

Example: tenants x (share 3) and y (share 1) with 400 slots: x holds 300 sequences and y 100; when
y has no work for 50 of them x has 350, and y gets its own back as they end.

What always holds: a turn costs O(log sources) once the sources of a pass are known; a run at a
quota of its own waits without holding up others; what is in flight is never taken away for a share.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from scheduler.core.context import Context
from scheduler.core.state import Job, Run, external_queue

SourceClass = Literal["eval", "between", "external", "train"]
_RANK: dict[SourceClass, int] = {"eval": 0, "between": 1, "external": 2, "train": 3}
CLASS_SHARE: dict[SourceClass, float] = {"eval": 0.5, "between": 0.1, "external": 0.25}
"""Parts of the ready slots that each class may hold before training has had its turn."""

Key = tuple[int, int, float, float, str]


@dataclass(slots=True, frozen=True)
class Source:
    """A ready queue with something in it that may be placed now."""

    queue: str
    kind: SourceClass
    run: Run
    evaluation: str = ""


class Turns:
    """The sources of one pass; what is placed is counted at once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._runs: dict[str, float] = {}
        self._tenants: dict[str, float] = {}
        self._classes: dict[SourceClass, float] = dict.fromkeys(_RANK, 0.0)
        self._heap: list[tuple[Key, Source]] = []
        self._turn: Key = (0, 0, 0.0, 0.0, "")
        self._set_aside: list[Source] = []
        for source in self._count():
            self._push(source)

    def next(self, *, capped: bool) -> Source | None:
        """Whose turn it is. ``capped`` sets those aside whose class has its part."""
        while self._heap:
            key, source = heapq.heappop(self._heap)
            if capped and self._has_its_part(source):
                self._set_aside.append(source)
                continue
            if self._heap:
                # What was placed since made its key only larger: look at that now.
                now = self._key(source)
                if now > key:
                    heapq.heappush(self._heap, (now, source))
                    continue
            self._turn = key
            return source
        return None

    def placed(self, source: Source, sequences: int) -> None:
        """A job of the source that ``next`` gave went; it has another turn."""
        self._add(source, sequences)
        if len(self._ctx.queue(source.queue)):
            heapq.heappush(self._heap, (self._turn, source))

    def uncap(self) -> None:
        """Those that were set aside get what is left."""
        for source in self._set_aside:
            self._push(source)
        self._set_aside.clear()

    def _count(self) -> list[Source]:
        """Count what is in flight and find the sources; O(runs + evaluations)."""
        ctx = self._ctx
        found: list[Source] = []
        for id, live in ctx.evaluations.items():
            evaluation = ctx.tables.evaluations[id]
            run = ctx.tables.runs[evaluation.run]
            kind: SourceClass = "between" if evaluation.kind == "between" else "eval"
            source = Source(id, kind, run, id)
            self._add(source, live.in_flight)
            found.append(source)
        for name, run_live in ctx.runs.items():
            run = ctx.tables.runs[name]
            for source, flying in (
                (Source(external_queue(name), "external", run), run_live.external_in_flight),
                (Source(name, "train", run), run_live.in_flight),
            ):
                self._add(source, flying)
                found.append(source)
        return [s for s in found if s.run.state == "running" and len(ctx.queue(s.queue))]

    def _add(self, source: Source, sequences: int) -> None:
        run = source.run
        self._classes[source.kind] += sequences
        self._runs[run.name] = self._runs.get(run.name, 0.0) + sequences
        tenant = run.spec.tenant
        self._tenants[tenant] = self._tenants.get(tenant, 0.0) + sequences

    def _has_its_part(self, source: Source) -> bool:
        share = CLASS_SHARE.get(source.kind)
        if share is None:
            return False
        return self._classes[source.kind] >= max(1.0, share * self._ctx.ready_slots)

    def _push(self, source: Source) -> None:
        heapq.heappush(self._heap, (self._key(source), source))

    def _key(self, source: Source) -> Key:
        ctx, spec = self._ctx, source.run.spec
        priority = spec.priority
        if source.kind == "external":
            priority = ctx.queue(source.queue).priority()
        tenant_share = max(ctx.settings.tenant_shares.get(spec.tenant, 1.0), 1e-6)
        return (
            -priority,
            _RANK[source.kind],
            self._tenants.get(spec.tenant, 0.0) / tenant_share,
            self._runs.get(spec.name, 0.0) / spec.share,
            source.queue,
        )


def over_quota(ctx: Context, run: Run, job: Job) -> str:
    """The run's quota that a job has to wait for, or nothing. Evaluations are not held up."""
    live, spec = ctx.runs[run.name], run.spec
    if job.evaluation:
        return ""
    flying = live.in_flight + live.external_in_flight
    most = spec.max_sequences_in_flight
    if most and flying and flying + job.sequences > most:
        return "max_sequences_in_flight"
    if job.kind == "recheck":
        return ""  # which draws no tokens
    if spec.tokens_per_minute and not live.bucket.allows(spec.tokens_per_minute, ctx.now):
        at_s = live.bucket.allowed_s(spec.tokens_per_minute, ctx.now)
        ctx.timers.set_earlier("sweep", "", max(at_s, ctx.now + 0.1))
        return "tokens_per_minute"
    return ""
