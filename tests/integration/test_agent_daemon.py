"""The agent daemon against a scripted cloud: real links, disk, fake engine and weights."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from agent_cloud import POLICY, WAIT_S, AgentCloud, Life

from edge_agent import installation, shell
from edge_agent.core.settings import AgentSettings
from edge_agent.daemon import load_keys, run_daemon
from edge_agent.engines.fake import FakeEngine
from edge_agent.workflow import SHIPPED
from transport.errors import ConfigError, StoreError, WeightApplyFailed
from transport.memory_links import MemoryNetwork
from transport.messages import (
    AttemptFailed,
    Goodbye,
    Heartbeat,
    Hello,
    HostedPolicies,
    LeaseReply,
    LeaseRevoke,
    Plane,
    Refuse,
    TrajectoryPut,
    VersionServing,
    WeightsRequest,
)
from transport.runtime.settings import TransportConfig
from transport.zmq_links import ZmqNetwork


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[AgentCloud]:
    async with AgentCloud(tmp_path, MemoryNetwork()) as made, asyncio.timeout(WAIT_S):
        yield made


async def deliver(cloud: AgentCloud, numbers: range) -> None:
    for number in numbers:
        cloud.offer(number)
    await cloud.until(lambda: len(cloud.bodies) >= len(numbers))


@pytest.mark.asyncio
async def test_an_agent_fetches_weights_works_and_leaves_in_order(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud)
    serving = await cloud.hear(VersionServing)
    assert (serving.version, serving.digest) == (0, cloud.digest())
    await deliver(cloud, range(8))
    for attempt, group in cloud.groups().items():
        assert group.policies == (POLICY,)
        assert len(group.sequences) == 4
        assert attempt == f"{group.job}#1"
    before = len(cloud.all(Heartbeat))
    await cloud.until(
        lambda: not cloud.all(Heartbeat)[-1].held and len(cloud.all(Heartbeat)) > before
    )
    beat = cloud.all(Heartbeat)[-1]
    assert beat.versions[POLICY].digest == cloud.digest()
    assert beat.tokens_generated > 0
    assert beat.rtt_s is not None
    assert beat.bytes_up > 0
    assert beat.bytes_down > 0
    assert await life.end() == 0
    await cloud.hear(Goodbye)
    assert cloud.all(AttemptFailed) == []


@pytest.mark.asyncio
async def test_real_sockets_with_curve_do_the_same(tmp_path: Path) -> None:
    async with AgentCloud(tmp_path, ZmqNetwork()) as cloud, asyncio.timeout(WAIT_S):
        cloud.publish()
        network = ZmqNetwork()
        stop = asyncio.Event()
        said: list[dict[str, Any]] = []
        life = asyncio.create_task(
            run_daemon(cloud.config(), stop=stop, on_ready=said.append, network=network)
        )
        await cloud.hear(VersionServing)
        await deliver(cloud, range(3))
        cloud.publish()
        assert (await cloud.hear(VersionServing, 2)).version == 1
        stop.set()
        assert await life == 0
        assert said == [{"ready": True, "ports": {}, "agent": "near"}]
        await network.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_the_torch_engine_does_the_same(tmp_path: Path) -> None:
    from torch_models import random_qwen3

    model = random_qwen3(tmp_path / "qwen")
    async with AgentCloud(tmp_path, MemoryNetwork(), model) as cloud, asyncio.timeout(100.0):
        cloud.publish()
        life = Life(cloud, engine="torch")
        assert (await cloud.hear(VersionServing)).digest == cloud.digest()
        cloud.publish()
        assert (await cloud.hear(VersionServing, 2)).digest == cloud.digest()
        await deliver(cloud, range(3))
        for group in cloud.groups().values():
            assert {version for s in group.sequences for _, _, version in s.segments} == {1}
        assert await life.end() == 0


@pytest.mark.asyncio
async def test_new_versions_flow_while_it_works_and_every_token_says_which(
    cloud: AgentCloud,
) -> None:
    cloud.publish()
    life = Life(cloud, fake={"tokens_per_s": 40.0, "mean_tokens": 12.0, "cv_tokens": 0.0})
    await cloud.hear(VersionServing)
    cloud.offer(1)
    await cloud.until(lambda: any(b.tokens_generated >= 8 for b in cloud.all(Heartbeat)))
    cloud.publish()
    await cloud.until(lambda: cloud.bodies)
    (group,) = cloud.groups().values()
    segments = group.sequences[0].segments
    assert [version for _, _, version in segments] == [0, 1]
    assert cloud.all(TrajectoryPut)[0].summary.versions == {POLICY: (0, 1)}
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_restarted_agent_serves_from_its_own_copy(cloud: AgentCloud) -> None:
    for _ in range(3):
        cloud.publish()
    first = Life(cloud)
    await cloud.hear(VersionServing)
    await first.crash()
    served = cloud.chunks_served
    again = Life(cloud)
    serving = await cloud.hear(VersionServing, 2)
    assert (serving.version, serving.digest, serving.fetched_bytes) == (2, cloud.digest(), 0)
    assert cloud.chunks_served == served
    first_life, *_, last_life = [hello.incarnation for hello in cloud.all(Hello)]
    assert last_life > first_life
    assert await again.end() == 0


@pytest.mark.asyncio
async def test_results_of_an_earlier_life_are_offered_and_delivered(cloud: AgentCloud) -> None:
    cloud.publish()
    cloud.deaf.add(Plane.TRAJECTORIES)
    first = Life(cloud)
    await cloud.hear(VersionServing)
    cloud.offer(1)
    await cloud.until(lambda: any(one.spooled for b in cloud.all(Heartbeat) for one in b.held))
    await first.crash()
    cloud.heard.clear()
    cloud.deaf.clear()
    again = Life(cloud)
    hello = await cloud.hear(Hello)
    assert hello.agent is not None
    assert [(one.attempt, one.fence, one.spooled) for one in hello.agent.held] == [
        ("run/t-000001#1", (1, 1), True)
    ]
    await cloud.until(lambda: cloud.bodies)
    await cloud.until(lambda: cloud.all(Heartbeat) and not cloud.all(Heartbeat)[-1].held)
    assert await again.end() == 0
    assert list((cloud.folder / "agent" / "spool").glob("*.group")) == []


@pytest.mark.asyncio
async def test_a_dead_trajectory_log_gets_everything_when_it_is_back(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud)
    await cloud.hear(VersionServing)
    await cloud.shut(Plane.TRAJECTORIES)
    for number in range(4):
        cloud.offer(number)
    await cloud.until(lambda: len([h for h in cloud.all(Heartbeat)[-1].held if h.spooled]) == 4)
    cloud.listen(Plane.TRAJECTORIES)
    await cloud.until(lambda: len(cloud.bodies) == 4)
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_work_goes_on_while_the_scheduler_is_away(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud)
    await cloud.hear(VersionServing)
    cloud.offer(1, max_new_tokens=64)
    await cloud.hear(LeaseReply)
    await cloud.shut(Plane.CONTROL)
    await cloud.until(lambda: cloud.bodies)
    before = cloud.all(Hello)[-1].incarnation
    cloud.heard.clear()
    cloud.listen(Plane.CONTROL)
    hello = await cloud.hear(Hello)
    assert hello.incarnation == before
    await cloud.hear(Heartbeat)
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_silent_scheduler_gets_a_new_link(cloud: AgentCloud) -> None:
    life = Life(cloud)
    await cloud.hear(Heartbeat)
    cloud.deaf.add(Plane.CONTROL)
    before = len(cloud.all(Hello))
    await cloud.until(lambda: Plane.CONTROL in cloud.deaf and peers_changed(cloud))
    cloud.deaf.clear()
    await cloud.hear(Hello, before + 1)
    assert await life.end() == 0


def peers_changed(cloud: AgentCloud) -> bool:
    """Whether the agent's control link is not the one that it was last heard on."""
    links: dict[bytes, object] = cloud._hubs[Plane.CONTROL]._links  # type: ignore[attr-defined]
    return cloud._route not in links


