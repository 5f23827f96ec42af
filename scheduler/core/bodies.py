"""Bodies in the trajectory log: who needs which, and what the log may drop.

What always holds: a body in ``Context.bodies`` is the result of that job (open, or concluded and
not confirmed by its submitter), or finished turns that it may go on from; every other one that was
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
    """A result, or finished turns, are needed no more."""
    del ctx.bodies[digest]
    release(ctx, digest)
