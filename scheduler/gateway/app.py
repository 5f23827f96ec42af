"""From a request to its answer: who asks, may they, how often, what, and the record of it.

What always holds: whoever has no token that counts learns no more than the files of the dashboard
and the description of the interface; nothing is read of a request that may not be made, and never
more than ``http.max_body_bytes`` of one that may; what changes something is recorded before it is
done, and not done when it cannot be recorded.
"""

import asyncio
import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from scheduler.gateway.access import HttpToken, Rates
from scheduler.gateway.audit import Asked, Audit, AuditLine
from scheduler.gateway.calls import Call, Route, World, busy, unauthorised
from scheduler.gateway.openapi import path_pattern
from scheduler.gateway.static_files import is_static, static_file
from scheduler.http_server import HttpListener, HttpRefused, bearer, json_response
from transport.asking import RequestRefused
from transport.errors import ConfigError, LinkError, LocalProtocolError, StoreError
from transport.runtime.metrics_http import NOT_BY_NAME, names_this_machine

BODY_S: Final = 20.0
"""How long a request's body may take."""
STRANGERS_PER_S: Final = 50.0
"""Requests that need a token and have none that counts, of all such together."""
OPEN_PER_S: Final = 100.0
"""Requests of whatever kind without a token that counts, from one address."""
MAX_ADDRESSES: Final = 1024
"""Of which is known how often they asked."""
SHOWN_PATH: Final = 300
RETRY_AFTER_S: Final = 2

_log = structlog.get_logger()


