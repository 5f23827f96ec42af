"""Shortlists of one placing pass, kept for jobs that are alike.

A pass places many jobs at one moment; only agents that got something meanwhile look different to
the next job of the same kind. So a shortlist is drawn once for several jobs, and of it only those
agents are looked at again whose load has changed.

What always holds: every candidate is as ``candidates.candidate_of`` gives it now; with no more open
agents than a shortlist holds, the outcome is that of drawing anew for every job; of a larger fleet
a draw serves at most ``REUSED`` jobs and not after half of it is gone, so that one neighbourhood
does not get everything. Jobs whose freshness counts, that are pinned, that ask for labels, that
recheck somebody or that have failed somewhere are never alike.
"""

from scheduler.core import candidates, prefetch
from scheduler.core.context import Context
from scheduler.core.placement import Candidate, FinishTime, JobView, all_expected_s
from scheduler.core.state import Job, Run
from scheduler.core.views import kind_of, max_new_tokens, pins, view_of

REUSED = 16

_Key = tuple[str, str, int, float, float]
_ViewKey = tuple[str, int, int]


class _Kept:
    __slots__ = ("drawn", "found", "seen", "uses")

    def __init__(self, found: list[Candidate], seen: int) -> None:
        self.found = found
        self.seen = seen
        self.drawn = len(found)
        self.uses = 0


class Shortlists:
    """Belongs to one pass over all open agents."""

    def __init__(self) -> None:
        self.moved: list[str] = []
        """Agents whose load has changed in this pass, in order."""
        self._views: dict[_ViewKey, JobView] = {}
        self._kept: dict[_Key, _Kept] = {}

    def view(self, ctx: Context, run: Run, job: Job) -> JobView:
        """What placement knows of a job. In a pass nothing of it changes but how fresh a result has
        to be, and only those of training jobs have to."""
        if job.kind == "train":
            return view_of(ctx, run, job)
        key = (kind_of(job), job.sequences, max_new_tokens(ctx, job))
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = view_of(ctx, run, job)
        return found

    def candidates(
        self, ctx: Context, run: Run, job: Job, view: JobView, names: list[str]
    ) -> list[Candidate]:
        """Agents of ``names`` that may take the job, as ``candidates.shortlist``."""
        everybody = names is ctx.open_agents.names
        if not everybody or view.policies or job.avoid or not _plain(ctx, job):
            return candidates.shortlist(ctx, run, job, view, names)
        key = (run.name, view.kind, view.sequences, view.tokens_mean, view.tokens_longest)
        kept = self._kept.get(key)
        if kept is not None:
            kept.uses += 1
            self._refresh(ctx, view, kept)
            if kept.uses < REUSED and len(kept.found) * 2 > kept.drawn:
                return kept.found
        found = candidates.shortlist(ctx, run, job, view, names)
        if isinstance(ctx.rule, FinishTime):
            found = _enough(view, found)
        self._kept[key] = kept = _Kept(found, len(self.moved))
        return kept.found

    def _refresh(self, ctx: Context, view: JobView, kept: _Kept) -> None:
        moved, kept.seen = self.moved[kept.seen :], len(self.moved)
        for name in dict.fromkeys(moved):
            place = next((at for at, one in enumerate(kept.found) if one.agent == name), None)
            if place is None:
                continue
            agent, live = ctx.tables.agents[name], ctx.agents[name]
            now: Candidate | None = None
            if name in ctx.open_agents and prefetch.has_room(ctx, agent, live, view.sequences):
                now = candidates.candidate_of(ctx, view, agent, live, {})
            if now is None:
                del kept.found[place]
            else:
                kept.found[place] = now


def _enough(view: JobView, found: list[Candidate]) -> list[Candidate]:
    """Those that the next jobs can go to by finish time: each job makes one candidate worse, so
    the best ``REUSED`` hold the best one for as many jobs. With them the one that was not used for
    longest, for a probe; all of them where prices count as well."""
    if len(found) <= REUSED or any(candidate.token_usd > 0.0 for candidate in found):
        return found
    finishes = zip(all_expected_s(view, found), found, strict=True)
    ordered = [one for _, one in sorted(finishes, key=lambda pair: (pair[0], pair[1].agent))]
    longest = min(ordered[REUSED:], key=lambda c: (c.load > 0, -c.idle_s, c.agent))
    return [*ordered[:REUSED], longest]


def _plain(ctx: Context, job: Job) -> bool:
    if pins(ctx, job):
        return False
    if job.evaluation:
        return not ctx.evaluations[job.evaluation].declined
    asked = job.external
    return asked is None or not (asked.require or asked.recheck)
