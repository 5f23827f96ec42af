"""Do a solver and its verifier learn beside each other, and what is the verifier good for?

``farflow up examples/solve_and_verify.toml`` over three seeds; the reference of every ratio is the
same evaluation before training, that of the last rows what the best of eight is to beat: the solver
alone (greedy, and drawn), and eight draws without the verifier. In full it also draws
``docs/pictures/solve-and-verify.svg`` (needs the ``plots`` extra). ``--quick``: one seed and fewer
steps, no picture.
"""

import tempfile
from pathlib import Path
from typing import Any, Final

from bench.learning import up
from bench.report import Row, main
from farflow.plots import read_metrics

ROOT: Final = Path(__file__).parents[1]
EXAMPLE: Final = ROOT / "examples" / "solve_and_verify.toml"
PICTURE: Final = ROOT / "docs" / "pictures" / "solve-and-verify.svg"
SEEDS: Final = (0, 1, 2)
QUICK_STEPS: Final = 20
POLICIES: Final = ("solver", "verifier")
NAMES: Final = {
    "held-out": "solver alone, greedy",
    "alone": "solver alone, drawn at temperature 1",
    "best-of-8": "best of eight by the verifier",
    "majority-of-8": "majority of eight, without the verifier",
    "verdicts": "verifier, greedy, half of the claims right",
}
RIVALS: Final = {"held-out": "greedy", "majority-of-8": "majority of eight", "alone": "drawn"}
"""What the best of eight is to beat."""
COLOURS: Final = {
    "held-out": "tab:blue",
    "alone": "tab:cyan",
    "best-of-8": "tab:green",
    "majority-of-8": "tab:purple",
    "verdicts": "tab:orange",
}
LEAST_GAIN: Final = 0.1
"""By which both are to improve."""

Records = list[dict[str, Any]]


def measure(quick: bool) -> list[Row]:
    rows: list[Row] = []
    runs: list[Records] = []
    for seed in SEEDS[:1] if quick else SEEDS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            steps = [f"policies.{name}.steps={QUICK_STEPS}" for name in POLICIES] if quick else []
            summary = up(EXAMPLE, folder, f"run.seed={seed}", *steps)
            runs.append(read_metrics(folder / "metrics.jsonl"))
        rows += seed_rows(seed, summary, quick)
    if not quick:
        draw(runs, PICTURE)
    return rows


def seed_rows(seed: int, summary: dict[str, Any], quick: bool) -> list[Row]:
    """Before and after of every evaluation, the verifier's use, and the time."""
    # The evaluations of the start and the end are of both policies: each has all of them.
    found = {one["name"]: one for one in summary["policies"][0]["evaluations"]}
    rows = []
    for name, words in NAMES.items():
        before, after = found[name]["accuracy_before"], found[name]["accuracy_after"]
        target = before + LEAST_GAIN
        rows.append(Row(metric=f"seed {seed}: {words}, before", value=before, unit="share"))
        rows.append(
            Row(
                metric=f"seed {seed}: {words}, after",
                value=after,
                unit="share",
                reference="before",
                ratio=after / before,
                target="" if quick else f">= {target:.3f}",
                ok=quick or after >= target,
            )
        )
    best = found["best-of-8"]["accuracy_after"]
    for name, words in RIVALS.items():
        rival = found[name]["accuracy_after"]
        rows.append(
            Row(
                metric=f"seed {seed}: best of eight against {words}, after",
                value=best,
                unit="share",
                reference=NAMES[name],
                ratio=best / rival,
                target="" if quick else f"> {rival:.3f}",
                ok=quick or best > rival,
            )
        )
    bound = found["alone"]["pass_at"]["8"]
    rows.append(Row(metric=f"seed {seed}: one of eight is right, after", value=bound, unit="share"))
    rows.append(Row(metric=f"seed {seed}: time", value=float(summary["wall_s"]), unit="s"))
    return rows


def draw(runs: list[Records], path: Path) -> None:
    """Every evaluation by optimizer step, a line per seed; the rewards of training beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = EXAMPLE.stem  # the same picture has the same bytes
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for number, records in enumerate(runs):
        for name, words in NAMES.items():
            done = [
                (one["step"], one["accuracy"])
                for one in records
                if one["type"] == "evaluation" and one["done"] and one["name"] == name
            ]
            label = "" if number else words
            left.plot(
                *zip(*sorted(set(done)), strict=True),
                "o-",
                color=COLOURS[name],
                markersize=3,
                linewidth=1,
                alpha=0.8,
                label=label,
            )
        for policy, name in (("solver", "alone"), ("verifier", "verdicts")):
            own = [
                (one["step"], one["reward_mean"])
                for one in records
                if one["type"] == "step" and one["policy"].endswith(f"/{policy}")
            ]
            right.plot(
                *zip(*sorted(own), strict=True),
                color=COLOURS[name],
                linewidth=0.8,
                alpha=0.8,
                label="" if number else policy,
            )
    left.set(ylim=(0, 1), xlabel="optimizer step", ylabel="share right", title="held-out items")
    right.set(xlabel="optimizer step", title="mean reward of training")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main("solve_and_verify", measure)