@pytest.mark.asyncio
async def test_revoked_and_unknown_attempts_stop(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, fake={"tokens_per_s": 1.0, "mean_tokens": 500.0})
    await cloud.hear(VersionServing)
    first, second = cloud.offer(1), cloud.offer(2)
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences == 8)
    cloud.say(LeaseRevoke(attempt=first.attempt, fence=first.fence, reason="duplicate"))
    cloud.unknown = (second.attempt,)
    await cloud.until(lambda: not cloud.all(Heartbeat)[-1].held)
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences == 0)
    assert cloud.all(AttemptFailed) == []
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_evaluations_run_at_exactly_their_version(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, fake={"tokens_per_s": 50.0})
    await cloud.hear(VersionServing)
    cloud.offer(1, pinned={POLICY: 1}, temperature=0.0)
    await cloud.until(lambda: cloud.all(WeightsRequest)[-1].upto == 1)
    cloud.publish()
    await cloud.until(lambda: cloud.all(Heartbeat)[-1].running_sequences)
    cloud.publish()
    await cloud.until(lambda: cloud.bodies)
    (summary,) = [put.summary for put in cloud.all(TrajectoryPut)]
    assert summary.versions == {POLICY: (1, 1)}
    await cloud.until(lambda: cloud.all(VersionServing)[-1].version == 2)
    cloud.offer(2, pinned={POLICY: 1})
    assert (await cloud.hear(LeaseReply, 2)).reason == "version_passed"
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_damaged_chunks_are_asked_for_again(cloud: AgentCloud) -> None:
    cloud.damage_chunks = 3
    cloud.publish()
    life = Life(cloud)
    serving = await cloud.hear(VersionServing)
    assert serving.digest == cloud.digest()
    assert await life.end() == 0


