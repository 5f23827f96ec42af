"""A page of metrics for Prometheus on this machine, for daemons that listen nowhere else.

What always holds: it listens on loopback only, has one page, and no failure of it (a port that is
taken) is one of the daemon. No page of somebody else in a browser here reads it.
"""

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Final

import structlog

from transport.telemetry import CONTENT_TYPE

HOST: Final = "127.0.0.1"
NOT_BY_NAME: Final = "name this machine as localhost, 127.0.0.1 or [::1]"
KEEPALIVE_S: Final = 30.0
BACKLOG: Final = 16
_log = structlog.get_logger()


async def serve_metrics(port: int, page: Callable[[], bytes], setting: str) -> None:
    """Serve ``GET /metrics`` on ``port`` until cancelled. Returns at once for port 0, and where the
    port cannot be had, which it says with the ``setting`` to change."""
    if not port:
        return
    from aiohttp import web

    async def handle(request: web.BaseRequest) -> web.Response:
        if request.path != "/metrics" or request.method not in ("GET", "HEAD"):
            return web.Response(status=404, text="the only page is /metrics\n")
        if not names_this_machine(request.headers.get("Host")):
            return web.Response(status=421, text=f"{NOT_BY_NAME}\n")
        return web.Response(body=page(), headers={"Content-Type": CONTENT_TYPE})

    server = web.Server(handle, keepalive_timeout=KEEPALIVE_S, access_log=None)
    runner = web.ServerRunner(server)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port, backlog=BACKLOG).start()
        except OSError as error:
            _log.error("metrics.not_served", port=port, reason=str(error), remedy=setting)
            return
        _log.info("metrics.served", address=f"http://{HOST}:{port}/metrics")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def names_this_machine(host: str | None) -> bool:
    """Whether a header ``Host`` names this machine itself. A page of somebody else whose name was
    made to lead here (DNS rebinding) sends that name; who is no browser may send none."""
    if host is None:
        return True
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") <= 1:
        name = name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
