"""Copies of weights that nobody is left to throw away.

An agent that is up when a run ends is told that the run's policies are hosted no more. One that is
down then is not: at its next start a copy would lie on its disk, and in its memory, for ever.

What always holds: only what was there at the start goes, and of that nothing that the scheduler
wanted hosted or that has lingered since within a while of its first welcome.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from edge_agent.core.effects import DiscardCopy
from edge_agent.core.machine import AgentCore

AFTER_S: Final = 60.0
"""As long as a policy that is hosted no more is kept while the agent is up."""
LOOK_S: Final = 1.0

_log = structlog.get_logger()


async def discard_leftovers(
    stored: Sequence[str], core: AgentCore, discard: Callable[[DiscardCopy], None]
) -> None:
    """Have ``discard`` called for each of the ``stored`` policies that is a leftover."""
    up = not stored
    while not up:
        await asyncio.sleep(LOOK_S)
        up = core.status().session == "up"
    await asyncio.sleep(AFTER_S)
    hosted = core.status().policies
    for policy in stored:
        if policy not in hosted:
            _log.info("weights.leftover", policy=policy)
            discard(DiscardCopy(policy=policy, unload=False))
