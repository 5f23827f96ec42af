"""A page of metrics for Prometheus on this machine, for daemons that listen nowhere else.

What always holds: it listens on loopback only, has one page, and no failure of it (a port that is
taken) is one of the daemon.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from transport.telemetry import CONTENT_TYPE

HOST: Final = "127.0.0.1"
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
