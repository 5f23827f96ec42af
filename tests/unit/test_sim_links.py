"""What links are like: shipped tables, profiles, models, drift, outages and partitions."""

import random

import pytest

from sim.fair_share import UNLIMITED, Pipe
from sim.faults import Fault, FaultSpec, Partition, link_faults
from sim.kernel import Kernel
from sim.links import Drift, LinkKeys, Links
from sim.network import Network
from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario, shipped_scenarios
from sim.tcp import TcpSpec
from sim.topology import GBIT, Topology, load_clouds, load_regions, load_table, star
from sim.workload import Workload
from transport.errors import ConfigError
from transport.messages import Body, Ping

SMALL = Scenario(
    name="small",
    profiles={"city": "lte", "home": "home-cable"},
    agents=AgentsSpec(per_site=2, slots=(2,), tokens_per_s=(100.0,)),
    policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=2)},
    group_size=2,
    steps=5,
    limit_s=5000.0,
    workload=Workload(mean_tokens=300.0, train_s=5.0, delta_bytes=10_000_000),
)


class Net:
    """A cloud host and one at ``edge``; hears when messages arrive there."""

    def __init__(self, topology: Topology, keys: LinkKeys, rate: float = 1e6) -> None:
        self.kernel = Kernel()
        self.network = Network(self.kernel, topology, random.Random(0), keys=keys)
        self.heard: list[tuple[float, int]] = []
        for name in ("cloud", "edge"):
            pipes = (Pipe(f"{name}-up", rate), Pipe(name, rate))
            self.network.add(name, name, *pipes, self._hear)

    def _hear(self, _source: str, message: object, _extra: object) -> None:
        self.heard.append((self.kernel.now, getattr(message, "sequence", 0)))

    def say(self, number: int, at_s: float = 0.0, payload_bytes: int = 0) -> None:
        def say(_: object) -> None:
            message = Ping(sequence=number, sent_s=0.0)
            self.network.send("cloud", "edge", message, payload_bytes=payload_bytes)

        self.kernel.at(at_s, say)

    def fetch(self, size_bytes: int) -> list[float]:
        done: list[float] = []
        self.network.transfer("cloud", "edge", size_bytes, lambda: done.append(self.kernel.now))
        return done


def plain(rtt_s: float = 0.1) -> Topology:
    return star({"edge": rtt_s}, centre="cloud")


def test_shipped_tables_say_where_they_are_from() -> None:
    table = load_table()
    parts = [*table.snapshots.values(), *table.rates.values(), *table.egress.values()]
    assert len(parts) == 4
    for part in (*parts, load_clouds()):
        assert "github.com" in part.source
        assert part.licence.startswith("Apache-2.0")
        assert part.measured[:2] == "20" or "2022" in part.measured


def test_rates_between_regions_are_those_measured() -> None:
    regions = load_regions("aws12-2022")
    assert regions.rate_bytes_s("us-east-1", "eu-west-1", steady=False) == pytest.approx(4.3 * GBIT)
    assert regions.rate_bytes_s("af-south-1", "us-east-1", steady=False) == pytest.approx(
        2.9 * GBIT
    )
    # In the long run the senders' limit counts, whatever the distance; heads take their part.
    long_run = {
        regions.rate_bytes_s(one, other, steady=True)
        for one in regions.sites
        for other in regions.sites
        if one != other
    }
    assert list(long_run) == [pytest.approx(4.77 * GBIT, rel=1e-3)]
    assert regions.rate_bytes_s("us-east-1", "us-east-1", steady=True) is None


def test_rates_between_providers_are_medians() -> None:
    made = star({"there": 0.05}, centre="us-east-1", providers={"there": "gcp"})
    assert made.rate_bytes_s("there", "us-east-1", steady=False) == pytest.approx(
        5.8 * GBIT * 0.9539, rel=1e-3
    )
    assert made.rate_bytes_s("us-east-1", "there", steady=False) < 5.1 * GBIT
    home = star({"home": 0.05}, centre="us-east-1")
    assert home.rate_bytes_s("home", "us-east-1", steady=False) is None
    for low, median, high in load_clouds().sent_gbit.values():
        assert low < median < high


