"""Does the main job learn? ``farflow up examples/arithmetic.toml`` over three seeds.

The reference of every ratio is the same run's accuracy before training. ``--quick`` makes 40 steps
with one seed: too few for the target, enough to see the loop learn.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import Row, main

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.toml"
SEEDS = (0, 1, 2)
MEAN_TARGET, EACH_TARGET, START_LIMIT, TIME_LIMIT_S = 0.85, 0.80, 0.50, 240.0


def up(example: Path, folder: Path, *changes: str) -> dict[str, Any]:
    """The summary of one run of an example, left in ``folder``; ``changes`` are ``KEY=VALUE``."""
    command = [sys.executable, "-m", "farflow", "up", str(example), "--plain"]
    command += ["--folder", str(folder)]
    for change in changes:
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def one(seed: int, steps: int | None) -> dict[str, Any]:
    """The summary of one run."""
    changes = [] if steps is None else [f"policies.solver.steps={steps}"]
    with tempfile.TemporaryDirectory() as scratch:
        return up(EXAMPLE, Path(scratch) / "run", f"run.seed={seed}", *changes)


def measure(quick: bool) -> list[Row]:
    rows = []
    after_all, wall_all = [], []
    for seed in SEEDS[:1] if quick else SEEDS:
        summary = one(seed, 40 if quick else None)
        policy = summary["policies"][0]
        before, after = policy["accuracy_before"], policy["accuracy_after"]
        wall = float(summary["wall_s"])
        after_all.append(after)
        wall_all.append(wall)
        rows.append(
            Row(
                metric=f"seed {seed}: accuracy before",
                value=before,
                unit="share",
                target=f"<= {START_LIMIT}",
                ok=before <= START_LIMIT,
            )
        )
        rows.append(
            Row(
                metric=f"seed {seed}: accuracy after",
                value=after,
                unit="share",
                reference="before",
                ratio=after / before,
                target="" if quick else f">= {EACH_TARGET}",
                ok=quick or after >= EACH_TARGET,
            )
        )
        rows.append(
            Row(
                metric=f"seed {seed}: time",
                value=wall,
                unit="s",
                target=f"<= {TIME_LIMIT_S:g}",
                ok=wall <= TIME_LIMIT_S,
            )
        )
    if not quick:
        mean = statistics.mean(after_all)
        rows.append(
            Row(
                metric="mean accuracy after",
                value=mean,
                unit="share",
                target=f">= {MEAN_TARGET}",
                ok=mean >= MEAN_TARGET,
            )
        )
        rows.append(Row(metric="median time", value=statistics.median(wall_all), unit="s"))
    return rows


if __name__ == "__main__":
    main("learning", measure)
