"""A fake engine, a spool and an attempt runner, for tests of workflows."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from cloud_trainer.numpy_trainer import make_numpy_model
from edge_agent.attempt_runner import AttemptRunner
from edge_agent.config import FakeEngineTable
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import AttemptCrashed, Event, GroupGenerated, GroupSpooled
from edge_agent.engines.fake import FakeEngine
from edge_agent.rewards import RewardPool
from edge_agent.spool import Spool
from edge_agent.workflow import Workflow, WorkflowFunction
from transport.messages import Item, LeaseOffer, RewardSpec
from transport.runtime.clock import SystemClock
from transport.trajectory import TrajectoryGroup, unpack

SOLVER, JUDGE = "run/solver", "run/judge"
Run = Callable[..., Awaitable[list[Event]]]


def offer(**changes: Any) -> LeaseOffer:
    values: dict[str, Any] = {
        "attempt": "run/t-000001#1",
        "fence": (1, 1),
        "job": "run/t-000001",
        "kind": "train",
        "items": (Item(index=4, prompt="3 + 4 =", answer="7"),),
        "group_size": 6,
        "workflow": "w",
        "settings": {"turns": 2},
        "policies": {"solver": SOLVER},
        "reward": RewardSpec(name="exact"),
        "max_new_tokens": 10,
        "temperature": 1.0,
        "seed": 11,
        "lease_s": 10.0,
    }
    return LeaseOffer(**{**values, **changes})


class Bench:
    """A fake engine, a spool and a runner for one workflow at a time."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine(64, FakeEngineTable(tokens_per_s=1e5, first_token_s=0.0))
        self.spool = Spool(folder / "spool", 2**20)
        self.model = make_numpy_model(folder / "model")
        self.events: list[Event] = []
        self.generated = asyncio.Event()
        self.rewards = RewardPool(1.0)
        self.rollouts = 1

    def runner(
        self, function: WorkflowFunction, timeout_s: float = 5.0, unwind_s: float = 5.0
    ) -> AttemptRunner:
        return AttemptRunner(
            self.engine,
            self.rewards,
            self.spool,
            {"w": Workflow("w", "", function, self.rollouts)},
            clock=SystemClock(),
            timeout_s=timeout_s,
            feed=self.feed,
            unwind_s=unwind_s,
        )

    def promising(self, rollouts: int) -> "Bench":
        """The same, with a workflow of so many rollouts per sibling."""
        self.rollouts = rollouts
        return self

    def feed(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, GroupGenerated):
            self.generated.set()

    async def start(self) -> None:
        await self.engine.start()
        for policy in (SOLVER, JUDGE):
            await self.engine.load_policy(policy, self.model, 3)

    async def run(
        self,
        function: WorkflowFunction,
        timeout_s: float = 5.0,
        unwind_s: float = 5.0,
        **changes: Any,
    ) -> list[Event]:
        """The events of one attempt, to its end."""
        await self.start()
        runner = self.runner(function, timeout_s, unwind_s)
        async with asyncio.TaskGroup() as tasks:
            runner.start(RunAttempt(offer=offer(**changes), queued_s=0.5), tasks)
        await self.engine.close()
        return self.events

    def group(self) -> TrajectoryGroup:
        spooled = self.events[-1]
        assert isinstance(spooled, GroupSpooled)
        return unpack(self.spool.read(spooled.summary.digest))


def crash(events: Sequence[Event]) -> AttemptCrashed:
    last = events[-1]
    assert isinstance(last, AttemptCrashed), last
    return last
