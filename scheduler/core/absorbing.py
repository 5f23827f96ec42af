"""How many waiting groups faster agents would take in time, so that a slow one is not wanted yet.

A group that waits a moment for a slot of a fast agent can be back before one that begins at once on
a slow agent, and the number of groups under way is bounded by the quota: those on slow agents are
missing on the fast ones. With F_j the finish time of a group that begins at once on agent j, and
q_j the groups per second that it takes on, all agents that are faster than F take

    K(F) = sum over F_j < F of q_j (F - F_j)

groups that are back before F. So a group goes to an agent with finish time F only if more groups
wait than ``HOLD`` x K(F): earliest finish time, with the waiting groups as a queue that all agents
share.

Example: 24 slots that take 12 s and 60 that take 24 s: K(24) = 24 / 12 x (24 - 12) = 24, of which
0.4 are kept: the first 9 waiting groups wait for the fast slots, at most 12 s; the others begin on
the slow ones at once.

What always holds: it looks at no more than ``shortlist`` agents and is worked out once per
``KEEP_S`` and run, or when an eighth of the agents have sent results, which makes it O(1) each;
agents that are too stale, cordoned or not ready take nothing on; equal agents never make each other
wait; and nothing waits for longer than it would save.
"""

from scheduler.core import candidates
from scheduler.core.context import Context
from scheduler.core.placement import Absorber, JobView, excess_lag, expected_s
from scheduler.core.state import Job, Run
from scheduler.core.work import work_of

KEEP_S = 0.5
RESULTS_SHARE = 8
"""One in so many agents may have sent a result since."""


def absorbers(ctx: Context, run: Run, job: Job, view: JobView) -> tuple[Absorber, ...]:
    """Agents of the run, fastest first, with what all agents up to each take on per second."""
    live = ctx.runs[run.name]
    fresh = RESULTS_SHARE * live.absorbers_age < len(ctx.ready)
    if live.absorbers is None or not fresh or ctx.now - live.absorbers_s >= KEEP_S:
        live.absorbers = _work_out(ctx, run, job, view)
        live.absorbers_s, live.absorbers_age = ctx.now, 0
    return live.absorbers


def _work_out(ctx: Context, run: Run, job: Job, view: JobView) -> tuple[Absorber, ...]:
    names, work = ctx.ready.names, work_of(ctx, job)
    most = ctx.settings.shortlist
    start, seen = 0, len(names)
    if seen > most:
        start = ctx.rng.randrange(seen)
        seen = max(1, most // candidates.DRAWN_SHARE)
    scale = len(names) / max(1, seen)
    found: list[tuple[float, str, float]] = []
    for offset in range(start, start + seen):
        name = names[offset % len(names)]
        agent, known = ctx.tables.agents[name], ctx.agents[name]
        if not candidates.fits(ctx, run, agent, known, work):
            continue
        candidate = candidates.candidate_of(ctx, view, agent, known, {}, at_once=True)
        if candidate is None:
            continue
        finish_s = expected_s(view, candidate)
        if excess_lag(view, candidate, finish_s) != 0:
            continue
        slot_s = max(view.tokens_mean * candidate.token_s * view.sequences, 1e-3)
        found.append((finish_s, name, agent.slots / slot_s * scale))
    found.sort()
    together: list[Absorber] = []
    rate = weighted = 0.0
    for finish_s, _, one in found:
        rate += one
        weighted += one * finish_s
        together.append((finish_s, rate, weighted))
    return tuple(together)
