"""Where things are and how far apart: sites, round trips, rates between them, prices of bytes.

What always holds: within a site a round trip is ``LOCAL_RTT_S``; the two ways of a pair add up to
its round trip; the shipped tables are read from this package, never fetched.
"""

from functools import cache
from importlib import resources
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sim.tcp import payload_share
from transport.errors import ConfigError

LOCAL_RTT_S: Final = 0.001
"""Between two hosts of one region."""
GBIT: Final = 125e6
"""Bytes per second."""

Provider = Literal["aws", "gcp", "azure", "home"]
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Rate = Annotated[float, Meta(ge=0.0, le=1e6)]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Round trips of one date: ``rtt_ms[i]`` are those of region i + 1 with regions 0 to i;
    ``jitter_ms`` is the mean deviation of a single one."""

    measured: str
    source: str
    licence: str
    jitter_ms: Milliseconds
    rtt_ms: tuple[tuple[Milliseconds, ...], ...]


class PairRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gbit/s from region i to region j: what arrived in a test of ``test_s`` over ``connections``
    connections, and the median of what was sent meanwhile."""

    measured: str
    source: str
    licence: str
    method: str
    connections: int
    test_s: float
    sent_gbit: Rate
    received_gbit: tuple[tuple[Rate, ...], ...]


class EgressPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars per GB (10^9 bytes) that leaves region i."""

    measured: str
    source: str
    licence: str
    region_usd_gb: tuple[Rate, ...]
    internet_usd_gb: tuple[Rate, ...]


class RegionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    regions: tuple[str, ...]
    snapshots: dict[str, Snapshot]
    rates: dict[str, PairRates]
    egress: dict[str, EgressPrices]


class CloudTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between providers: ``sent_gbit["aws-gcp"]`` is p5, median and p95 over pairs of regions."""

    title: str
    measured: str
    source: str
    licence: str
    method: str
    sent_gbit: dict[str, tuple[Rate, Rate, Rate]]
    egress_usd_gb: dict[Provider, Rate]


class Topology:
    """Sites by name. ``jitter_s`` is the mean extra delay of a message one way, ``up_s`` how long
    the way from a site to the ``centre`` takes where it is not half the round trip, ``providers``
    whose network a site is in."""

    def __init__(
        self,
        sites: tuple[str, ...],
        rtt_s: dict[tuple[str, str], float],
        jitter_s: float,
        *,
        centre: str = "",
        up_s: dict[str, float] | None = None,
        providers: dict[str, Provider] | None = None,
    ) -> None:
        self.sites = sites
        self.jitter_s = jitter_s
        self._rtt_s = rtt_s
        self._centre = centre
        self._up_s = up_s or {}
        self._providers = providers or {}

    def rtt_s(self, one: str, other: str) -> float:
        """Seconds; raises ConfigError for a site that is not there."""
        if one == other and one in self.sites:
            return LOCAL_RTT_S
        found = self._rtt_s.get((one, other))
        if found is None:
            found = self._rtt_s.get((other, one))
        if found is None:
            known = ", ".join(self.sites)
            raise ConfigError(f"sites: no round trip {one} - {other}; there are {known}")
        return found

    def one_way_s(self, source: str, target: str) -> float:
        """Seconds from one site to another."""
        rtt_s = self.rtt_s(source, target)
        if target == self._centre and source in self._up_s:
            return self._up_s[source]
        if source == self._centre and target in self._up_s:
            return rtt_s - self._up_s[target]
        return rtt_s / 2

    def provider(self, site: str) -> Provider:
        """Whose network a site is in: as said, AWS for its regions, otherwise somebody's home."""
        said = self._providers.get(site)
        return said or ("aws" if site in load_table().regions else "home")

    def rate_bytes_s(self, source: str, target: str, *, steady: bool) -> float | None:
        """Measured goodput of one VM to another, or None where nothing was measured.

        Between AWS regions that is what arrived in a test of 5 s, slow start included, or, if
        ``steady``, what the senders' limit leaves for payload; between providers the median of what
        was sent.
        """
        table = load_table()
        one, other = self.provider(source), self.provider(target)
        if source == target:
            return None
        if one == other == "aws" and {source, target} <= set(table.regions):
            rates = table.rates["aws12-2022"]
            if steady:
                return rates.sent_gbit * GBIT * payload_share()
            row = rates.received_gbit[table.regions.index(source)]
            return row[table.regions.index(target)] * GBIT
        found = load_clouds().sent_gbit.get(f"{one}-{other}")
        return None if found is None else found[1] * GBIT * payload_share()

    def egress_usd_gb(self, source: str, target: str) -> float:
        """What the owner of ``source`` pays for a GB (10^9 bytes) to ``target``, US dollars."""
        if source == target:
            return 0.0
        table = load_table()
        provider = self.provider(source)
        if provider == "aws" and source in table.regions:
            prices = table.egress["aws12-2022"]
            inside = self.provider(target) == "aws"
            column = prices.region_usd_gb if inside else prices.internet_usd_gb
            return column[table.regions.index(source)]
        return load_clouds().egress_usd_gb[provider]


def star(
    sites: dict[str, float],
    *,
    centre: str,
    jitter_s: float = 0.0,
    up_s: dict[str, float] | None = None,
    providers: dict[str, Provider] | None = None,
) -> Topology:
    """Every site's round trip in seconds to the ``centre``, through which all else goes."""
    names = (centre, *sites)
    rtt_s = {(centre, name): rtt for name, rtt in sites.items()}
    for one in sites:
        for other in sites:
            if one < other:
                rtt_s[one, other] = sites[one] + sites[other]
    return Topology(names, rtt_s, jitter_s, centre=centre, up_s=up_s, providers=providers)


def load_regions(snapshot: str, providers: dict[str, Provider] | None = None) -> Topology:
    """A shipped table, ``aws12-2022`` or ``aws12-2020``.

    Raises:
        ConfigError: there is no such snapshot.
    """
    table = load_table()
    found = table.snapshots.get(snapshot)
    if found is None:
        known = ", ".join(sorted(table.snapshots))
        raise ConfigError(f"sites: {snapshot!r} is not shipped; there are {known}")
    rtt_s = {
        (table.regions[low], table.regions[high + 1]): value / 1000.0
        for high, row in enumerate(found.rtt_ms)
        for low, value in enumerate(row)
    }
    return Topology(table.regions, rtt_s, found.jitter_ms / 1000.0, providers=providers)


@cache
def load_table() -> RegionTable:
    """The shipped regions.

    Raises:
        ConfigError: a table does not fit the regions.
    """
    text = resources.files("sim.data").joinpath("aws12.toml").read_bytes()
    table = msgspec.toml.decode(text, type=RegionTable)
    count = len(table.regions)
    for name, snapshot in table.snapshots.items():
        if [len(row) for row in snapshot.rtt_ms] != list(range(1, count)):
            raise ConfigError(f"{name}: rtt_ms is not a lower triangle of {count}")
    for name, rates in table.rates.items():
        if [len(row) for row in rates.received_gbit] != [count] * count:
            raise ConfigError(f"{name}: received_gbit is not {count} x {count}")
    for name, prices in table.egress.items():
        if not len(prices.region_usd_gb) == len(prices.internet_usd_gb) == count:
            raise ConfigError(f"{name}: egress has not {count} prices")
    return table


@cache
def load_clouds() -> CloudTable:
    """The shipped medians between providers."""
    text = resources.files("sim.data").joinpath("clouds.toml").read_bytes()
    return msgspec.toml.decode(text, type=CloudTable)
