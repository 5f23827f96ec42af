"""What one agent's link is like: delay, jitter, rate, queue and outages, with their names.

What always holds:

1. A ``LinkProfile`` that exists is usable: numbers are finite and not negative, outages are in
   order and do not overlap. Anything else is a ``ConfigError`` that names profile and field.
2. "Up" is from the agent to the cloud, "down" the other way. A rate of 0 is unlimited.
3. The profiles that farflow ships are data (``profiles.toml``); a file of the user's may add to
   them or replace one by its name.
"""

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from transport.errors import ConfigError
from transport.runtime.units import parse_bytes, parse_duration_s, parse_rate_bits_per_s

MIN_QUEUE_BYTES: Final = 256 * 1024
"""A bottleneck holds at least this much: less than a few TCP windows starves any flow."""
QUEUE_TIME_S: Final = 0.2
"""Otherwise it holds what the link carries in this time, as routers' rules of thumb have it."""
MIN_RATE_BITS_PER_S: Final = 8_000.0
"""Below it one packet occupies the link for more than a second, and nothing of ours would work."""
MAX_DELAY_S: Final = 10.0
"""A longer delay is a wrong unit, not a link."""

_RTT_KEYS: Final = ("rtt", "delay_up", "delay_down", "jitter")
_RATE_KEYS: Final = ("rate", "rate_up", "rate_down", "queue")
_KEYS: Final = (*_RTT_KEYS, *_RATE_KEYS, "outages")


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link is silent for ``duration_s``, ``start_s`` after the profile took effect."""

    start_s: float
    duration_s: float


class LinkProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One agent's link; delays one way in seconds, rates in bits per second (0: unlimited).

    ``jitter_s`` is half the width of a uniform spread around the delay, so that the mean stays;
    order is kept, so a dense stream feels the upper half of it. ``queue_bytes`` 0 means
    ``max(256 KiB, rate x 200 ms)``.
    """

    name: str
    delay_up_s: float = 0.0
    delay_down_s: float = 0.0
    jitter_s: float = 0.0
    rate_up_bits_per_s: float = 0.0
    rate_down_bits_per_s: float = 0.0
    queue_bytes: int = 0
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        for field in ("delay_up_s", "delay_down_s", "jitter_s"):
            self._require(field, getattr(self, field), 0.0, MAX_DELAY_S)
        for field in ("rate_up_bits_per_s", "rate_down_bits_per_s"):
            if getattr(self, field) != 0:
                self._require(field, getattr(self, field), MIN_RATE_BITS_PER_S, math.inf)
        self._require("queue_bytes", self.queue_bytes, 0, math.inf)
        free_from = 0.0
        for index, outage in enumerate(self.outages):
            self._require(f"outages[{index}].start_s", outage.start_s, free_from, math.inf)
            self._require(f"outages[{index}].duration_s", outage.duration_s, 1e-3, math.inf)
            free_from = outage.start_s + outage.duration_s

    @property
    def rtt_s(self) -> float:
        """The round trip of an idle link."""
        return self.delay_up_s + self.delay_down_s

    def queue_limit_bytes(self, rate_bits_per_s: float) -> int:
        """How much the bottleneck of a direction with that rate holds before it pushes back."""
        return self.queue_bytes or max(MIN_QUEUE_BYTES, int(rate_bits_per_s / 8 * QUEUE_TIME_S))

    def _require(self, field: str, value: float, low: float, high: float) -> None:
        # Written so that NaN fails; infinity passes no bound because it is checked by itself.
        if not (low <= value <= high and math.isfinite(value)):
            bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise ConfigError(
                f"link profile {self.name!r}: {field} = {value!r} must be finite and {bound}"
            )


def profile_from_table(name: str, table: Mapping[str, Any]) -> LinkProfile:
    """The profile of one table of ``profiles.toml``; raises ``ConfigError`` naming the key."""
    where = f"link profile {name!r}"
    if unknown := sorted(set(table) - set(_KEYS)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(_KEYS)}")
    for both, ends in (("rtt", ("delay_up", "delay_down")), ("rate", ("rate_up", "rate_down"))):
        if both in table and any(end in table for end in ends):
            raise ConfigError(f"{where}: {both!r} excludes {ends[0]!r} and {ends[1]!r}")

    def duration_s(key: str) -> float:
        return parse_duration_s(table.get(key, 0.0), f"{where}: {key}")

    def rate(key: str) -> float:
        return parse_rate_bits_per_s(table.get(key, table.get("rate", 0)), f"{where}: {key}")

    half_rtt_s = duration_s("rtt") / 2
    return LinkProfile(
        name=name,
        delay_up_s=duration_s("delay_up") or half_rtt_s,
        delay_down_s=duration_s("delay_down") or half_rtt_s,
        jitter_s=duration_s("jitter"),
        rate_up_bits_per_s=rate("rate_up"),
        rate_down_bits_per_s=rate("rate_down"),
        queue_bytes=parse_bytes(table.get("queue", 0), f"{where}: queue"),
        outages=_outages(table.get("outages", []), where),
    )


def load_profiles(path: Path | None = None) -> dict[str, LinkProfile]:
    """The shipped profiles by name, with those of the TOML file ``path`` added or replacing.

    Raises ``ConfigError`` naming the file when it cannot be read or holds a bad table.
    """
    profiles = _parse_profiles(
        resources.files("sim").joinpath("profiles.toml").read_text("utf-8"), "profiles.toml"
    )
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read link profiles from {path}: {error}") from error
        profiles |= _parse_profiles(text, str(path))
    return profiles


def find_profile(name: str, path: Path | None = None) -> LinkProfile:
    """The profile called ``name``; raises ``ConfigError`` listing the names that exist."""
    profiles = load_profiles(path)
    if name not in profiles:
        raise ConfigError(f"no link profile {name!r}; known: {', '.join(sorted(profiles))}")
    return profiles[name]


def _parse_profiles(text: str, source: str) -> dict[str, LinkProfile]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from error
    profiles = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {name!r} must be a table with keys such as rtt = '80ms'")
        try:
            profiles[name] = profile_from_table(name, table)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
    return profiles


def _outages(entries: Any, where: str) -> tuple[Outage, ...]:
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: outages must be a list of {{start = '60s', duration = '20s'}}")
    outages = []
    for index, entry in enumerate(entries):
        field = f"{where}: outages[{index}]"
        if not isinstance(entry, dict) or set(entry) != {"start", "duration"}:
            raise ConfigError(f"{field} must have exactly 'start' and 'duration'")
        outages.append(
            Outage(
                parse_duration_s(entry["start"], f"{field}.start"),
                parse_duration_s(entry["duration"], f"{field}.duration"),
            )
        )
    return tuple(outages)
