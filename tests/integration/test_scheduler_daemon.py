"""The scheduler daemon: its loop against real SQLite, and the whole of it with its services, task
sources and CURVE sockets."""

import asyncio
import hashlib
import json
import os
import random
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from deployment import deployment
from publisher import Trainer
from service_world import POLICY, WAIT_S, until

from scheduler import children
from scheduler.children import overrides_of
from scheduler.config import SchedulerConfig, SchedulerTable
from scheduler.control_plane import fitting
from scheduler.core.effects import Effect, RecordEvaluation, RecordStep, Reply, RunEnded
from scheduler.core.events import Event, FromAgent, FromOperator
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import CoreSettings
from scheduler.daemon import core_settings
from scheduler.decider import Decider
from scheduler.event_log import (
    EventLog,
    EventLogStart,
    RecordedTerm,
    effects_digest,
    recorded_terms,
    unpack_event,
)
from scheduler.metrics_file import MetricsFiles
from scheduler.operator import RequestRefused
from scheduler.service import Worker
from scheduler.store import SchedulerStore
from scheduler.task_items import is_held_out
from scheduler.tokens import revoke_key
from transport.envelope import CONTROL_FRAME_BYTES
from transport.errors import PeerUnreachable, StoreError
from transport.keys import KeyPair, trainer_name
from transport.messages import (
    AgentInventory,
    BatchGrant,
    BatchRequest,
    BodyRequest,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    LeaseOffer,
    LeaseReply,
    Plane,
    Refuse,
    Role,
    RunCommand,
    RunSubmit,
    StatusReply,
    StatusRequest,
    TrainerInventory,
    TrajectoryAck,
    TrajectoryPut,
    VersionServing,
    WeightsPlan,
    WeightsRequest,
    Welcome,
)
from transport.runs import (
    AlgorithmSpec,
    DataSpec,
    EvaluationSpec,
    PolicySpec,
    RunSpec,
    TaskSpec,
    WorkflowSpec,
)
from transport.runtime.clock import ManualClock, SystemClock
from transport.runtime.settings import RelayAddress, TransportConfig
from transport.status import AgentStatus, EvaluationStatus, RunStatus, SchedulerStatus, StepStatus


def run_spec(folder: Path, name: str = "sums", path: str = "items.jsonl") -> RunSpec:
    items = folder / "items.jsonl"
    if not items.exists():
        lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(50)]
        items.write_text("\n".join(lines) + "\n")
    return RunSpec(
        name=name,
        policies={"solver": PolicySpec(model="model", batch_groups=2)},
        task=TaskSpec(source="jsonl", path=str(folder / path), reward="exact"),
        workflow=WorkflowSpec(policies=("solver",), group_size=2),
        evaluation=EvaluationSpec(items=4, items_per_job=4),
    )


# ---- the loop --------------------------------------------------------------------------------


class Loop:
    """A decider with its store, and what it has executed."""

    def __init__(self, folder: Path, clock: ManualClock | SystemClock | None = None) -> None:
        self.folder = folder
        self.store = SchedulerStore.open(folder)
        self.writer = Worker("test-writer")
        self.event_log = EventLog(folder / "events")
        self.seed = 99
        self.rows = list(self.store.rows())
        self.core = SchedulerCore(
            CoreSettings(),
            term=self.store.term,
            rng=random.Random(self.seed),
            build="b",
            rows=self.rows,
            now=self.store.now,
        )
        self.executed: list = []
        self.decider = Decider(
            self.core,
            self.store,
            self.writer,
            self.event_log,
            clock or SystemClock(),
            self.executed.append,
        )
        self.tasks: list[asyncio.Task] = []

    def begin_log(self) -> None:
        start = EventLogStart(
            build="b",
            term=self.store.term,
            now=self.store.now,
            seed=self.seed,
            settings=CoreSettings(),
            wall_s=0.0,
            rows=len(self.rows),
        )
        self.event_log.begin(start, self.rows)

    def start(self) -> None:
        parts = self.decider.parts()
        self.tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]

    async def stop(self) -> list[BaseException | None]:
        for task in self.tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.writer.close()
        self.event_log.close()
        self.store.close()
        return outcomes

    def replies(self) -> list[Reply]:
        return [effect for effect in self.executed if isinstance(effect, Reply)]


