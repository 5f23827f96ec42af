"""The run's policies behind an OpenAI-compatible API, for programs on this machine.

    GET  /v1/models                 the policies that a program may name
    POST /v1/chat/completions       a completion, whole or as server-sent events
    POST /v1/farflow/reward         the rollout's reward, once: {"reward": 1.0}

What always holds: it listens on 127.0.0.1 alone, at a port that the operating system chose, from
when the first program needs it; every request carries the key of one rollout, which is random, is
compared in constant time, and opens nothing once that rollout is over; connections, requests under
way and the sizes of bodies are bounded; a program that hangs up ends what it asked for.

A completion that is streamed is sent when it is complete: its tokens must be on record first.
"""

import asyncio
import contextlib
import contextvars
import logging
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import structlog

from edge_agent.chat_requests import (
    Answer,
    ChatRefused,
    RewardRequest,
    chat_request,
    decoded,
    models,
    pieces,
    refusal,
    whole,
)
from edge_agent.chat_session import ChatOptions, ChatSession, gone
from edge_agent.containment import ours
from transport.errors import FarflowError
from transport.runtime.clock import Clock

if TYPE_CHECKING:
    from aiohttp import web

    from edge_agent.workflow import WorkflowContext

HOST: Final = "127.0.0.1"
MAX_BODY_BYTES: Final = 4 * 2**20
MAX_CONNECTIONS: Final = 1024
MAX_REQUESTS: Final = 512
"""Under way at once, of all rollouts; what is behind the engine's slots waits there."""
FIRST_REQUEST_S: Final = 10.0
"""A connection that has asked for nothing after so long is closed."""
KEEPALIVE_S: Final = 30.0
STALLED_S: Final = 60.0
"""A program that does not take its answer for so long is cut off."""
BODY_S: Final = 30.0
"""A body must have arrived within this time."""

_KEY: Final = re.compile(r"farflow-(\d{1,18})-[A-Za-z0-9_-]{1,100}")

_log = structlog.get_logger()


class ChatEndpointFailed(FarflowError):
    """The endpoint cannot listen."""

    code = "chat.endpoint"


