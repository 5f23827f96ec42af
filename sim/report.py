"""One HTML file that shows a run, a comparison or a sweep: tables, and its pictures inside.

What always holds: the file needs nothing beside itself, no script and no network; every text from
outside is escaped; it reads in light and dark.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sim.compare import Comparison, Measure
from sim.run import Result
from sim.sweep import Sweep

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads and rows."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #22252a; --faint: #6a7078; --ground: #ffffff;
  --card: #f6f7f9; --line: #e1e4e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #9aa1aa; --ground: #15171a;
  --card: #1e2125; --line: #33373d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1120px; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
p.about { color: var(--faint); margin-top: 0; }
.facts { display: flex; flex-wrap: wrap; gap: 0.8rem; margin: 1.4rem 0; }
.fact { background: var(--card); border-radius: 10px; padding: 0.7rem 1.1rem; min-width: 8rem; }
.fact b { display: block; font-size: 1.35rem; font-weight: 650; }
.fact span { color: var(--faint); font-size: 0.85rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { color: var(--faint); font-weight: 600; font-size: 0.85rem; }
figure { margin: 0.8rem 0; background: #ffffff; border-radius: 10px; padding: 0.8rem;
  border: 1px solid var(--line); }
img { display: block; max-width: 100%; margin: 0 auto; }
.scroll { overflow-x: auto; } .bad { color: #d55e00; font-weight: 600; }
pre { background: var(--card); border-radius: 10px; padding: 0.9rem; overflow-x: auto;
  font-size: 0.85rem; }
"""


def report(
    title: str,
    about: str,
    *,
    facts: Sequence[tuple[str, str]] = (),
    tables: Mapping[str, Table] | None = None,
    pictures: Mapping[str, Path] | None = None,
    problems: Sequence[str] = (),
    source: str = "",
) -> str:
    """The page. ``facts`` are (value, what it is), ``pictures`` PNG files by title, ``source`` the
    scenario's text.

    Raises:
        OSError: a picture cannot be read.
    """
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{html.escape(title)}</h1><p class="about">{html.escape(about)}</p>',
    ]
    parts += [f'<p class="bad">{html.escape(problem)}</p>' for problem in problems]
    if facts:
        cards = (
            f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'
            for value, what in facts
        )
        parts.append(f'<div class="facts">{"".join(cards)}</div>')
    for name, path in (pictures or {}).items():
        data = base64.b64encode(path.read_bytes()).decode()
        text = html.escape(name)
        parts.append(
            f'<h2>{text}</h2><figure><img alt="{text}" src="data:image/png;base64,{data}"></figure>'
        )
    for name, (heads, rows) in (tables or {}).items():
        parts.append(f"<h2>{html.escape(name)}</h2>{_table(heads, rows)}")
    if source:
        parts.append(f"<h2>Scenario</h2><pre>{html.escape(source)}</pre>")
    return "\n".join([*parts, "</body></html>\n"])


def run_facts(result: Result) -> list[tuple[str, str]]:
    """What one looks at first."""
    return [
        (f"{result.steps_hour:.1f}", "steps per hour"),
        (f"{result.lag_mean:.2f}", "mean policy lag"),
        (f"{result.wasted_share:.1%}", "of attempts wasted"),
        (f"{result.waiting_share:.1%}", "of trainer time waiting"),
        (f"{1.0 - result.idle_share:.1%}", "of slots in use"),
        (f"{result.turnaround_p50_s:.1f} s", "median turnaround"),
        (f"{result.virtual_s / 60:.1f} min", "virtual time"),
    ]


def accounting_table(result: Result) -> Table:
    """Groups by policy and what became of them."""
    names = [
        "submitted",
        "trained",
        "taken",
        "buffered",
        "in_flight",
        "queued",
        "expired",
        "filtered",
        "dropped",
        "failed",
        "cancelled",
    ]
    rows = [
        [f"{row.policy} ({row.kind})", *(str(getattr(row, name)) for name in names)]
        for row in result.accounting
    ]
    return ["policy", *(name.replace("_", " ") for name in names)], rows


def measure_table(measures: Sequence[Measure], what: str = "rule") -> Table:
    """Means with their 95 % intervals."""
    heads = (what, "steps/h", "ratio", "wasted", "policy lag", "trainer waits", "turnaround p50")
    rows = [
        (
            one.name,
            str(one.steps_hour),
            "" if one.ratio is None else str(one.ratio),
            f"{one.wasted_share.mean:.1%}",
            f"{one.lag_mean.mean:.2f}",
            f"{one.waiting_share.mean:.1%}",
            f"{one.turnaround_p50_s.mean:.1f} s",
        )
        for one in measures
    ]
    return heads, rows


def run_report(result: Result, pictures: Mapping[str, Path], *, about: str, source: str) -> str:
    """The page of one run."""
    ended = "" if result.finished else " Stopped before its last step."
    return report(
        f"{result.scenario}: {result.placement}, seed {result.seed}",
        about + ended,
        facts=run_facts(result),
        tables={"Groups": accounting_table(result)},
        pictures=pictures,
        problems=result.problems,
        source=source,
    )


def comparison_report(comparison: Comparison, pictures: Mapping[str, Path], source: str) -> str:
    """The page of a comparison."""
    found = len(comparison.results)
    cut = "" if found == comparison.asked else f"; {found} of {comparison.asked} runs were done"
    return report(
        f"{comparison.scenario}: placement rules",
        f"Only the rule changes between the runs of a seed; ratios are seed by seed{cut}.",
        tables={"Rules": measure_table(comparison.measures)},
        pictures=pictures,
        problems=comparison.problems,
        source=source,
    )


def sweep_report(swept: Sweep, pictures: Mapping[str, Path], source: str) -> str:
    """The page of a sweep."""
    measures = [point.measure for point in swept.points if point.measure is not None]
    return report(
        f"{swept.scenario}: {', '.join(swept.keys)}",
        f"{len(measures)} of {len(swept.points)} points, placed by {swept.placement}.",
        tables={"Points": measure_table(measures, "point")},
        pictures=pictures,
        problems=swept.problems,
        source=source,
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )
