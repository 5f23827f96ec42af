"""A request on its way to what answers it, and what all answers are made with."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from scheduler.config import SchedulerConfig
from scheduler.gateway.access import HttpRole, HttpToken, TokenBook
from scheduler.gateway.feed import Feed
from scheduler.gateway.metrics import BridgeCounts
from scheduler.gateway.submitters import Submitters
from scheduler.http_server import HttpRefused
from scheduler.operator import Operator
from transport.runtime.clock import Clock

RETRY_AFTER: Final = "1"  # seconds

LOOK: Final = frozenset({HttpRole.VIEWER, HttpRole.OPERATOR})
ORDER: Final = frozenset({HttpRole.OPERATOR})
SUBMIT: Final = frozenset({HttpRole.SUBMITTER})
ANYBODY: Final[frozenset[HttpRole]] = frozenset()
"""No token is asked for."""


class Line:
    """An operator's connection that answers one request after the other; at most ``most`` wait."""

    def __init__(self, operator: Operator, most: int) -> None:
        self.operator = operator
        self._most = most
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Operator]:
        """Raises HttpRefused when too many wait already."""
        if self._waiting >= self._most:
            raise busy("too many requests wait for the scheduler; try again")
        self._waiting += 1
        try:
            yield self.operator
        finally:
            self._waiting -= 1


@dataclass(slots=True)
class World:
    """What answers are made with. ``folder`` is the scheduler's, read by one at a time (``disk``);
    ``orders`` answers at once, ``logs`` after an agent has; ``bridge`` is there with ``[mqtt]``.
    ``refused`` counts requests and connections by the code with which they were refused;
    ``connections`` says how many there are."""

    config: SchedulerConfig
    folder: Path
    clock: Clock
    life: int
    book: TokenBook
    feed: Feed
    orders: Line
    logs: Line
    submitters: Submitters
    disk: asyncio.Lock
    streams: int = 0
    downloads: int = 0
    bridge: BridgeCounts | None = None
    refused: Counter[str] = field(default_factory=Counter)
    connections: Callable[[], int] = lambda: 0


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route that takes no query."""


@dataclass(slots=True)
class Call:
    """One request: the parts of its path by name, its query and body as the route's types, and
    whose token it came with (None where the route asks for none)."""

    world: World
    request: web.BaseRequest
    names: Mapping[str, str]
    query: Any
    body: Any
    token: HttpToken | None

    @property
    def by(self) -> str:
        """For whom an order is given."""
        return "" if self.token is None else f"http:{self.token.name}"


Answer = Callable[[Call], Awaitable[Any]]
"""Returns what is written as JSON, or a whole response. Raises HttpRefused, or what asking the
scheduler raises."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path and who may use it. ``{name}`` in ``path`` is one of ``PARTS``; ``result``
    is the type of the answer, ``body`` of the request's (None: it has none) which may be left out
    where ``body_optional``; ``toml`` bodies are taken too where that is set. Requests that
    ``change`` something are recorded. ``open_to_metrics`` ones need no token where
    ``http.open_metrics`` says so."""

    method: str
    path: str
    roles: frozenset[HttpRole]
    summary: str
    answer: Answer
    result: Any
    query: type[msgspec.Struct] = NoQuery
    body: Any = None
    body_optional: bool = False
    toml: Callable[[str], Any] | None = None
    change: bool = False
    content_type: str = "application/json"
    open_to_metrics: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """An order was taken. ``message`` is what the scheduler adds to its yes, "" for nothing."""

    message: str


class HttpError(msgspec.Struct, frozen=True, kw_only=True):
    """Any answer with a status from 400 on: a stable ``code``, and what to do."""

    code: str
    message: str


def busy(text: str) -> HttpRefused:
    """That there are too many of something right now."""
    return HttpRefused(503, "http.busy", text, **{"Retry-After": RETRY_AFTER})


def unauthorised() -> HttpRefused:
    """That a token is needed, and the one that was sent does not count (any more)."""
    return HttpRefused(
        401,
        "http.unauthorised",
        "send the header Authorization: Bearer TOKEN; `farflow token http create NAME"
        " --role viewer` makes one",
        **{"WWW-Authenticate": "Bearer"},
    )
