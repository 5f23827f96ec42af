"""What the links of a scenario are like: which model, which profiles, how they change over a day.

``fluid``   messages take half a round trip, transfers share links at once; no limit of TCP's
``tcp``     the same links, and each connection's window, loss and slow start (``sim.tcp``)
``proxy``   what the real-time emulator does (``sim.link_shaper``): delay, jitter, one rate per
            direction and agent, a queue, outages in which time stands still; no NIC at the cloud

What always holds: the same profile means the same delays, jitter, rates, queue and outages here as
in the emulator; everything is a function of the scenario and the time.
"""

import math
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sim.fair_share import UNLIMITED
from sim.link_profile import LinkProfile, load_profiles
from sim.tcp import TcpSpec, Window
from sim.topology import Provider, Topology
from transport.errors import ConfigError

LinkModel = Literal["fluid", "tcp", "proxy"]
Share = Annotated[float, Meta(ge=0.0, le=0.9)]

DRIFT_STEP_S: Final = 300.0
"""Drift is piecewise constant over so long."""
STANDING_SHARE: Final = 0.25
"""Of rate x round trip, what a transfer keeps in the bottleneck's queue: our senders aim at 1.25
times what the path holds (``transport.delivery_window``)."""


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's day: round trips are longer and rates lower by these shares at the worst hour,
    ``worst_h`` hours after the start, and the other way round half a ``period_s`` later.

    Example: ``rtt_share`` 0.2 moves a round trip of 100 ms between 80 and 120 ms.
    """

    rtt_share: Share = 0.0
    rate_share: Share = 0.0
    worst_h: float = 0.0
    period_s: Annotated[float, Meta(gt=0.0, le=1e9)] = 86_400.0

    def factors(self, now: float) -> tuple[float, float]:
        """What round trips and rates are multiplied by in the step that ``now`` is in."""
        middle_s = (now // DRIFT_STEP_S + 0.5) * DRIFT_STEP_S
        wave = math.cos(2.0 * math.pi * (middle_s - self.worst_h * 3600.0) / self.period_s)
        return 1.0 + self.rtt_share * wave, 1.0 - self.rate_share * wave


class LinkKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a scenario that say what links are like.

    ``profiles`` gives sites their link profile (a name from ``profiles.toml`` or
    ``profile_file``): round trip to the cloud, jitter, rates of each agent's access link, queue,
    outages. ``loss`` is the share of segments lost on the way from and to a site. ``rate``
    ``measured`` bounds each pair of hosts by the shipped rates between their regions or providers.
    ``providers`` says whose network a site is in, ``drift`` how a site's links change over a day.
    """

    link_model: LinkModel = "fluid"
    tcp: TcpSpec = TcpSpec()
    loss: dict[str, Share] = {}
    rate: Literal["access", "measured"] = "access"
    profiles: dict[str, str] = {}
    profile_file: str = ""
    providers: dict[str, Provider] = {}
    drift: dict[str, Drift] = {}

    def link_profiles(self) -> dict[str, LinkProfile]:
        """By site.

        Raises:
            ConfigError: a profile is not there.
        """
        if not self.profiles:
            return {}
        known = load_profiles(Path(self.profile_file) if self.profile_file else None)
        for site, name in self.profiles.items():
            if name not in known:
                names = ", ".join(sorted(known))
                raise ConfigError(f"profiles.{site}: no link profile {name!r}; known: {names}")
        return {site: known[name] for site, name in self.profiles.items()}


def link_rate(rate_bits_per_s: float) -> float:
    """Bytes per second of a profile's rate."""
    return rate_bits_per_s / 8.0 if rate_bits_per_s else UNLIMITED


class Links:
    """What a network asks about its paths.

    Raises:
        ConfigError: a key names a site or profile that is not there.
    """

    def __init__(self, topology: Topology, keys: LinkKeys | None = None) -> None:
        self.topology = topology
        self.keys = keys or LinkKeys()
        self.profiles = self.keys.link_profiles()
        for key in ("loss", "drift", "providers", "profiles"):
            for site in getattr(self.keys, key):
                if site not in topology.sites:
                    known = ", ".join(topology.sites)
                    raise ConfigError(f"{key}.{site}: there is no such site; there are {known}")

    @property
    def has_windows(self) -> bool:
        return self.keys.link_model == "tcp"

    def delay_s(self, source: str, target: str) -> float:
        """The least that a message takes."""
        mean_s = self.topology.one_way_s(source, target)
        return max(0.0, mean_s - self._profile_jitter_s(source, target))

    def spread_s(self, source: str, target: str) -> float:
        """How much more it takes at most; uniform."""
        return 2.0 * (self.topology.jitter_s + self._profile_jitter_s(source, target))

    def tail_s(self, source: str, target: str) -> float:
        """How much more the last byte of a transfer takes: order is kept, so that among many
        segments the one that is late counts."""
        return 2.0 * self._profile_jitter_s(source, target)

    def window(self, source: str, target: str) -> Window:
        """The windows of one direction, with the loss of both sites."""
        kept = 1.0 - self.keys.tcp.loss
        for site in {source: None, target: None}:
            kept *= 1.0 - self.keys.loss.get(site, 0.0)
        spec = msgspec.structs.replace(self.keys.tcp, loss=min(0.5, 1.0 - kept))
        return Window(spec, self.topology.rtt_s(source, target))

    def pair_rate(self, source: str, target: str) -> float | None:
        """Bytes per second that were measured between two hosts of these sites."""
        if self.keys.rate != "measured":
            return None
        return self.topology.rate_bytes_s(source, target, steady=self.has_windows)

    def queue_bytes(self, source: str, target: str, rate: float) -> int:
        """What the bottleneck of a path holds; 0 where queues are not modelled."""
        if self.keys.link_model == "fluid":
            return 0
        profile = self.profiles.get(source) or self.profiles.get(target) or LinkProfile(name="-")
        return profile.queue_limit_bytes(0.0 if rate >= UNLIMITED else rate * 8.0)

    def _profile_jitter_s(self, source: str, target: str) -> float:
        found = [self.profiles[site].jitter_s for site in (source, target) if site in self.profiles]
        return sum(found) if source != target else 0.0
