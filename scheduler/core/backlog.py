"""When an agent will have slots free, from what it holds.

Sequences get slots in the order of the offers. Of a group of n sequences that begins at b, with
mean time m and longest time l, n - 1 slots are free again at b + m' and the last one at b + l,
where m' is the mean of the others. A time that has passed without news is taken to be late by a
share of its lateness (``OVERRUN``): whoever is late will be late for a while longer.

    wait(k sequences) = max(mean start, last start + m - l)

because the group is done when its last sequence is, and only one of them is the longest.

Example: 4 slots hold a group of 4 that began just now with m = 10 s, l = 20 s. A group of 2 gets
its slots after 7 s.

What always holds: the list is worked out anew after every change of what the agent holds, in
O(attempts), and read in O(1) for a job that fits into the first free slots; for an agent of more
than ``MAX_EXACT`` attempts, whose slots become free evenly, a flow stands for the list.
"""

from scheduler.core.context import AgentLive, Context, Lease
from scheduler.core.state import Agent

OVERRUN = 0.25
MAX_EXACT = 32
MAX_WAVES = 64
"""A group of more waves than this is not taken apart: nobody is going to choose such an agent."""

Frees = list[tuple[float, int]]


def changed(live: AgentLive) -> None:
    """The agent holds more, less, or something has begun."""
    live.frees = None


def frees(ctx: Context, agent: Agent, live: AgentLive) -> Frees:
    """(time, slots that become free then), earliest first; times may have passed."""
    found = live.frees
    if found is None:
        found = live.frees = _work_out(ctx, agent, live)
    return found


def starts(
    ctx: Context, agent: Agent, live: AgentLive, sequences: int, mean_s: float, longest_s: float
) -> tuple[float, float]:
    """When the first sequence of a group begins, and the wait of the group, in seconds from now."""
    if len(live.leases) > MAX_EXACT:
        excess = live.load + sequences - agent.slots
        return _flow_s(excess - sequences, agent, mean_s), _flow_s(excess, agent, mean_s)
    found, now = frees(ctx, agent, live), ctx.now
    at, count = found[0]
    first_s = at - now if at > now else OVERRUN * (now - at)
    if count >= sequences:
        return first_s, first_s
    if len(found) == 1:  # waves on an agent that is otherwise free
        waves = -(-sequences // count) - 1
        mean = first_s + waves * mean_s / 2.0
        return first_s, max(mean, first_s + waves * mean_s + mean_s - longest_s)
    left, total_s, last_s = sequences, 0.0, first_s
    for at, count in found:
        last_s = at - now if at > now else OVERRUN * (now - at)
        got = min(left, count)
        total_s += got * last_s
        left -= got
        if not left:
            break
    else:
        slots = sum(count for _, count in found)
        waves = -(-left // slots)
        last_s += waves * mean_s
        total_s += left * last_s
    return first_s, max(total_s / sequences, last_s + mean_s - longest_s)


def _flow_s(excess: int, agent: Agent, mean_s: float) -> float:
    """An agent of many attempts frees its slots evenly."""
    return max(0, excess) * mean_s / agent.slots


def ends_s(ctx: Context, agent: Agent, live: AgentLive, lease: Lease) -> float:
    """When an attempt should be generated, in seconds from now."""
    if len(live.leases) <= MAX_EXACT:
        frees(ctx, agent, live)
    begin_s = ctx.now if lease.begin_s is None else lease.begin_s
    at = begin_s + max(lease.mean_s, lease.longest_s)
    return at - ctx.now if at > ctx.now else OVERRUN * (ctx.now - at)


def _work_out(ctx: Context, agent: Agent, live: AgentLive) -> Frees:
    slots = max(1, agent.slots)
    found: Frees = [(ctx.now, slots)]
    for lease in live.leases.values():
        if lease.counted:
            _occupy(ctx, found, lease, slots)
    return found


def _occupy(ctx: Context, found: Frees, lease: Lease, slots: int) -> None:
    """Take the earliest slots for an attempt, and give them back when its sequences end."""
    if lease.started_s is not None:
        lease.begin_s = lease.started_s
    elif lease.begin_s is None or lease.begin_s > ctx.now:
        lease.begin_s = max(ctx.now, found[0][0])
    begun = lease.begin_s <= ctx.now
    sequences = lease.sequences
    if sequences == 1:
        at, count = found[0]
        if count == 1:
            del found[0]
        else:
            found[0] = (at, count - 1)
        at = lease.begin_s if begun and at <= ctx.now else max(at, lease.begin_s)
        _insert(found, (at + lease.longest_s, 1))
        return
    if sequences > MAX_WAVES * slots:
        sequences = MAX_WAVES * slots
    left = sequences
    others_s = _others_s(lease)
    while left:
        at, count = found[0]
        got = min(left, count)
        if got == count:
            found.pop(0)
        else:
            found[0] = (at, count - got)
        at = lease.begin_s if begun and at <= ctx.now else max(at, lease.begin_s)
        left -= got
        if not left:
            _insert(found, (at + lease.longest_s, 1))
            got -= 1
        if got:
            _insert(found, (at + others_s, got))


def _others_s(lease: Lease) -> float:
    """Mean time of the sequences that are not the longest."""
    if lease.sequences <= 1:
        return lease.mean_s
    rest_s = (lease.sequences * lease.mean_s - lease.longest_s) / (lease.sequences - 1)
    return max(rest_s, lease.mean_s / 2.0)


def _insert(found: Frees, entry: tuple[float, int]) -> None:
    at = len(found)
    while at and found[at - 1][0] > entry[0]:
        at -= 1
    found.insert(at, entry)
