"""Hosts, the paths between them and what is under way on one.

What always holds: what one host says to another is delivered in the order in which it was said, or
counted as lost.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.fair_share import Pipe
from sim.kernel import Call
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


class Parcel:
    """A message under way; ``due_s`` is when it arrives, in the link's own time."""

    __slots__ = ("due_s", "epochs", "extra", "message", "size_bytes")

    def __init__(
        self, epochs: tuple[int, int, int], message: Message, extra: Any, size_bytes: int
    ) -> None:
        self.epochs = epochs
        self.message = message
        self.extra = extra
        self.size_bytes = size_bytes
        self.due_s = 0.0


class Path:
    """From one host to another. ``last_s`` is when the latest message arrives, in the link's own
    time, which stands still while one of its hosts is stopped; ``large`` is a message that shares
    the links at present, ``behind`` what was said since, ``waiting`` what came up while stopped."""

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
        self.waiting: list[tuple[float, Call, Any]] = []
        self.last_s = 0.0
        self.epoch = 0

    def deliver(self, parcel: Parcel) -> None:
        source, target = self.pair
        network = self.network
        if parcel.epochs != (self.epoch, source.epoch, target.epoch) or target.cut:
            network.lose(parcel.size_bytes)
            return
        if network.has_stopped and self.is_early(parcel.due_s, self.deliver, parcel):
            return
        target.bytes_down += parcel.size_bytes
        target.receive(source.name, parcel.message, parcel.extra)

    def stood_s(self) -> float:
        """For how long time has stood still here until now."""
        now = self.network.now
        return sum(
            host.stood_s + (0.0 if host.stopped_at_s is None else now - host.stopped_at_s)
            for host in self.pair
        )

    def is_early(self, due_s: float, call: Call, argument: Any) -> bool:
        """Whether time stood still since ``call(argument)`` was planned for now, so that it is due
        only later; it is called then."""
        if any(host.stopped_at_s is not None for host in self.pair):
            self.waiting.append((due_s, call, argument))
            return True
        now = self.network.now
        at_s = due_s + self.stood_s()
        if at_s <= now + 1e-9:
            return False
        self.network.later(at_s, call, argument)
        return True

    def go_on(self) -> None:
        """Time goes on at a host: what was to happen meanwhile happens as much later."""
        if all(host.stopped_at_s is None for host in self.pair):
            waiting, self.waiting = self.waiting, []
            for due_s, call, argument in waiting:
                self.network.later(due_s + self.stood_s(), call, argument)

    @property
    def is_held(self) -> bool:
        """Whether transfers have to wait."""
        return any(host.cut or host.stopped_at_s is not None for host in self.pair)
