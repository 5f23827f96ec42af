"""An agent dies between two turns and another goes on: the whole scheduler, its trajectory log and
weight store as processes, two agents with fake engines, real sockets with CURVE."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, deployment
from publisher import Trainer
from service_world import POLICY, WAIT_S, PlaneLink, until

from edge_agent.config import AgentConfig, AgentTable, FakeEngineTable
from edge_agent.daemon import run_daemon
from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.fake import FakeEngine
from scheduler.core.settings import TRAJECTORY_LOG
from transport.keys import trainer_name
from transport.messages import (
    BatchGrant,
    BatchRequest,
    Body,
    BodyRequest,
    Hello,
    Plane,
    Role,
    TrainerInventory,
    Welcome,
)
from transport.runs import PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.runtime.settings import TransportConfig
from transport.trajectory import TrajectoryGroup, expand, unpack
from transport.zmq_links import ZmqNetwork

GROUP = 2
TURNS = 3


class Watched(FakeEngine):
    """Notes what it has drawn; draws nothing of turns after ``last``."""

    def __init__(self, drawn: list[tuple[str, str]], name: str, last: int) -> None:
        super().__init__(8, FakeEngineTable(tokens_per_s=1e4, first_token_s=0.0, mean_tokens=6.0))
        self.drawn, self.name, self.last = drawn, name, last

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        turn = request.request_id.rpartition("/turn-")[2]
        if int(turn.partition(".")[0]) > self.last:
            await asyncio.Event().wait()
        completions = await super().generate(request)
        self.drawn.append((self.name, turn))
        return completions


def run_spec(folder: Path) -> RunSpec:
    """One group that is never right, so that every sibling has all its turns."""
    items = folder / "items.jsonl"
    items.write_text(
        "".join(json.dumps({"prompt": f"{i} + 1 =", "answer": "never"}) + "\n" for i in range(50))
    )
    return RunSpec(
        name="sums",
        policies={"solver": PolicySpec(model="model", batch_groups=1)},
        task=TaskSpec(source="jsonl", path=str(items), reward="exact"),
        workflow=WorkflowSpec(
            reference="multi_turn",
            policies=("solver",),
            group_size=GROUP,
            settings={"turns": TURNS},
        ),
        max_groups=1,
    )


class Box:
    """An agent daemon with a network of its own."""

    def __init__(self, world: Deployment, name: str, engine: FakeEngine) -> None:
        keys = world.folder / "keys"
        config = AgentConfig(
            transport=TransportConfig(
                control_port=world.ports["control"],
                trajectories_port=world.ports["trajectories"],
                weights_port=world.ports["weights"],
                keys=str(keys),
            ),
            agent=AgentTable(
                folder=str(world.folder / f"agent-{name}"),
                key=str(keys / f"{name}.toml"),
                engine="fake",
                slots=8,
                drain_s=1.0,
            ),
        )
        self.stop = asyncio.Event()
        self.network = ZmqNetwork()
        life = run_daemon(
            config,
            stop=self.stop,
            on_ready=lambda facts: None,
            network=self.network,
            engines=lambda config, clock: engine,
        )
        self.task = asyncio.create_task(life)

    async def die(self) -> None:
        """Without a word."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.network.close()


async def counted(operator: Any, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (await operator.status()).counters.get(name):
            await asyncio.sleep(0.05)


async def trainer_of(world: Deployment) -> PlaneLink:
    trainer = world.link(trainer_name(POLICY))
    inventory = TrainerInventory(policy=POLICY, checkpoint_step=0, checkpoint_version=0)
    await trainer.send(Hello(role=Role.TRAINER, incarnation=1, build="b", trainer=inventory))
    await trainer.expect(Welcome)
    await trainer.send(BatchRequest(policy=POLICY, step=1, groups=1, head_version=0))
    return trainer


async def granted(world: Deployment, trainer: PlaneLink) -> TrajectoryGroup:
    [grant] = await trainer.expect(BatchGrant)
    fetching = world.link(trainer_name(POLICY), Plane.TRAJECTORIES)
    await fetching.send(BodyRequest(digests=(grant.groups[0].digest,)))
    await until(lambda: bool(fetching.received))
    [(body, payload)] = fetching.received
    assert isinstance(body, Body)
    return unpack(b"".join(payload))


@pytest.mark.asyncio
async def test_a_second_agent_goes_on_at_turn_two_and_no_turn_is_drawn_twice(
    tmp_path: Path,
) -> None:
    drawn: list[tuple[str, str]] = []
    async with deployment(tmp_path, lost_after_s=1.0) as world, world.operator() as operator:
        await operator.submit(run_spec(tmp_path))
        publisher = Trainer(tmp_path)
        offering = world.link(trainer_name(POLICY), Plane.WEIGHTS)
        trainer = await trainer_of(world)
        await publisher.publish(offering, publisher.first)
        first = Box(world, "a", Watched(drawn, "a", last=1))
        await counted(operator, "partials.kept")
        assert drawn == [("a", "1")]
        await first.die()
        await publisher.publish(offering, publisher.next(1, 0))
        second = Box(world, "b", Watched(drawn, "b", last=TURNS))
        group = await granted(world, trainer)
        assert group.attempt.endswith("#2")
        assert sorted(drawn) == [
            ("a", "1"),
            *(("b", f"{turn}.{n}") for turn in (2, 3) for n in (1, 2)),
        ]
        for sequence in group.sequences:
            policies, versions = expand(sequence.segments)
            by_turn = [v for p, v in zip(policies, versions, strict=True) if p >= 0]
            assert by_turn == sorted(by_turn)
            assert set(by_turn) == {0, 1}
            assert [p for _, p, _ in sequence.segments].count(-1) == TURNS - 1
        status = await operator.status()
        assert status.counters["partials.resumed"] == 1
        turns = tmp_path / "scheduler" / TRAJECTORY_LOG / "turns"
        await until(lambda: not list(turns.glob("*.turns")), "the turns are dropped")
        second.stop.set()
        assert await asyncio.wait_for(second.task, WAIT_S) == 0
        await second.network.close()