def test_who_sends_pays() -> None:
    regions = load_regions("aws12-2022")
    assert regions.egress_usd_gb("us-east-1", "eu-west-1") == 0.02
    assert regions.egress_usd_gb("af-south-1", "us-east-1") == 0.147
    assert regions.egress_usd_gb("us-east-1", "us-east-1") == 0.0
    made = star({"home": 0.05, "g": 0.03}, centre="us-east-1", providers={"g": "gcp"})
    assert made.egress_usd_gb("us-east-1", "home") == 0.09
    assert made.egress_usd_gb("home", "us-east-1") == 0.0
    assert made.egress_usd_gb("g", "us-east-1") == 0.12


def test_a_profile_gives_delays_and_rates_each_way() -> None:
    topology = SMALL.topology()
    assert topology.one_way_s("home", "us-east-1") == pytest.approx(0.024)
    assert topology.one_way_s("us-east-1", "home") == pytest.approx(0.018)
    assert topology.rtt_s("home", "us-east-1") == pytest.approx(0.042)
    plans = {plan.site: plan for plan in SMALL.fleet(0)}
    assert (plans["home"].up, plans["home"].down) == (2.5e6, 31.25e6)
    assert [plan.name for plan in SMALL.fleet(0)] == ["city-0", "city-1", "home-0", "home-1"]
    bare = Scenario(name="x", profiles={"a": "local"}).fleet(0)[0]
    assert bare.up == UNLIMITED


def test_jitter_of_a_profile_spreads_evenly_around_the_delay() -> None:
    links = Links(SMALL.topology(), SMALL)
    ways = ("us-east-1", "city")
    assert links.delay_s(*ways) == pytest.approx(0.030 - 0.015)
    assert links.spread_s(*ways) == links.tail_s(*ways) == pytest.approx(0.030)


def test_wrong_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"drift\.mars: there is no such site; there are cloud"):
        Links(plain(), LinkKeys(drift={"mars": Drift()}))
    with pytest.raises(ConfigError, match=r"profiles\.a: no link profile 'b'; known: .*lte"):
        Scenario(name="x", profiles={"a": "b"}).topology()
    with pytest.raises(ConfigError, match=r"profiles\.a: its round trip is in sites"):
        Scenario(name="x", sites={"a": 1.0}, profiles={"a": "lte"}).topology()
    with pytest.raises(ConfigError, match="regions have their round trips"):
        Scenario(name="x", regions="aws12-2022", profiles={"a": "lte"}).topology()
    spec = FaultSpec(partitions=(Partition(where="b", start_s=0.0, duration_s=1.0),))
    with pytest.raises(ConfigError, match=r"partitions\[0\]\.where: 'b' is no site"):
        link_faults(spec, [("a-0", "a")], 0, 100.0)


def test_a_measured_rate_bounds_each_pair_of_hosts() -> None:
    topology = star({"edge": 0.1}, centre="cloud", providers={"edge": "aws", "cloud": "azure"})
    net = Net(topology, LinkKeys(rate="measured"), rate=UNLIMITED)
    done = net.fetch(4_500_000_000)
    net.kernel.run(1e3)
    assert done == [pytest.approx(10.0 / 0.9539 + 0.05, rel=1e-3)]
    free = Net(topology, LinkKeys(), rate=UNLIMITED)
    done = free.fetch(4_500_000_000)
    free.kernel.run(1e3)
    assert done == [pytest.approx(0.05, rel=1e-3)]


def test_loss_of_a_site_slows_its_transfers() -> None:
    keys = LinkKeys(link_model="tcp", loss={"edge": 1e-4}, tcp=TcpSpec(mss_bytes=1460))
    net = Net(plain(0.15), keys, rate=1e9)
    done = net.fetch(11_875_000)
    net.kernel.run(1e5)
    assert done == [pytest.approx(10.6, abs=0.1)]  # 9.5 Mbit/s, after four slow round trips


def test_drift_moves_round_trips_and_rates_over_a_day() -> None:
    drift = Drift(rtt_share=0.2, rate_share=0.5, worst_h=6.0)
    assert drift.factors(6 * 3600.0) == pytest.approx((1.2, 0.5), abs=1e-3)
    assert drift.factors(18 * 3600.0) == pytest.approx((0.8, 1.5), abs=1e-3)
    assert drift.factors(0.0) == pytest.approx((1.0, 1.0), abs=0.02)
    for model in ("fluid", "tcp"):
        net = Net(plain(), LinkKeys(link_model=model, drift={"edge": drift}))
        took = []
        for hour in (6, 18):
            net.kernel.run(hour * 3600.0)
            assert net.network.delay_s("cloud", "edge") == pytest.approx(
                0.05 * (1.2 if hour == 6 else 0.8), rel=1e-3
            )
            done = net.fetch(10_000_000)
            net.kernel.run(hour * 3600.0 + 100.0)
            took.append(done[0] - hour * 3600.0)
        # The cloud's own link does not drift, so it binds when the site's is at its best.
        assert took == pytest.approx([20.0, 10.0], rel=0.05)