@pytest.mark.asyncio
async def test_effects_wait_for_the_disk_and_leave_in_order(tmp_path):
    loop = Loop(tmp_path)
    loop.start()
    gate = threading.Event()
    blocked = asyncio.create_task(loop.writer.run(gate.wait))
    loop.decider.put(FromOperator("op", 1, RunSubmit(run=run_spec(tmp_path))))
    loop.decider.put(FromOperator("op", 2, StatusRequest()))
    for _ in range(20):
        await asyncio.sleep(0.005)
    loop.decider.put(FromOperator("op", 3, StatusRequest()))  # changes nothing, still waits
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert loop.executed == []
    gate.set()
    await blocked
    await until(lambda: len(loop.replies()) == 3)
    assert [reply.request for reply in loop.replies()] == [1, 2, 3]
    await loop.stop()
    again = Loop(tmp_path)
    assert {table for table, _, _ in again.rows} >= {"run", "policy"}
    await again.stop()


@pytest.mark.asyncio
async def test_a_disk_that_refuses_ends_the_loop_before_any_effect_of_the_lost_commit(tmp_path):
    loop = Loop(tmp_path)
    pages = loop.store._connection.execute("PRAGMA page_count").fetchone()[0]
    loop.store._connection.execute(f"PRAGMA max_page_count = {pages}")
    loop.start()
    big = msgspec.structs.replace(
        run_spec(tmp_path),
        policies={"solver": PolicySpec(model="x" * 100_000)},
    )
    loop.decider.put(FromOperator("op", 1, RunSubmit(run=big)))
    await asyncio.wait(loop.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    outcomes = await loop.stop()
    assert any(isinstance(outcome, StoreError) for outcome in outcomes)
    assert loop.executed == []


@pytest.mark.asyncio
async def test_an_event_that_breaks_the_core_ends_the_loop_and_only_the_log_keeps_it(
    tmp_path, monkeypatch
):
    loop = Loop(tmp_path)
    loop.begin_log()
    handle = loop.core.handle

    def breaks(event: Event, now: float) -> list[Effect]:
        effects = handle(event, now)
        if isinstance(event, FromAgent):
            raise OverflowError("out of range")
        return effects

    monkeypatch.setattr(loop.core, "handle", breaks)
    loop.start()
    loop.decider.put(FromOperator("op", 1, StatusRequest()))
    await until(lambda: len(loop.replies()) == 1)
    loop.decider.put(FromOperator("op", 2, RunSubmit(run=run_spec(tmp_path))))
    loop.decider.put(FromAgent("mallory", Heartbeat(sequence=1, sent_s=0.0)))
    await asyncio.wait(loop.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    await loop.writer.run(int)
    outcomes = await loop.stop()
    assert any(isinstance(outcome, OverflowError) for outcome in outcomes)
    assert len(loop.replies()) == 1
    [folder] = recorded_terms(tmp_path / "events")
    recorded = [unpack_event(e) for b in RecordedTerm(folder).batches() for _, e in b.inputs]
    assert recorded[-1] == FromAgent("mallory", Heartbeat(sequence=1, sent_s=0.0))
    again = Loop(tmp_path)
    assert not {table for table, _, _ in again.rows} & {"run", "agent"}
    await again.stop()


@pytest.mark.asyncio
async def test_the_cores_clock_stands_still_while_the_scheduler_is_down(tmp_path):
    clock = ManualClock(monotonic_s=1000.0)
    loop = Loop(tmp_path, clock)
    loop.start()
    clock.advance(40.0)
    loop.decider.put(FromOperator("op", 1, RunSubmit(run=run_spec(tmp_path))))
    await until(lambda: bool(loop.replies()))
    assert loop.decider.now() == 40.0
    await loop.stop()
    again = Loop(tmp_path, ManualClock(monotonic_s=5.0))
    assert (again.store.now, again.decider.now()) == (40.0, 40.0)
    await again.stop()


@pytest.mark.asyncio
async def test_what_was_recorded_replays_to_the_same_effects(tmp_path):
    loop = Loop(tmp_path)
    loop.begin_log()
    loop.start()
    inventory = AgentInventory(
        slots=4, hardware="cpu", engine="fake", workflows={"single_turn": "x"}, rewards=("exact",)
    )
    loop.decider.put(FromOperator("op", 1, RunSubmit(run=run_spec(tmp_path))))
    for incarnation in (1, 2, 1):
        hello = Hello(role=Role.AGENT, incarnation=incarnation, build="b", agent=inventory)
        loop.decider.put(FromAgent("a", hello))
    await until(lambda: bool(loop.executed))
    loop.decider.put(FromAgent("a", Heartbeat(sequence=1, sent_s=0.0)))
    loop.decider.put(FromOperator("op", 2, RunCommand(run="sums", command="stop")))
    await until(lambda: len(loop.replies()) == 2)
    await loop.stop()
    [folder] = recorded_terms(tmp_path / "events")
    term = RecordedTerm(folder)
    core = SchedulerCore(
        term.start.settings,
        term=term.start.term,
        rng=random.Random(term.start.seed),
        build=term.start.build,
        rows=term.rows(),
        now=term.start.now,
    )
    batches = list(term.batches())
    assert sum(len(batch.inputs) for batch in batches) >= 6
    for batch in batches:
        effects = []
        for now, packed in batch.inputs:
            effects += core.handle(unpack_event(packed), now)
        assert effects_digest(effects) == batch.effects_digest
    assert core.dump() == loop.core.dump()


# ---- small parts -----------------------------------------------------------------------------


def test_every_setting_that_core_and_table_share_reaches_the_core():
    table = SchedulerTable(lease_s=7.0, placement="nearest", retry_backoff_max_s=3.0)
    settings = core_settings(SchedulerConfig(scheduler=table))
    assert (settings.lease_s, settings.placement) == (7.0, "nearest")
    assert settings.retry_backoff_max_s == 3.0


def test_services_get_every_setting_as_it_was_resolved():
    from transport.runtime.config import load_config

    config = SchedulerConfig(
        transport=TransportConfig(
            control_port=1,
            keys="/a b/'\"keys",
            relays=(RelayAddress(name="eu", host="h"), RelayAddress(name="us", host="i", port=1)),
        ),
        scheduler=SchedulerTable(folder="ü\\x", trajectory_disk_bytes=7, work_grace_s=1.5),
    )
    overrides = overrides_of(config)[1::2]
    assert load_config(SchedulerConfig, [], overrides, environ={}).value == config


SLOW_TO_OPEN = """
import json, sys, time
time.sleep(1.5)
print(json.dumps({"port": 4711}), flush=True)
sys.stdin.read()
"""


@pytest.mark.asyncio
async def test_a_service_that_takes_long_to_open_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "slow_to_open.py").write_text(SLOW_TO_OPEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "_MODULES", {"weight-store": "slow_to_open"})
    monkeypatch.setattr(children, "READY_S", 0.5)
    services = children.Services(
        SchedulerConfig(scheduler=SchedulerTable(folder=str(tmp_path / "scheduler")))
    )
    (part,) = services.parts().values()
    keeping = asyncio.create_task(part)
    try:
        async with asyncio.timeout(15.0):
            assert await services.ports() == {"weight-store": 4711}
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def test_a_status_of_a_huge_fleet_is_cut_to_one_frame_and_says_so():
    agents = tuple(
        AgentStatus(
            name=f"agent-{number:05d}",
            state="ready",
            slots=64,
            running_sequences=3,
            leases=2,
            rtt_s=0.1,
            rate_tokens_s=30.0,
            tokens_generated=1,
            bytes_up=1,
            bytes_down=1,
            versions={POLICY: 4},
            digests={POLICY: "0" * 64},
            groups_done=1,
            attempts_failed=0,
        )
        for number in range(5000)
    )
    status = SchedulerStatus(term=1, build="b", uptime_s=0.0, runs=(), agents=agents, counters={})
    cut = fitting(status)
    assert len(msgspec.msgpack.encode(StatusReply(status=cut))) < CONTROL_FRAME_BYTES
    assert 100 < len(cut.agents) == 5000 - cut.counters["status.agents_left_out"]
    small = msgspec.structs.replace(status, agents=agents[:3])
    assert fitting(small) is small


def test_a_status_of_very_many_runs_is_cut_to_the_latest_and_says_so():
    runs = tuple(
        RunStatus(name=f"r{n}", state="running", reason="x" * 90, policies=(), accounting=())
        for n in range(3000)
    )
    status = SchedulerStatus(term=1, build="b", uptime_s=0.0, runs=runs, agents=(), counters={})
    cut = fitting(status)
    assert len(msgspec.msgpack.encode(StatusReply(status=cut))) < CONTROL_FRAME_BYTES
    assert 100 < len(cut.runs) == 3000 - cut.counters["status.runs_left_out"]
    assert cut.runs[-1].name == "r2999"


def test_metrics_are_one_whole_object_per_line(tmp_path):
    step = StepStatus(
        policy=POLICY,
        step=1,
        version=1,
        reward_mean=0.5,
        policy_lag_mean=0.0,
        policy_lag_max=0,
        response_tokens=10,
        busy_s=1.0,
        waiting_s=0.5,
        delta_bytes=None,
        full_bytes=None,
        at_s=3.0,
    )
    evaluation = EvaluationStatus(
        policy=POLICY, version=0, step=0, items=4, scored=4, accuracy=0.25, done=True
    )
    path = tmp_path / "runs" / "sums" / "metrics.jsonl"
    files = MetricsFiles(tmp_path, ManualClock())
    files.record(RecordStep("sums", step, {"loss": 0.1}))
    with open(path, "ab") as file:
        file.write(b'{"type": "step", "po')  # death in mid-line
    files = MetricsFiles(tmp_path, ManualClock())
    files.record(RecordEvaluation("sums", evaluation))
    files.record(RunEnded("sums", "completed", cost_usd=0.5, tokens=9))
    files.record(RunEnded("../../elsewhere", "completed"))
    lines = path.read_text().splitlines()
    first, torn, second, last = lines[0], lines[1], lines[2], lines[3]
    assert json.loads(first)["metrics"] == {"loss": 0.1}
    assert json.loads(first)["type"] == "step"
    assert torn == '{"type": "step", "po'
    assert json.loads(second) | {"wall_s": 0} == {
        "type": "evaluation",
        **msgspec.to_builtins(evaluation),
        "wall_s": 0,
    }
    end = {"type": "end", "reason": "completed", "cost_usd": 0.5, "tokens": 9, "wall_s": 0}
    assert (json.loads(last) | {"wall_s": 0}, len(lines)) == (end, 4)
    assert not (tmp_path.parent / "elsewhere").exists()


# ---- the whole daemon ------------------------------------------------------------------------


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def hello(incarnation: int = 1, role: Role = Role.AGENT) -> Hello:
    inventory = AgentInventory(
        slots=8,
        hardware="cpu",
        engine="fake",
        workflows={"single_turn": "x"},
        rewards=("exact",),
    )
    return Hello(role=role, incarnation=incarnation, build="b", agent=inventory)


@pytest.mark.asyncio
async def test_a_daemon_serves_operators_and_agents_by_their_keys_and_stops_in_order(tmp_path):
    async with deployment(tmp_path) as world, world.operator() as operator:
        assert len(set(world.ports.values())) == 3
        await operator.submit(run_spec(tmp_path))
        await operator.submit(run_spec(tmp_path))
        changed = msgspec.structs.replace(run_spec(tmp_path), seed=5)
        with pytest.raises(RequestRefused, match=r"^run\."):
            await operator.submit(changed)
        data = DataSpec(filters=(AlgorithmSpec(name="os:getpid"),))
        policies = {"solver": msgspec.structs.replace(changed.policies["solver"], data=data)}
        foreign = msgspec.structs.replace(changed, name="foreign", policies=policies)
        with pytest.raises(RequestRefused, match=r"filters\[0\]\.name: module 'os' is not one"):
            await operator.submit(foreign)
        with pytest.raises(RequestRefused, match=r"run\.unknown: .*live runs: sums"):
            await operator.command("subs", "pause")

        async with world.operator("viewer", answer_s=0.5) as viewer:
            assert (await viewer.status()).term == 1
            with pytest.raises(PeerUnreachable, match="no answer within"):
                await viewer.command("sums", "stop")

        agent = world.link("a")
        await agent.send(Heartbeat(sequence=1, sent_s=0.0))
        await agent.expect(HelloRequired)
        await agent.send(hello(role=Role.TRAINER))
        assert [refused.code for refused in await agent.expect(Refuse)] == ["role.mismatch"]
        await agent.send(hello())
        assert [w.policies for w in await agent.expect(Welcome)] == [(POLICY,)]
        await agent.send(StatusRequest())  # not an agent's to say: no answer
        await agent.send(Heartbeat(sequence=2, sent_s=1.5))
        [reply] = await agent.expect(HeartbeatReply)
        assert (reply.sequence, reply.sent_s) == (2, 1.5)
        status = await operator.status()
        assert [a.name for a in status.agents] == ["a"]
        assert status.runs[0].state == "running"
        assert status.counters["control.received.not_allowed"] >= 2
        assert status.counters["control.hello_required"] == 1

        stranger = world.link(KeyPair.generate("c", Role.AGENT))
        await until(lambda: stranger.link.handshake_failures > 0)
        assert not stranger.link.connected

        again = world.link("a")  # the same process over another connection
        await again.send(hello())
        await again.expect(Welcome)
        await agent.send(Heartbeat(sequence=3, sent_s=2.0))
        await agent.expect(HelloRequired)
        other = world.link("a")  # another box with the same key
        await other.send(hello(incarnation=2))
        [refused] = await other.expect(Refuse)
        assert refused.code == "agent.duplicate"
        assert 0.0 < refused.retry_s <= 0.6
        await again.send(Heartbeat(sequence=4, sent_s=2.5))
        await again.expect(HeartbeatReply)
        status = await operator.status()
        assert status.counters["control.refused.agent.duplicate"] == 1
        await again.close()  # as the end of a process does: the other one gets in when that is seen
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(m, Welcome) for m, _ in other.received):
                await other.send(hello(incarnation=2))
                await asyncio.sleep(0.02)

        revoke_key(tmp_path / "keys", "a")  # lost at once, not after a silence
        async with asyncio.timeout(WAIT_S):
            while "agents.lost.revoked" not in (status := await operator.status()).counters:
                await asyncio.sleep(0.02)
        assert [(a.name, a.state) for a in status.agents] == [("a", "lost")]

        children = world.children()
        assert len(children) >= 2
        assert world.child is not None
        assert world.child.stdin is not None
        world.child.stdin.close()
        assert await asyncio.wait_for(world.child.wait(), WAIT_S) == 0
        assert not alive(children)


@pytest.mark.asyncio
async def test_after_kill_9_the_daemon_is_found_where_it_was_and_knows_what_it_knew(tmp_path):
    async with deployment(tmp_path) as world, world.operator() as operator:
        ports = dict(world.ports)
        await operator.submit(run_spec(tmp_path))
        await operator.command("sums", "pause")
        agent = world.link("a")
        await agent.send(hello())
        await agent.expect(Welcome)
        services = world.children()
        await world.end(signal.SIGKILL)
        await world.start()
        assert world.ports == ports
        await until(lambda: not alive(services))
        status = await operator.status()
        assert (status.term, status.runs[0].state) == (2, "paused")
        await agent.send(Heartbeat(sequence=1, sent_s=0.0))
        await agent.expect(HelloRequired)
        await agent.send(hello())
        [welcome] = await agent.expect(Welcome)
        assert welcome.term == 2


@pytest.mark.asyncio
async def test_a_run_whose_task_source_fails_says_why_and_a_dead_service_comes_back(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    trained = next(f"{n} + 1 =" for n in range(99) if not is_held_out(f"{n} + 1 =", 5))
    few = json.dumps({"prompt": trained, "answer": "?"})
    (tmp_path / "few.jsonl").write_text(few + "\n")
    async with deployment(tmp_path) as world, world.operator() as operator:
        # What a source says when it is opened is said before there is a run.
        with pytest.raises(RequestRefused, match=r"bad.jsonl:1: answer: Expected `str`, got `int`"):
            await operator.submit(run_spec(tmp_path, "broken", "bad.jsonl"))
        assert not (await operator.status()).runs
        await operator.submit(run_spec(tmp_path, "broken", "few.jsonl"))
        reason = ""
        async with asyncio.timeout(WAIT_S):
            while "few.jsonl" not in reason:
                [run] = (await operator.status()).runs
                reason = run.reason
        assert "few.jsonl: no line is held out" in reason

        await until(lambda: len(world.children()) == 2)  # the failed task source has ended
        before = world.children()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(world.children()) == len(before))
        log = world.link("a", Plane.TRAJECTORIES)
        async with asyncio.timeout(WAIT_S):
            await log.link.wait_connected()
        assert world.child is not None
        assert world.child.returncode is None


