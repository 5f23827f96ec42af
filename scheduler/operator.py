"""What an operator's command says to a scheduler, and how it gets an answer.

What always holds: one request is out at a time; each may be sent again, because saying the same
twice is harmless to the scheduler; an answer that comes after we gave up is never taken for that
of a later request, because giving up closes the connection that it would come on.
"""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

from transport.envelope import LIMITS, decode, encode
from transport.errors import FarflowError, PeerUnreachable, ProtocolError
from transport.keys import KeyPair, load_server_key
from transport.links import Link, Network
from transport.messages import (
    CommandReply,
    Message,
    Plane,
    Refuse,
    RunCommand,
    RunSubmit,
    StatusReply,
    StatusRequest,
)
from transport.plane_hub import reachable
from transport.plane_links import link_options
from transport.runs import RunSpec
from transport.runtime.settings import TransportConfig
from transport.status import SchedulerStatus

ANSWER_S: Final = 10.0
ATTEMPT_S: Final = 3.0

M = TypeVar("M", bound=Message)
_LIMITS = LIMITS[Plane.CONTROL]


class RequestRefused(FarflowError):
    """The scheduler said no; the text begins with its stable code."""

    code = "operator.refused"


class Operator:
    """An operator's connection to a scheduler; an asynchronous context manager."""

    def __init__(
        self,
        transport: TransportConfig,
        key: Path,
        *,
        answer_s: float = ANSWER_S,
        network: Network | None = None,
    ) -> None:
        """``key`` is the operator's (or viewer's) secret key file; the scheduler's public key is
        ``server.public.toml`` in ``transport.keys``.

        Raises:
            ConfigError: a key file does not load.
        """
        self._key = KeyPair.load(key)
        self._server_key = load_server_key(Path(transport.keys))
        self._endpoint = f"tcp://{reachable(transport.host)}:{transport.control_port}"
        self._options = link_options(transport, Plane.CONTROL)
        self._answer_s = answer_s
        self._own_network = network is None
        self._network = network
        self._link: Link | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._network is None:
            from transport.zmq_links import ZmqNetwork

            self._network = ZmqNetwork()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._hang_up()
        if self._own_network and self._network is not None:
            await self._network.close()
            self._network = None

    async def submit(self, run: RunSpec) -> str:
        """Submit a run; the same one again is harmless. Returns what the scheduler adds to its
        yes, "" for a new run.

        Raises:
            RequestRefused: another run has that name, or the run is not possible.
            PeerUnreachable: no answer.
        """
        return await self._command(RunSubmit(run=run))

    async def command(self, run: str, command: Literal["pause", "resume", "stop"]) -> None:
        """Pause, resume or stop a run; raises as ``submit``."""
        await self._command(RunCommand(run=run, command=command))

    async def status(self) -> SchedulerStatus:
        """The view model; raises PeerUnreachable without an answer."""
        return (await self._ask(StatusRequest(), StatusReply)).status

    async def _command(self, message: Message) -> str:
        reply = await self._ask(message, CommandReply)
        if not reply.ok:
            raise RequestRefused(f"{reply.code}: {reply.message}")
        return reply.message

    async def _ask(self, message: Message, kind: type[M]) -> M:
        frames = encode(message, limits=_LIMITS)
        async with self._turn:
            why = "no answer"
            try:
                async with asyncio.timeout(self._answer_s):
                    while True:
                        link = self._connected_link()
                        try:
                            async with asyncio.timeout(ATTEMPT_S):
                                return await _converse(link, frames, kind)
                        except (TimeoutError, PeerUnreachable):
                            why = link.last_failure or why
                            await self._hang_up()
            except TimeoutError as error:
                if self._link is not None:
                    why = self._link.last_failure or why
                raise PeerUnreachable(
                    f"scheduler at {self._endpoint}: {why} within {self._answer_s:g} s"
                ) from error
            except BaseException:
                await self._hang_up()
                raise

    def _connected_link(self) -> Link:
        if self._network is None:
            raise PeerUnreachable("the operator's connection was never opened: use `async with`")
        if self._link is None:
            self._link = self._network.link(
                self._endpoint,
                self._options,
                key=self._key,
                server_key=self._server_key,
            )
        return self._link

    async def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


async def _converse(link: Link, frames: list[bytes], kind: type[M]) -> M:
    """Send and wait for the answer."""
    await link.wait_connected()
    link.send(frames)
    while True:
        for received in await link.recv():
            try:
                answer, _ = decode(received, _LIMITS)
            except ProtocolError:
                continue
            if isinstance(answer, kind):
                return answer
            if isinstance(answer, Refuse | CommandReply):
                raise RequestRefused(f"{answer.code}: {answer.message}")
