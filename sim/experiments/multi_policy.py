"""What makes decoupled multi-policy training 2.7 times faster than synchronous colocated training.

Every cell is one setting; every system gets it. ``base`` is AstraFlow's headline task as far as it
is known; ``spread`` varies GPUs and the spread of lengths, ``length`` the lengths, ``policies``
their number. The colocated system is taken with all eight combinations of its losses, so that each
loss's share of the factor is a Shapley value: its mean effect over all orders of switching it off.
"""

import math
from dataclasses import dataclass, replace
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.experiments.cells import Findings, Row, Table, find
from sim.parallel import OnDone
from sim.picture_style import INK, SERIES, figure
from sim.training_models.astraflow import train_astraflow
from sim.training_models.colocated import Switches, train_colocated
from sim.training_models.one_to_one import train_one_to_one
from sim.training_models.parameters import PAGEABLE_BYTES_S, QWEN3_8B, Outcome, Setting
from sim.training_models.production import train_farflow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAME: Final = "a-multi-policy"
BASE: Final = Setting(QWEN3_8B, gpus=8, policies=2)
LOSSES: Final = ("tail", "swap", "turns")
COPIES: Final = ("pinned", "pageable")
SMALL_BATCHES: Final = 0.2
"""Of the peak rate in training with micro-batches of 4, as Dr. MAS sets them, instead of 0.35
[assumed]."""
PUBLISHED: Final = {"colocated": 212.64, "astraflow": 77.65}
"""Seconds per iteration of the headline task: Dr. MAS on verl, AstraFlow [study]."""
PUBLISHED_FACTOR: Final = 2.74


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str
    setting: Setting


def cells(quick: bool) -> list[Cell]:
    base = replace(BASE, steps=8, warm_up=3) if quick else BASE
    found = [Cell("base", base)]
    gpus = (16,) if quick else (8, 16, 32, 64)
    spreads = (0.0, 1.0) if quick else (0.0, 0.35, 0.7, 1.0, 1.4)
    found += [
        Cell("spread", replace(base, gpus=n, cv_tokens=cv)) for n, cv in product(gpus, spreads)
    ]
    if not quick:
        found += [
            Cell("length", replace(base, mean_tokens=mean, max_tokens=round(mean * 8192 / 2400)))
            for mean in (300.0, 600.0, 1200.0, 2400.0, 4800.0, 9600.0)
        ]
        found += [Cell("policies", replace(base, gpus=16, policies=n)) for n in (1, 2, 3, 4)]
    return found