class Gateway:
    """Answers requests with ``routes``; ``listener`` is set by who listens."""

    def __init__(self, world: World, routes: Sequence[Route], audit: Audit) -> None:
        self._world = world
        self._audit = audit
        self._routes = [(path_pattern(route.path), route) for route in routes]
        self._in_flight: Counter[str] = Counter()
        self._parsing = asyncio.Lock()
        self.rates = Rates(world.config.http.requests_per_s)
        self._strangers = Rates(STRANGERS_PER_S)
        self._addresses = Rates(OPEN_PER_S, MAX_ADDRESSES)
        self.listener: HttpListener

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to any request."""
        self.listener.heard(request.protocol)
        try:
            answer = await self._answer(request)
        except HttpRefused as refused:
            self._world.refused[refused.code] += 1
            answer = refused.response()
        if not answer.prepared:
            answer.headers.setdefault("X-Content-Type-Options", "nosniff")
            answer.headers.setdefault("Cache-Control", "no-store")
            answer.headers["Server"] = "farflow"
        return answer

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        token = self._world.book.lookup(bearer(request))
        self._seldom_enough(token, request)
        if is_static(request.path):
            return await static_file(request)
        route, names = self._find(request)
        if not route.roles or (token is None and self._is_open(route, request)):
            return await self._carry_out(
                route, Call(self._world, request, names, _query(route, request), None, None)
            )
        if token is None:
            raise self._stranger()
        await self._allow(route, token, request)
        most = max(1, self._world.config.http.max_connections // 4)
        if self._in_flight[token.name] >= most:
            raise busy(f"{most} requests of this token are not answered yet; wait for them")
        self._in_flight[token.name] += 1
        try:
            return await self._for_token(route, names, token, request)
        finally:
            self._in_flight[token.name] -= 1
            if not self._in_flight[token.name]:
                del self._in_flight[token.name]

    async def _for_token(
        self, route: Route, names: dict[str, str], token: HttpToken, request: web.BaseRequest
    ) -> web.StreamResponse:
        raw = b""
        try:
            query = _query(route, request)
            raw = await self._read(request) if request.method == "POST" else b""
            body = await self._understood(route, request, raw)
        except HttpRefused as refused:
            if route.change:
                await self._record_refused(_asked(token, request, raw), refused)
            raise
        call = Call(self._world, request, names, query, body, token)
        if not route.change:
            return await self._carry_out(route, call)
        begun = await self._begin(_asked(token, request, raw))
        status, code = 500, "http.internal"
        try:
            answer = await self._carry_out(route, call)
            status, code = 200, ""
        except HttpRefused as refused:
            status, code = refused.status, refused.code
            raise
        finally:
            await self._end(begun, status, code)
        return answer

    # ---- who may what --------------------------------------------------------------------------

    def _find(self, request: web.BaseRequest) -> tuple[Route, dict[str, str]]:
        found = [
            (route, match)
            for pattern, route in self._routes
            if (match := pattern.fullmatch(request.path))
        ]
        if not found:
            text = "there is nothing under this path; /v1/openapi.json lists all"
            raise HttpRefused(404, "http.not_found", text)
        for route, match in found:
            if route.method == request.method:
                return route, match.groupdict()
        allowed = ", ".join(sorted({route.method for route, _ in found}))
        raise HttpRefused(405, "http.method", f"this path takes {allowed}", Allow=allowed)

    def _seldom_enough(self, token: HttpToken | None, request: web.BaseRequest) -> None:
        """Raises HttpRefused for one too many of a token, or of an address that has none."""
        now_s = self._world.clock.monotonic_s()
        if token is None:
            wait_s = self._addresses.take(self.listener.group(request.remote or ""), now_s)
            if wait_s:
                text = f"without a token this address may ask {OPEN_PER_S:g} times a second"
                raise _too_often(text, wait_s)
            return
        wait_s = self.rates.take(token.name, now_s)
        if wait_s:
            text = f"this token may ask {self._world.config.http.requests_per_s:g} times a second"
            raise _too_often(text, wait_s)

    def _is_open(self, route: Route, request: web.BaseRequest) -> bool:
        """Whether this machine may ask for it without a token; raises HttpRefused where it is asked
        by a name that others may have made to lead here."""
        if not (route.open_to_metrics and self._world.config.http.open_metrics):
            return False
        if not names_this_machine(request.headers.get("Host")):
            raise HttpRefused(421, "http.host", f"{NOT_BY_NAME}, or send a token")
        return True

    def _stranger(self) -> HttpRefused:
        wait_s = self._strangers.take("", self._world.clock.monotonic_s())
        if wait_s:
            text = f"more than {STRANGERS_PER_S:g} requests a second have no token that counts"
            return _too_often(text, wait_s)
        return unauthorised()

    async def _allow(self, route: Route, token: HttpToken, request: web.BaseRequest) -> None:
        if token.role in route.roles:
            return
        roles = " or ".join(sorted(role.value for role in route.roles))
        refused = HttpRefused(
            403,
            "http.forbidden",
            f"token {token.name} has role {token.role.value}; this takes one of role {roles}",
        )
        if route.change:
            await self._record_refused(_asked(token, request, b""), refused)
        raise refused

    async def _record_refused(self, asked: Asked, refused: HttpRefused) -> None:
        try:
            await self._audit.refused(asked, refused.status, refused.code)
        except StoreError as error:
            _log.error("http.not_recorded", reason=str(error))

    # ---- what comes in -------------------------------------------------------------------------

    async def _read(self, request: web.BaseRequest) -> bytes:
        most = self._world.config.http.max_body_bytes
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HttpRefused(415, "http.encoding", "send the body as it is, not compressed")
        too_large = HttpRefused(
            413, "http.too_large", f"a body has at most {most} bytes (http.max_body_bytes)"
        )
        if (request.content_length or 0) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.content.iter_any():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            text = f"the body did not come within {BODY_S:g} s"
            raise HttpRefused(408, "http.slow", text) from error
        except (RequestPayloadError, ConnectionError) as error:
            raise HttpRefused(400, "http.body", f"the body cannot be read: {error}") from error
        return bytes(body)

    async def _understood(self, route: Route, request: web.BaseRequest, raw: bytes) -> Any:
        """The body as the route's type. The parser of TOML takes a second for a large file: beside
        the loop, and one at a time, so that nobody else waits for it."""
        if not _is_toml(route, request):
            return _body(route, request, raw)
        async with self._parsing:
            return await asyncio.to_thread(_body, route, request, raw)

    # ---- what is done --------------------------------------------------------------------------

    async def _carry_out(self, route: Route, call: Call) -> web.StreamResponse:
        """Raises HttpRefused for everything that is foreseen."""
        try:
            answer = await route.answer(call)
        except RequestRefused as error:
            code, _, text = str(error).partition(": ")
            raise HttpRefused(_status_of(code), code, text or code) from error
        except LocalProtocolError as error:
            raise HttpRefused(422, "request.invalid", str(error)) from error
        except (UnicodeError, OverflowError) as error:
            raise HttpRefused(422, "request.invalid", f"a value cannot be sent: {error}") from error
        except LinkError as error:
            raise HttpRefused(
                503,
                "scheduler.unreachable",
                f"{error}; ask again",
                **{"Retry-After": str(RETRY_AFTER_S)},
            ) from error
        except StoreError as error:
            raise HttpRefused(503, error.code, str(error)) from error
        return answer if isinstance(answer, web.StreamResponse) else json_response(answer)

    async def _begin(self, asked: Asked) -> AuditLine:
        try:
            return await self._audit.begin(asked)
        except StoreError as error:
            _log.error("http.not_recorded", reason=str(error))
            text = f"not done, because it could not be recorded: {error}"
            raise HttpRefused(503, "http.not_recorded", text) from error

    async def _end(self, begun: AuditLine, status: int, code: str) -> None:
        _log.info(
            "http.order",
            token=begun.token,
            address=begun.address,
            method=begun.method,
            path=begun.path,
            status=status,
            code=code,
        )
        try:
            await self._audit.end(begun, status, code)
        except StoreError as error:
            _log.error("http.not_recorded", reason=str(error))


def _too_often(text: str, wait_s: float) -> HttpRefused:
    return HttpRefused(429, "http.too_often", text, **{"Retry-After": str(math.ceil(wait_s))})


def _query(route: Route, request: web.BaseRequest) -> Any:
    pairs = request.query
    given = dict(pairs.items())
    if len(given) < len(pairs):
        raise HttpRefused(422, "http.query", "a parameter is there twice; give each once")
    try:
        query = msgspec.convert(given, route.query, strict=False)
    except msgspec.ValidationError as error:
        raise HttpRefused(422, "http.query", f"query: {error}") from error
    for name, value in msgspec.structs.asdict(query).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise HttpRefused(422, "http.query", f"query: {name}: a finite number, please")
    return query


def _is_toml(route: Route, request: web.BaseRequest) -> bool:
    return route.toml is not None and request.content_type in ("application/toml", "text/toml")


def _body(route: Route, request: web.BaseRequest, raw: bytes) -> Any:
    if route.body is None:
        if raw.strip() not in (b"", b"{}"):
            raise HttpRefused(422, "http.body", "this takes no body")
        return None
    if not raw.strip() and route.body_optional:
        raw = b"{}"
    try:
        if route.toml is not None and _is_toml(route, request):
            return route.toml(raw.decode())
        return msgspec.json.decode(raw, type=route.body)
    except (msgspec.ValidationError, ConfigError) as error:
        raise HttpRefused(422, "http.body", f"body: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: no TOML, or no text
        raise HttpRefused(400, "http.body", f"body: {error}") from error
    except (OverflowError, RecursionError) as error:
        raise HttpRefused(422, "http.body", f"body: too large or too deep: {error}") from error


def _asked(token: HttpToken, request: web.BaseRequest, raw: bytes) -> Asked:
    return Asked(
        token=token.name,
        role=token.role.value,
        address=request.remote or "",
        method=request.method,
        path=re.sub(r"[^\x20-\x7e]", "?", request.path)[:SHOWN_PATH],
        body_sha256=hashlib.sha256(raw).hexdigest() if raw else "",
    )


def _status_of(code: str) -> int:
    """HTTP's word for the scheduler's refusal."""
    if code.startswith("quota."):
        return 429
    _, _, kind = code.rpartition(".")
    return {"unknown": 404, "invalid": 422, "which": 422}.get(kind, 409)
