"""The transitions of this life as numbered events.

    number = term * 2**32 + place in this life

so that numbers grow over restarts and a reader of an earlier life goes on with what is new. What
always holds: a page looks at no more than the ring holds; ``last`` is the number of the last
transition that was looked at, so that asking again after it misses nothing and repeats nothing.
"""

from itertools import islice

import msgspec

from scheduler.core.context import Context
from transport.messages import Events, Transition

TERM_SHIFT = 32
MAX_REPLY_BYTES = 192 * 1024
MAX_TEXT = 200


def newest(ctx: Context) -> int:
    """The number of the last transition so far."""
    return (ctx.term << TERM_SHIFT) + ctx.entries_made


def page(ctx: Context, after: int, limit: int, subject: str) -> Events:
    """Transitions after a number, about ``subject`` or naming it (all when it is empty)."""
    base = ctx.term << TERM_SHIFT
    forgotten = ctx.entries_made - len(ctx.entries)
    wanted = min(max(0, after - base), ctx.entries_made)
    start = max(wanted, forgotten)
    found: list[Transition] = []
    last = start
    left_bytes = MAX_REPLY_BYTES
    # From the end, because who listens has seen nearly all of a long ring.
    unseen = list(islice(reversed(ctx.entries), ctx.entries_made - start))
    for place, entry in enumerate(reversed(unseen), start + 1):
        at_s, about, what, facts = entry
        if not subject or names(about, facts, subject):
            transition = Transition(
                number=base + place,
                at_s=at_s,
                subject=about[:MAX_TEXT],
                what=what,
                facts={name: str(value)[:MAX_TEXT] for name, value in facts.items()},
            )
            left_bytes -= len(msgspec.msgpack.encode(transition))
            if len(found) >= limit or (found and left_bytes < 0):
                break
            found.append(transition)
        last = place
    return Events(transitions=tuple(found), last=base + last, missed=start - wanted, now_s=ctx.now)


def names(about: str, facts: dict[str, object], subject: str) -> bool:
    """Whether a transition is about a subject, an attempt of it, or names it."""
    if about == subject or (about.startswith(subject) and about[len(subject)] == "#"):
        return True
    return any(value == subject for value in facts.values())