def compute(cell: Cell) -> Row:
    """All systems on one setting, in seconds per step."""
    setting = cell.setting
    rollout, each = setting.split()
    row: Row = {
        "kind": cell.kind,
        "gpus": setting.gpus,
        "policies": setting.policies,
        "cv": setting.cv_tokens,
        "mean_tokens": setting.mean,
        "rollout_gpus": rollout,
        "trainer_gpus": each,
    }
    for copy in COPIES:
        for switches in product((True, False), repeat=len(LOSSES)):
            given = setting if copy == "pinned" else pageable(setting)
            outcome = train_colocated(given, Switches(*switches))
            row[f"{copy} {_label(switches)}"] = outcome.step_s
            if all(switches):
                row |= {f"{copy} {part}": value for part, value in outcome.parts}
    _add(row, train_one_to_one(setting))
    _add(row, train_astraflow(setting))
    _add(row, train_farflow(setting))
    if cell.kind == "base":
        slow = pageable(replace(setting, gpu=replace(setting.gpu, train_share=SMALL_BATCHES)))
        row["pageable, slow training"] = train_colocated(slow).step_s
        _add(row, replace(train_farflow(setting, prefetch_groups=1), system="farflow, prefetch 1"))
        _add(row, replace(train_farflow(setting, swap_s=8.3), system="farflow, pause 8.3 s"))
        both = setting.token_s(setting.slots)
        both /= setting.policies * setting.token_s(setting.slots // setting.policies)
        shared = train_farflow(setting, tokens_share=both)
        _add(row, replace(shared, system="farflow, all policies on every GPU"))
    return row


def pageable(setting: Setting) -> Setting:
    return replace(setting, gpu=replace(setting.gpu, host_copy_bytes_s=PAGEABLE_BYTES_S))


def shares(row: Row, copy: str) -> dict[str, float]:
    """Factors of the losses, whose product is all of them together; the order does not matter."""
    effects = dict.fromkeys(LOSSES, 0.0)
    orders = list(permutations(LOSSES))
    for order in orders:
        on = dict.fromkeys(LOSSES, True)
        before = row[f"{copy} {_label(on.values())}"]
        for loss in order:
            on[loss] = False
            after = row[f"{copy} {_label(on.values())}"]
            effects[loss] += math.log(before / after) / len(orders)
            before = after
    return {loss: math.exp(effect) for loss, effect in effects.items()}


def run(quick: bool, jobs: int, on_done: OnDone | None = None) -> Findings:
    return find(NAME, quick, compute, cells(quick), _report, jobs, on_done)


def _report(rows: "Sequence[Row]") -> list[Table]:
    return [_systems(rows[0]), _attribution(rows[0]), _sweep("GPUs and spread of lengths", rows)]


def _add(row: Row, outcome: Outcome) -> None:
    row[outcome.system] = outcome.step_s
    row[f"{outcome.system} waste"] = outcome.wasted_share
    row[f"{outcome.system} lag"] = outcome.lag_mean


def _label(switches: "Iterable[bool]") -> str:
    """The losses that are on."""
    on = [loss for loss, is_on in zip(LOSSES, switches, strict=True) if is_on]
    return "+".join(on) or "none"


ALL: Final = "+".join(LOSSES)


def _systems(row: Row) -> Table:
    reference = row[f"pageable {ALL}"]
    table = Table(
        "Headline task: 2 policies of 8B, 8 H100, 32 x 8 trajectories per step",
        ("system", "s/step", "published", "pageable colocated / it", "mean lag", "wasted"),
    )

    def add(name: str, step_s: float, key: str = "", published: float | None = None) -> None:
        table.rows.append(
            (
                name,
                f"{step_s:.1f}",
                f"{published:.1f}" if published else "",
                f"{reference / step_s:.2f}",
                f"{row[f'{key} lag']:.1f}" if key else "0.0",
                f"{row[f'{key} waste']:.1%}" if key else "0.0%",
            )
        )

    name = f"colocated, pageable copies, training at {SMALL_BATCHES} of peak"
    add(name, row["pageable, slow training"], published=PUBLISHED["colocated"])
    for copy in reversed(COPIES):
        add(f"colocated, {copy} copies", row[f"{copy} {ALL}"])
    add("no tail, no swap, no turns: the ideal", row["pinned none"])
    for key in [key for key in row if f"{key} lag" in row]:
        add(key, row[key], key, PUBLISHED.get(key))
    return table


def _attribution(row: Row) -> Table:
    table = Table(
        "Where the factor comes from (shares multiply)",
        (
            "colocated with",
            *LOSSES,
            "all three",
            "decoupling's own costs (farflow)",
            "colocated / farflow",
        ),
    )
    for copy in reversed(COPIES):
        found = shares(row, copy)
        whole = math.prod(found.values())
        own = row["farflow"] / row["pinned none"]
        factors = [*found.values(), whole, 1.0 / own, whole / own]
        table.rows.append((f"{copy} copies", *(f"{factor:.2f}" for factor in factors)))
    return table


def _sweep(title: str, rows: "Sequence[Row]") -> Table:
    table = Table(
        title,
        (
            "varied", "GPUs", "policies", "mean tokens", "CV", "split",
            *(f"{copy} / farflow" for copy in COPIES), "pageable / AstraFlow",
            "one-to-one / farflow", "swap (pageable)", "tail", "turns",
        ),
    )  # fmt: skip
    for row in rows[1:]:
        found = shares(row, "pageable")
        table.rows.append(
            (
                row["kind"],
                str(row["gpus"]),
                str(row["policies"]),
                f"{row['mean_tokens']:.0f}",
                f"{row['cv']:g}",
                f"{row['rollout_gpus']}+{row['policies']}x{row['trainer_gpus']}",
                *(f"{row[f'{copy} {ALL}'] / row['farflow']:.2f}" for copy in COPIES),
                f"{row[f'pageable {ALL}'] / row['astraflow']:.2f}",
                f"{row['one-to-one'] / row['farflow']:.2f}",
                *(f"{found[loss]:.2f}" for loss in ("swap", "tail", "turns")),
            )
        )
    return table


def plot(findings: Findings, path: Path) -> None:
    """The factor's parts, and the factor over GPUs and spread."""
    with figure(path, 10.5, 4.2) as made:
        left, right = made.subplots(1, 2)
        _plot_parts(left, findings.rows[0])
        _plot_spread(right, [row for row in findings.rows if row["kind"] == "spread"])


def _plot_parts(axes: Any, base: Row) -> None:
    """What each loss costs, on a logarithmic axis: widths add up as factors multiply."""
    for place, copy in enumerate(reversed(COPIES)):
        at = 0.0
        for colour, (loss, factor) in zip(SERIES, shares(base, copy).items(), strict=False):
            width = math.log2(factor)
            axes.barh(place, width, left=at, color=colour, label=loss if place == 0 else None)
            if width > 0.1:
                middle = at + width / 2
                text = f"{loss}\n\u00d7{factor:.2f}"
                axes.text(middle, place, text, ha="center", va="center", color="white")
            at += width
        factor = base[f"{copy} {ALL}"] / base["farflow"]
        axes.plot([math.log2(factor)] * 2, [place - 0.4, place + 0.4], color=INK)
        text = f"farflow \u00d7{factor:.2f}"
        axes.text(math.log2(factor), place + 0.43, text, ha="center")
    ticks = (1.0, 1.25, 1.5, 2.0, 2.7)
    axes.set_xticks([math.log2(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_yticks([0, 1], [f"{copy}\ncopies" for copy in reversed(COPIES)])
    axes.set_ylim(-0.6, 1.8)
    axes.set_xlabel("times faster than colocated")
    axes.set_title("Headline task: what each loss costs")


def _plot_spread(axes: Any, rows: "Sequence[Row]") -> None:
    for colour, gpus in zip(SERIES, sorted({row["gpus"] for row in rows}), strict=False):
        line = [row for row in rows if row["gpus"] == gpus]
        for copy, style in (("pageable", "o-"), ("pinned", ".--")):
            axes.plot(
                [row["cv"] for row in line],
                [row[f"{copy} {ALL}"] / row["farflow"] for row in line],
                style,
                color=colour,
                label=f"{gpus} GPUs" if copy == "pageable" else None,
            )
    axes.axhline(PUBLISHED_FACTOR, color=INK, linewidth=0.8)
    text = f"published: {PUBLISHED_FACTOR}"
    axes.text(rows[-1]["cv"], PUBLISHED_FACTOR / 1.12, text, fontsize=8, ha="right")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_xlabel("spread of lengths (CV)")
    axes.set_ylabel("times faster than colocated")
    axes.set_title("farflow; dashed: pinned copies")
    axes.legend(fontsize=8)
