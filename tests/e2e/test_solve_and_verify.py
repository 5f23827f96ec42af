"""``farflow up examples/solve_and_verify.toml``, shortened: a solver and a verifier of torch learn
beside each other in a whole deployment."""

from pathlib import Path

import pytest

from bench.learning import up
from bench.solve_and_verify import EXAMPLE, NAMES, POLICIES

STEPS = 60
ITEMS = 256


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_learn_and_the_verifiers_choice_is_better_than_the_solver(tmp_path: Path) -> None:
    changes = []
    for name in POLICIES:
        settings = f"policies.{name}.settings"
        changes += [f"policies.{name}.steps={STEPS}", f"{settings}.warmup_steps=5"]
        changes += [f"{settings}.lr=1.5e-4"]
    for name in NAMES:
        table = "evaluation" if name == "held-out" else f"evaluations.{name}"
        changes += [f"{table}.items={ITEMS}", f"{table}.every_versions=0"]
    summary = up(EXAMPLE, tmp_path / "run", *changes)
    assert summary["problems"] == []
    assert {one["steps"] for one in summary["policies"]} == {STEPS}
    found = {one["name"]: one for one in summary["policies"][0]["evaluations"]}
    gains = {n: one["accuracy_after"] - one["accuracy_before"] for n, one in found.items()}
    assert gains["alone"] >= 0.05, gains
    assert gains["verdicts"] >= 0.1, gains
    assert gains["best-of-8"] >= 0.05, gains
    assert found["best-of-8"]["accuracy_after"] > found["alone"]["accuracy_after"]
