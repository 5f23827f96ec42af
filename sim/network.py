"""Messages and bulk transfers between hosts, in virtual time.

A message takes half a round trip, its bytes at the slower of both access links, and jitter; what
one host says to another arrives in the order in which it was said. Its size is that of the real
codec's frames. Anything larger than ``FLUID_BYTES``, and every ``transfer``, shares the links:
rates of all transfers under way are max-min fair (``fair_share``) and change only when one begins,
ends, or a link does; a transfer has arrived half a round trip after its last byte left.

What always holds: a message is delivered once or, when a host was cut off or its connection was
renewed meanwhile, not at all; a transfer through a host that is cut off waits; every byte that
arrives was counted when it left. Small messages do not slow each other or transfers down.

Where TCP's own limits come in: ``transfer(bound=...)`` caps one transfer's rate.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sim.fair_share import UNLIMITED, Pipe, max_min
from sim.kernel import History, Kernel
from sim.topology import Topology
from transport.envelope import encode
from transport.messages import Message

if TYPE_CHECKING:
    import random

FLUID_BYTES: Final = 64 * 1024
OVERHEAD_BYTES: Final = 66
"""Of a small message beside its frames: three ZMTP frame heads, TCP and IP heads of one segment."""

_DONE_BYTES: Final = 1e-3

Receive = Callable[[str, Message, Any], None]


class Host:
    """An address with access links, which hosts may share (``up`` and ``down`` of one NIC)."""

    __slots__ = ("bytes_down", "bytes_up", "cut", "down", "epoch", "name", "receive", "site", "up")

    def __init__(self, name: str, site: str, up: Pipe, down: Pipe, receive: Receive) -> None:
        self.name = name
        self.site = site
        self.up = up
        self.down = down
        self.receive = receive
        self.cut = False
        self.epoch = 0
        self.bytes_up = 0
        self.bytes_down = 0


class Flow:
    """A transfer under way."""

    __slots__ = ("bound", "done", "is_message", "pipes", "rate", "remaining", "source", "target")

    def __init__(
        self,
        source: Host,
        target: Host,
        pipes: tuple[Pipe, ...],
        size_bytes: int,
        bound: float,
        done: Callable[[], None],
    ) -> None:
        self.source = source
        self.target = target
        self.pipes = pipes
        self.remaining = float(size_bytes)
        self.bound = bound
        self.done = done
        self.rate = 0.0
        self.is_message = False


class _Path:
    """From one host to another; ``last_s`` is when the latest message arrives."""

    __slots__ = ("byte_s", "delay_s", "epoch", "last_s", "name", "network", "pair", "pipes")

    def __init__(self, network: "Network", source: Host, target: Host, delay_s: float) -> None:
        self.network = network
        self.pair = (source, target)
        self.name = f"{source.name}>{target.name}\0".encode()
        self.delay_s = delay_s
        # Hosts of one machine reach each other beside its NIC.
        shared = source.up is target.up
        self.pipes = () if shared else (source.up, target.down)
        rates = [pipe.rate for pipe in self.pipes]
        self.byte_s = 1.0 / min(rates) if rates else 0.0
        self.last_s = 0.0
        self.epoch = 0

    def deliver(self, parcel: tuple[int, int, int, Message, Any, int]) -> None:
        source, target = self.pair
        epoch, source_epoch, target_epoch, message, extra, size_bytes = parcel
        if epoch != self.epoch or source_epoch != source.epoch or target_epoch != target.epoch:
            self.network.lost += 1
            return
        if target.cut:
            self.network.lost += 1
            return
        target.bytes_down += size_bytes
        target.receive(source.name, message, extra)


class Network:
    """Hosts by name. ``sent`` and ``lost`` count messages."""

    def __init__(
        self,
        kernel: Kernel,
        topology: Topology,
        rng: "random.Random",
        history: History | None = None,
    ) -> None:
        self.sent = 0
        self.lost = 0
        self._kernel = kernel
        self._topology = topology
        self._rng = rng
        self._history = history
        self._hosts: dict[str, Host] = {}
        self._paths: dict[tuple[str, str], _Path] = {}
        self._flows: dict[Flow, None] = {}
        self._shared_s = 0.0
        self._plan = 0
        self._replanning = False

    def add(self, name: str, site: str, up: Pipe, down: Pipe, receive: Receive) -> Host:
        host = self._hosts[name] = Host(name, site, up, down, receive)
        return host

    def delay_s(self, source: str, target: str) -> float:
        """Half a round trip."""
        return self._path(source, target).delay_s

    # ---- messages ------------------------------------------------------------------------------

    def send(
        self,
        source: str,
        target: str,
        message: Message,
        *,
        payload_bytes: int = 0,
        extra: Any = None,
    ) -> None:
        """Say something; ``extra`` stands for a payload of ``payload_bytes`` and travels along."""
        path = self._paths.get((source, target)) or self._path(source, target)
        sender, receiver = path.pair
        self.sent += 1
        header = encode(message)[1]
        now = self._kernel.now
        if self._history is not None:
            self._history.add(now, path.name, header)
        if sender.cut or receiver.cut:
            self.lost += 1
            return
        size_bytes = len(header) + OVERHEAD_BYTES + payload_bytes
        sender.bytes_up += size_bytes
        parcel = (path.epoch, sender.epoch, receiver.epoch, message, extra, size_bytes)
        if size_bytes > FLUID_BYTES and path.pipes:
            flow = self._start(path, size_bytes, UNLIMITED, lambda: self._arrive(path, parcel))
            flow.is_message = True
            return
        jitter_s = self._topology.jitter_s
        delay_s = path.delay_s + size_bytes * path.byte_s
        if jitter_s and path.pipes:
            delay_s += self._rng.random() * 2.0 * jitter_s
        arrival_s = now + delay_s
        if arrival_s < path.last_s:
            arrival_s = path.last_s
        path.last_s = arrival_s
        self._kernel.at(arrival_s, path.deliver, parcel)

    def _arrive(self, path: _Path, parcel: tuple[int, int, int, Message, Any, int]) -> None:
        """The last byte of a large message has left."""
        path.last_s = max(path.last_s, self._kernel.now + path.delay_s)
        self._kernel.at(path.last_s, path.deliver, parcel)

    # ---- connections ---------------------------------------------------------------------------

    def renew(self, source: str, target: str) -> None:
        """Make a connection anew: what is under way in it is lost, in both directions."""
        for pair in ((source, target), (target, source)):
            self._path(*pair).epoch += 1

    def reset(self, name: str) -> None:
        """A host's process has died: whatever is under way to or from it is lost."""
        host = self._hosts[name]
        host.epoch += 1
        for flow in tuple(self._flows):
            if host is flow.source or host is flow.target:
                self.lost += flow.is_message
                self.cancel(flow)

    def cut(self, name: str, is_cut: bool = True) -> None:
        """Cut a host off, or bring it back: messages are lost meanwhile, transfers wait."""
        self._hosts[name].cut = is_cut
        self._replan_soon()

    def scale(self, pipe: Pipe, scale: float) -> None:
        """Change a link's rate for transfers."""
        pipe.scale = scale
        self._replan_soon()

    # ---- transfers -----------------------------------------------------------------------------

    def transfer(
        self,
        source: str,
        target: str,
        size_bytes: int,
        done: Callable[[], None],
        *,
        bound: float = UNLIMITED,
    ) -> Flow:
        """Move bytes; ``done`` is called when the last one has arrived."""
        path = self._path(source, target)

        def left() -> None:
            target_host.bytes_down += size_bytes
            self._kernel.after(path.delay_s, lambda _: done())

        source_host, target_host = path.pair
        source_host.bytes_up += size_bytes
        return self._start(path, size_bytes, bound, left)

    def cancel(self, flow: Flow) -> None:
        """Forget a transfer; harmless when its last byte has left."""
        if self._flows.pop(flow, 0) is None:
            self._replan_soon()

    def _start(self, path: _Path, size_bytes: int, bound: float, done: Callable[[], None]) -> Flow:
        flow = Flow(*path.pair, path.pipes, size_bytes, bound, done)
        self._flows[flow] = None
        self._replan_soon()
        return flow

    def _replan_soon(self) -> None:
        """Many transfers may begin at one instant: their rates are worked out once."""
        if not self._replanning:
            self._replanning = True
            self._kernel.at(self._kernel.now, self._replan)

    def _replan(self, _: Any = None) -> None:
        self._replanning = False
        self._progress()
        moving = [f for f in self._flows if not (f.source.cut or f.target.cut)]
        for flow in self._flows:
            flow.rate = 0.0
        rates = max_min([f.pipes for f in moving], [f.bound for f in moving])
        next_s: float | None = None
        for flow, rate in zip(moving, rates, strict=True):
            flow.rate = rate
            if rate > 0.0:
                left_s = flow.remaining / rate
                next_s = left_s if next_s is None or left_s < next_s else next_s
        self._plan += 1
        if next_s is not None:
            self._kernel.after(next_s, self._completed, self._plan)

    def _completed(self, plan: int) -> None:
        """The transfer that was to end first has."""
        if plan != self._plan:
            return
        self._progress()
        soon_s = 1e-9 * max(1.0, self._kernel.now)
        ended = [f for f in self._flows if f.remaining <= max(_DONE_BYTES, f.rate * soon_s)]
        for flow in ended:
            del self._flows[flow]
        self._replan_soon()
        for flow in ended:
            flow.done()

    def _progress(self) -> None:
        elapsed_s = self._kernel.now - self._shared_s
        self._shared_s = self._kernel.now
        if elapsed_s > 0.0:
            for flow in self._flows:
                flow.remaining = max(0.0, flow.remaining - flow.rate * elapsed_s)

    def _path(self, source: str, target: str) -> _Path:
        path = self._paths.get((source, target))
        if path is None:
            one, other = self._hosts[source], self._hosts[target]
            delay_s = self._topology.rtt_s(one.site, other.site) / 2
            path = self._paths[source, target] = _Path(self, one, other, delay_s)
        return path
