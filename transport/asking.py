"""Asking a hub and waiting for its answer: what operators and submitters do.

What always holds: one request is out at a time on one ``Asking``; each may be sent again, because
saying the same twice is harmless to the scheduler; an answer that comes after we gave up is never
taken for that of a later request, because giving up closes the connection that it would come on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from transport.envelope import LIMITS, decode, encode
from transport.errors import FarflowError, LocalProtocolError, PeerUnreachable, ProtocolError
from transport.keys import KeyPair, load_server_key
from transport.links import Link, Network
from transport.messages import CommandReply, Message, Plane, Refuse
from transport.plane_hub import reachable
from transport.plane_links import link_options
from transport.reaching import NO_ANSWER, what_to_look_at
from transport.runtime.settings import TransportConfig
from transport.server_rotation import not_restarted

ANSWER_S: Final = 10.0
ATTEMPT_S: Final = 3.0

PATIENCE_S: Final = 300.0
_AGAIN_S: Final = 0.05
_RETRY_S: Final = 0.5
_RETRY_MAX_S: Final = 15.0

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class RequestRefused(FarflowError):
    """The scheduler said no; the text begins with its stable code."""

    code = "operator.refused"


async def patiently(ask: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """What ``ask`` returns, asked again for as long as the hub is away, at most ``patience_s``;
    then its PeerUnreachable."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    pause_s = _RETRY_S
    while True:
        try:
            return await ask()
        except PeerUnreachable:
            if loop.time() + pause_s > until_s:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_MAX_S)


class Pace:
    """Keeps a loop of requests that the hub may hold back from spinning when it holds none back."""

    def __init__(self, least_s: float = _RETRY_S) -> None:
        self._least_s = least_s
        self._asked_s = -least_s

    async def keep(self) -> None:
        """Call before each request that follows an empty answer."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._asked_s + self._least_s - loop.time()))
        self._asked_s = loop.time()


class Asking:
    """Requests over one plane's link, which is made at the first and again after a failure.

    ``key`` is the secret key file of whoever asks; the scheduler's public key is
    ``server.public.toml`` in ``transport.keys``. Without ``network`` it makes real sockets.

    Raises:
        ConfigError: a key file does not load.
    """

    def __init__(
        self,
        transport: TransportConfig,
        key: Path,
        *,
        plane: Plane = Plane.CONTROL,
        answer_s: float = ANSWER_S,
        network: Network | None = None,
    ) -> None:
        self._key = KeyPair.load(key)
        self._keys = Path(transport.keys)
        self._server_key = load_server_key(self._keys)
        port = {
            Plane.CONTROL: transport.control_port,
            Plane.TRAJECTORIES: transport.trajectories_port,
            Plane.WEIGHTS: transport.weights_port,
        }[plane]
        self._port_setting = f"transport.{plane.value}_port"
        self._endpoint = f"tcp://{reachable(transport.host)}:{port}"
        self._options = link_options(transport, plane)
        self._limits = LIMITS[plane]
        self._answer_s = answer_s
        self._own_network = network is None
        self._network = network
        self._link: Link | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    def use(self, network: Network) -> None:
        """Connect through ``network``, which is its owner's to close; before the first request."""
        self._own_network = False
        self._network = network

    async def close(self) -> None:
        """Hang up; a later request raises PeerUnreachable."""
        self._closed = True
        await self._hang_up()
        if self._own_network and self._network is not None:
            await self._network.close()
            self._network = None

    async def ask(
        self,
        message: Message,
        kind: type[M],
        *,
        wait_s: float = 0.0,
        accept: Callable[[M], bool] = lambda _answer: True,
    ) -> tuple[M, list[bytes]]:
        """The answer of ``kind`` that ``accept`` takes, with its payload. ``wait_s`` is for how
        long the hub may hold the request back before it answers, beside ``answer_s``.

        Raises:
            RequestRefused: the answer is no.
            PeerUnreachable: no answer.
            LocalProtocolError: the request does not fit a frame, or breaks a bound of its kind.
        """
        frames = encode(message, limits=self._limits)
        try:
            decode(frames, self._limits)  # the hub would only count what it cannot read
        except ProtocolError as error:
            raise LocalProtocolError(f"this cannot be asked: {error}") from error
        answer_s = self._answer_s + wait_s
        async with self._turn:
            why = NO_ANSWER
            try:
                async with asyncio.timeout(answer_s):
                    while True:
                        link = self._connected_link()
                        try:
                            async with asyncio.timeout(ATTEMPT_S + wait_s):
                                return await self._converse(link, frames, kind, accept)
                        except (TimeoutError, PeerUnreachable):
                            why = await link.why() or why
                            await self._hang_up()
                            await asyncio.sleep(_AGAIN_S)
            except TimeoutError as error:
                if self._link is not None and why == NO_ANSWER:
                    why = self._link.last_failure or why
                raise PeerUnreachable(
                    f"scheduler at {self._endpoint}: {why} within {answer_s:g} s{self._hint(why)}"
                ) from error
            except BaseException:
                await self._hang_up()
                raise

    async def _converse(
        self, link: Link, frames: list[bytes], kind: type[M], accept: Callable[[M], bool]
    ) -> tuple[M, list[bytes]]:
        """Send and wait for the answer, or for the end of the connection that it would come on."""
        async with asyncio.timeout(ATTEMPT_S):
            await link.wait_connected()
        link.send(frames)
        answering = asyncio.ensure_future(self._answer(link, kind, accept))
        lost = asyncio.ensure_future(link.wait_disconnected())
        try:
            await asyncio.wait({answering, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise PeerUnreachable(link.last_failure or "the connection was lost")
        finally:
            for task in (answering, lost):
                task.cancel()
            await asyncio.gather(answering, lost, return_exceptions=True)

    async def _answer(
        self, link: Link, kind: type[M], accept: Callable[[M], bool]
    ) -> tuple[M, list[bytes]]:
        while True:
            for received in await link.recv():
                try:
                    answer, payload = decode(received, self._limits)
                except ProtocolError:
                    continue
                if isinstance(answer, kind):
                    if accept(answer):
                        return answer, payload
                elif isinstance(answer, Refuse | CommandReply):
                    raise RequestRefused(f"{answer.code}: {answer.message}")

    def _hint(self, why: str) -> str:
        if why == NO_ANSWER:  # connected, perhaps, and not heard: nothing that an address mends
            return ""
        restart = not_restarted(self._keys) if "server key" in why else ""
        return f"; {restart or what_to_look_at(why, 'transport.host', self._port_setting)}"

    def _connected_link(self) -> Link:
        if self._closed:
            raise PeerUnreachable("the connection was closed: use it inside its `async with`")
        if self._network is None:
            from transport.zmq_links import ZmqNetwork

            self._network = ZmqNetwork()
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
