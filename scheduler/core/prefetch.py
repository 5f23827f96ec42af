"""How much an agent may hold beyond its slots.

When a group is done, its successor must be there already: the news travels to the scheduler and
the next offer back, and the body has to be uploaded before. And a group counts as a whole until its
longest sibling is done, while the slots of the others are free. With s the slot time of a sequence
and g how many times as long as the mean the longest of a group takes, an agent of n slots needs

    (rtt + upload) n / s  +  (g - 1) n      sequences waiting,

and never less than ``prefetch_groups`` groups (0: nothing is ever prefetched).

Example: 16 slots, 0.5 s per sequence, 300 ms round trip and 50 ms upload: 0.35 x 16 / 0.5 = 12
sequences; with 30 s per sequence one is enough. With groups whose longest takes twice the mean,
16 more.

What always holds: at most ``MAX_PREFETCH`` sequences per agent are held for this reason; an idle
agent takes one job however large it is (it runs in waves).
"""

import math

from scheduler.core.context import AgentLive, Context
from scheduler.core.estimators import PRIOR_RTT_S
from scheduler.core.state import Agent

MAX_PREFETCH = 256
MAX_PER_SLOT = 2


def learn(ctx: Context, agent: Agent, live: AgentLive, body_bytes: float) -> None:
    """Size an agent's prefetch anew, after a result of that size."""
    estimate = live.estimate
    sequence_s = estimate.sequence_s.value
    if not ctx.settings.prefetch_groups or not sequence_s:
        live.prefetch = 0
        return
    away_s = PRIOR_RTT_S if estimate.rtt_s.value is None else estimate.rtt_s.value
    away_s += body_bytes * (estimate.up_byte_s.value or 0.0)
    beyond = (estimate.spread.value or 1.0) - 1.0
    wanted = math.ceil((away_s / sequence_s + beyond) * agent.slots)
    live.prefetch = min(wanted, MAX_PER_SLOT * agent.slots, MAX_PREFETCH)
    live.most_prefetch = max(live.most_prefetch, live.prefetch)


def has_room(ctx: Context, agent: Agent, live: AgentLive, sequences: int) -> bool:
    """Whether an agent takes a job of so many sequences."""
    if live.load == 0:
        return True
    ahead = max(ctx.settings.prefetch_groups * sequences, live.prefetch)
    return live.load + sequences <= agent.slots + ahead
