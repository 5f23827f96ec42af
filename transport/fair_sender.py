"""Bulk answers to many peers in turn: one asked-for piece per peer and round.

What always holds: a peer that asked for much waits behind nobody who asked for little by more than
one piece; a piece is made only when it is about to be sent, so that memory does not grow with what
was asked for; a peer that does not keep up is tried again later, less and less often, without
holding up the others; one that is gone is forgotten with all it asked for.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from transport.errors import PeerUnreachable, WindowFull

MAX_QUEUED: Final = 8192
"""Pieces per peer; what is beyond is not answered, the peer asks again."""

FIRST_RETRY_S: Final = 0.005
MAX_RETRY_S: Final = 0.05
"""The window of a connection must not run empty before we look again."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Peer(Generic[K]):
    wanted: dict[K, None] = field(default_factory=dict)
    retry_s: float = FIRST_RETRY_S


class FairSender(Generic[K]):
    """``make`` gives the frames of a piece, none when there is nothing to send any more; ``send``
    is the hub's; ``on_sent`` hears of each piece that the hub took."""

    def __init__(
        self,
        send: Callable[[bytes, Sequence[bytes]], None],
        make: Callable[[K], Awaitable[Sequence[bytes]]],
        on_sent: Callable[[K], None] | None = None,
    ) -> None:
        self._send = send
        self._make = make
        self._on_sent = on_sent
        self._peers: dict[bytes, _Peer[K]] = {}
        self._turns: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.sent = 0
        self.window_full = 0
        self.unreachable = 0
        self.over_limit = 0

    @property
    def queued(self) -> int:
        """Pieces that are waiting, over all peers."""
        return sum(len(peer.wanted) for peer in self._peers.values())

    def ask(self, route: bytes, piece: K) -> None:
        """Send ``piece`` to ``route`` when it is its turn; asking twice before that is once."""
        peer = self._peers.get(route)
        if peer is None:
            peer = self._peers[route] = _Peer()
            self._take_turn(route)
        if len(peer.wanted) >= MAX_QUEUED:
            self.over_limit += 1
            return
        peer.wanted[piece] = None

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            if not self._turns:
                self._wake.clear()
                await self._wake.wait()
                continue
            route = self._turns.popleft()
            peer = self._peers.get(route)
            if peer is None:
                continue
            piece = next(iter(peer.wanted))
            frames = await self._make(piece)
            try:
                if frames:
                    self._send(route, frames)
            except WindowFull:
                self.window_full += 1
                self._retry_later(route, peer)
            except PeerUnreachable:
                self.unreachable += 1
                self._forget(route)
            else:
                if frames:
                    self.sent += 1
                    if self._on_sent is not None:
                        self._on_sent(piece)
                peer.retry_s = FIRST_RETRY_S
                peer.wanted.pop(piece, None)
                if peer.wanted:
                    self._take_turn(route)
                else:
                    self._forget(route)

    def _forget(self, route: bytes) -> None:
        self._peers.pop(route, None)

    def _take_turn(self, route: bytes) -> None:
        self._turns.append(route)
        self._wake.set()

    def _retry_later(self, route: bytes, peer: _Peer[K]) -> None:
        asyncio.get_running_loop().call_later(peer.retry_s, self._take_turn, route)
        peer.retry_s = min(2 * peer.retry_s, MAX_RETRY_S)
