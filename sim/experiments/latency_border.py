"""When network latency becomes the bottleneck of frequent small-batch updates.

Every cell is a step time T, a round trip R, a delta of D bytes and a bound S on policy lag, run
through the production cores over links of ``LINK_MBIT``, and compared with the same run at zero
latency and unlimited rate. Work scales with T: a response takes T / 2 on average (CV 0.5), and
there are twice as many slots as the trainer can use, so that at zero latency it is always busy.

The analytic border beside it is where a step time is just long enough for three conditions. g is
the time that 95 % of groups stay below (the longest of its siblings), r the link's rate, p the
engine's pause:

    link       D / r < T
    weights    F + max(F, T) + R / 2 + g <= (S + 1) T
    leases     R + g <= S T

F is the time of one update: announced, asked for, sent, applied. An update that takes longer than a
step brings all that changed meanwhile, F / T deltas, so F = (3/2 R + p) / (1 - D / (r T)); a
quicker one brings one delta, F = 3/2 R + p + D / r. An agent's weights are F old when they come
into use and are replaced max(F, T) later; a group that begins just before still has to be
generated, sent and consumed within the bound. S batches may be under way beside the one that
trains, each of which needs a group's time and a round trip for lease and result. Queues are left
out.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sim.experiments.cells import Findings, Row, Table, find
from sim.parallel import OnDone
from sim.picture_style import figure
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.training_models.astraflow import GRACE_S, Links, reload_s, train_astraflow
from sim.training_models.parameters import QWEN3_1_7B, Setting
from sim.training_models.production import measure
from sim.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = "b-latency-border"
LINK_MBIT: Final = 500.0
UNLIMITED_MBIT: Final = 1e8
GOOD: Final = 0.95
"""Of the steps per hour at zero latency."""
TOKENS_S: Final = 200.0
CV: Final = 0.5
BATCH_GROUPS: Final = 8
SIBLINGS: Final = 4
AGENTS: Final = 4
SLOTS: Final = 8
PAUSE_S: Final = 0.036
"""Of an engine for an update in place: 32 to 39 ms with a GPU engine's own patch call on a CPU, two
tensors [measured here]; more for large models."""
RESPONSE: Final = 0.5
"""Mean time of a response over T."""
GROUP: Final = RESPONSE * 2.57
"""g / T: the 95 % quantile of the longest of 4 log-normal lengths with CV 0.5 is 2.57 means."""
ROUND_TRIPS_MS: Final = (0.0, 20.0, 50.0, 100.0, 200.0, 400.0, 800.0)
STEP_TIMES_S: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
DELTAS_MB: Final = (1.0, 20.0, 200.0)
BOUNDS: Final = (2, 4)


@dataclass(frozen=True, slots=True)
class Cell:
    """``link_mbit`` None: zero latency, unlimited rate."""

    step_s: float
    rtt_ms: float
    delta_mb: float
    bound: int
    steps: int
    link_mbit: float | None = LINK_MBIT

    def scenario(self) -> Scenario:
        mean = TOKENS_S * RESPONSE * self.step_s
        free = self.link_mbit is None
        return Scenario(
            name=NAME,
            sites={"far": 0.0 if free else self.rtt_ms},
            nic_mbit=UNLIMITED_MBIT,
            agents=AgentsSpec(
                per_site=AGENTS,
                slots=(SLOTS,),
                tokens_per_s=(TOKENS_S,),
                link_mbit=(self.link_mbit or UNLIMITED_MBIT,),
            ),
            policies={
                "policy": PolicyShape(
                    batch_groups=BATCH_GROUPS, max_policy_lag=self.bound, train_s=self.step_s
                )
            },
            group_size=SIBLINGS,
            steps=self.steps,
            limit_s=1e7,
            workload=Workload(
                mean_tokens=mean,
                cv_tokens=CV,
                max_new_tokens=max(4, round(8 * mean)),
                delta_bytes=round(self.delta_mb * 1e6),
                full_bytes=round(max(2e9, 20 * self.delta_mb * 1e6)),
                swap_s=PAUSE_S,
            ),
            scheduler={"prefetch_groups": max(1, SLOTS // SIBLINGS)},
        )


def keeps_pace(step_s: float, rtt_s: float, delta_mb: float, bound: int) -> bool:
    """Whether the three conditions hold."""
    delta_s = delta_mb * 8 / LINK_MBIT
    if delta_s >= step_s:
        return False
    group_s = GROUP * step_s
    update_s = 1.5 * rtt_s + PAUSE_S + delta_s
    if update_s > step_s:
        update_s = (1.5 * rtt_s + PAUSE_S) / (1.0 - delta_s / step_s)
    oldest_s = update_s + max(update_s, step_s) + rtt_s / 2 + group_s
    return oldest_s <= (bound + 1) * step_s and rtt_s + group_s <= bound * step_s


def border_s(rtt_s: float, delta_mb: float, bound: int) -> float:
    """The least step time for which all conditions hold, by bisection.

    Raises:
        ValueError: a bound for which no step time is enough.
    """
    low, high = 1e-3, 1e6
    if not keeps_pace(high, rtt_s, delta_mb, bound):
        raise ValueError(f"bound: {bound} never lets a group of {GROUP:g} steps keep the pace")
    while high / low > 1.0 + 1e-9:
        middle = (low * high) ** 0.5
        if keeps_pace(middle, rtt_s, delta_mb, bound):
            high = middle
        else:
            low = middle
    return high


def cells(quick: bool) -> list[Cell]:
    """The reference of each step time and bound comes first."""
    steps = 16 if quick else 40
    times = (0.25, 1.0) if quick else STEP_TIMES_S
    trips = (20.0, 400.0) if quick else ROUND_TRIPS_MS
    deltas = (1.0, 20.0) if quick else DELTAS_MB
    bounds = (4,) if quick else BOUNDS
    found = [Cell(t, 0.0, 0.0, bound, steps, None) for t, bound in product(times, bounds)]
    found += [Cell(*key, steps) for key in product(times, trips, deltas, bounds)]
    return found


def compute(cell: Cell) -> Row:
    outcome = measure("farflow", cell.scenario(), max(4, cell.steps // 4), cell.step_s)
    return {
        "step_s": cell.step_s,
        "rtt_ms": cell.rtt_ms,
        "delta_mb": cell.delta_mb,
        "bound": cell.bound,
        "free": cell.link_mbit is None,
        "pace_s": outcome.step_s,
        "lag": outcome.lag_mean,
        "waste": outcome.wasted_share,
    }


def run(quick: bool, jobs: int, on_done: OnDone | None = None) -> Findings:
    return find(NAME, quick, compute, cells(quick), partial(_report, quick), jobs, on_done)


def _report(quick: bool, rows: "Sequence[Row]") -> list[Table]:
    """Adds ``share`` to the rows: pace at zero latency over pace."""
    free = {(row["step_s"], row["bound"]): row["pace_s"] for row in rows if row["free"]}
    for row in rows:
        row["share"] = float(f"{free[row['step_s'], row['bound']] / row['pace_s']:.6g}")
    bounds = sorted({row["bound"] for row in rows})
    return [*(_map(rows, bound) for bound in bounds), _borders(rows), _rival(quick)]


def measured_border_s(rows: "Sequence[Row]") -> float | None:
    """The least step time from which on the share stays good, interpolated on log T between the
    cells on either side; None: not within the map; rows of one round trip, delta, bound."""
    line = sorted(rows, key=lambda row: float(row["step_s"]))
    good: float | None = None
    before: Row | None = None
    for row in reversed(line):
        if row["share"] < GOOD:
            before = row
            break
        good = row["step_s"]
    if good is None or before is None:
        return good
    above = next(row for row in line if row["step_s"] == good)
    weight = (GOOD - before["share"]) / (above["share"] - before["share"])
    return float(before["step_s"] * (good / before["step_s"]) ** weight)


def _lines(rows: "Sequence[Row]") -> dict[tuple[int, float, float], list[Row]]:
    found: dict[tuple[int, float, float], list[Row]] = {}
    for row in rows:
        if not row["free"]:
            found.setdefault((row["bound"], row["delta_mb"], row["rtt_ms"]), []).append(row)
    return dict(sorted(found.items()))


def _map(rows: "Sequence[Row]", bound: int) -> Table:
    times = sorted({row["step_s"] for row in rows})
    table = Table(
        f"Share of the steps per hour at zero latency, lag bound {bound}",
        ("delta", "RTT", *(f"T = {t:g} s" for t in times)),
    )
    for (of, delta, rtt), line in _lines(rows).items():
        if of == bound:
            by_time = {row["step_s"]: row["share"] for row in line}
            shares = (f"{by_time[t]:.0%}" for t in times)
            table.rows.append((f"{delta:g} MB", f"{rtt:g} ms", *shares))
    return table


def _borders(rows: "Sequence[Row]") -> Table:
    table = Table(
        f"Border: least step time that keeps {GOOD:.0%}",
        ("lag bound", "delta", "RTT", "simulated", "analytic"),
    )
    least = min(row["step_s"] for row in rows)
    most = max(row["step_s"] for row in rows)
    for (bound, delta, rtt), line in _lines(rows).items():
        found = measured_border_s(line)
        text = f"> {most:g} s" if found is None else f"{found:.2f} s"
        if found == least:
            text = f"<= {least:g} s"
        table.rows.append(
            (str(bound), f"{delta:g} MB", f"{rtt:g} ms", text, _analytic(rtt, delta, bound))
        )
    return table


def _analytic(rtt_ms: float, delta_mb: float, bound: int) -> str:
    try:
        return f"{border_s(rtt_ms / 1000.0, delta_mb, bound):.2f} s"
    except ValueError:
        return "none"


def rival_setting(step_s: float, steps: int) -> Setting:
    """A 1.7B policy whose trainer's own work takes ``step_s``, with half more rollout rate than
    that needs, so that only an update's fixed costs show. A response takes a step, but 10 s at
    most: longer steps have more of them."""
    slots, response_s = 48, min(step_s, 10.0)
    sequences = slots / 1.5 * step_s / response_s
    setting = Setting(
        QWEN3_1_7B,
        2,
        batch_groups=round(sequences / SIBLINGS),
        group_size=SIBLINGS,
        cv_tokens=CV,
        slots=slots,
        max_lag=4,
        train_overhead_s=0.0,
        steps=steps,
        warm_up=steps // 4,
    )
    for _ in range(8):  # a longer response decodes more slowly
        mean = response_s / setting.token_s(slots)
        setting = replace(setting, mean_tokens=mean, max_tokens=round(8 * mean))
    return replace(setting, train_overhead_s=max(0.0, step_s - setting.train_s(1)))


def _rival(quick: bool) -> Table:
    """AstraFlow's model at 1.7B: its fixed costs bind long before a round trip does."""
    times = (2.0, 32.0) if quick else (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    pause_s = GRACE_S + reload_s(QWEN3_1_7B)
    table = Table(
        f"AstraFlow's model, 1.7B, pause {pause_s:.1f} s: share of the trainer's own pace",
        ("RTT", *(f"T = {t:g} s" for t in times)),
    )
    for rtt_s in (0.001, 0.05, 0.3):
        links = Links(rtt_s=rtt_s, bytes_s=LINK_MBIT * 125_000.0)
        shares = [
            t / train_astraflow(rival_setting(t, 24 if quick else 60), links).step_s for t in times
        ]
        table.rows.append((f"{rtt_s * 1000:g} ms", *(f"{share:.0%}" for share in shares)))
    return table


def plot(findings: Findings, path: Path) -> None:
    """A map per bound and delta with both borders."""
    from matplotlib.colors import BoundaryNorm

    lines = _lines(findings.rows)
    bounds = sorted({key[0] for key in lines})
    deltas = sorted({key[1] for key in lines})
    times = sorted({row["step_s"] for row in findings.rows})
    trips = sorted({key[2] for key in lines})
    norm = BoundaryNorm([0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.02], 256)
    shown = None
    with figure(path, 3.0 * len(deltas) + 1, 2.8 * len(bounds)) as made:
        axes = made.subplots(len(bounds), len(deltas), squeeze=False, sharey=True)
        for (row, bound), (column, delta) in product(enumerate(bounds), enumerate(deltas)):
            axis = axes[row][column]
            grid = [
                [
                    next(r["share"] for r in lines[bound, delta, rtt] if r["step_s"] == t)
                    for rtt in trips
                ]
                for t in times
            ]
            shown = axis.pcolormesh(
                range(len(trips) + 1), range(len(times) + 1), grid, norm=norm, cmap="Blues_r"
            )
            places, edges = [], []
            for place, rtt in enumerate(trips):
                try:
                    edge = border_s(rtt / 1000.0, delta, bound)
                except ValueError:
                    continue
                places.append(place + 0.5)
                edges.append(_place(edge, times))
            axis.plot(places, edges, color="#D55E00", marker=".", label="analytic border")
            axis.set_ylim(0, len(times))
            axis.set_xticks([n + 0.5 for n in range(len(trips))], [f"{rtt:g}" for rtt in trips])
            axis.set_yticks([n + 0.5 for n in range(len(times))], [f"{t:g}" for t in times])
            axis.set_title(f"{delta:g} MB, lag bound {bound}", fontsize=9.5)
            if row == len(bounds) - 1:
                axis.set_xlabel("RTT, ms")
            if column == 0:
                axis.set_ylabel("step time, s")
        axes[0][0].legend(fontsize=7, loc="upper left")
        made.colorbar(shown, ax=axes, label="share of zero-latency pace")


def _place(edge_s: float, times: "Sequence[float]") -> float:
    """Where a time lies on an axis with equal distances between ``times``, logarithmic between."""
    from math import log

    steps = log(times[-1] / times[0]) / (len(times) - 1)
    return log(edge_s / times[0]) / steps + 0.5
