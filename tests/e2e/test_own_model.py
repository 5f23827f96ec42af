"""``examples/own-model/own.toml``: a Hugging Face folder and a JSONL file, trained by torch."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_by_hand import ROOT, call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLE = ROOT / "examples" / "own-model"


@pytest.mark.asyncio
async def test_a_model_folder_and_a_data_file_are_trained(tmp_path: Path) -> None:
    few = ("--set", "policies.solver.steps=2", "--set", "evaluation.items=16")
    said = await call("up", str(EXAMPLE / "own.toml"), "--folder", "run", *few, cwd=tmp_path)
    assert "run own: finished (completed)" in said
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if one["type"] == "step"]
    assert [one["step"] for one in steps] == [1, 2]
    assert (tmp_path / "run" / "models" / "solver" / "model.safetensors").is_file()
    items = (EXAMPLE / "items.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in items]
    assert len(set(prompts)) == len(prompts)