class ChatEndpoint:
    """One agent's endpoint. It starts when the first session is opened; ``close`` ends it."""

    def __init__(self, clock: Clock, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[int, ChatSession] = {}
        self._opened = 0
        self._requests = 0
        self._starting: asyncio.Task[int] | None = None
        self._runner: web.ServerRunner | None = None
        self._silent: dict[Any, asyncio.TimerHandle] = {}

    async def close(self) -> None:
        """Ends every session and stops listening; idempotent."""
        for session in list(self._sessions.values()):
            self.end(session)
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.wait({starting})
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # ---- sessions ------------------------------------------------------------------------------

    async def open(
        self, context: "WorkflowContext", number: int, options: ChatOptions
    ) -> ChatSession:
        """A session; ``number`` counts those of an item. Raises ChatEndpointFailed."""
        port = await self._listening()
        self._opened += 1
        base_url = f"http://{HOST}:{port}/v1"
        session = ChatSession(context, number, options, self._opened, base_url)
        self._sessions[session.id] = session
        return session

    def end(self, session: ChatSession) -> None:
        """Its key opens nothing any more; idempotent."""
        self._sessions.pop(session.id, None)
        session.close()

    async def _listening(self) -> int:
        """The port; starts the server, once for all who wait for it."""
        starting = self._starting
        if starting is None or (starting.done() and starting.exception() is not None):
            # Neither the server nor what it does for other rollouts belongs to this attempt.
            with ours():
                starting = asyncio.create_task(
                    self._start(), name="chat endpoint", context=contextvars.Context()
                )
            self._starting = starting
        return await asyncio.shield(starting)

    async def _start(self) -> int:
        from aiohttp import web

        outer, loop = self, asyncio.get_running_loop()

        class Server(web.Server):
            """Bounds connections before a byte of theirs is looked at."""

            def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
                super().connection_made(handler, transport)
                if len(self.connections) > MAX_CONNECTIONS:
                    loop.call_soon(transport.abort)  # its task must have started to end well
                    return
                outer._silent[handler] = loop.call_later(FIRST_REQUEST_S, transport.abort)

            def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
                outer._heard(handler)
                super().connection_lost(handler, exc)

        def request(
            message: Any, payload: Any, protocol: Any, writer: Any, task: Any
        ) -> web.BaseRequest:
            return web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=self._max_body_bytes
            )

        server = Server(
            self._handle,
            request_factory=request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            logger=logging.getLogger(__name__),
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
        except OSError as error:
            await runner.cleanup()
            raise ChatEndpointFailed(
                f"cannot listen on {HOST}: {error.strerror or error}; look at the limit of open "
                "files (`ulimit -n`)"
            ) from error
        self._runner = runner
        port = int(runner.addresses[0][1])
        _log.info("chat.listening", host=HOST, port=port)
        return port

    def _heard(self, handler: Any) -> None:
        timer = self._silent.pop(handler, None)
        if timer is not None:
            timer.cancel()

    # ---- requests ------------------------------------------------------------------------------

    async def _handle(self, request: "web.BaseRequest") -> "web.StreamResponse":
        from aiohttp import web

        self._heard(request.protocol)
        try:
            return await self._answered(request)
        except ChatRefused as refused:
            code, status = refused.reason, refused.status
            _log.debug("chat.refused", reason=code, status=status, detail=str(refused))
            headers = {} if refused.retry else {"x-should-retry": "false"}  # for OpenAI's clients
            return web.Response(
                status=status,
                body=refusal(refused),
                content_type="application/json",
                headers=headers,
            )

    async def _answered(self, request: "web.BaseRequest") -> "web.StreamResponse":
        session = self._session(request.headers.get("Authorization", ""))
        match request.method, request.path:
            case "GET", "/v1/models":
                return _json(models(session.models))
            case "POST", "/v1/chat/completions":
                asked = chat_request(await self._body(request))
                if self._requests >= MAX_REQUESTS:
                    text = "the agent answers as many requests as it can; try again"
                    raise ChatRefused(503, "overloaded", text, retry=True)
                self._requests += 1
                try:
                    answer = await session.answer(asked, int(self._clock.wall_s()))
                finally:
                    self._requests -= 1
                if not asked.stream:
                    return _json(whole(answer))
                options = asked.stream_options
                return await _streamed(
                    request, answer, usage=bool(options and options.include_usage)
                )
            case "POST", "/v1/farflow/reward":
                posted = decoded(await self._body(request), RewardRequest)
                session.post_reward(posted.reward)
                return _json(b"{}")
            case _:
                raise ChatRefused(
                    404,
                    "not_found",
                    f"{request.method} {request.path:.200}: there is GET /v1/models, POST "
                    "/v1/chat/completions and POST /v1/farflow/reward",
                )

    def _session(self, authorisation: str) -> ChatSession:
        scheme, _, key = authorisation.partition(" ")
        key = key.strip()
        named = _KEY.fullmatch(key)
        session = self._sessions.get(int(named[1])) if named else None
        if scheme.lower() != "bearer" or session is None or not session.opened_by(key):
            raise gone()
        return session

    async def _body(self, request: "web.BaseRequest") -> bytes:
        from aiohttp import web

        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {self._max_body_bytes} bytes; send shorter messages"
            raise ChatRefused(413, "request_too_large", text) from None
        except TimeoutError:
            raise ChatRefused(408, "timeout", f"no body within {BODY_S:g} s") from None


class AttemptChats:
    """The sessions of one attempt; none outlives it."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self._sessions: set[ChatSession] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def session(
        self, context: "WorkflowContext", number: int, options: ChatOptions
    ) -> AsyncIterator[ChatSession]:
        """A session, until the block is left or the attempt is over."""
        session = await self._endpoint.open(context, number, options)
        self._sessions.add(session)
        if self._closed:
            self._end(session)
        try:
            yield session
        finally:
            self._end(session)

    def close(self) -> None:
        """Ends what is open, and whatever is opened from now on at once."""
        self._closed = True
        for session in list(self._sessions):
            self._end(session)

    def _end(self, session: ChatSession) -> None:
        self._sessions.discard(session)
        self._endpoint.end(session)


async def _streamed(
    request: "web.BaseRequest", answer: Answer, *, usage: bool
) -> "web.StreamResponse":
    from aiohttp import web

    response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    try:
        async with asyncio.timeout(STALLED_S):
            for piece in pieces(answer, usage=usage):
                await response.write(piece)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # it hung up; its answer is on record
    return response


def _json(body: bytes) -> "web.Response":
    from aiohttp import web

    return web.Response(body=body, content_type="application/json")
