"""What a person makes in a clone by following the documentation does not end up in a commit."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")


def git(*argv: str) -> list[str]:
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def test_secrets_state_and_downloads_are_ignored() -> None:
    made = [
        "cloud/deployment.toml",
        "cloud/keys/server.toml",
        "keys/trainer-words-solver.toml",
        "keys/signing/trainer-words-solver.toml",
        "elsewhere/keys/agent.toml",
        "boxes.token",
        "cloud-2/box1.token",
        "agent/agent.toml",
        "trainer/checkpoints/step-00000001/trainer",
        "examples/gpu-boxes/qwen3-0.6b/model.safetensors",
        "runs/arithmetic/scheduler/events",
    ]
    assert git("check-ignore", "--no-index", *made) == made


def test_nothing_that_is_tracked_is_ignored() -> None:
    assert git("ls-files", "-ci", "--exclude-standard") == []
