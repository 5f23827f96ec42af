"""What the dashboard's pages and collectors of metrics ask beside the status."""

import asyncio
from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from scheduler.gateway.calls import LOOK, Call, Route
from scheduler.gateway.history import RunHistory, run_history
from scheduler.gateway.jobs import MAX_LIMIT, JobPage, job_page
from scheduler.gateway.metrics import HttpCounts, render
from scheduler.http_server import HttpRefused
from transport.messages import Id
from transport.runtime.build import build_id
from transport.telemetry import CONTENT_TYPE


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Which farflow this is, and whose token asks. ``site`` is where the scheduler stands
    (``http.site``)."""

    build: str
    token: str
    role: str
    site: str


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs whose id begins with ``prefix``, of a run and in a state if given, behind ``after``."""

    prefix: Id = ""
    run: Id = ""
    state: Id = ""
    after: Id = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 100


async def _about(call: Call) -> About:
    token = call.token
    return About(
        build=build_id(),
        token="" if token is None else token.name,
        role="" if token is None else token.role.value,
        site=call.world.config.http.site,
    )


async def _jobs(call: Call) -> JobPage:
    query: JobsQuery = call.query
    async with call.world.disk:
        return await asyncio.to_thread(job_page, call.world.folder, **msgspec.structs.asdict(query))


async def _history(call: Call) -> RunHistory:
    run = call.names["run"]
    try:
        async with call.world.disk:
            found = await asyncio.to_thread(run_history, call.world.folder, run)
    except OSError as error:
        raise HttpRefused(503, "store", f"the steps of {run} cannot be read: {error}") from error
    if found is None:
        raise HttpRefused(404, "run.unknown", f"run {run} has no steps (yet)")
    return found


async def _metrics(call: Call) -> web.Response:
    world = call.world
    snapshot = await world.feed.status()
    world.feed.expect(call.by)
    http = HttpCounts(
        connections=world.connections(),
        refused=dict(world.refused),
        status_age_s=world.clock.monotonic_s() - snapshot.taken_s,
    )
    page = await asyncio.to_thread(render, snapshot.status, world.bridge, http)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


PAGES: Final = (
    Route(method="GET", path="/v1/about", roles=LOOK, answer=_about, result=About,
          summary="Which farflow this is, and whose token asks."),
    Route(method="GET", path="/v1/jobs", roles=LOOK, answer=_jobs, result=JobPage, query=JobsQuery,
          summary="Jobs, page by page."),
    Route(method="GET", path="/v1/runs/{run}/history", roles=LOOK, answer=_history,
          result=RunHistory, summary="The steps of a run so far."),
    Route(method="GET", path="/metrics", roles=LOOK, answer=_metrics, result=str,
          content_type="text/plain", open_to_metrics=True,
          summary="The scheduler's metrics, as Prometheus reads them."),
)  # fmt: skip
