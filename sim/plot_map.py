"""The map of a simulation's sites and links, or their distances where no place is known.

Coastlines are Natural Earth's (public domain, ``data/world.toml``), positions those of the cities
that providers name (``data/places.toml``); the projection is Equal Earth (Savric, Patterson and
Jenny, 2018). Nothing is fetched.
"""

import math
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from sim.picture_style import FAINT, INK, figure
from sim.recording import Recording

_A: Final = (1.340264, -0.081106, 0.000893, 0.003796)
LAND: Final = "#e9e7e1"
SEA: Final = "#f7fafc"

Place = tuple[float, float]
"""Latitude and longitude in degrees."""

_POINT: Final = 5.44 / (11.5 * 72.0)
"""A typographer's point on the map, in the plane's units."""


class Places(msgspec.Struct, frozen=True):
    """Latitude and longitude in degrees by region."""

    title: str
    source: str
    licence: str
    places: dict[str, tuple[float, float]]


class World(msgspec.Struct, frozen=True):
    """Rings of alternating longitude and latitude in degrees."""

    title: str
    source: str
    licence: str
    rings: list[list[float]]


def load_places() -> Places:
    data = resources.files("sim.data").joinpath("places.toml").read_bytes()
    return msgspec.toml.decode(data, type=Places)


def load_world() -> World:
    data = resources.files("sim.data").joinpath("world.toml").read_bytes()
    return msgspec.toml.decode(data, type=World)


def project(latitude: float, longitude: float) -> tuple[float, float]:
    """Degrees to Equal Earth's plane (radii of the globe)."""
    root = math.sqrt(3.0)
    theta = math.asin(root / 2.0 * math.sin(math.radians(latitude)))
    a1, a2, a3, a4 = _A
    t2, t6 = theta**2, theta**6
    slope = 9 * a4 * t6 * t2 + 7 * a3 * t6 + 3 * a2 * t2 + a1
    x = 2.0 * root * math.radians(longitude) * math.cos(theta) / (3.0 * slope)
    return x, theta * (a4 * t6 * t2 + a3 * t6 + a2 * t2 + a1)


def arc(one: Place, other: Place, points: int = 48) -> list[list[Place]]:
    """A curve between two places, the shorter way round and bent northwards, cut where it leaves
    the map. It shows that there is a link, not where its cables are."""
    (lat, lon), (other_lat, other_lon) = one, other
    turn = (other_lon - lon + 180.0) % 360.0 - 180.0
    bend = min(18.0, 0.16 * math.hypot(turn, other_lat - lat))
    parts: list[list[Place]] = [[]]
    for number in range(points + 1):
        share = number / points
        raw = lon + share * turn
        place = (
            lat + share * (other_lat - lat) + bend * math.sin(math.pi * share),
            (raw + 180.0) % 360.0 - 180.0,
        )
        if parts[-1] and abs(place[1] - parts[-1][-1][1]) > 180.0:
            parts.append([])
        parts[-1].append(place)
    return parts


def draw_map(recording: Recording, path: Path) -> None:
    """Sites with their slots, links with their round trips to the cloud."""
    places = load_places().places
    sites = {agent.site: agent.rtt_s for agent in recording.agents}
    if all(site in places for site in (*sites, recording.cloud)):
        _draw_world(recording, sites, places, path)
    else:
        _draw_distances(recording, sites, path)


def _draw_world(
    recording: Recording,
    sites: dict[str, float],
    places: dict[str, tuple[float, float]],
    path: Path,
) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    slots = _slots(recording)
    with figure(path, 11.5, 5.6) as made:
        axes = made.subplots()
        _draw_land(axes)
        norm = Normalize(0.0, max(sites.values(), default=1.0) * 1e3)
        colours = colormaps["viridis_r"]
        home = places[recording.cloud]
        labels: list[tuple[Place, str, float]] = []
        for site, rtt_s in sorted(sites.items()):
            colour = colours(0.15 + 0.85 * norm(rtt_s * 1e3))
            for part in arc(home, places[site]):
                if len(part) > 1:
                    xy = [project(*place) for place in part]
                    axes.plot(*zip(*xy, strict=True), color=colour, linewidth=1.6, zorder=2)
            x, y = project(*places[site])
            size = 24 + 6 * slots[site]
            axes.scatter([x], [y], s=size, color=colour, edgecolor="white", zorder=3)
            label = f"{site}\n{rtt_s * 1e3:.0f} ms, {slots[site]} slots"
            labels.append(((x, y), label, size))
        x, y = project(*home)
        axes.scatter([x], [y], s=190, marker="*", color=INK, edgecolor="white", zorder=5)
        if recording.cloud not in sites:
            labels.append(((x, y), f"{recording.cloud}\nscheduler, trainers", 120.0))
        _place_labels(axes, labels)
        axes.set_title(
            f"{len(recording.agents)} agents at {len(sites)} sites; star: scheduler, trainers"
            f" ({recording.cloud}); area: slots, colour: round trip"
        )


