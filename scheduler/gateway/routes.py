"""Every route of the interface, in one table: the requests, their roles and their description."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from scheduler.gateway.calls import ANYBODY, Call, Route
from scheduler.gateway.openapi import description
from scheduler.gateway.routes_jobs import SUBMITTING
from scheduler.gateway.routes_look import LOOKING
from scheduler.gateway.routes_orders import ORDERING
from scheduler.gateway.routes_pages import PAGES
from scheduler.gateway.wheel import WHEELS


async def _describe(call: Call) -> dict[str, Any]:
    return openapi()


ROUTES: Final = (
    *LOOKING,
    *ORDERING,
    *SUBMITTING,
    *PAGES,
    *WHEELS,
    Route(
        method="GET",
        path="/v1/openapi.json",
        roles=ANYBODY,
        summary="This description.",
        answer=_describe,
        result=dict[str, Any],
    ),
)


@cache
def openapi() -> dict[str, Any]:
    """The description of ``ROUTES``; made once, as everybody may ask for it."""
    try:
        number = version("farflow")
    except PackageNotFoundError:  # run from a folder of sources
        number = "0"
    return description(ROUTES, number)
