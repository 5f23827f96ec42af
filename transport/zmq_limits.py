"""Bounds on the connections of a hub that lets anybody in: how many there are, how long each lives
and how much it may send.

What always holds: a connection counts from its first byte, so also one that never ends its
handshake and one that never says a word; what is over the bounds is shut down under libzmq, the
oldest first; a descriptor is shut only while it is the connection that was seen under its number
(libzmq reports the end of a connection before it frees the descriptor).

The bound on bytes is what keeps an unfinished message of very many frames, which libzmq collects
without limit, from filling the memory; it is looked at every ``LOOK_S`` and needs Linux's TCP_INFO.
"""

import asyncio
import os
import socket as sockets
import struct
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 0.1
_TCP_INFO_BYTES: Final = 136
_BYTES_RECEIVED: Final = struct.Struct("@Q")
"""``tcpi_bytes_received``, the last of those 136 bytes (linux/tcp.h)."""


class ConnectionLimits:
    """At most ``most`` connections, none older than ``life_s``, none that has sent more than
    ``most_bytes``. ``settle`` takes in every event that the socket has reported so far."""

    def __init__(
        self, most: int, life_s: float, most_bytes: int, settle: Callable[[], None]
    ) -> None:
        self._most = most
        self._life_s = life_s
        self._most_bytes = most_bytes
        self._settle = settle
        self._open: dict[int, tuple[int, float]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.cut = 0

    def __len__(self) -> int:
        return len(self._open)

    def accepted(self, descriptor: int) -> None:
        """A connection has come; the oldest goes when there are too many."""
        inode = inode_of(descriptor)
        if inode is None:
            return
        self._open.pop(descriptor, None)
        self._open[descriptor] = (inode, self._loop.time())
        if len(self._open) > self._most:
            self._cut(next(iter(self._open)))
        if self._timer is None:
            self._look_later()

    def gone(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(min(LOOK_S, self._life_s / 4), self._look)

    def _look(self) -> None:
        self._timer = None
        self._settle()
        before_s = self._loop.time() - self._life_s
        for descriptor, (inode, since_s) in list(self._open.items()):
            if since_s <= before_s or bytes_received(descriptor, inode) > self._most_bytes:
                self._cut(descriptor)
        if self._open:
            self._look_later()

    def _cut(self, descriptor: int) -> None:
        inode, _ = self._open.pop(descriptor)
        self.cut += 1
        shut_down(descriptor, inode)


def inode_of(descriptor: int) -> int | None:
    """What tells whether a descriptor, which belongs to libzmq, is still the same connection."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def bytes_received(descriptor: int, inode: int) -> int:
    """What a TCP connection has brought so far; 0 where that cannot be known."""
    option = getattr(sockets, "TCP_INFO", None)
    if option is None:
        return 0
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino != inode:
                return 0
            info = copy.getsockopt(sockets.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return 0
    if len(info) < _TCP_INFO_BYTES:
        return 0
    found: int = _BYTES_RECEIVED.unpack_from(info, _TCP_INFO_BYTES - _BYTES_RECEIVED.size)[0]
    return found


def shut_down(descriptor: int, inode: int) -> None:
    """Shut a connection down under libzmq, which has no call for it; libzmq then sees the end of
    the stream and forgets the peer."""
    try:
        # The copy pins the descriptor, so that it cannot become another one meanwhile.
        with sockets.socket(fileno=os.dup(descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino == inode:
                copy.shutdown(sockets.SHUT_RDWR)
    except OSError:
        return
