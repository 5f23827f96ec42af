"""A run of a mixture, with several evaluations: real processes, the fake engine, the numpy trainer.

Half of the items come from a file, the others from a function of the user's; the run's held-out
items are evaluated greedily, other items with several answers each.
"""

import json
from pathlib import Path

import pytest

from bench.toy import counts, running, write_toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # a whole deployment

STEPS = 8
OWN_TASK = """
import random

def products(seed, largest):
    rng = random.Random(seed)
    while True:
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        yield {"prompt": f"{a} * {b} =", "answer": str(a * b)}
"""
TABLES = """
[task]
source = "mixture"
held_out_one_in = 4

[[task.parts]]
source = "jsonl"
path = "items.jsonl"
reward = "exact"

[[task.parts]]
source = "python"
function = "toy_products:products"
settings = {largest = 30}
reward = "exact"

[evaluations.often]
items = 12
items_between = 6
items_per_job = 8
every_versions = 3
samples = 4
temperature = 1.0
accuracy_threshold = 0.5

[evaluations.own]
items = 10
at_start = false

[evaluations.own.task]
source = "python"
function = "toy_products:products"
settings = {largest = 5}
reward = "exact"
"""


@pytest.mark.asyncio
async def test_a_mixture_is_trained_on_and_evaluated_under_several_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, modules = tmp_path / "work", tmp_path / "modules"
    for folder in (work, modules):
        folder.mkdir()
    (modules / "toy_products.py").write_text(OWN_TASK)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    path = write_toy(work, steps=STEPS)
    text = path.read_text()
    before, _, after = text.partition("[task]")
    _, _, after = after.partition("[workflow]")
    text = f"{before}{TABLES}\n[workflow]{after}"
    text = text.replace("[scheduler]", '[scheduler]\ntask_modules = ["toy_products"]')
    path.write_text(text)
    async with running(path, tmp_path / "run") as run:
        summary = await run.finish(within_s=60.0)
    assert summary.problems == ()
    assert counts(summary)["trained"] == STEPS * 4
    row = counts(summary, "eval")  # an in-between one gives way to the end
    assert row["scored"] + row["cancelled"] == row["submitted"] > 0
    [policy] = summary.policies
    found = {e.name: e for e in policy.evaluations}
    assert {name: (e.samples, e.items) for name, e in found.items()} == {
        "held-out": (1, 32),
        "often": (4, 12),
        "own": (1, 10),
    }
    chances = [found["often"].pass_at[k] for k in ("1", "2", "4")]
    assert chances == sorted(chances)
    assert chances[0] == pytest.approx(found["often"].accuracy_after)
    lines = [
        json.loads(line)
        for line in next((tmp_path / "run").rglob("metrics.jsonl")).read_text().splitlines()
    ]
    steps: dict[str, list[int]] = {}
    for line in lines:
        if line["type"] == "evaluation":
            steps.setdefault(line["name"], []).append(line["step"])
    # One that agents have moved past starts over at a newer version, so not all begin at 0.
    assert all(found[-1] == STEPS for found in steps.values())
    assert steps["own"] == [STEPS]
