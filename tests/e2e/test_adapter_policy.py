"""A policy that is published as an adapter, through a whole deployment with torch."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.toy import counts, running
from edge_agent.weight_copy import WeightCopies
from farflow.weights_commands import weights_group
from scheduler.weight_reading import StoreReader
from transport.weights.folder import read_model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's
]

MODEL = Path(__file__).parents[2] / "examples" / "models" / "arithmetic-1m"
STEPS, RANK = 3, 8
POLICY = "adapted/solver"
RUN = f"""
[run]
name = "adapted"
seed = 0

[policies.solver]
model = "{MODEL}"
trainer = "torch"
steps = {STEPS}
batch_groups = 8
max_policy_lag = 2
checkpoint_every = 2

[policies.solver.settings]
lr = 1e-3
warmup_steps = 0
lora = {{ rank = {RANK}, targets = ["q_proj", "v_proj"], publish = "adapter" }}

[task]
source = "reasoning-gym"
dataset = "chain_sum"

[task.settings]
min_terms = 2
max_terms = 2
min_digits = 2
max_digits = 2

[workflow]
reference = "single_turn"
policies = ["solver"]
group_size = 4
max_new_tokens = 8

[evaluation]
items = 16
items_per_job = 16
at_start = false

[local.agents.near]
[local.agents.far]

[agent]
engine = "torch"
slots = 32
"""


@pytest.mark.asyncio
async def test_three_steps_of_an_adapter_are_bit_for_bit_everywhere(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    file = tmp_path / "run.toml"
    file.write_text(RUN, encoding="utf-8")
    async with running(file, tmp_path / "run") as run:
        summary = await run.finish(360.0)
        folder = run.deployment.folder
    assert summary.problems == ()
    assert counts(summary)["trained"] == STEPS * 8
    versions = folder.scheduler / "weight-store" / "versions"
    shelf = StoreReader(versions).shelf(POLICY)
    assert sorted(shelf.versions) == list(range(STEPS + 1))
    head = dict(shelf.arena(STEPS).tensors)
    assert head != dict(shelf.arena(0).tensors)
    for agent in ("near", "far"):
        copies = WeightCopies(folder.agent(agent) / "weights", trusted={})
        assert copies.held()[POLICY].version == STEPS
        assert dict(copies.tensors(POLICY)) == head
    assert read_model_folder(folder.models / "solver") == head
    # Not even version 0 with everything that travels with it is a fifth of the model.
    files = [entry for stored in shelf.versions.values() for entry in stored.manifest.files]
    assert max(entry.size_bytes for entry in files) < model_bytes() / 5
    exported = tmp_path / "exported"
    argv = ["export", POLICY, str(STEPS), str(exported), "--store", str(versions), "--json"]
    said = CliRunner().invoke(weights_group, argv, catch_exceptions=False)
    assert json.loads(said.output)["digest"] == shelf.version(STEPS).manifest.digest
    tokens = torch.tensor([[5, 60, 70, 201, 9]])
    found = []
    for place in (exported, folder.models / "solver"):
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        with torch.no_grad():
            before = base(input_ids=tokens).logits
            model = peft.PeftModel.from_pretrained(base, place).eval()
            found.append(model(input_ids=tokens).logits)
    assert torch.equal(*found)
    assert not torch.equal(found[0], before)


def model_bytes() -> int:
    return sum(tensor.size_bytes for tensor in read_model_folder(MODEL).values())
