"""Bodies in the trajectory log: who needs which, and what the log may drop.

What always holds: a body in ``Context.bodies`` is the result of that job (open, or concluded and
not confirmed by its submitter), finished turns that it may go on from, or a trained group that may
be trained on again (``Context.held_bodies`` counts for how many policies); every other one that was
heard of is released, once, in a row of its own until the log has dropped it.
"""

from scheduler.core.context import Context
from scheduler.core.state import Release


def release(ctx: Context, digest: str) -> None:
    """The log may drop this body, unless it is a result that is still needed."""
    if digest in ctx.bodies:
        ctx.count("results.foreign_body")
    elif digest not in ctx.tables.releases:
        ctx.tables.add(Release(digest=digest))
        ctx.new_releases.append(digest)


def let_go(ctx: Context, digest: str) -> None:
    """A job needs a result, or finished turns, no more."""
    if digest not in ctx.held_bodies:
        del ctx.bodies[digest]
        release(ctx, digest)


def hold(ctx: Context, digest: str, job: str) -> None:
    """One more policy may use the result of a job again, also when the job is over."""
    ctx.bodies[digest] = job
    ctx.held_bodies[digest] = ctx.held_bodies.get(digest, 0) + 1


def unhold(ctx: Context, digest: str) -> None:
    """One policy less may."""
    ctx.held_bodies[digest] -= 1
    if not ctx.held_bodies[digest]:
        del ctx.held_bodies[digest]
        if ctx.bodies[digest] not in ctx.tables.jobs:
            let_go(ctx, digest)
