"""Settings of a run's file that could never do what they are there for.

Each is right by itself and the run would go on, but nothing would be learned, or the setting would
change nothing. Looked for where a file is read; a scheduler takes such runs, which tests and
simulations want.
"""

from collections.abc import Iterator

from cloud_trainer.presets import resolve_settings
from edge_agent.workflow_registry import SHIPPED
from farflow.workflow_settings import is_program
from scheduler.core.replay_pool import share
from transport.runs import PolicySpec, RunSpec


def idle_faults(run: RunSpec) -> Iterator[str]:
    """Every such setting with its key and the remedy. The policies' settings have been checked."""
    trained = {name: policy for name, policy in run.policies.items() if policy.trained}
    if not trained:
        yield "policies: none is trained; remove trained = false from one that the workflow uses"
    for name, policy in trained.items():
        yield from _replay_faults(policy, f"policies.{name}")
        yield from _group_faults(run, name, policy)
        if run.workflow.temperature == 0.0 and policy.trainer != "emulated":
            yield "workflow.temperature: is 0 (greedy); learning needs sampled sequences, use 1.0"


def _replay_faults(policy: PolicySpec, where: str) -> Iterator[str]:
    replay, groups = policy.data.replay, policy.batch_groups
    if replay.ratio == 0.0:
        return
    says = f"{where}.data.replay.ratio: is {replay.ratio:g}"
    if policy.max_policy_lag == 0:
        yield (
            f"{says}, but with max_policy_lag = 0 a group that was trained on is too old for the"
            " next batch; raise max_policy_lag, or set ratio = 0"
        )
    elif share(replay, groups) == 0:
        yield (
            f"{says}, less than one group of a batch of {groups}; raise it or batch_groups, or set"
            " ratio = 0"
        )


def _group_faults(run: RunSpec, name: str, policy: PolicySpec) -> Iterator[str]:
    """A workflow of a user's may return several sequences of a policy per sibling."""
    reference = run.workflow.reference
    shipped = reference in SHIPPED or is_program(reference)
    if run.workflow.group_size > 1 or not shipped or policy.trainer == "emulated":
        return
    if policy.trainer == "torch" and resolve_settings(policy.settings).baseline == "critic":
        return
    yield (
        f"workflow.group_size: is 1, but policies.{name} compares the rewards of a group, so every"
        " advantage would be 0; use 2 or more"
        + (', or baseline = "critic" (preset = "ppo")' if policy.trainer == "torch" else "")
    )