class Refusing(FakeEngine):
    """Takes no change of its weights for a while."""

    refusals = 1

    async def apply(self, policy: str, version: int, tensors: Any) -> float:
        if self.refusals:
            self.refusals -= 1
            raise WeightApplyFailed("not now")
        return await super().apply(policy, version, tensors)


@pytest.mark.asyncio
async def test_a_failed_swap_heals_from_nothing(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, engines=lambda config, clock: Refusing(16, config.agent.fake, clock=clock))
    await cloud.hear(VersionServing)
    cloud.publish()
    await cloud.until(lambda: cloud.all(WeightsRequest)[-1].have_version is None)
    serving = await cloud.hear(VersionServing, 2)
    assert (serving.version, serving.digest) == (1, cloud.digest())
    await deliver(cloud, range(2))
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_local_model_spares_the_download(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, local_models={"solver": str(cloud.model)})
    serving = await cloud.hear(VersionServing)
    assert (serving.version, serving.fetched_bytes) == (0, 0)
    assert cloud.chunks_served == 0
    cloud.publish()
    assert (await cloud.hear(VersionServing, 2)).version == 1
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_local_model_is_a_base_for_later_versions(cloud: AgentCloud) -> None:
    for _ in range(3):
        cloud.publish()
    life = Life(cloud, local_models={POLICY: str(cloud.model)})
    serving = await cloud.hear(VersionServing)
    assert (serving.version, serving.digest) == (2, cloud.digest())
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_versions_of_an_unknown_signer_are_not_used(cloud: AgentCloud) -> None:
    for path in (cloud.folder / "keys" / "signers").iterdir():
        path.rename(cloud.folder / path.name)
    cloud.publish()
    life = Life(cloud)
    await cloud.hear(WeightsRequest, 2)
    assert cloud.chunks_served == 0
    assert cloud.all(VersionServing) == []
    for path in cloud.folder.glob("trainer-*.toml"):
        path.rename(cloud.folder / "keys" / "signers" / path.name)
    await cloud.hear(VersionServing)
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_policy_that_is_hosted_no_more_takes_no_work_but_its_last_version(
    cloud: AgentCloud,
) -> None:
    cloud.publish()
    life = Life(cloud)
    await cloud.hear(VersionServing)
    cloud.say(HostedPolicies(policies=()))
    cloud.offer(1)
    assert (await cloud.hear(LeaseReply)).reason == "policy_unknown"
    cloud.publish()
    assert (await cloud.hear(VersionServing, 2)).version == 1
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_a_policy_that_nobody_wants_leaves_disk_and_engine_and_can_come_back(
    cloud: AgentCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = installation.core_settings

    def settings(*arguments: Any, **options: Any) -> AgentSettings:
        return msgspec.structs.replace(whole(*arguments, **options), linger_s=0.02)

    monkeypatch.setattr(shell, "core_settings", settings)
    engine = FakeEngine(16)
    unloaded = asyncio.Event()

    async def unload_policy(policy: str) -> None:
        await FakeEngine.unload_policy(engine, policy)
        unloaded.set()

    monkeypatch.setattr(engine, "unload_policy", unload_policy)
    cloud.publish()
    life = Life(cloud, engines=lambda config, clock: engine)
    await cloud.hear(VersionServing)
    cloud.say(HostedPolicies(policies=()))
    await unloaded.wait()
    assert engine.version(POLICY) is None
    await cloud.until(lambda: not cloud.all(Heartbeat)[-1].versions)
    cloud.say(HostedPolicies(policies=(POLICY,)))
    again = await cloud.hear(VersionServing, 2)
    assert again.digest == cloud.digest()
    assert again.fetched_bytes > 0
    assert engine.version(POLICY) == 0
    assert await life.end() == 0


WORKFLOW = """
from edge_agent.workflow import Rollout

async def terse(context, item):
    drawn = await context.policy().generate(item.prompt, n=context.group_size, max_new_tokens=1)
    return [Rollout.of(each, reward=0.25) for each in drawn]
"""


@pytest.mark.asyncio
async def test_an_agent_offers_and_runs_workflows_of_its_owner(
    cloud: AgentCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = "farflow_owners_workflows:terse"
    (cloud.folder / "farflow_owners_workflows.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(str(cloud.folder))
    cloud.publish()
    life = Life(cloud, workflows=(reference,))
    hello = await cloud.hear(Hello)
    assert hello.agent is not None
    assert set(hello.agent.workflows) == {*SHIPPED, reference}
    await cloud.hear(VersionServing)
    cloud.offer(1, workflow=reference)
    await cloud.until(lambda: cloud.bodies)
    (group,) = cloud.groups().values()
    assert [(len(s.tokens), s.reward) for s in group.sequences] == [(1, 0.25)] * 4
    assert await life.end() == 0


@pytest.mark.asyncio
async def test_an_agent_without_a_workflow_of_its_table_does_not_start(cloud: AgentCloud) -> None:
    with pytest.raises(ConfigError, match=r"'no_such_module:f'.*pip install"):
        await Life(cloud, workflows=("no_such_module:f",)).task
    assert cloud.heard == []


@pytest.mark.asyncio
async def test_draining_hands_back_what_cannot_be_finished(cloud: AgentCloud) -> None:
    cloud.publish()
    life = Life(cloud, drain_s=0.05, fake={"tokens_per_s": 1.0, "mean_tokens": 500.0})
    await cloud.hear(VersionServing)
    cloud.offer(1, max_new_tokens=500)
    await cloud.hear(LeaseReply)
    assert await life.end() == 0
    failed = await cloud.hear(AttemptFailed)
    assert failed.code == "agent.draining"


@pytest.mark.asyncio
async def test_a_refusal_for_good_ends_the_agent_with_status_1(cloud: AgentCloud) -> None:
    life = Life(cloud)
    await cloud.hear(Hello)
    cloud.say(Refuse(code="agent.duplicate", message="another agent has this key"))
    assert await life.task == 1


@pytest.mark.asyncio
async def test_two_agents_do_not_share_a_folder(cloud: AgentCloud) -> None:
    life = Life(cloud)
    await cloud.hear(Hello)
    with pytest.raises(StoreError, match="already used by process"):
        await Life(cloud).task
    assert await life.end() == 0


def test_keys_are_checked_before_anything_starts(tmp_path: Path) -> None:
    from transport.keys import create_keys

    create_keys(tmp_path, agents=["near"])
    transport = TransportConfig(keys=str(tmp_path))
    with pytest.raises(ConfigError, match=r"agent\.key: name the agent's key file"):
        load_keys(transport, "")
    with pytest.raises(ConfigError, match="key of role operator"):
        load_keys(transport, str(tmp_path / "operator.toml"))
    pair, server = load_keys(transport, str(tmp_path / "near.toml"))
    assert pair.name == "near"
    assert server