def result_of(offer: LeaseOffer, digest: str) -> tuple[GroupSummary, bytes]:
    """What an agent that answers half of its items would send."""
    sequences = len(offer.items) * offer.group_size
    body = offer.attempt.encode() * 10
    summary = GroupSummary(
        attempt=offer.attempt,
        fence=offer.fence,
        job=offer.job,
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=tuple(float(n % 2) for n in range(sequences)),
        lengths=(3,) * sequences,
        versions={POLICY: (0, 0)},
        prompt_tokens=5,
        queued_s=0.0,
        generating_s=0.01,
    )
    return summary, body


@pytest.mark.asyncio
async def test_groups_flow_from_leases_over_all_three_planes_to_a_trainers_batch(tmp_path):
    async with deployment(tmp_path) as world, world.operator() as operator:
        await operator.submit(run_spec(tmp_path))
        publisher = Trainer(tmp_path)
        trainer = world.link(trainer_name(POLICY))
        inventory = TrainerInventory(policy=POLICY, checkpoint_step=0, checkpoint_version=0)
        await trainer.send(Hello(role=Role.TRAINER, incarnation=1, build="b", trainer=inventory))
        [welcome] = await trainer.expect(Welcome)
        assert welcome.run == run_spec(tmp_path)

        agent, weights = world.link("a"), world.link("a", Plane.WEIGHTS)
        await agent.send(hello())
        await agent.expect(Welcome)
        await weights.send(WeightsRequest(policy=POLICY, have_version=None))
        await publisher.publish(world.link(trainer_name(POLICY), Plane.WEIGHTS), publisher.first)
        [plan] = await weights.expect(WeightsPlan)
        assert plan.version == 0
        digest = publisher.first.manifest.digest
        await agent.send(VersionServing(policy=POLICY, version=0, digest=digest, pause_s=0.0))
        await trainer.send(BatchRequest(policy=POLICY, step=1, groups=2, head_version=0))

        uploads = world.link("a", Plane.TRAJECTORIES)
        bodies: dict[str, bytes] = {}
        kinds: list[str] = []
        while kinds.count("train") < 2 or "eval" not in kinds:
            [offer] = await agent.expect(LeaseOffer)
            kinds.append(offer.kind)
            reply = LeaseReply(attempt=offer.attempt, fence=offer.fence, accepted=True)
            await agent.send(reply)
            summary, body = result_of(offer, digest)
            bodies[summary.digest] = body
            await uploads.send(TrajectoryPut(summary=summary), (body,))
            [ack] = await uploads.expect(TrajectoryAck)
            assert ack.digest == summary.digest
        [grant] = await trainer.expect(BatchGrant)
        assert [group.policy_lag for group in grant.groups] == [0, 0]

        fetching = world.link(trainer_name(POLICY), Plane.TRAJECTORIES)
        await fetching.send(BodyRequest(digests=tuple(g.digest for g in grant.groups)))
        await until(lambda: len(fetching.received) == 2)
        for body, payload in fetching.received:
            assert payload == [bodies[body.digest]]

        status = await operator.status()
        [policy] = status.runs[0].policies
        assert [(e.version, e.accuracy, e.done) for e in policy.evaluations] == [(0, 0.5, True)]
        row = next(row for row in status.runs[0].accounting if row.kind == "train")
        assert (row.taken, row.balance) == (2, 0)
        metrics = tmp_path / "scheduler" / "runs" / "sums" / "metrics.jsonl"
        await until(metrics.exists)
        assert json.loads(metrics.read_text().splitlines()[0])["type"] == "evaluation"
