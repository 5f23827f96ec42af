"""Where things are and how far apart: sites and the round trips between them.

What always holds: a round trip is the same in both directions; within a site it is ``LOCAL_RTT_S``;
the shipped tables are read from this package, never fetched.
"""

from importlib import resources
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from transport.errors import ConfigError

LOCAL_RTT_S: Final = 0.001
"""Between two hosts of one region."""

Milliseconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Round trips of one date: ``rtt_ms[i]`` are those of region i + 1 with regions 0 to i;
    ``jitter_ms`` is the mean deviation of a single one."""

    measured: str
    source: str
    licence: str
    jitter_ms: Milliseconds
    rtt_ms: tuple[tuple[Milliseconds, ...], ...]


class RegionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    regions: tuple[str, ...]
    snapshots: dict[str, Snapshot]


class Topology:
    """Sites by name; ``jitter_s`` is the mean extra delay of a message one way."""

    def __init__(
        self, sites: tuple[str, ...], rtt_s: dict[tuple[str, str], float], jitter_s: float
    ) -> None:
        self.sites = sites
        self.jitter_s = jitter_s
        self._rtt_s = rtt_s

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


def star(sites: dict[str, float], *, centre: str, jitter_s: float = 0.0) -> Topology:
    """Every site's round trip in seconds to the ``centre``, through which all else goes."""
    names = (centre, *sites)
    rtt_s = {(centre, name): rtt for name, rtt in sites.items()}
    for one in sites:
        for other in sites:
            if one < other:
                rtt_s[one, other] = sites[one] + sites[other]
    return Topology(names, rtt_s, jitter_s)


def load_regions(snapshot: str) -> Topology:
    """A shipped table, ``aws12-2022`` or ``aws12-2020``.

    Raises:
        ConfigError: there is no such snapshot, or its triangle does not fit its regions.
    """
    text = resources.files("sim.data").joinpath("aws12.toml").read_bytes()
    table = msgspec.toml.decode(text, type=RegionTable)
    found = table.snapshots.get(snapshot)
    if found is None:
        known = ", ".join(sorted(table.snapshots))
        raise ConfigError(f"sites: {snapshot!r} is not shipped; there are {known}")
    rows = found.rtt_ms
    if [len(row) for row in rows] != list(range(1, len(table.regions))):
        raise ConfigError(f"{snapshot}: rtt_ms is not a lower triangle of {len(table.regions)}")
    rtt_s = {
        (table.regions[low], table.regions[high + 1]): value / 1000.0
        for high, row in enumerate(rows)
        for low, value in enumerate(row)
    }
    return Topology(table.regions, rtt_s, found.jitter_ms / 1000.0)