def test_in_an_outage_of_a_profile_time_stands_still(tmp_path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(
        '[gap]\nrtt = "100ms"\nrate = "8Mbit/s"\noutages = [{ start = "2s", duration = "5s" }]\n'
    )
    for model in ("proxy", "fluid"):
        keys = LinkKeys(link_model=model, profiles={"edge": "gap"}, profile_file=str(path))
        net = Net(plain(), keys)
        done = net.fetch(10_000_000)
        for number, at_s in enumerate((1.99, 3.0, 7.5)):
            net.say(number, at_s)
        net.kernel.run(1e3)
        assert done == [pytest.approx(15.05)]
        queue_s = 0.025 if model == "proxy" else 0.0
        assert net.network.lost == 0
        assert [number for _, number in net.heard] == [0, 1, 2]
        times = [at_s for at_s, _ in net.heard]
        assert times == pytest.approx([7.04 + queue_s, 7.05 + queue_s, 7.55 + queue_s], abs=0.03)


def test_a_message_waits_in_the_queue_of_its_own_transfer_only() -> None:
    for model, queue_s in (("fluid", 0.0), ("proxy", 0.025)):
        net = Net(plain(), LinkKeys(link_model=model))
        net.fetch(10_000_000)
        net.say(1, at_s=1.0)
        net.kernel.at(1.0, lambda _, net=net: net.network.send("edge", "cloud", Body(digest="d")))
        net.kernel.run(5.0)
        times = {number: at_s for at_s, number in net.heard}
        assert times == pytest.approx({0: 1.05, 1: 1.05 + queue_s}, abs=1e-3)


def test_partitions_cut_a_whole_site_and_overlaps_are_one() -> None:
    spec = FaultSpec(
        partitions=(
            Partition(where="a", start_s=10.0, duration_s=20.0),
            Partition(where="a-0", start_s=25.0, duration_s=10.0),
        )
    )
    agents = [("a-0", "a"), ("a-1", "a"), ("b-0", "b")]
    assert link_faults(spec, agents, 0, 100.0) == [
        Fault(10.0, "a-0", "cut"),
        Fault(10.0, "a-1", "cut"),
        Fault(30.0, "a-1", "restore"),
        Fault(35.0, "a-0", "restore"),
    ]


def test_random_outages_are_the_seeds() -> None:
    spec = FaultSpec(link_mtbf_s=100.0, link_down_s=10.0)
    agents = [("a-0", "a"), ("a-1", "a")]
    faults = link_faults(spec, agents, 3, 10_000.0)
    assert faults == link_faults(spec, agents, 3, 10_000.0)
    assert faults != link_faults(spec, agents, 4, 10_000.0)
    cuts = [fault for fault in faults if fault.what == "cut"]
    assert 120 < len(cuts) < 240
    assert len(faults) == 2 * len(cuts)


@pytest.mark.parametrize("model", ["fluid", "tcp", "proxy"])
def test_a_run_ends_under_every_model(model: str) -> None:
    import msgspec

    changes = {
        "link_model": model,
        "drift": {"city": Drift(rtt_share=0.3, rate_share=0.3)},
        "faults": FaultSpec(
            link_mtbf_s=60.0, partitions=(Partition(where="home", start_s=20.0, duration_s=20.0),)
        ),
    }
    scenario = msgspec.structs.replace(SMALL, **changes)
    result = Simulation(scenario, seed=1, check=True, history=True).run()
    assert result.finished
    assert result.problems == ()
    assert result.lost_messages > 0
    assert result.digest == Simulation(scenario, seed=1, history=True).run().digest


def test_shipped_scenarios_are_whole_and_say_what_is_assumed() -> None:
    names = {"aws12-mixed", "home-edge", "identical", "lte", "spot-churn"}
    assert names <= set(shipped_scenarios())
    for name in names:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert "ssumed" in scenario.about
        topology = scenario.topology()
        Links(topology, scenario)
        for plan in scenario.fleet(0):
            assert topology.rtt_s(plan.site, scenario.cloud) > 0.0
            assert plan.up > 0.0
