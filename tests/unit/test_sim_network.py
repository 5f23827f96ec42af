"""Messages and transfers in virtual time."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from sim.fair_share import Pipe
from sim.kernel import History, Kernel
from sim.network import OVERHEAD_BYTES, Network
from sim.topology import LOCAL_RTT_S, load_regions, star
from transport.envelope import encode
from transport.errors import ConfigError
from transport.messages import Body, Message, Ping, Pong

SIZE = 10_000_000


class Net:
    """A cloud host and two edge hosts, 100 ms and 20 ms away; 10 MB/s to the cloud, 1 MB/s edge."""

    def __init__(self, nic: float = 10e6, edge: float = 1e6) -> None:
        self.kernel = Kernel()
        topology = star({"far": 0.1, "near": 0.02}, centre="cloud")
        self.network = Network(self.kernel, topology, random.Random(0))
        self.heard: list[tuple[float, str, Message]] = []
        self.pipes = {"nic": Pipe("nic", nic)}
        self.network.add("cloud", "cloud", self.pipes["nic"], Pipe("in", nic), self._hear("cloud"))
        for name in ("far", "near"):
            self.pipes[name] = Pipe(name, edge)
            up = Pipe(f"{name}-up", edge)
            self.network.add(name, name, up, self.pipes[name], self._hear(name))

    def _hear(self, name: str) -> Callable[[str, Message, Any], None]:
        return lambda _source, message, _extra: self.heard.append((self.kernel.now, name, message))

    def times(self) -> list[float]:
        return [at_s for at_s, _, _ in self.heard]

    def transferred(self, *targets: str, size_bytes: int = SIZE) -> list[float]:
        """When transfers from the cloud that begin now have arrived."""
        done: list[float] = []
        for target in targets:
            self.network.transfer("cloud", target, size_bytes, lambda: done.append(self.kernel.now))
        self.kernel.run(1e6)
        return done


def test_a_message_takes_half_a_round_trip_and_its_bytes() -> None:
    net, message = Net(), Ping(sequence=1, sent_s=0.0)
    net.network.send("far", "cloud", message)
    net.kernel.run(1.0)
    size_bytes = len(encode(message)[1]) + OVERHEAD_BYTES
    assert net.times() == [pytest.approx(0.05 + size_bytes / 1e6)]


def test_messages_of_one_pair_keep_their_order() -> None:
    net = Net()
    net.network.send("far", "cloud", Body(digest="big"), payload_bytes=60_000)
    net.network.send("far", "cloud", Ping(sequence=1, sent_s=0.0))
    net.kernel.run(1.0)
    assert [type(message) for _, _, message in net.heard] == [Body, Ping]


def test_a_large_message_shares_the_link() -> None:
    net, done = Net(), []
    net.network.transfer("far", "cloud", SIZE, lambda: done.append(net.kernel.now))
    net.network.send("far", "cloud", Body(digest="d"), payload_bytes=SIZE)
    net.kernel.run(100.0)
    assert [*net.times(), *done] == [pytest.approx(20.05, rel=1e-4)] * 2


def test_what_is_said_behind_a_large_message_waits_for_it() -> None:
    net = Net()
    net.network.send("far", "cloud", Body(digest="a"), payload_bytes=SIZE)
    net.network.send("far", "cloud", Ping(sequence=1, sent_s=0.0))
    net.network.send("far", "cloud", Body(digest="b"), payload_bytes=SIZE)
    net.network.send("near", "cloud", Ping(sequence=2, sent_s=0.0))
    net.kernel.run(100.0)
    assert net.times() == pytest.approx([0.01, 10.05, 10.05, 20.05], rel=1e-2)
    kinds = [type(message) for _, _, message in net.heard]
    assert kinds == [Ping, Body, Ping, Body]


def test_a_renewed_connection_forgets_what_was_waiting() -> None:
    net = Net()
    net.network.send("far", "cloud", Body(digest="a"), payload_bytes=SIZE)
    net.network.send("far", "cloud", Ping(sequence=1, sent_s=0.0))
    net.kernel.run(2.0)
    net.network.renew("cloud", "far")
    net.network.send("far", "cloud", Ping(sequence=2, sent_s=0.0))
    net.kernel.run(100.0)
    assert [getattr(message, "sequence", 0) for _, _, message in net.heard] == [2]
    assert (net.network.lost, net.network.lost_bytes) == (2, 2_000_000)


def test_a_transfer_alone_gets_the_slower_link() -> None:
    assert Net().transferred("far") == [pytest.approx(10.05)]
    assert Net(nic=0.5e6).transferred("far") == [pytest.approx(20.05)]


def test_transfers_share_what_they_have_in_common() -> None:
    assert Net(nic=1e6).transferred("far", "near") == pytest.approx([20.01, 20.05])
    assert Net().transferred("far", "near") == pytest.approx([10.01, 10.05])


def test_who_stays_gets_what_others_leave() -> None:
    net, done = Net(nic=1e6), []
    for target, size_bytes in (("far", SIZE), ("near", SIZE // 2)):
        net.network.transfer("cloud", target, size_bytes, lambda: done.append(net.kernel.now))
    net.kernel.run(1e3)
    # Half each until the smaller one is through after 10 s; then all of it for the other.
    assert done == pytest.approx([10.01, 15.05])


def test_a_cancelled_transfer_leaves_its_share() -> None:
    net, done = Net(nic=1e6), []
    flow = net.network.transfer("cloud", "near", SIZE, lambda: done.append(-1.0))
    net.network.transfer("cloud", "far", SIZE, lambda: done.append(net.kernel.now))
    net.kernel.at(2.0, lambda _: net.network.cancel(flow))
    net.kernel.run(1e3)
    assert done == pytest.approx([11.05])


def test_a_host_that_is_cut_off_hears_nothing_and_its_transfers_wait() -> None:
    net, done = Net(), []
    net.network.transfer("cloud", "far", SIZE, lambda: done.append(net.kernel.now))
    net.kernel.at(2.0, lambda _: net.network.cut("far"))
    net.kernel.at(3.0, lambda _: net.network.send("cloud", "far", Ping(sequence=1, sent_s=0.0)))
    net.kernel.at(7.0, lambda _: net.network.cut("far", is_cut=False))
    net.kernel.at(8.0, lambda _: net.network.send("cloud", "far", Ping(sequence=2, sent_s=0.0)))
    net.kernel.run(1e3)
    assert done == pytest.approx([15.05])
    assert [getattr(message, "sequence", 0) for _, _, message in net.heard] == [2]
    assert net.network.lost == 1


def test_a_renewed_connection_loses_what_was_under_way() -> None:
    net = Net()
    net.network.send("far", "cloud", Ping(sequence=1, sent_s=0.0))
    net.network.send("near", "cloud", Ping(sequence=2, sent_s=0.0))
    net.network.renew("cloud", "far")
    net.network.send("far", "cloud", Ping(sequence=3, sent_s=0.0))
    net.kernel.run(1.0)
    assert [getattr(message, "sequence", 0) for _, _, message in net.heard] == [2, 3]
    assert (net.network.sent, net.network.lost) == (3, 1)


def test_a_dead_host_loses_its_transfers() -> None:
    net, done = Net(), []
    net.network.transfer("cloud", "far", SIZE, lambda: done.append(1))
    net.network.send("cloud", "far", Body(digest="d"), payload_bytes=SIZE)
    net.kernel.at(1.0, lambda _: net.network.reset("far"))
    net.kernel.run(1e3)
    assert not done
    assert not net.heard
    assert net.network.lost == 1


def test_a_bound_holds_a_transfer_back() -> None:
    net, done = Net(), []
    net.network.transfer("cloud", "far", SIZE, lambda: done.append(net.kernel.now), bound=0.25e6)
    net.kernel.run(1e3)
    assert done == pytest.approx([40.05])


def test_a_small_world_has_its_golden_history() -> None:
    """Whoever changes times, sizes or order on purpose changes the digest here."""
    kernel, history = Kernel(), History()
    topology = star({"far": 0.1, "near": 0.02}, centre="cloud", jitter_s=0.002)
    network = Network(kernel, topology, random.Random(7), history)

    def hear(name: str) -> Callable[[str, Message, Any], None]:
        def heard(source: str, message: Message, _: object) -> None:
            if isinstance(message, Ping) and message.sequence < 20:
                pong = Pong(sequence=message.sequence, sent_s=round(kernel.now, 9))
                network.send(name, source, pong)
                size_bytes = 5000 * message.sequence
                network.send(name, source, Body(digest="d"), payload_bytes=size_bytes)
            elif isinstance(message, Pong):
                again = Ping(sequence=message.sequence + 1, sent_s=round(kernel.now, 9))
                network.send(name, source, again)

        return heard

    nic = Pipe("nic", 2e6)
    network.add("cloud", "cloud", nic, Pipe("in", 2e6), hear("cloud"))
    for name in ("far", "near"):
        network.add(name, name, Pipe(f"{name}-up", 1e6), Pipe(name, 1e6), hear(name))
        network.send(name, "cloud", Ping(sequence=0, sent_s=0.0))
    assert kernel.run(100.0)
    assert network.sent == 122
    assert history.digest() == "27d9521ea4af5b5cd0ba059f60a8ad19"


def test_the_shipped_regions_are_symmetric_and_complete() -> None:
    for snapshot, pair_s in (("aws12-2022", 0.085), ("aws12-2020", 0.071)):
        topology = load_regions(snapshot)
        assert len(topology.sites) == 12
        assert topology.rtt_s("us-east-1", "eu-west-1") == pair_s
        for one in topology.sites:
            assert topology.rtt_s(one, one) == LOCAL_RTT_S
            for other in topology.sites:
                assert topology.rtt_s(one, other) == topology.rtt_s(other, one) > 0.0


def test_an_unknown_snapshot_or_site_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match="aws12-2020, aws12-2022"):
        load_regions("aws13")
    with pytest.raises(ConfigError, match="cloud, a"):
        star({"a": 0.1}, centre="cloud").rtt_s("a", "b")
