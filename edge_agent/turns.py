"""The finished turns of one running attempt: packed and handed over in the background, newest only.

What always holds: nothing here delays the workflow or makes its attempt fail; at most one packing
of an attempt runs at a time, not more often than every ``MIN_INTERVAL_S``; what was finished
meanwhile goes with the next. An attempt that is to go on from another's turns waits at most
``FETCH_S`` for them, and begins anew without them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from edge_agent.engine import Engine
from edge_agent.progress import NotResumable, partial_of, resumed, verified
from edge_agent.workflow import Sibling
from transport.errors import FarflowError
from transport.messages import LeaseOffer, PartialSummary
from transport.partials import pack_partial, summarise_partial
from transport.texts import told

MIN_INTERVAL_S: Final = 0.25
FETCH_S: Final = 15.0

_log = structlog.get_logger()


class Keeper(Protocol):
    """Who keeps finished turns; all but ``fetch`` return at once."""

    def keep(self, summary: PartialSummary, data: bytes) -> None:
        """The newest turns of an attempt."""
        ...

    def forget(self, attempt: str) -> None:
        """The attempt is over: its turns need not be sent any more."""
        ...

    async def fetch(self, digest: str) -> bytes | None:
        """Turns that somebody kept; None when they are not there (any more)."""
        ...


class TurnsOfAttempt:
    """A context: entered, earlier turns are there; left, nothing is packed any more."""

    def __init__(self, offer: LeaseOffer, code: str, engine: Engine, keeper: Keeper | None) -> None:
        self._offer = offer
        self._code = code
        self._engine = engine
        self._keeper = keeper
        self._resumed: dict[int, tuple[Sibling, ...]] = {}
        self._standing: dict[int, tuple[Sibling, ...]] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "TurnsOfAttempt":
        if self._keeper is not None:
            await self._take_up(self._keeper)
            self._task = asyncio.create_task(self._keep(self._keeper), name="finished turns")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None or self._keeper is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._keeper.forget(self._offer.attempt)

    def resumed(self, position: int) -> tuple[Sibling, ...]:
        """Where the siblings of an item stood before, empty when they begin."""
        return self._resumed.get(position, ())

    def heard(self, position: int) -> Callable[[Sequence[Sibling]], None]:
        """What a workflow's context tells of the item at ``position``."""

        def finished(siblings: Sequence[Sibling]) -> None:
            self._standing[position] = tuple(siblings)
            self._changed.set()

        return finished

    async def _take_up(self, keeper: Keeper) -> None:
        offer = self._offer
        if offer.resume is None:
            return
        try:
            async with asyncio.timeout(FETCH_S):
                data = await keeper.fetch(offer.resume.digest)
            if data is None:
                raise NotResumable("they are not kept any more")
            partial = await asyncio.to_thread(verified, offer, data)
            self._resumed = resumed(offer, self._code, self._engine, partial)
        except TimeoutError:
            _log.info("attempt.begins_anew", reason=f"earlier turns: not there in {FETCH_S:g} s")
        except FarflowError as error:
            _log.info("attempt.begins_anew", reason=f"earlier turns: {error}", code=error.code)
        else:
            self._standing = dict(self._resumed)
            _log.info("attempt.resumed", turns=partial.turns, earlier=partial.group.attempt)

    async def _keep(self, keeper: Keeper) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                summary, data = await asyncio.to_thread(self._packed, dict(self._standing))
            except Exception as error:  # noqa: BLE001
                # What the workflow says of itself is wrong, or too large: the attempt goes on.
                _log.warning("attempt.turns_not_kept", reason=told(error))
            else:
                keeper.keep(summary, data)
            await asyncio.sleep(MIN_INTERVAL_S)

    def _packed(self, standing: dict[int, tuple[Sibling, ...]]) -> tuple[PartialSummary, bytes]:
        """Blocks."""
        partial = partial_of(self._offer, self._code, standing)
        data = pack_partial(partial)
        return summarise_partial(partial, data, fence=self._offer.fence), data
