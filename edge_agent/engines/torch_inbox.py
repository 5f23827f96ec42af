"""What the event loop puts into the inbox of a torch engine's worker, and how that answers.

What always holds: an answer is given in the loop of whoever waits for it, once, and to nobody where
that loop is gone.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_agent.engines.torch_decoding import Row
from edge_agent.engines.torch_policy import HostedPolicy, StagedWrite
from transport.errors import EngineError

if TYPE_CHECKING:
    import torch

    from edge_agent.engine import Completion


@dataclass(slots=True)
class OpenRequest:
    """A request in the engine, ``open_rows`` of whose rows have not ended. ``future`` belongs to
    ``loop``; the rest to the worker."""

    policy: HostedPolicy
    rows: list[Row]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[list[Completion]]"
    open_rows: int

    def abort(self) -> None:
        """Let none of its rows be drawn any further."""
        for row in self.rows:
            row.aborted = True


@dataclass(frozen=True, slots=True)
class Swap:
    """Staged ``writes`` that make a policy's weights ``version``; the worker adds the tensors that
    they ``replaced``, and answers for how many seconds nothing was drawn."""

    policy: HostedPolicy
    version: int
    writes: list[StagedWrite]
    replaced: "list[torch.Tensor]"
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[float]"


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing is to be answered after this."""


def answer(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", value: Any) -> None:
    """Complete ``future`` in its loop, unless it is cancelled or the loop is gone."""

    def complete() -> None:
        if future.done():
            return
        if isinstance(value, EngineError):
            future.set_exception(value)
        else:
            future.set_result(value)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(complete)
