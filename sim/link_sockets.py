"""The sockets of an emulated link: small buffers and short segments.

What always holds: what waits in the kernel is a queue that the emulated link does not have, so it
is small; nothing waits for the timers of the machine's own TCP.
"""

import contextlib
import socket
from typing import Final

from transport.errors import ConfigError

Address = tuple[str, int]
"""Host (name or literal) and port."""

SOCKET_BUFFER_BYTES: Final = 128 * 1024
"""Asked of the kernel for each socket, which doubles it for its own bookkeeping."""
SEGMENT_BYTES: Final = 4096
"""The loopback's own segments are as long as half such a buffer: the last one that fits would wait
for the receiver's delayed acknowledgement, 40 ms that no link has."""


def small_socket(host: str) -> socket.socket:
    """An unconnected socket for an address of ``host``'s family."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    with contextlib.suppress(OSError):  # a system that bounds it otherwise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    return sock


def listening_socket(name: str, address: Address) -> socket.socket:
    """Bound to ``address``. Raises ``ConfigError`` that names the target."""
    sock = small_socket(address[0])  # accepted sockets inherit the buffers' sizes
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        where = f"{address[0]}:{address[1]}"
        raise ConfigError(f"target {name!r}: cannot listen on {where}: {error}") from error
    return sock
