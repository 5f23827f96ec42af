"""TCP's limits: formulas, slow start, idle reset, and the figures that others measured."""

import math
import random
import statistics

import pytest

from bench.simulator_network import (
    MEDIAN_ERROR,
    WORST_ERROR,
    World,
    iperf_pairs,
    loss_rows,
    sharing_rows,
)
from sim.fair_share import Pipe
from sim.kernel import Kernel
from sim.links import LinkKeys
from sim.network import Network
from sim.tcp import (
    TcpSpec,
    Window,
    arrived_bytes,
    loss_rate,
    steady_rate,
    timeout_s,
    window_rate,
)
from sim.topology import star

PLAIN = TcpSpec(growth=2.0, window_bytes=2**30)


def world(tcp: TcpSpec, rate: float, rtt_s: float) -> World:
    return World(LinkKeys(link_model="tcp", tcp=tcp), rate, rtt_s)


def took_s(made: World, size_bytes: int) -> float:
    """From now until a transfer of that size has arrived."""
    began_s, done = made.kernel.now, list[float]()
    made.network.transfer("a", "b", size_bytes, lambda: done.append(made.kernel.now))
    while not done:
        made.kernel.run(began_s + 1e5, max_events=1)
    return done[0] - began_s


def test_the_formulas_give_known_values() -> None:
    # 4 MB of window over 150 ms: 213 Mbit/s; loss of 1e-4 at 1460 bytes: 9.5 Mbit/s.
    assert window_rate(TcpSpec(window_bytes=4_000_000), 0.15) * 8e-6 == pytest.approx(213, abs=1)
    lossy = TcpSpec(mss_bytes=1460, loss=1e-4)
    assert loss_rate(lossy, 0.15) * 8e-6 == pytest.approx(9.5, abs=0.1)
    assert steady_rate(TcpSpec(streams=8, loss=1e-4), 0.15) == 8 * steady_rate(
        TcpSpec(loss=1e-4), 0.15
    )
    assert loss_rate(TcpSpec(), 0.15) == math.inf
    assert timeout_s(0.15) == pytest.approx(0.35)
    assert timeout_s(0.15, 0.1) == pytest.approx(0.55)


def test_slow_start_takes_as_many_round_trips_as_doubling_needs() -> None:
    # 14 480 bytes in the first round trip, then twice as much: 15 times that after four.
    size_bytes = 15 * 14_480
    assert took_s(world(PLAIN, 1e12, 0.1), size_bytes) == pytest.approx(0.4 + 0.05)
    assert arrived_bytes(PLAIN, 0.1, 1e12, 0.4) == pytest.approx(size_bytes)


def test_more_connections_begin_with_more() -> None:
    size_bytes = 15 * 14_480
    many = TcpSpec(growth=2.0, streams=15)
    assert took_s(world(many, 1e12, 0.1), size_bytes) == pytest.approx(0.1 + 0.05)


def test_a_slow_link_ends_slow_start() -> None:
    rate, size_bytes = 1.25e6, 10_000_000
    took = took_s(world(PLAIN, rate, 0.1), size_bytes)
    # The window passes rate x round trip after four round trips, having moved 217 kB of 500 kB.
    assert took == pytest.approx(size_bytes / rate + 0.05 + 0.4 - 217_200 / rate, abs=0.01)


def test_a_window_that_is_too_small_holds_for_ever() -> None:
    tcp = TcpSpec(window_bytes=1_000_000)
    # 10 MB/s, and what slow start gives away in about eight round trips.
    assert took_s(world(tcp, 1e9, 0.1), 500_000_000) == pytest.approx(50.6, abs=0.2)


def test_a_warm_connection_is_faster_and_silence_cools_it() -> None:
    made, size_bytes = world(PLAIN, 12.5e6, 0.1), 5_000_000
    cold_s = took_s(made, size_bytes)
    rests = {}
    for rest_s in (0.05, 1.0, 60.0):
        made.kernel.after(rest_s, lambda _: made.kernel.stop())
        made.kernel.run(1e9)
        rests[rest_s] = took_s(made, size_bytes)
    assert rests[0.05] == pytest.approx(size_bytes / 12.5e6 + 0.05)
    assert rests[0.05] < rests[1.0] < rests[60.0] == pytest.approx(cold_s)


