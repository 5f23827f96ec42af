"""A whole deployment of real processes with the fake engine and the numpy trainer, time constants
scaled down, for the failure runs. The torch runs use the same driver with other tables."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from farflow.local import LocalDeployment
from farflow.run_folder import RunFolder
from farflow.summary import RunSummary
from farflow.up import Options, Prepared, finish, prepare, settled
from farflow.up_config import up_config
from scheduler.operator import Operator
from transport.errors import LinkError
from transport.status import PolicyStatus, SchedulerStatus

POLL_S = 0.05

TOY = """
[run]
name = "toy"
seed = 1

[policies.solver]
model = "model"
trainer = "numpy"
steps = {steps}
batch_groups = 4
max_policy_lag = 4
checkpoint_every = 5

[policies.solver.settings]
lr = 0.01

[task]
source = "jsonl"
path = "items.jsonl"
reward = "exact"
held_out_one_in = 4

[workflow]
reference = "single_turn"
policies = ["solver"]
group_size = 4
max_new_tokens = 12

[evaluation]
items = 32
items_per_job = 16

[scheduler]
heartbeat_s = 0.2
lost_after_s = 1.2
lease_s = 4.0
offer_timeout_s = 1.0
reconnect_grace_s = 2.0
retry_backoff_s = 0.1
retry_backoff_max_s = 1.0

[agent]
engine = "fake"
slots = 16
drain_s = 1.0

[agent.fake]
tokens_per_s = 100.0
first_token_s = 0.05
mean_tokens = 8.0

[trainer]
fetch_timeout_s = 2.0

[local]
start_s = 30.0
stop_s = 5.0
settle_s = 8.0

{agents}
"""

LOCAL_AGENTS = """
[local.agents.near]
[local.agents.far]
"""


def write_toy(folder: Path, *, steps: int = 30, agents: str = LOCAL_AGENTS) -> Path:
    """The file of a toy run with its model and items; returns its path."""
    from cloud_trainer.numpy_trainer import make_numpy_model

    make_numpy_model(folder / "model", seed=3)
    items = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(12) for b in range(12)]
    lines = [json.dumps(item) for item in items]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "toy.toml"
    path.write_text(TOY.format(steps=steps, agents=agents), encoding="utf-8")
    return path


class Running:
    """A deployment in progress, and what a test wants to know of it."""

    def __init__(self, prepared: Prepared, deployment: LocalDeployment, operator: Operator) -> None:
        self.prepared = prepared
        self.deployment = deployment
        self.operator = operator

    async def status(self) -> SchedulerStatus | None:
        """None while the scheduler does not answer."""
        if self.deployment.failure.done():
            raise AssertionError(self.deployment.failure.result())
        try:
            status = await self.operator.status()
        except LinkError:
            return None
        self.deployment.tend(
            next(r.state for r in status.runs if r.name == self.prepared.spec.name)
        )
        return status

    async def until(
        self, what: str, condition: Callable[[SchedulerStatus], bool], within_s: float
    ) -> SchedulerStatus:
        """Poll until the condition holds; names what it waited for when it does not."""
        status = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    status = await self.status() or status
                    if status is not None and condition(status):
                        return status
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"not within {within_s} s: {what}; last: {status}") from None

    def policy(self, status: SchedulerStatus, name: str = "solver") -> PolicyStatus:
        run = next(r for r in status.runs if r.name == self.prepared.spec.name)
        return next(p for p in run.policies if p.policy.endswith(f"/{name}"))

    async def reach_step(self, step: int, within_s: float = 20.0) -> SchedulerStatus:
        return await self.until(f"step {step}", lambda s: self.policy(s).step >= step, within_s)

    async def finish(self, within_s: float = 25.0) -> RunSummary:
        """Wait for the run's end and everybody's last version, and do the audit of ``up``."""
        name = self.prepared.spec.name

        def ended(status: SchedulerStatus) -> bool:
            run = next(r for r in status.runs if r.name == name)
            return run.state == "finished" and settled(status, run, self.deployment)

        status = await self.until("the run finished and settled", ended, within_s)
        await self.deployment.stop(5.0)
        return finish(self.deployment, status, wall_s=0.0)


@asynccontextmanager
async def running(
    file: Path, folder: Path, overrides: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Running]:
    """Start everything of ``file`` and submit its run; everything is stopped at the end.
    ``options`` go to ``LocalDeployment``."""
    prepared = prepare(file, Options(overrides=overrides, folder=folder))
    config, agents = up_config(prepared.data)
    deployment = LocalDeployment(
        RunFolder(prepared.path), overrides, config, agents, prepared.spec, **options
    )
    try:
        await deployment.start()
        async with Operator(deployment.transport(), deployment.operator_key) as operator:
            await operator.submit(prepared.spec)
            yield Running(prepared, deployment, operator)
    finally:
        await deployment.stop(5.0)


def counts(summary: RunSummary, kind: str = "train") -> Mapping[str, int]:
    """The accounting row of one kind as a mapping."""
    row = next(r for r in summary.accounting if r.kind == kind)
    return {
        name: getattr(row, name) for name in row.__struct_fields__ if name not in ("policy", "kind")
    }
