"""``farflow up examples/solve_and_verify.toml``, shortened: a solver and a verifier of torch learn
beside each other in a whole deployment."""

from pathlib import Path

import pytest

from bench.learning import up
from bench.solve_and_verify import EXAMPLE, POLICIES

STEPS = 25
ITEMS = 256
EVALUATIONS = ("evaluation", "evaluations.alone", "evaluations.best-of-4", "evaluations.verdicts")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_learn_and_the_verifiers_choice_is_better_than_the_solver(tmp_path: Path) -> None:
    changes = [f"policies.{name}.steps={STEPS}" for name in POLICIES]
    for name in EVALUATIONS:
        changes += [f"{name}.items={ITEMS}", f"{name}.every_versions=0"]
    summary = up(EXAMPLE, tmp_path / "run", *changes)
    assert summary["problems"] == []
    assert {one["steps"] for one in summary["policies"]} == {STEPS}
    found = {one["name"]: one for one in summary["policies"][0]["evaluations"]}
    gains = {n: one["accuracy_after"] - one["accuracy_before"] for n, one in found.items()}
    assert gains["alone"] >= 0.1, gains
    assert gains["verdicts"] >= 0.1, gains
    assert gains["best-of-4"] >= 0.1, gains
    best = found["best-of-4"]["accuracy_after"]
    assert best >= found["alone"]["accuracy_after"] + 0.05
