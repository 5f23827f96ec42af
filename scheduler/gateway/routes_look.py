"""What viewers and operators may look at."""

import asyncio
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from scheduler.core.settings import WEIGHT_STORE
from scheduler.gateway.calls import ANYBODY, LOOK, ORDER, Call, Route, unauthorised
from scheduler.gateway.stream import stream
from scheduler.http_server import HttpRefused
from scheduler.weight_reading import StoreReader
from scheduler.weight_rows import VersionRow, version_rows
from transport.errors import FarflowError
from transport.messages import AgentLogs, Count, DeadLetter, Events, Explanation, Id
from transport.status import AgentStatus, RunStatus, SchedulerStatus

MAX_WAIT_S: Final = 60.0
PACE_S: Final = 0.2
"""Between two looks for events of one who waits for them."""
NONE_YET: Final = "there are no weights yet"

Wait = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As ``EventsRequest``: transitions after number ``after``, or from now on."""

    after: Count | None = None
    subject: Id = ""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    wait_s: Wait = 0.0


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last ``lines`` of an agent's log, of one run unless it is empty."""

    run: Id = ""
    lines: Annotated[int, Meta(ge=1, le=2000)] = 200


class DeadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most ``limit`` jobs, of one run unless it is empty."""

    run: Id = ""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class AgentCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent serves of a policy, and how many versions that is behind the newest."""

    agent: str
    state: str
    version: int
    behind: int


class PolicyVersions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of a policy that are kept, by number, and the agents that serve it."""

    policy: str
    versions: tuple[VersionRow, ...]
    agents: tuple[AgentCopy, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """That the HTTP interface itself is there."""

    ok: bool = True


async def _status(call: Call) -> web.Response:
    snapshot = await call.world.feed.status()
    etag = f'W/"{call.world.life}-{snapshot.number}"'
    headers = {"ETag": etag}
    if etag in (one.strip() for one in call.request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    return web.Response(body=snapshot.encoded, content_type="application/json", headers=headers)


async def _runs(call: Call) -> tuple[RunStatus, ...]:
    return (await call.world.feed.status()).status.runs


async def _agents(call: Call) -> tuple[AgentStatus, ...]:
    return (await call.world.feed.status()).status.agents


async def _explain(call: Call) -> Explanation:
    async with call.world.orders.turn() as operator:
        return await operator.explain(call.names["subject"])


async def _events(call: Call) -> Events | web.StreamResponse:
    query: EventsQuery = call.query
    headers = call.request.headers
    if "text/event-stream" in headers.get("Accept", ""):
        resumed = headers.get("Last-Event-ID", "")
        if resumed and not (resumed.isascii() and resumed.isdecimal() and len(resumed) < 16):
            raise HttpRefused(422, "http.query", "Last-Event-ID: is no number of an event")
        return await stream(call, int(resumed) if resumed else query.after, query.subject)
    if not query.wait_s:
        return await _page(call, query.after)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + query.wait_s
    feed = call.world.feed
    async with feed.listening():
        after = query.after
        while True:
            mark = feed.mark()
            page = await _page(call, after)
            if call.token is None or not call.world.book.valid(call.token):
                raise unauthorised()
            left_s = until_s - loop.time()
            if page.transitions or page.missed or left_s <= 0.0:
                return page
            after = page.last
            await feed.changed(mark, left_s)
            await asyncio.sleep(min(PACE_S, left_s))


async def _page(call: Call, after: int | None) -> Events:
    query: EventsQuery = call.query
    async with call.world.orders.turn() as operator:
        return await operator.events(after, subject=query.subject, limit=query.limit)


async def _logs(call: Call) -> AgentLogs:
    query: LogsQuery = call.query
    async with call.world.logs.turn() as operator:
        return await operator.agent_logs(call.names["agent"], run=query.run, lines=query.lines)


async def _dead(call: Call) -> list[DeadLetter]:
    query: DeadQuery = call.query
    async with call.world.orders.turn() as operator:
        return await operator.dead_letters(query.run, most=query.limit)


async def _versions(call: Call) -> PolicyVersions:
    policy = f"{call.names['run']}/{call.names['policy']}"
    async with call.world.disk:
        rows = await asyncio.to_thread(_rows, call, policy)
    head = rows[-1].version if rows else 0
    agents = (await call.world.feed.status()).status.agents
    return PolicyVersions(
        policy=policy,
        versions=tuple(rows),
        agents=tuple(
            AgentCopy(
                agent=agent.name,
                state=agent.state,
                version=agent.versions[policy],
                behind=max(0, head - agent.versions[policy]),
            )
            for agent in agents
            if policy in agent.versions
        ),
    )


def _rows(call: Call, policy: str) -> list[VersionRow]:
    folder = call.world.folder / WEIGHT_STORE / "versions"
    try:
        reader = StoreReader(folder)
        known = reader.policies()
        if policy in known:
            return version_rows(reader.shelf(policy))
    except FarflowError as error:
        if isinstance(error.__cause__, OSError):
            raise HttpRefused(503, error.code, "the store's disk does not answer") from error
        raise HttpRefused(404, "policy.unknown", NONE_YET) from error
    text = f"no weights of {policy!r}; known: {', '.join(known) or 'none'}"
    raise HttpRefused(404, "policy.unknown", text)


async def _health(call: Call) -> Health:
    return Health()


def _look(path: str, summary: str, answer: Any, result: Any, **more: Any) -> Route:
    more = {"roles": LOOK, **more}
    return Route(method="GET", path=path, summary=summary, answer=answer, result=result, **more)


LOOKING: Final = (
    _look("/v1/status", "The whole view of the scheduler.", _status, SchedulerStatus),
    _look("/v1/runs", "All runs.", _runs, tuple[RunStatus, ...]),
    _look("/v1/agents", "All agents.", _agents, tuple[AgentStatus, ...]),
    _look("/v1/explain/{subject}", "Why a job, attempt, agent, policy or run is where it is.",
          _explain, Explanation),
    _look("/v1/events", "What happened, or as a stream (Accept: text/event-stream) what happens.",
          _events, Events, query=EventsQuery),
    _look("/v1/versions/{run}/{policy}", "Weight versions of a policy, and who serves which.",
          _versions, PolicyVersions),
    _look("/v1/agents/{agent}/logs", "The last lines of an agent's log.", _logs, AgentLogs,
          query=LogsQuery, roles=ORDER),
    _look("/v1/dead", "Jobs that were given up.", _dead, list[DeadLetter], query=DeadQuery,
          roles=ORDER),
    _look("/v1/healthz", "Whether this interface is there; says nothing else.", _health, Health,
          roles=ANYBODY),
)  # fmt: skip
