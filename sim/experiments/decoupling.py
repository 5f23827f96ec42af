"""At what scale and spread of response lengths decoupling costs more than it gives.

One policy of 1.7B on 2 to 16 GPUs; short and long responses, large batches (64 responses per GPU
and step: every slot has work) and small ones (16); several spreads. The rival is the colocated
system with pinned copies (quick swaps), so that decoupling gets no gain from a slow rival. What
decoupling pays: whole GPUs on either side (``Setting.split``), pauses for weights, slots that stay
empty, messages. What it gains: no tail, no swaps.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sim.experiments.cells import Findings, Row, Table, find
from sim.parallel import OnDone
from sim.picture_style import INK, figure
from sim.training_models.astraflow import train_astraflow
from sim.training_models.colocated import Switches, train_colocated
from sim.training_models.parameters import QWEN3_1_7B, Setting
from sim.training_models.production import train_farflow

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = "c-decoupling"
GPUS: Final = (2, 3, 4, 8, 16)
SPREADS: Final = (0.0, 0.25, 0.5, 1.0, 1.5)
TASKS: Final = ((200.0, 8), (2000.0, 8), (2000.0, 2))
"""Mean tokens of a response, groups of 8 per GPU and step."""
OVERHEAD_S: Final = 0.5
"""Of a step, beside its work per token [assumed]."""
LEVELS: Final = (0.4, 0.6, 0.8, 0.95, 1.05, 1.25, 1.67, 2.5, 4.0)
"""Of the map's colours, about as far below 1 as above."""
PREFETCH_CV: Final = 1.0
"""Where the default prefetch is simulated too."""
SYSTEMS: Final = ("farflow", "astraflow")


@dataclass(frozen=True, slots=True)
class Cell:
    gpus: int
    cv: float
    task: tuple[float, int]
    steps: int

    def setting(self) -> Setting:
        mean, groups = self.task
        return Setting(
            QWEN3_1_7B,
            gpus=self.gpus,
            batch_groups=groups * self.gpus,
            mean_tokens=mean,
            max_tokens=round(4 * mean),
            cv_tokens=self.cv,
            max_lag=4,
            train_overhead_s=OVERHEAD_S,
            steps=self.steps,
            warm_up=self.steps // 3,
        )


def cells(quick: bool) -> list[Cell]:
    gpus = (2, 8) if quick else GPUS
    spreads = (0.0, 1.0) if quick else SPREADS
    tasks = TASKS[1:2] if quick else TASKS
    steps = 9 if quick else 12
    return [Cell(n, cv, task, steps) for n, cv, task in product(gpus, spreads, tasks)]


def compute(cell: Cell) -> Row:
    setting = cell.setting()
    rollout, each = setting.split()
    together = train_colocated(setting)
    row: Row = {
        "gpus": cell.gpus,
        "cv": cell.cv,
        "mean_tokens": cell.task[0],
        "groups_per_gpu": cell.task[1],
        "rollout_gpus": rollout,
        "trainer_gpus": each,
        "colocated": together.step_s,
        "colocated, free swaps": train_colocated(setting, Switches(swap=False)).step_s,
        # The split's price alone: both sides at full rate, the slower one sets the pace.
        "split": max(setting.decode_s(rollout), setting.train_s(each)),
        # All GPUs at full rate on either, one after the other, nothing lost.
        "ideal": setting.decode_s(cell.gpus) + setting.train_s(cell.gpus),
    }
    outcomes = [train_farflow(setting), train_astraflow(setting)]
    if cell.cv == PREFETCH_CV:
        # The default leaves the slots of a group's finished siblings empty.
        default = train_farflow(setting, prefetch_groups=1)
        outcomes.append(replace(default, system="farflow, prefetch 1"))
    for outcome in outcomes:
        row[outcome.system] = outcome.step_s
        row[f"{outcome.system} waste"] = outcome.wasted_share
    return row


def run(quick: bool, jobs: int, on_done: OnDone | None = None) -> Findings:
    return find(NAME, quick, compute, cells(quick), _report, jobs, on_done)


def _report(rows: "Sequence[Row]") -> list[Table]:
    pairs = product(SYSTEMS, _tasks(rows))
    return [*(_gains(rows, system, task) for system, task in pairs), _losses(rows)]


def border_cv(line: "Sequence[Row]", system: str, rival: str = "colocated") -> float | None:
    """The spread from which on decoupling gains, between cells linearly; None: not within the map;
    rows of one number of GPUs and length, 0 if it always gains."""
    rows = sorted(line, key=lambda row: float(row["cv"]))
    gains = [row[rival] / row[system] for row in rows]
    if min(gains) >= 1.0:
        return 0.0
    last = max(n for n, gain in enumerate(gains) if gain < 1.0)
    if last == len(rows) - 1:
        return None
    low, high = rows[last], rows[last + 1]
    weight = (1.0 - gains[last]) / (gains[last + 1] - gains[last])
    return float(low["cv"] + weight * (high["cv"] - low["cv"]))


