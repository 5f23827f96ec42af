"""Hosts, the paths between them and what is under way on one.

What always holds: what one host says to another is delivered in the order in which it was said, or
counted as lost.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.fair_share import Pipe
from sim.links import Links
from transport.messages import Message

if TYPE_CHECKING:
    from sim.flows import Connection, Flow
    from sim.network import Network

Receive = Callable[[str, Message, Any], None]


class Host:
    """An address with access links, which hosts may share (``up`` and ``down`` of one NIC)."""

    __slots__ = (
        "bytes_down",
        "bytes_up",
        "cut",
        "down",
        "epoch",
        "name",
        "paths",
        "receive",
        "site",
        "stood_s",
        "stopped_at_s",
        "up",
    )

    def __init__(self, name: str, site: str, up: Pipe, down: Pipe, receive: Receive) -> None:
        self.name = name
        self.site = site
        self.up = up
        self.down = down
        self.receive = receive
        self.cut = False
        self.stopped_at_s: float | None = None
        self.stood_s = 0.0
        self.epoch = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.paths: list[Path] = []


class Parcel(NamedTuple):
    """A message under way; ``stood_s`` is for how long its path had stood still when it left."""

    epochs: tuple[int, int, int]
    message: Message
    extra: Any
    size_bytes: int
    stood_s: float


class Path:
    """From one host to another. ``last_s`` is when the latest message arrives, ``large`` a message
    that shares the links at present, ``behind`` what was said since."""

    __slots__ = (
        "behind",
        "byte_s",
        "connection",
        "delay_s",
        "epoch",
        "flows",
        "large",
        "last_s",
        "name",
        "network",
        "pair",
        "pipes",
        "queue_bytes",
        "spread_s",
        "tail_s",
        "usual_s",
        "waiting",
    )

    def __init__(self, network: "Network", links: Links, source: Host, target: Host) -> None:
        sites = (source.site, target.site)
        self.network = network
        self.pair = (source, target)
        self.name = f"{source.name}>{target.name}\0".encode()
        self.usual_s = self.delay_s = links.delay_s(*sites)
        self.spread_s = self.tail_s = 0.0
        self.queue_bytes = 0
        self.pipes: tuple[Pipe, ...] = ()
        self.connection: Connection | None = None
        self.byte_s = 0.0
        # Hosts of one machine reach each other beside its NIC.
        if source.up is not target.up:
            self.pipes = (source.up, target.down)
            pair_rate = links.pair_rate(*sites)
            if pair_rate is not None:
                self.pipes += (Pipe(f"{source.name}>{target.name}", pair_rate),)
            rate = min(pipe.rate for pipe in self.pipes)
            self.byte_s = 1.0 / rate
            self.queue_bytes = links.queue_bytes(*sites, rate)
            self.spread_s, self.tail_s = links.spread_s(*sites), links.tail_s(*sites)
        self.flows: dict[Flow, None] = {}
        self.large: Flow | None = None
        self.behind: deque[Parcel] = deque()
        self.waiting: list[tuple[float, Parcel]] = []
        self.last_s = 0.0
        self.epoch = 0

    def deliver(self, parcel: Parcel) -> None:
        source, target = self.pair
        network = self.network
        if parcel.epochs != (self.epoch, source.epoch, target.epoch) or target.cut:
            network.lose(parcel.size_bytes)
            return
        if network.has_stopped and self._is_late(parcel):
            return
        target.bytes_down += parcel.size_bytes
        target.receive(source.name, parcel.message, parcel.extra)

    def _is_late(self, parcel: Parcel) -> bool:
        """Time stood still on the link since the message left: it is that much behind."""
        source, target = self.pair
        if source.stopped_at_s is not None or target.stopped_at_s is not None:
            self.waiting.append((self.network.now, parcel))
            return True
        if source.stood_s + target.stood_s <= parcel.stood_s:
            return False
        self._put_off(self.network.now, parcel)
        return True

    def go_on(self) -> None:
        """Time goes on at a host: what was to arrive meanwhile arrives as much later."""
        if all(host.stopped_at_s is None for host in self.pair):
            waiting, self.waiting = self.waiting, []
            for due_s, parcel in waiting:
                self._put_off(due_s, parcel)

    def _put_off(self, due_s: float, parcel: Parcel) -> None:
        stood_s = sum(host.stood_s for host in self.pair)
        at_s = due_s + stood_s - parcel.stood_s
        self.last_s = max(self.last_s, at_s)
        self.network.later(at_s, self, parcel._replace(stood_s=stood_s))

    @property
    def is_held(self) -> bool:
        """Whether transfers have to wait."""
        return any(host.cut or host.stopped_at_s is not None for host in self.pair)
