"""Messages and bulk transfers between hosts, in virtual time.

A message takes the path's delay, its bytes at the slower of both access links, and jitter; what one
host says to another arrives in the order in which it was said. Its size is that of the real codec's
frames. Anything larger than ``FLUID_BYTES``, and every ``transfer``, shares the links (``flows``);
it has arrived one delay after its last byte left. What paths are like comes from ``links``.

What always holds: a message is delivered once or, when a host was cut off or its connection was
renewed meanwhile, not at all; a transfer through a host that is cut off or stands still waits;
``bytes_up`` of all hosts are their ``bytes_down``, ``lost_bytes`` and what is under way. Small
messages do not slow each other or transfers down.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sim.fair_share import UNLIMITED, Pipe
from sim.flows import Connection, Flow, Flows
from sim.kernel import Call, History, Kernel
from sim.links import DRIFT_STEP_S, STANDING_SHARE, LinkKeys, Links
from sim.paths import Host, Parcel, Path, Receive
from sim.topology import Topology
from transport.envelope import encode
from transport.messages import Message

if TYPE_CHECKING:
    import random

__all__ = ["FLUID_BYTES", "OVERHEAD_BYTES", "Flow", "Host", "Network", "Receive"]

FLUID_BYTES: Final = 64 * 1024
OVERHEAD_BYTES: Final = 66
"""Of a small message beside its frames: three ZMTP frame heads, TCP and IP heads of one segment."""


class Network:
    """Hosts by name. ``sent`` and ``lost`` count messages, ``lost_bytes`` what left in vain."""

    def __init__(
        self,
        kernel: Kernel,
        topology: Topology,
        rng: "random.Random",
        history: History | None = None,
        keys: LinkKeys | None = None,
    ) -> None:
        self.sent = 0
        self.lost = 0
        self.lost_bytes = 0
        self._kernel = kernel
        self._links = Links(topology, keys)
        self._rng = rng
        self._history = history
        self._hosts: dict[str, Host] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._flows = Flows(kernel)
        self._rtt_factors: dict[str, float] = {}
        self.has_stopped = False
        if self._links.keys.drift:
            self._drift()

    @property
    def now(self) -> float:
        return self._kernel.now

    def add(self, name: str, site: str, up: Pipe, down: Pipe, receive: Receive) -> Host:
        """A new host. The outages of its site's link profile begin to count now."""
        host = self._hosts[name] = Host(name, site, up, down, receive)
        profile = self._links.profiles.get(site)
        for outage in profile.outages if profile is not None else ():
            begin_s = self._kernel.now + outage.start_s
            self._kernel.at(begin_s, lambda _: self.stop(name))
            self._kernel.at(begin_s + outage.duration_s, lambda _: self.stop(name, False))
        if site in self._links.keys.drift:
            up.drift = down.drift = self._links.keys.drift[site].factors(self._kernel.now)[1]
        return host

    def delay_s(self, source: str, target: str) -> float:
        """From one host to another, without jitter."""
        return self._path(source, target).delay_s

    def life(self, name: str) -> int:
        """Changes when the process of a host ends."""
        return self._hosts[name].epoch

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
        if self._history is not None:
            self._history.add(self._kernel.now, path.name, header)
        if sender.cut or receiver.cut:
            self.lost += 1
            return
        size_bytes = len(header) + OVERHEAD_BYTES + payload_bytes
        epochs = (path.epoch, sender.epoch, receiver.epoch)
        parcel = Parcel(epochs, message, extra, size_bytes)
        if path.large is not None:
            path.behind.append(parcel)
        elif size_bytes > FLUID_BYTES and path.pipes:
            self._send_large(path, parcel)
        else:
            self._send_small(path, parcel)

    def _send_small(self, path: Path, parcel: Parcel) -> None:
        path.pair[0].bytes_up += parcel.size_bytes
        stood_s = path.stood_s() if self.has_stopped else 0.0
        due_s = self._kernel.now - stood_s + path.delay_s + parcel.size_bytes * path.byte_s
        if path.spread_s:
            due_s += self._rng.random() * path.spread_s
        if path.flows and path.queue_bytes:
            due_s += self._queue_s(path)
        if due_s < path.last_s:
            due_s = path.last_s
        path.last_s = parcel.due_s = due_s
        self._kernel.at(due_s + stood_s, path.deliver, parcel)

    def _send_large(self, path: Path, parcel: Parcel) -> None:
        def left(flow: Flow) -> None:
            path.large = None
            path.pair[0].bytes_up += parcel.size_bytes
            stood_s = path.stood_s() if self.has_stopped else 0.0
            due_s = self._kernel.now - stood_s + path.delay_s + path.tail_s
            path.last_s = parcel.due_s = max(path.last_s, due_s)
            self._kernel.at(parcel.due_s + stood_s, path.deliver, parcel)
            while path.behind and path.large is None:
                after = path.behind.popleft()
                large = after.size_bytes > FLUID_BYTES
                (self._send_large if large else self._send_small)(path, after)

        path.large = self._begin(path, parcel.size_bytes, UNLIMITED, left)

    def _queue_s(self, path: Path) -> float:
        """What waits in the bottleneck's queue before a message of the same connections."""
        rate = sum(flow.rate for flow in path.flows)
        if rate <= 0.0:
            return 0.0
        return min(path.queue_bytes / rate, STANDING_SHARE * 2.0 * path.delay_s)

    def later(self, at_s: float, call: Call, argument: Any) -> None:
        """Call at another time."""
        self._kernel.at(at_s, call, argument)

    def lose(self, size_bytes: int) -> None:
        """A message whose bytes had left will not be delivered."""
        self.lost += 1
        self.lost_bytes += size_bytes

    # ---- connections ---------------------------------------------------------------------------

    def renew(self, source: str, target: str) -> None:
        """Make a connection anew: what is under way in it is lost, in both directions."""
        for pair in ((source, target), (target, source)):
            path = self._path(*pair)
            path.epoch += 1
            self._abandon(path)
            if path.connection is not None:
                path.connection.anew()

    def reset(self, name: str) -> None:
        """A host's process has died: whatever is under way to or from it is lost."""
        host = self._hosts[name]
        host.epoch += 1
        for path in host.paths:
            self._abandon(path)
            for flow in tuple(path.flows):
                self.cancel(flow)
            if path.connection is not None:
                path.connection.anew()

    def _abandon(self, path: Path) -> None:
        """Forget the messages that have not left."""
        self.lost += (path.large is not None) + len(path.behind)
        path.behind.clear()
        if path.large is not None:
            self.cancel(path.large)
            path.large = None

    def cut(self, name: str, is_cut: bool = True) -> None:
        """Cut a host off, or bring it back: messages are lost meanwhile, transfers wait."""
        self._hosts[name].cut = is_cut
        self._hold(self._hosts[name])

    def stop(self, name: str, is_stopped: bool = True) -> None:
        """Let time stand still on a host's link, or go on: nothing is lost, everything is late.
        Windows begin anew afterwards: their connections have timed out."""
        host = self._hosts[name]
        self.has_stopped = True
        if is_stopped and host.stopped_at_s is None:
            host.stopped_at_s = self._kernel.now
        elif not is_stopped and host.stopped_at_s is not None:
            host.stood_s += self._kernel.now - host.stopped_at_s
            host.stopped_at_s = None
            for path in host.paths:
                path.go_on()
                if path.connection is not None:
                    path.connection.anew()
        self._hold(host)

    def scale(self, pipe: Pipe, scale: float) -> None:
        """Change a link's rate for transfers."""
        pipe.scale = scale
        self._flows.link_changed(pipe)

    # ---- transfers -----------------------------------------------------------------------------

    def transfer(
        self,
        source: str,
        target: str,
        size_bytes: int,
        done: Callable[[], None],
        *,
        bound: float = UNLIMITED,
        follows: bool = False,
    ) -> Flow:
        """Move bytes, never faster than ``bound`` bytes per second; ``done`` is called when the
        last one has arrived. One that ``follows`` left right behind a message that arrives now."""
        path = self._path(source, target)
        source_host, target_host = path.pair

        def left(_: Flow) -> None:
            source_host.bytes_up += size_bytes
            self._kernel.after((0.0 if follows else path.delay_s) + path.tail_s, arrived)

        def arrived(_: object) -> None:
            target_host.bytes_down += size_bytes
            done()

        return self._begin(path, size_bytes, bound, left)

    def cancel(self, flow: Flow) -> None:
        """Forget a transfer; harmless when its last byte has left."""
        moved_bytes = self._flows.cancel(flow)
        if moved_bytes is not None:
            path: Path = flow.owner
            del path.flows[flow]
            path.pair[0].bytes_up += moved_bytes
            self.lost_bytes += moved_bytes

    def _begin(
        self, path: Path, size_bytes: int, bound: float, left: Callable[[Flow], None]
    ) -> Flow:
        if path.connection is None and path.pipes and self._links.has_windows:
            window = self._links.window(path.pair[0].site, path.pair[1].site)
            path.connection = Connection(path.name.decode(), window, self._flows, self._kernel)
            path.connection.travel(self._rtt_s(path))

        def ended(flow: Flow) -> None:
            del path.flows[flow]
            left(flow)

        flow = Flow(path, path.pipes, path.connection, size_bytes, bound, ended)
        flow.held = path.is_held
        path.flows[flow] = None
        return self._flows.begin(flow)

    def _hold(self, host: Host) -> None:
        for path in host.paths:
            for flow in path.flows:
                self._flows.hold(flow, path.is_held)

    # ---- paths ---------------------------------------------------------------------------------

    def _path(self, source: str, target: str) -> Path:
        path = self._paths.get((source, target))
        if path is None:
            one, other = self._hosts[source], self._hosts[target]
            path = self._paths[source, target] = Path(self, self._links, one, other)
            path.delay_s *= self._rtt_factor(path)
            one.paths.append(path)
            other.paths.append(path)
        return path

    def _rtt_s(self, path: Path) -> float:
        one, other = path.pair
        return self._links.topology.rtt_s(one.site, other.site) * self._rtt_factor(path)

    def _rtt_factor(self, path: Path) -> float:
        factors = self._rtt_factors
        return factors.get(path.pair[0].site, 1.0) * factors.get(path.pair[1].site, 1.0)

    def _drift(self, _: object = None) -> None:
        """The next step of the day at all sites."""
        now, drift = self._kernel.now, self._links.keys.drift
        factors = {site: drift[site].factors(now) for site in drift}
        self._rtt_factors = {site: rtt for site, (rtt, _) in factors.items()}
        for host in self._hosts.values():
            if host.site in factors:
                for pipe in (host.up, host.down):
                    pipe.drift = factors[host.site][1]
                    self._flows.link_changed(pipe)
        for path in self._paths.values():
            path.delay_s = path.usual_s * self._rtt_factor(path)
            if path.connection is not None:
                path.connection.travel(self._rtt_s(path))
        self._kernel.after(DRIFT_STEP_S, self._drift)
