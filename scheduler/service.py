"""What the two service processes beside the scheduler have in common.

What always holds: a service is reached only by keys of the authorized folder, and each message is
one that its sender's role may say on this plane; it is known to the scheduler by its own key; it
says one line on standard output when it can be reached; it stops when it is told to, when its
standard input ends, or when the disk refuses (status 1): what cannot be kept must not be promised.
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from scheduler.config import SchedulerConfig
from scheduler.control_link import ControlLink
from transport.authorized import AllowList
from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import ConfigError, LinkClosed, LinkError, ProtocolError, StoreError
from transport.keys import KeyPair, Peer, load_public
from transport.links import Hub, LinkOptions, Network
from transport.messages import Message, Plane
from transport.permissions import may_send
from transport.runtime.clock import Clock
from transport.runtime.files import atomic_write, private_dir, read_limited
from transport.runtime.settings import TransportConfig

T = TypeVar("T")

_BUILD_FILES: Final = ("scheduler/core", "transport")
_log = structlog.get_logger()


class Arrival(NamedTuple):
    """A message of the plane that its sender may say."""

    route: bytes
    peer: Peer
    message: Message
    payload: list[bytes]


class Service(Protocol):
    """One plane's work. ``run`` is its background part; the others are called on the loop and must
    not block."""

    def arrived(self, arrival: Arrival) -> None: ...

    def welcomed(self) -> None:
        """The scheduler knows us (again): announce what it has not confirmed."""
        ...

    def from_scheduler(self, message: Message) -> None: ...

    async def has_room(self) -> None:
        """Returns when more may be received."""
        ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...