def _tasks(rows: "Sequence[Row]") -> list[tuple[float, int]]:
    present = {(row["mean_tokens"], row["groups_per_gpu"]) for row in rows}
    return [task for task in TASKS if task in present]


def _lines(rows: "Sequence[Row]", task: tuple[float, int]) -> dict[int, list[Row]]:
    """Rows of a task by GPUs."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if (row["mean_tokens"], row["groups_per_gpu"]) == task:
            found.setdefault(row["gpus"], []).append(row)
    return found


def _title(system: str, task: tuple[float, int]) -> str:
    return f"{system}, {task[0]:g} tokens, {8 * task[1]} per GPU"


def _gains(rows: "Sequence[Row]", system: str, task: tuple[float, int]) -> Table:
    lines = _lines(rows, task)
    spreads = [row["cv"] for row in next(iter(lines.values()))]
    table = Table(
        f"colocated / {_title(system, task)}",
        ("GPUs", *(f"CV {cv:g}" for cv in spreads), "gains from CV", "... with free swaps"),
    )
    for gpus, line in lines.items():
        borders = [
            border_cv(line, system, rival) for rival in ("colocated", "colocated, free swaps")
        ]
        table.rows.append(
            (
                str(gpus),
                *(f"{row['colocated'] / row[system]:.2f}" for row in line),
                *("never" if border is None else f"{border:.2f}" for border in borders),
            )
        )
    return table


def _losses(rows: "Sequence[Row]") -> Table:
    table = Table(
        "Where the time goes (seconds per step)",
        (
            "tokens", "per GPU", "GPUs", "CV", "split", "ideal", "whole GPUs", "farflow",
            "farflow, prefetch 1", "AstraFlow", "colocated", "... free swaps",
        ),
    )  # fmt: skip
    seconds = (
        "ideal",
        "split",
        "farflow",
        "farflow, prefetch 1",
        "astraflow",
        "colocated",
        "colocated, free swaps",
    )
    for task in _tasks(rows):
        for row in (row for line in _lines(rows, task).values() for row in line):
            if row["cv"] not in (0.0, PREFETCH_CV):
                continue
            table.rows.append(
                (
                    f"{row['mean_tokens']:g}",
                    str(8 * row["groups_per_gpu"]),
                    str(row["gpus"]),
                    f"{row['cv']:g}",
                    f"{row['rollout_gpus']}+{row['trainer_gpus']}",
                    *(f"{row[key]:.1f}" if key in row else "" for key in seconds),
                )
            )
    return table


def plot(findings: Findings, path: Path) -> None:
    """Maps of the gain; the line is where there is none, dashed with free swaps for the rival."""
    from matplotlib.colors import BoundaryNorm

    tasks = _tasks(findings.rows)
    norm = BoundaryNorm(LEVELS, 256)
    shown = None
    with figure(path, 2.6 * len(tasks) + 0.8, 4.2) as made:
        axes = made.subplots(2, len(tasks), sharex=True, sharey=True, squeeze=False)
        for (row, system), (column, task) in product(enumerate(SYSTEMS), enumerate(tasks)):
            axis, lines = axes[row][column], _lines(findings.rows, task)
            spreads = [cell["cv"] for cell in next(iter(lines.values()))]
            xs = [x + 0.5 for x in range(len(spreads))]
            ys = [y + 0.5 for y in range(len(lines))]
            grid = [[cell["colocated"] / cell[system] for cell in line] for line in lines.values()]
            free = [
                [cell["colocated, free swaps"] / cell[system] for cell in line]
                for line in lines.values()
            ]
            shown = axis.pcolormesh(grid, norm=norm, cmap="RdBu")
            for y, line in zip(ys, grid, strict=True):
                for x, gain in zip(xs, line, strict=True):
                    colour = "white" if gain < LEVELS[1] or gain > LEVELS[-3] else INK
                    text = f"{gain:.2f}"
                    axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=7.5)
            for values, style in ((grid, "solid"), (free, "dashed")):
                flat = [value for line in values for value in line]
                if min(flat) < 1.0 < max(flat):
                    axis.contour(xs, ys, values, levels=[1.0], colors=INK, linestyles=style)
            axis.set_xticks(xs, [f"{cv:g}" for cv in spreads])
            axis.set_yticks(ys, [str(gpus) for gpus in lines])
            axis.set_title(_title(system, task), fontsize=8)
            if row == 1:
                axis.set_xlabel("spread of lengths (CV)")
            if column == 0:
                axis.set_ylabel("GPUs")
        made.colorbar(shown, ax=axes, label="times faster than colocated", extend="both")
