"""Work in threads that holds a lock of the event loop's.

What always holds: work in a thread cannot be cancelled, so who is cancelled while he waits for it
goes on only when it is over, or has taken so long that it hangs.
"""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

HANGS_S: Final = 30.0


async def in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """As ``asyncio.to_thread``; cancelling it takes effect after the work, ``HANGS_S`` later at
    the latest, so what is locked around it stays locked until then."""
    thread = asyncio.create_task(asyncio.to_thread(work, *arguments, **named))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        over, _ = await asyncio.wait({thread}, timeout=HANGS_S)
        for one in over:
            one.exception()  # nobody is left who could want it
        raise