def _draw_land(axes: Any) -> None:
    from matplotlib.collections import PolyCollection

    edge = [project(lat, 180.0) for lat in range(-60, 85)]
    outline = edge + [(-x, y) for x, y in reversed(edge)]
    rings = [
        [project(lat, lon) for lon, lat in zip(ring[::2], ring[1::2], strict=True)]
        for ring in load_world().rings
    ]
    axes.add_collection(PolyCollection([outline], facecolor=SEA, edgecolor="none", zorder=0))
    land = [ring for ring in rings if not _is_caspian(ring)]
    water = [ring for ring in rings if _is_caspian(ring)]
    axes.add_collection(PolyCollection(land, facecolor=LAND, edgecolor="#d3d0c7", lw=0.5, zorder=1))
    axes.add_collection(PolyCollection(water, facecolor=SEA, edgecolor="#d3d0c7", lw=0.5, zorder=1))
    axes.set_aspect("equal")
    axes.set_xlim(-2.72, 2.72)
    axes.set_ylim(-1.12, 1.33)
    axes.set_axis_off()


def _is_caspian(ring: list[tuple[float, float]]) -> bool:
    """The one ring that is water: around 42 degrees north, 51 east."""
    x, y = project(42.0, 51.0)
    xs, ys = zip(*ring, strict=True)
    return bool(min(xs) < x < max(xs) and min(ys) < y < max(ys) and max(xs) - min(xs) < 0.3)


def _place_labels(axes: Any, labels: list[tuple[Place, str, float]]) -> None:
    """Each label beside its dot, on the side where it covers least of what is there."""
    taken = [
        (x - r, y - r, x + r, y + r)
        for (x, y), _, size in labels
        for r in [math.sqrt(size) / 2 * _POINT]
    ]
    for at, text, size in labels:
        lines = text.split("\n")
        wide = max(len(line) for line in lines) * 4.3 * _POINT
        high = len(lines) * 9.5 * _POINT
        gap = math.sqrt(size) / 2 + 3
        sides = []
        for dx, dy in ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            x = at[0] + dx * gap * _POINT - (wide if dx < 0 else 0.0)
            y = at[1] + dy * (gap * _POINT + high / 2) * 0.8 - high / 2
            box = (x, y, x + wide, y + high)
            sides.append((sum(_overlap(box, other) for other in taken), dx, dy, box))
        _, dx, dy, box = min(sides, key=lambda side: side[0])
        taken.append(box)
        offset = (dx * gap, dy * (gap + high / _POINT / 2) * 0.8)
        _label(axes, at, text, offset)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, wide) * max(0.0, high)


def _label(axes: Any, at: Place, text: str, offset: tuple[float, float]) -> None:
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        at,
        offset,
        textcoords="offset points",
        fontsize=7.5,
        ha="left" if offset[0] > 0 else "right",
        va="center",
        linespacing=1.15,
        zorder=6,
        path_effects=[withStroke(linewidth=2.4, foreground="white")],
    )


def _draw_distances(recording: Recording, sites: dict[str, float], path: Path) -> None:
    """Sites by round trip, agents as dots as large as their slots."""
    order = sorted(sites, key=lambda site: (sites[site], site))
    slots = _slots(recording)
    with figure(path, 8.5, 1.6 + 0.42 * len(order)) as made:
        axes = made.subplots()
        for y, site in enumerate(order):
            rtt_ms = sites[site] * 1e3
            axes.plot([0, rtt_ms], [y, y], color=FAINT, linewidth=1.4, zorder=1)
            size = 24 + 6 * slots[site]
            axes.scatter([rtt_ms], [y], s=size, color="#0072B2", edgecolor="white", zorder=2)
            count = sum(agent.site == site for agent in recording.agents)
            text = f"{count} agents, {slots[site]} slots"
            _label(axes, (rtt_ms, y), text, (math.sqrt(size) / 2 + 3, 0))
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set(title="How far the sites are", xlabel=f"round trip to {recording.cloud} (ms)")


def _slots(recording: Recording) -> dict[str, int]:
    found: dict[str, int] = {}
    for agent in recording.agents:
        found[agent.site] = found.get(agent.site, 0) + agent.slots
    return found