def test_windows_halve_per_timeout_down_to_the_initial_one() -> None:
    window = Window(PLAIN, 0.1)
    window.begin(0.0)
    for _ in range(6):
        window.grow()
    full = window.size_bytes
    assert full == 64 * 14_480
    window.begin(0.29)
    assert window.size_bytes == full
    window.used_s = 0.0
    window.begin(2 * timeout_s(0.1) + 0.01)
    assert window.size_bytes == full / 4
    window.begin(1e9)
    assert window.size_bytes == 14_480


def test_windows_keep_to_their_bound() -> None:
    window = Window(TcpSpec(window_bytes=20_000), 0.1)
    for _ in range(5):
        window.grow()
    assert window.size_bytes == 20_000
    assert window.is_open
    window.travel(0.05)
    assert window.rate == 20_000 / 0.05


def test_two_transfers_of_one_connection_share_its_window() -> None:
    made = world(TcpSpec(window_bytes=1_000_000), 1e9, 0.1)
    done: list[float] = []
    for _ in range(2):
        made.network.transfer("a", "b", 100_000_000, lambda: done.append(made.kernel.now))
    made.kernel.run(1e4)
    assert done == [pytest.approx(20.7, abs=0.1)] * 2


def test_the_network_does_what_the_closed_form_says() -> None:
    rng = random.Random(1)
    for _ in range(20):
        tcp = TcpSpec(
            streams=rng.choice([1, 4, 64]), loss=rng.choice([0.0, 1e-5, 1e-3]), growth=1.7
        )
        rtt_s, rate, until_s = rng.uniform(0.01, 0.4), rng.uniform(1e6, 1e9), rng.uniform(0.1, 9.0)
        made = world(tcp, rate, rtt_s)
        flow = made.begin()
        made.kernel.run(until_s)
        expected = arrived_bytes(tcp, rtt_s, rate, until_s)
        assert flow.moved_bytes(made.kernel.now) == pytest.approx(expected, rel=1e-6)


def test_a_crowd_is_worked_out_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> list[float]:
        kernel, done, rng = Kernel(), list[float](), random.Random(3)
        sites = {f"s{n}": rng.uniform(0.02, 0.3) for n in range(130)}
        keys = LinkKeys(link_model="tcp", tcp=TcpSpec(streams=4))
        network = Network(kernel, star(sites, centre="c"), random.Random(0), keys=keys)
        network.add("c", "c", Pipe("nic", 1e9), Pipe("in", 1e9), lambda *_: None)
        for name in sites:
            network.add(name, name, Pipe("up", 1e7), Pipe(name, 1e7), lambda *_: None)
            network.transfer("c", name, 20_000_000, lambda: done.append(kernel.now))
        kernel.run(1e4)
        return done

    crowd = ends()
    monkeypatch.setattr("sim.flows.CROWD", 10**9)
    alone = ends()
    assert len(crowd) == len(alone) == 130
    assert max(crowd) == pytest.approx(max(alone), rel=0.01)
    assert statistics.fmean(crowd) == pytest.approx(statistics.fmean(alone), rel=0.01)
    assert crowd != alone


def test_published_iperf_figures_are_reproduced() -> None:
    pairs = iperf_pairs()
    errors = [abs(pair.error) for pair in pairs]
    assert len(pairs) == 132
    assert statistics.median(errors) <= MEDIAN_ERROR
    assert max(errors) <= WORST_ERROR
    assert abs(statistics.fmean(pair.error for pair in pairs)) <= 0.02
    # It is the round trip that explains the figures: without slow start all would be alike.
    assert max(pair.modelled for pair in pairs) > 2.5 * min(pair.modelled for pair in pairs)


def test_the_bench_rows_hold() -> None:
    assert all(row.ok for row in loss_rows() + sharing_rows())
