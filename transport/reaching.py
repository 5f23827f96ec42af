"""What to say of an address that cannot be reached: which, why as far as can be found out, what to
look at, and how often.

What always holds: what lasts is said soon and then more and more rarely, however often the link is
made anew meanwhile; looking for the reason takes a bounded time and says nothing to the peer but a
TCP connection that ends at once.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from transport.errors import LinkClosed

if TYPE_CHECKING:
    from transport.links import Link

FIRST_S: Final = 5.0
MOST_S: Final = 300.0
LOOK_S: Final = 5.0
"""For the name, and again for the connection."""

NO_ANSWER: Final = "no answer"
REFUSED: Final = "nobody listens there: the connection was refused"
NAME: Final = "the name is not known here"
SILENT: Final = "nothing comes back"


def address_of(endpoint: str) -> str:
    """``HOST:PORT`` of ``tcp://HOST:PORT``."""
    return endpoint.removeprefix("tcp://")


class Rarely:
    """When to speak of what lasts: ``FIRST_S`` after it began, then after twice as long each time,
    at most ``MOST_S`` apart. ``now`` is in seconds of any clock that is always the same."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._due_s: float | None = None

    def due_s(self, now: float) -> float:
        """When it is time; begins with ``now`` if it has not begun."""
        if self._due_s is None:
            self._due_s = now + self._wait_s
        return self._due_s

    def said(self, now: float) -> None:
        """It was said."""
        self._wait_s = min(2 * self._wait_s, MOST_S)
        self._due_s = now + self._wait_s

    def over(self) -> None:
        """It lasts no longer."""
        self._wait_s = FIRST_S
        self._due_s = None


class Reaching:
    """Waits for one address. ``say_why`` hears now and then why there is no connection."""

    def __init__(self, say_why: Callable[[str], None]) -> None:
        self._say_why = say_why
        self._rarely = Rarely()
        self._why = ""

    async def connected(self, link: "Link") -> None:
        """Wait for the connection of ``link``, the present one to this address.

        Raises:
            LinkClosed: after or during its ``close``.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._rarely.due_s(loop.time())):
                        await link.wait_connected()
                        self._rarely.over()
                        self._why = ""
                        return
                self._why = await link.why() or self._why
                if not link.connected:
                    self._say_why(self._why or NO_ANSWER)
                    self._rarely.said(loop.time())
        except LinkClosed:
            self._why = link.last_failure or self._why  # a new link knows nothing yet
            raise


def family_of(host: str) -> socket.AddressFamily:
    """The addresses that links look for: of IPv4 alone (as libzmq's sockets do), unless ``host`` is
    an address of IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def why_no_tcp(endpoint: str, within_s: float = LOOK_S) -> str:
    """Why there is no TCP connection to ``tcp://HOST:PORT``; "" when there is one. Takes at most
    twice ``within_s``."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            found = await loop.getaddrinfo(
                host, port, family=family_of(host), type=socket.SOCK_STREAM
            )
    except TimeoutError:
        return f"{NAME}: no name server answers within {within_s:g} s"
    except (OSError, UnicodeError) as error:
        return f"{NAME}: {getattr(error, 'strerror', None) or error}"
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(str(found[0][4][0]), port)
    except TimeoutError:
        return f"{SILENT} within {within_s:g} s"
    except ConnectionRefusedError:
        return REFUSED
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


def refuses_key(why: str) -> bool:
    """Whether a link's failure says that the hub does not know our key (any more)."""
    return "refused our key" in why or "not authorised" in why


def what_to_look_at(why: str, host: str, port: str) -> str:
    """A remedy for ``why``, of a peer whose address is given by the settings ``host`` and
    ``port``."""
    if refuses_key(why):
        return "is our public key in the authorized/ of its keys?"
    if "server key" in why:
        return f"is that {host}, and has it another key than the file that we have of it?"
    if why.startswith(NAME):
        return f"is {host} spelt right, and does this machine resolve names?"
    if why == REFUSED:
        return f"does it run there, and are {host} and {port} right?"
    return (
        f"does it run there, are {host} and {port} right, and does every firewall in between let"
        " that port through?"
    )
