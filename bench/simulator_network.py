"""The network model against figures that others measured, and against the formulas it claims.

iperf        what arrives in 5 s over 64 connections between 132 pairs of regions: the shipped
             table against a transfer in the simulator over the same round trip and sent rate
loss         the rate of a long transfer against the Mathis bound
sharing      64 transfers over one NIC against an equal share each

The receiver's clock of iperf3 starts when the test is announced and stops when its end is, a round
trip longer than the sender's; so do we count.
"""

import random
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from bench.report import Row, main
from sim.fair_share import UNLIMITED, Pipe
from sim.flows import Flow
from sim.kernel import Kernel
from sim.links import LinkKeys
from sim.network import Network
from sim.tcp import TcpSpec, payload_share
from sim.topology import GBIT, load_regions, load_table, star

MEDIAN_ERROR, WORST_ERROR = 0.025, 0.20
TUNED = 2**30
"""Bytes of window per connection: the tests ran with buffers that never bind."""


class Pair(NamedTuple):
    """Gbit/s from one region to another; ``error`` is the model's, as a share."""

    source: str
    target: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1.0


class World:
    """Two hosts, in regions or so far apart, and a link of ``rate`` bytes per second each way."""

    def __init__(self, keys: LinkKeys, rate: float, rtt_s: float) -> None:
        self.kernel = Kernel()
        topology = star({"b": rtt_s}, centre="a")
        self.network = Network(self.kernel, topology, random.Random(0), keys=keys)
        for name in ("a", "b"):
            self.network.add(name, name, Pipe("up", rate), Pipe("down", rate), lambda *_: None)

    def begin(self, size_bytes: int = 2**50) -> Flow:
        return self.network.transfer("a", "b", size_bytes, lambda: None)


def iperf_pairs(growth: float = TcpSpec().growth) -> list[Pair]:
    """Every pair of the shipped table, as the model has it."""
    table = load_table()
    rates, topology = table.rates["aws12-2022"], load_regions("aws12-2022")
    link_rate = rates.sent_gbit * GBIT * payload_share()
    tcp = TcpSpec(streams=rates.connections, window_bytes=TUNED, growth=growth)
    keys = LinkKeys(link_model="tcp", tcp=tcp)
    pairs = []
    for source, row in zip(table.regions, rates.received_gbit, strict=True):
        for target, measured in zip(table.regions, row, strict=True):
            if source != target:
                rtt_s = topology.rtt_s(source, target)
                world = World(keys, link_rate, rtt_s)
                flow = world.begin()
                world.kernel.run(rates.test_s)
                arrived = flow.moved_bytes(world.kernel.now) / (rates.test_s + rtt_s)
                pairs.append(Pair(source, target, measured, arrived / GBIT))
    return pairs


def iperf_rows() -> list[Row]:
    """The model's errors over all pairs, beside those of doubling and of no slow start at all."""
    errors = _sizes(pair.error for pair in iperf_pairs())
    doubling = _sizes(pair.error for pair in iperf_pairs(growth=2.0))
    table = load_table().rates["aws12-2022"]
    flat = table.sent_gbit * payload_share()
    none = _sizes(flat / pair.measured - 1.0 for pair in iperf_pairs())
    rows = []
    for what, at, most in (
        ("median", statistics.median, MEDIAN_ERROR),
        ("worst", max, WORST_ERROR),
    ):
        value, other = at(errors), at(none)
        rows.append(
            Row(
                metric=f"iperf: {what} error over {len(errors)} pairs",
                value=value,
                unit="share",
                reference="no slow start",
                ratio=value / other,
                target=f"<= {most}",
                ok=value <= most,
            )
        )
        rows.append(
            Row(
                metric=f"iperf: {what} error when windows double",
                value=at(doubling),
                unit="share",
                reference="no slow start",
                ratio=at(doubling) / other,
            )
        )
    return rows


def loss_rows() -> list[Row]:
    """Long transfers under loss, of one and of eight connections."""
    rows = []
    for streams, loss, rtt_s in ((1, 1e-4, 0.15), (8, 1e-4, 0.15), (1, 1e-3, 0.03)):
        tcp = TcpSpec(streams=streams, loss=loss, window_bytes=TUNED)
        world = World(LinkKeys(link_model="tcp", tcp=tcp), UNLIMITED, rtt_s)
        flow = world.begin()
        world.kernel.run(1000.0)
        before = flow.moved_bytes(world.kernel.now)
        world.kernel.run(2000.0)
        rate = (flow.moved_bytes(world.kernel.now) - before) / 1000.0
        bound = streams * 1.22 * tcp.mss_bytes / (rtt_s * loss**0.5)
        rows.append(
            Row(
                metric=f"loss {loss:g}, {rtt_s * 1e3:g} ms, {streams} streams",
                value=rate * 8e-6,
                unit="Mbit/s",
                reference="Mathis bound",
                ratio=rate / bound,
                target="1 within 1 %",
                ok=abs(rate / bound - 1.0) <= 0.01,
            )
        )
    return rows


def sharing_rows() -> list[Row]:
    """When 64 agents fetch the same bytes at once from a NIC of 5 Gbit/s."""
    count, size_bytes, nic = 64, 150_000_000, 5 * GBIT
    kernel, done = Kernel(), list[float]()
    sites = {f"s{n}": 0.02 + 0.004 * n for n in range(count)}
    network = Network(kernel, star(sites, centre="c"), random.Random(0))
    network.add("c", "c", Pipe("nic", nic), Pipe("in", nic), lambda *_: None)
    for name in sites:
        pipe = Pipe(name, GBIT)
        network.add(name, name, Pipe("up", GBIT), pipe, lambda *_: None)
        network.transfer("c", name, size_bytes, lambda: done.append(kernel.now))
    kernel.run(1e6)
    expected_s = count * size_bytes / nic + max(sites.values()) / 2
    return [
        Row(
            metric="64 fetches of 150 MB over 5 Gbit/s: the last",
            value=max(done),
            unit="s",
            reference="all bytes at the NIC's rate",
            ratio=max(done) / expected_s,
            target="1 within 0.1 %",
            ok=len(done) == count and abs(max(done) / expected_s - 1.0) <= 1e-3,
        )
    ]


def measure(quick: bool) -> list[Row]:
    """The same rows either way: they take seconds."""
    del quick
    return iperf_rows() + loss_rows() + sharing_rows()


def _sizes(errors: Iterable[float]) -> list[float]:
    return [abs(error) for error in errors]


if __name__ == "__main__":
    main("simulator_network", measure)
