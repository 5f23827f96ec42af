"""The pictures of comparisons and sweeps; needs the ``plots`` extra.

What always holds: every mean is shown with its 95 % interval over the seeds, and every seed as a
dot of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from sim.compare import Comparison, Interval, Measure
from sim.picture_style import FAINT, INK, SERIES, figure
from sim.sweep import Point, Sweep

MAX_TICKS: Final = 12


def draw_comparison(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """``rules.png`` in ``folder``, by title. Raises ConfigError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rules.png"
    order = sorted(comparison.measures, key=lambda one: (one.steps_hour.mean, one.name))
    seeds = len(order[-1].seeds) if order else 0
    with figure(path, 10.5, 1.5 + 0.5 * len(order)) as made:
        left, right = made.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        _draw_rules(left, order, comparison, "steps_hour")
        _draw_rules(right, order, comparison, "wasted_share")
        left.set_yticks(range(len(order)), [one.name for one in order])
        left.set(title="Steps per hour", xlabel=f"mean of {seeds} seeds, 95 % interval")
        for y, one in enumerate(order):
            ratio = one.ratio
            text = "reference" if one.name == comparison.reference else ""
            if ratio is not None:
                text = f"{ratio.mean:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
            left.annotate(
                text,
                (1.0, y),
                (-2, 9),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=FAINT,
            )
        right.set(title="Share of attempts wasted", xlabel="began, and not trained on")
        right.xaxis.set_major_formatter("{x:.0%}")
        for axes in (left, right):
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
            axes.margins(y=0.14)
            axes.set_xlim(left=0)
            axes.margins(x=0.08)
    return {"Placement rules": path}


def _draw_rules(axes: Any, order: Sequence[Measure], comparison: Comparison, value: str) -> None:
    best = order[-1].name if order else ""
    for y, one in enumerate(order):
        colour = SERIES[0] if one.name == best else FAINT
        spread = getattr(one, value)
        dots = [getattr(r, value) for r in comparison.results if r.placement == one.name]
        below = [y - 0.17] * len(dots)
        axes.scatter(dots, below, s=14, color=colour, alpha=0.55, linewidth=0, zorder=1)
        axes.plot([spread.low, spread.high], [y, y], color=colour, linewidth=3.2, zorder=2)
        axes.scatter([spread.mean], [y], s=58, color=colour, edgecolor="white", zorder=3)


def draw_sweep(swept: Sweep, folder: Path) -> dict[str, Path]:
    """``sweep.png`` in ``folder``, by title: lines for one key of numbers, a map for two keys, rows
    for anything else. Raises ConfigError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.png"
    points = [(point, point.measure) for point in swept.points if point.measure is not None]
    if len(swept.keys) == 1 and all(_is_number(point.values[swept.keys[0]]) for point, _ in points):
        _draw_lines(swept, points, path)
    elif len(swept.keys) == 2:
        _draw_grid(swept, path)
    else:
        _draw_rows(points, path)
    return {f"Over {', '.join(swept.keys)}": path}


def _draw_lines(swept: Sweep, points: list[tuple[Point, Measure]], path: Path) -> None:
    key = swept.keys[0]
    xs = [float(point.values[key]) for point, _ in points]
    panels: tuple[tuple[str, Callable[[Measure], Interval], str], ...] = (
        ("Steps per hour", lambda one: one.steps_hour, "{x:g}"),
        ("Share of attempts wasted", lambda one: one.wasted_share, "{x:.0%}"),
        ("Mean policy lag", lambda one: one.lag_mean, "{x:g}"),
    )
    with figure(path, 11.5, 3.7) as made:
        for number, (title, pick, form) in enumerate(panels):
            axes = made.add_subplot(1, 3, number + 1)
            found = [pick(one) for _, one in points]
            low, high = [one.low for one in found], [one.high for one in found]
            colour = SERIES[number]
            axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(xs, [one.mean for one in found], "o-", color=colour, markersize=4.5)
            if xs and min(xs) > 0 and max(xs) / min(xs) > 30:
                axes.set_xscale("log")
            axes.set(title=title, xlabel=key)
            axes.set_ylim(0, max([1e-9, *high]) * 1.12)
            axes.yaxis.set_major_formatter(form)
            axes.grid()


def _draw_grid(swept: Sweep, path: Path) -> None:
    import numpy as np

    rows, columns = swept.keys
    ys = list(dict.fromkeys(_short(point.values[rows]) for point in swept.points))
    xs = list(dict.fromkeys(_short(point.values[columns]) for point in swept.points))
    values = np.full((len(ys), len(xs)), np.nan)
    for point in swept.points:
        if point.measure is not None:
            at = ys.index(_short(point.values[rows])), xs.index(_short(point.values[columns]))
            values[at] = point.measure.steps_hour.mean
    with figure(path, 3.2 + 0.72 * len(xs), 2.2 + 0.46 * len(ys)) as made:
        axes = made.subplots()
        image = axes.imshow(values, cmap="cividis", origin="lower", aspect="auto")
        axes.set_xticks(range(len(xs)), xs)
        axes.set_yticks(range(len(ys)), ys)
        axes.set(title="Steps per hour", xlabel=columns, ylabel=rows)
        if len(xs) <= MAX_TICKS and len(ys) <= MAX_TICKS:
            middle = (np.nanmin(values) + np.nanmax(values)) / 2
            for (y, x), value in np.ndenumerate(values):
                ink = INK if value > middle else "white"
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=8.5)
        made.colorbar(image, ax=axes).outline.set_visible(False)


def _draw_rows(points: list[tuple[Point, Measure]], path: Path) -> None:
    with figure(path, 9.0, 1.3 + 0.36 * len(points)) as made:
        axes = made.subplots()
        for y, (_, one) in enumerate(points):
            spread = one.steps_hour
            axes.plot([spread.low, spread.high], [y, y], color=SERIES[0], linewidth=3)
            axes.scatter([spread.mean], [y], s=50, color=SERIES[0], edgecolor="white", zorder=3)
        axes.set_yticks(range(len(points)), [one.name for _, one in points])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.set(title="Steps per hour", xlabel="mean over seeds, 95 % interval")


def _short(value: Any) -> str:
    """A number as people write it: 100M for 100000000."""
    if not _is_number(value):
        return str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
