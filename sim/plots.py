"""The pictures of one simulation, out of its recording; needs the ``plots`` extra.

What always holds: nothing here runs a simulation or touches the network; what does not fit into a
picture is said in it.
"""

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sim.picture_style import (
    FAINT,
    GRID,
    INK,
    OUTCOMES,
    SERIES,
    figure,
    seconds_axis,
    short,
)
from sim.plot_map import draw_map
from sim.plot_timeline import draw_timeline
from sim.recording import Recording

BINS: Final = 48
MAX_NAMED: Final = 40
"""Agents that one picture names."""

Draw = Callable[[Recording, Path], None]


def draw_run(recording: Recording, folder: Path) -> dict[str, Path]:
    """All pictures of a run in ``folder``, by title.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: tuple[tuple[str, str, Draw], ...] = (
        ("Sites and links", "map", draw_map),
        ("What agents and trainers did", "timeline", draw_timeline),
        ("Policy lag", "policy_lag", draw_lag),
        ("Throughput and waste", "throughput", draw_throughput),
        ("How weights spread", "weights", draw_weights),
        ("Utilisation", "utilisation", draw_utilisation),
    )
    written: dict[str, Path] = {}
    for title, name, draw in pictures:
        path = folder / f"{name}.png"
        draw(recording, path)
        written[title] = path
    return written


def draw_lag(recording: Recording, path: Path) -> None:
    """Share of trained groups by policy lag, with the bound and the mean."""
    found = recording.lags()
    most = max([*recording.bounds.values(), *(max(lags) for lags in found.values() if lags)])
    with figure(path, 7.2, 3.8) as made:
        axes = made.subplots()
        width = 0.84 / max(1, len(found))
        for number, (policy, lags) in enumerate(sorted(found.items())):
            total = sum(lags.values())
            mean = sum(lag * count for lag, count in lags.items()) / total
            shift = (number - (len(found) - 1) / 2) * width
            shares = [lags.get(lag, 0) / total for lag in range(most + 1)]
            bars = axes.bar(
                [lag + shift for lag in range(most + 1)],
                shares,
                width * 0.94,
                color=SERIES[number % len(SERIES)],
                label=f"{short(policy)}: {total} groups, mean {mean:.2f}",
            )
            labels = [f"{share:.0%}" if share >= 0.005 else "" for share in shares]
            axes.bar_label(bars, labels, padding=2, fontsize=8.5, color=INK)
        for bound in sorted(set(recording.bounds.values())):
            axes.axvline(bound + 0.5, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.2)
            axes.annotate(
                f"bound {bound}",
                (bound + 0.5, 1.0),
                (-4, -10),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right",
                color=FAINT,
            )
        axes.set(
            title="How old the weights were that made what was trained on",
            xlabel="policy lag (optimizer steps between a group's oldest token and its use)",
            ylabel="share of groups",
            xticks=range(most + 1),
        )
        axes.margins(y=0.2)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(axis="y")
        if found:
            axes.legend(loc="upper left")


def draw_throughput(recording: Recording, path: Path) -> None:
    """Tokens per second drawn, trained on and wasted; the share that was wasted so far."""
    samples = _thinned(recording, 3.0 * _step_s(recording))
    with figure(path, 9.0, 4.8) as made:
        above, below = made.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        unit_s = seconds_axis(below, recording.ends_s)
        pairs = list(itertools.pairwise(samples))
        at = [(one.at_s + other.at_s) / 2 / unit_s for one, other in pairs]

        def rates(name: str) -> list[float]:
            return [
                (getattr(other, name) - getattr(one, name)) / max(other.at_s - one.at_s, 1e-9)
                for one, other in pairs
            ]

        for name, colour, label in (
            ("drawn_tokens", FAINT, "drawn"),
            ("trained_tokens", OUTCOMES["trained"][0], "trained on"),
            ("wasted_tokens", OUTCOMES["wasted"][0], "wasted"),
        ):
            above.plot(at, rates(name), color=colour, linewidth=1.8, label=label)
        above.set(title="Tokens per second, and the share of them that was for nothing")
        above.set_ylabel("tokens / s")
        above.grid(axis="y")
        above.legend(loc="upper left", ncols=3, bbox_to_anchor=(0.0, 1.02))
        above.set_ylim(0, 1.28 * max(1.0, *rates("drawn_tokens"), *rates("wasted_tokens")))
        shares = [s.wasted_tokens / max(1, s.wasted_tokens + s.trained_tokens) for s in samples]
        ats = [sample.at_s / unit_s for sample in samples]
        below.fill_between(ats, shares, color=OUTCOMES["wasted"][0], alpha=0.3, linewidth=0)
        below.plot(ats, shares, color=OUTCOMES["wasted"][0], linewidth=1.8)
        below.annotate(
            f"{shares[-1]:.1%}",
            (ats[-1], shares[-1]),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
        below.set_ylabel("wasted so far")
        below.yaxis.set_major_formatter("{x:.0%}")
        below.set_ylim(0, max(0.05, *shares) * 1.15)
        below.grid(axis="y")


def draw_weights(recording: Recording, path: Path) -> None:
    """How soon agents used each version, and where the time went per agent."""
    published = {(p.policy, p.version): p.at_s for p in recording.publications}
    fetches = [f for f in recording.fetches if (f.policy, f.version) in published]
    used: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for fetch in fetches:
        if fetch.swapped_s is not None:
            found = used.setdefault((fetch.policy, fetch.agent), [])
            found.append((fetch.version, fetch.swapped_s))
    agents = len(recording.agents)
    with figure(path, 11.0, max(4.2, 1.4 + 0.2 * min(agents, MAX_NAMED))) as made:
        left, right = made.subplots(1, 2, width_ratios=(1, 1.15))
        lines = [
            sorted(
                delay
                for (owner, _), swaps in used.items()
                if owner == policy
                for delay in [_first_use(swaps, version, at_s)]
                if delay is not None
            )
            for (policy, version), at_s in published.items()
        ]
        shares = [(place + 1) / agents for place in range(agents)]
        for delays in lines:
            left.step(
                [1e-3, *delays],
                [0, *shares[: len(delays)]],
                where="post",
                color=SERIES[5],
                alpha=max(0.08, min(0.5, 6 / max(1, len(lines)))),
                linewidth=1.0,
            )
        typical = _typical(lines, agents)
        if typical:
            xs, ys = [1e-3, *typical], [0.0, *shares[: len(typical)]]
            left.step(xs, ys, where="post", color=SERIES[0], linewidth=2.4)
            left.annotate(
                "the typical version",
                (typical[len(typical) // 2], shares[len(typical) // 2]),
                (10, -12),
                textcoords="offset points",
                color=SERIES[0],
                fontweight="bold",
            )
        every = [delay for delays in lines for delay in delays]
        low, high = max(1e-2, min(every, default=1.0)), max(every, default=1.0)
        left.set_xlim(0.0, 1.1 * high)
        if high > 20.0 * low:
            left.set_xscale("log")
            left.set_xlim(0.8 * low, 1.2 * high)
            left.xaxis.set_major_formatter("{x:g}")
            left.xaxis.set_minor_formatter("")
        left.set(
            title="From durable in the cloud to in use",
            xlabel="seconds since the version was published",
            ylabel="share of agents that use it or a newer one",
            ylim=(0, 1.03),
        )
        left.yaxis.set_major_formatter("{x:.0%}")
        left.grid()
        _draw_delays(right, recording, published)


def _draw_delays(axes: Any, recording: Recording, published: dict[tuple[str, int], float]) -> None:
    """Median parts of the delay per agent, slowest first."""
    parts: dict[str, tuple[float, float, float]] = {}
    for agent in recording.agents:
        own = [
            (published[f.policy, f.version], f.began_s, f.arrived_s, f.swapped_s)
            for f in recording.fetches
            if f.agent == agent.name and (f.policy, f.version) in published
        ]
        whole = [
            (began - at, arrived - began, swapped - arrived)
            for at, began, arrived, swapped in own
            if arrived is not None and swapped is not None
        ]
        if whole:
            asked, fetched, swapped_ = zip(*whole, strict=True)
            parts[agent.name] = (
                statistics.median(asked),
                statistics.median(fetched),
                statistics.median(swapped_),
            )
    order = sorted(parts, key=lambda name: (sum(parts[name]), name))
    shown = order[:: max(1, -(-len(order) // MAX_NAMED))]
    start = [0.0] * len(shown)
    for part, (label, colour) in enumerate(
        (("asked for", SERIES[6]), ("fetched", SERIES[0]), ("swapped in", SERIES[3]))
    ):
        widths = [parts[name][part] for name in shown]
        axes.barh(shown, widths, 0.72, left=start, color=colour, label=label)
        start = [one + width for one, width in zip(start, widths, strict=True)]
    some = "" if len(shown) == len(order) else f" ({len(shown)} of {len(order)} agents)"
    axes.set(title=f"Where the time goes{some}", xlabel="seconds, medians per agent")
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.grid(axis="x")
    axes.margins(y=0.01)
    axes.legend(loc="lower right")


def draw_utilisation(recording: Recording, path: Path) -> None:
    """Slots in use over time per agent or site; links and trainers beside and above it."""
    import numpy as np

    samples = _thinned(recording, 0.0)
    slots = np.array(recording.row_slots, dtype=float)[:, None]
    busy = np.array([sample.busy_s for sample in samples]).T
    times = np.array([sample.at_s for sample in samples])
    used = np.diff(busy, axis=1) / np.maximum(np.diff(times), 1e-9) / slots
    rows = len(recording.rows)
    with figure(path, 11.0, max(4.4, 2.2 + 0.19 * rows)) as made:
        grid = made.add_gridspec(
            2, 2, width_ratios=(3.4, 1), height_ratios=(1, max(2.2, 0.14 * rows))
        )
        trainer, heat = made.add_subplot(grid[0, 0]), made.add_subplot(grid[1, 0])
        links = made.add_subplot(grid[1, 1], sharey=heat)
        unit_s = seconds_axis(heat, recording.ends_s)
        image = heat.pcolormesh(
            times / unit_s, np.arange(rows + 1) - 0.5, used, cmap="cividis", vmin=0.0, vmax=1.0
        )
        heat.set_yticks(range(rows), recording.rows)
        heat.tick_params(axis="y", labelsize=8, length=0)
        heat.invert_yaxis()
        heat.set_title(f"Slots in use: {used.mean():.0%} on average", fontsize=10)
        bar = made.colorbar(image, ax=heat, location="bottom", aspect=60, pad=0.01, fraction=0.04)
        bar.ax.xaxis.set_major_formatter("{x:.0%}")
        bar.outline.set_visible(False)
        _draw_trainers(trainer, recording, times, unit_s)
        _draw_links(links, recording)


def _draw_trainers(axes: Any, recording: Recording, times: Any, unit_s: float) -> None:
    import numpy as np

    # Bins of several steps, or the line would only show where in a step each bin begins.
    fitting = recording.ends_s / max(3.0 * _step_s(recording), 1e-9)
    edges = np.linspace(0.0, times[-1], int(min(BINS, max(2.0, fitting))) + 1)
    middle = (edges[1:] + edges[:-1]) / 2 / unit_s
    for number, policy in enumerate(sorted(recording.bounds)):
        spans = [(s.began_s, s.ended_s) for s in recording.steps if s.policy == policy]
        busy = [
            sum(max(0.0, min(end, high) - max(begin, low)) for begin, end in spans) / (high - low)
            for low, high in itertools.pairwise(edges)
        ]
        total = sum(end - begin for begin, end in spans) / max(recording.ends_s, 1e-9)
        colour = SERIES[number % len(SERIES)]
        axes.plot(
            middle, busy, color=colour, linewidth=1.8, label=f"{short(policy)}: {total:.0%} busy"
        )
        axes.fill_between(middle, busy, color=colour, alpha=0.15, linewidth=0)
    axes.set(title="Trainers", ylim=(0, 1.05), xlim=(0, recording.ends_s / unit_s))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.tick_params(labelbottom=False)
    axes.grid(axis="y")
    axes.legend(loc="lower right")


def _draw_links(axes: Any, recording: Recording) -> None:
    """Share of what the access links could have carried, per row of the heat map."""
    total: dict[str, list[float]] = {row: [0.0, 0.0, 0.0, 0.0] for row in recording.rows}
    for agent in recording.agents:
        sums = total[agent.name if agent.name in total else agent.site]
        up, down = recording.link_bytes.get(agent.name, (0, 0))
        for place, value in enumerate((up, agent.up, down, agent.down)):
            sums[place] += value
    seconds = max(recording.ends_s, 1e-9)
    places = range(len(recording.rows))
    shares = [(s[2] / s[3] / seconds, s[0] / s[1] / seconds) for s in total.values()]
    axes.barh(
        [p - 0.2 for p in places],
        [down for down, _ in shares],
        0.36,
        color=SERIES[0],
        label="down (weights)",
    )
    axes.barh(
        [p + 0.2 for p in places],
        [up for _, up in shares],
        0.36,
        color=SERIES[1],
        label="up (results)",
    )
    axes.set_title("Access links in use", fontsize=10)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.tick_params(axis="y", labelleft=False, length=0)
    axes.grid(axis="x", color=GRID)
    axes.set_xlim(0, max(0.05, min(1.05, 1.1 * max(max(pair) for pair in shares))))
    axes.get_figure().legend(
        *axes.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8
    )


def _thinned(recording: Recording, least_s: float) -> list[Any]:
    """At most about ``BINS`` samples with ``least_s`` between them, the first and the last among
    them."""
    samples = recording.samples
    apart_s = max(least_s, recording.ends_s / BINS)
    kept = [samples[0]]
    for sample in samples[1:-1]:
        if sample.at_s - kept[-1].at_s >= apart_s and recording.ends_s - sample.at_s >= apart_s / 2:
            kept.append(sample)
    return [*kept, *samples[-1:]] if len(samples) > 1 else kept


def _step_s(recording: Recording) -> float:
    """Usual seconds from one step to the next."""
    ends: dict[str, list[float]] = {}
    for step in recording.steps:
        ends.setdefault(step.policy, []).append(step.ended_s)
    gaps = [b - a for own in ends.values() for a, b in itertools.pairwise(own)]
    return statistics.median(gaps) if gaps else 0.0


def _first_use(swaps: list[tuple[int, float]], version: int, at_s: float) -> float | None:
    """Seconds until ``version`` or a newer one was used."""
    return min((when - at_s for number, when in swaps if number >= version), default=None)


def _typical(lines: list[list[float]], agents: int) -> list[float]:
    """For each number of agents, the median delay until so many had it; versions that fewer than
    half reached before the end say nothing."""
    whole = [line for line in lines if len(line) > agents / 2]
    typical: list[float] = []
    for place in range(agents):
        there = [line[place] for line in whole if len(line) > place]
        if not there or len(there) < len(whole) / 2:
            break
        typical.append(statistics.median(there))
    return typical
