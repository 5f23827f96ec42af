"""``examples/arithmetic-vllm.toml``, shorter: one vLLM and two torch agents teach one model, with
the torch trainer. Two minutes on two cores that others use, too."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from bench.toy import counts, running
from cloud_trainer.checkpoints import lineage_ids
from scheduler.core.events import FromService, FromTrainer
from scheduler.event_log import RecordedTerm, recorded_terms, unpack_event
from transport.messages import StepReport, TrajectoriesStored

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic-vllm.toml"
STEPS = 30
LEARN_WITHIN_S = 240.0
START_WITHIN_S = 300.0
SHORTER = (
    f"policies.solver.steps={STEPS}",
    "evaluation.items=256",
    "evaluation.every_versions=0",
    "local.agents.near.join_after_s=0.0",
    "local.agents.far.join_after_s=0.0",
)
AGENTS = {"box", "near", "far"}


def told(events: Path):
    """Which agent made each job's group, and by agent how far the trainer's log-probabilities are
    from the recorded ones: tokens compared, mean difference and k3 in nats a token."""
    agents, found = {}, defaultdict(list)
    for term in recorded_terms(events):
        for batch in RecordedTerm(term).batches():
            for _, packed in batch.inputs:
                match unpack_event(packed):
                    case FromService(message=TrajectoriesStored(summaries=summaries)):
                        agents.update((each.job, each.agent) for each in summaries)
                    case FromTrainer(message=StepReport(drifts=of_step)):
                        for drift in of_step:
                            row = (drift.tokens, drift.difference, drift.kl)
                            found[agents[drift.job]].append(row)
    means = {}
    for agent, rows in found.items():
        tokens, difference, kl = np.array(rows).T
        total = tokens.sum()
        means[agent] = (int(total), tokens @ difference / total, tokens @ kl / total)
    return agents, means


@pytest.mark.asyncio
async def test_one_vllm_and_two_torch_agents_teach_one_model(tmp_path):
    """Nothing is placed before all three serve: how long vLLM takes to start says nothing."""
    async with running(EXAMPLE, tmp_path / "run", SHORTER) as run:
        await run.operator.command("arithmetic-vllm", "pause")
        await run.until(
            "all serve version 0",
            lambda status: {a.name for a in status.agents if a.versions} == AGENTS,
            START_WITHIN_S,
        )
        await run.operator.command("arithmetic-vllm", "resume")
        summary = await run.finish(LEARN_WITHIN_S)
        events = run.deployment.folder.scheduler / "events"
        lineage = lineage_ids(run.deployment.folder.trainer("solver"))

    assert summary.problems == ()  # among them: weights that are not the published ones, bit by bit
    assert {each.agent for each in summary.agents if each.equal} == AGENTS
    assert {each.version for each in summary.agents} == {STEPS}
    assert counts(summary)["trained"] == STEPS * 32
    (policy,) = summary.policies
    assert policy.accuracy_before <= 0.5
    assert policy.accuracy_after >= policy.accuracy_before + 0.2

    agents, means = told(events)
    trained = Counter(agents[job] for _, jobs in lineage for job in jobs)
    print(f"accuracy {policy.accuracy_before:.3f} to {policy.accuracy_after:.3f}", trained)  # noqa: T201
    for agent, (tokens, difference, kl) in sorted(means.items()):
        print(f"{agent}: mean {difference:.4f}, k3 {kl:.2e} over {tokens} tokens")  # noqa: T201
    assert trained["box"] >= 5
    _, difference, kl = means["box"]
    assert 0 < difference < 0.03  # nothing else than torch could agree to the last bit
    assert kl < 0.003
