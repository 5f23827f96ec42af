"""Any transfers, messages, cuts and changes of links: bytes are conserved, shares are fair."""

import random
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from sim.fair_share import Pipe, max_min
from sim.kernel import Kernel
from sim.links import LinkKeys
from sim.network import Network, Receive
from sim.tcp import MATHIS, TcpSpec, steady_rate
from sim.topology import star
from transport.messages import Message, Ping

if TYPE_CHECKING:
    from sim.flows import Flow

SITES = {"a": 0.02, "b": 0.1, "c": 0.3}
HOSTS = ("cloud", *SITES)


class World:
    def __init__(self, model: str, rates: list[float]) -> None:
        self.kernel = Kernel()
        tcp = TcpSpec(window_bytes=200_000)
        keys = LinkKeys(link_model=model, tcp=tcp)  # type: ignore[arg-type]
        topology = star(SITES, centre="cloud", jitter_s=0.001)
        self.network = Network(self.kernel, topology, random.Random(0), keys=keys)
        self.hosts = [
            self.network.add(
                name, name, Pipe(f"{name}-up", rate), Pipe(name, rate), self._hear(name)
            )
            for name, rate in zip(HOSTS, rates, strict=True)
        ]
        self.done = self.begun = self.said = 0
        self.heard: dict[tuple[str, str], int] = {}
        self.flows: list[Flow] = []

    def _hear(self, name: str) -> Receive:
        def hear(source: str, message: Message, _: object) -> None:
            """Order is kept, whatever happens."""
            assert isinstance(message, Ping)
            assert message.sequence > self.heard.get((source, name), 0)
            self.heard[source, name] = message.sequence

        return hear

    def act(self, step: tuple[str, str, str, int]) -> None:
        what, one, other, size = step
        network = self.network
        if what == "transfer" and one != other:
            self.begun += 1
            self.flows.append(network.transfer(one, other, size, self._done))
        elif what == "send" and one != other:
            self.said += 1
            ping = Ping(sequence=self.said, sent_s=0.0)
            network.send(one, other, ping, payload_bytes=size // self.said)
        elif what == "cut":
            network.cut(one)
            self.kernel.after(size / 1e6, lambda _: network.cut(one, is_cut=False))
        elif what == "stop":
            network.stop(one)
            self.kernel.after(size / 1e6, lambda _: network.stop(one, is_stopped=False))
        elif what == "scale":
            network.scale(self.hosts[HOSTS.index(one)].up, 0.25)
            pipe = self.hosts[HOSTS.index(one)].up
            self.kernel.after(size / 1e6, lambda _: network.scale(pipe, 1.0))
        elif what == "reset":
            network.reset(one)
        elif what == "renew" and one != other:
            network.renew(one, other)
        elif what == "cancel" and self.flows:
            network.cancel(self.flows[size % len(self.flows)])

    def _done(self) -> None:
        self.done += 1

    def check_shares(self) -> None:
        """The rates are those of all transfers worked out together, and no link is overfull."""
        flows = list(self.network._flows)
        load: dict[Pipe, float] = {}
        for flow in flows:
            for pipe in flow.pipes:
                load[pipe] = load.get(pipe, 0.0) + flow.rate
        for pipe, total in load.items():
            assert total <= pipe.capacity * (1 + 1e-6) + 1e-6
        moving = [flow for flow in flows if not flow.held]
        rates = max_min([flow.pipes for flow in moving], [flow.bound for flow in moving])
        for flow, rate in zip(moving, rates, strict=True):
            assert abs(flow.rate - rate) <= 1e-6 * max(1.0, rate) + 2.0
        assert all(flow.rate == 0.0 for flow in flows if flow.held)


kinds = ("transfer",) * 5 + ("send",) * 3 + ("cut", "stop", "scale", "reset", "renew", "cancel")
steps = st.tuples(
    st.sampled_from(kinds),
    st.sampled_from(HOSTS),
    st.sampled_from(HOSTS),
    st.integers(0, 3_000_000),
)
rates = st.lists(st.sampled_from((1e5, 1e6, 1e7)), min_size=4, max_size=4)


@given(st.sampled_from(("fluid", "tcp", "proxy")), rates, st.lists(steps, max_size=25), st.data())
def test_bytes_are_conserved_and_shares_are_fair(
    model: str, drawn: list[float], script: list[tuple[str, str, str, int]], data: Any
) -> None:
    world = World(model, drawn)
    for step in script:
        world.act(step)
        wait_s = data.draw(st.sampled_from((0.0, 0.01, 0.3, 2.0)))
        until_s = world.kernel.now + wait_s
        world.kernel.at(until_s, lambda _: world.kernel.stop())
        world.kernel.run(until_s + 1.0)
        if not world.network._flows._planning:
            world.check_shares()
    assert world.kernel.run(1e7)
    network, hosts = world.network, world.hosts
    assert not list(network._flows)
    assert not network._flows._loads
    up, down = (sum(getattr(h, way) for h in hosts) for way in ("bytes_up", "bytes_down"))
    assert up == down + network.lost_bytes
    lossless = all(what in ("transfer", "send", "stop", "scale") for what, *_ in script)
    if lossless:
        assert network.lost == network.lost_bytes == 0
        assert world.done == world.begun


@given(
    st.floats(0.005, 0.5),
    st.floats(1e-6, 0.1),
    st.integers(1, 16),
    st.integers(500, 9000),
    st.floats(1e5, 1e9),
)
def test_no_transfer_is_faster_than_loss_allows_and_a_long_one_as_fast(
    rtt_s: float, loss: float, streams: int, mss_bytes: int, rate: float
) -> None:
    tcp = TcpSpec(streams=streams, mss_bytes=mss_bytes, loss=loss, window_bytes=2**30)
    kernel = Kernel()
    keys = LinkKeys(link_model="tcp", tcp=tcp)
    network = Network(kernel, star({"b": rtt_s}, centre="a"), random.Random(0), keys=keys)
    for name in ("a", "b"):
        network.add(name, name, Pipe("up", rate), Pipe("down", rate), lambda *_: None)
    flow = network.transfer("a", "b", 2**50, lambda: None)
    bound = streams * MATHIS * mss_bytes / (rtt_s * loss**0.5)
    assert steady_rate(tcp, rtt_s) <= bound * (1 + 1e-9)
    kernel.run(1.0)
    assert flow.moved_bytes(1.0) <= min(bound, rate) * 1.0 * (1 + 1e-9) + 1
    kernel.run(200.0)
    before = flow.moved_bytes(200.0)
    kernel.run(1200.0)
    moved = (flow.moved_bytes(1200.0) - before) / 1000.0
    assert abs(moved / min(bound, rate) - 1.0) <= 1e-3
