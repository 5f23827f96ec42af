"""The trainer daemon against a scripted cloud: real threads, disk, model and publication."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from trainer_cloud import POLICY, TrainerCloud, make_group

from cloud_trainer.checkpoints import lineage_ids
from cloud_trainer.config import TrainerTable
from cloud_trainer.daemon import run_daemon
from cloud_trainer.numpy_trainer import NumpyTrainer
from cloud_trainer.trainer import Trainer
from transport.errors import ConfigError, ModelError, StoreError, WindowFull
from transport.messages import BatchRequest, BodyRequest, Message, Plane, VersionRejected
from transport.plane_links import PlaneLinks
from transport.runs import PolicySpec
from transport.trajectory import body_digest
from transport.weights.digest import is_finite, state_digest
from transport.weights.folder import read_model_folder
from transport.weights.tensors import TensorBytes


def tree(cloud: TrainerCloud) -> list[tuple[int, int | None, int]]:
    """Number, parent and step of every stored version."""
    return [(m.version, m.parent, m.step) for m in cloud.versions.versions(POLICY)]


def trained_jobs(cloud: TrainerCloud) -> list[str]:
    lineage = lineage_ids(cloud.folder / "trainer")
    assert [step for step, _ in lineage] == list(range(1, len(lineage) + 1))
    jobs = [job for _, jobs in lineage for job in jobs]
    assert len(set(jobs)) == len(jobs)
    return jobs


@pytest.mark.asyncio
async def test_a_run_is_trained_published_checkpointed_and_exported(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=5, checkpoint_every=2) as cloud:
        with structlog.testing.capture_logs() as logs:
            assert await cloud.train() == 0
    begun = {line["step"]: line["jobs"] for line in logs if line["event"] == "step.begins"}
    assert sorted(begun) == [1, 2, 3, 4, 5]
    followed = [job for jobs in begun.values() for job in jobs]
    assert sorted(followed) == sorted(trained_jobs(cloud)), "jobs can be followed"
    assert tree(cloud) == [
        (0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 5),
    ]  # fmt: skip
    stored = cloud.versions.versions(POLICY)
    assert len({manifest.digest for manifest in stored}) == 6
    assert cloud.scheduler.final == (5, 5)
    assert cloud.scheduler.reports == {step: step for step in range(1, 6)}
    assert cloud.scheduler.checkpoint_reports[:2] == [(2, 2), (4, 4)]
    exported = read_model_folder(tmp_path / "trainer" / "model")
    assert state_digest(exported) == stored[-1].digest
    assert sorted(trained_jobs(cloud)) == [f"run/t-{number:06d}" for number in range(10)]
    assert list((tmp_path / "trainer" / "outbox" / "manifests").iterdir()) == []
    lines = (tmp_path / "trainer" / "metrics.jsonl").read_text().splitlines()
    facts = [json.loads(line) for line in lines]
    assert [f["step"] for f in facts if f["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert [f["version"] for f in facts if f["kind"] == "version"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_a_trainer_that_reaches_nobody_says_whom_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.reaching.FIRST_S", 0.02)
    async with TrainerCloud(tmp_path) as cloud:
        config = cloud.config()
    config = msgspec.structs.replace(
        config, transport=msgspec.structs.replace(config.transport, host="nowhere.invalid")
    )
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as logs:
        life = asyncio.create_task(run_daemon(config, stop=stop, on_ready=lambda _: None))
        async with asyncio.timeout(10):
            while len({m["plane"] for m in logs if m["event"] == "link.not_connected"}) < 3:
                await asyncio.sleep(0.01)
        stop.set()
        assert await life == 0
    said = next(m for m in logs if m["event"] == "link.not_connected" and m["plane"] == "control")
    assert said["address"] == f"nowhere.invalid:{config.transport.control_port}"
    assert said["reason"].startswith("the name is not known here")
    assert "transport.host" in said["remedy"]


@pytest.mark.asyncio
async def test_a_run_that_was_stopped_in_between_ends_in_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with TrainerCloud(tmp_path / "a", steps=6, checkpoint_every=4) as whole:
        assert await whole.train() == 0
    async with TrainerCloud(tmp_path / "b", steps=6, checkpoint_every=4) as cut:
        stop = asyncio.Event()
        life = asyncio.create_task(cut.train(stop))
        await cut.until(lambda cloud: len(cloud.scheduler.reports) >= 2)
        stop.set()
        assert await life == 0
        assert cut.heard["Goodbye"] == 1
        assert cut.scheduler.final is None
        assert await cut.train() == 0
    assert tree(cut) == tree(whole)
    digests = [[m.digest for m in cloud.versions.versions(POLICY)] for cloud in (cut, whole)]
    assert digests[0] == digests[1]
    assert trained_jobs(cut) == trained_jobs(whole)


@pytest.mark.asyncio
async def test_a_crash_returns_to_the_checkpoint_and_forks_the_version_tree(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=9, checkpoint_every=5) as cloud:
        await cloud.train_until(lambda c: len(c.versions.versions(POLICY)) >= 7)
        assert await cloud.train() == 0
    versions = tree(cloud)
    numbers = [version for version, _, _ in versions]
    assert numbers == sorted(set(numbers))
    forks = [(parent, step) for _, parent, step in versions if parent == 5]
    assert forks == [(5, 6), (5, 5)]  # the second is version 5 again, and the new head
    assert cloud.scheduler.final == (9, numbers[-1])
    assert len(trained_jobs(cloud)) == 18
    assert len(cloud.scheduler.incarnations) == 2


@pytest.mark.asyncio
async def test_restarts_after_a_rollback_go_on_from_its_one_version(tmp_path: Path) -> None:
    committed = tmp_path / "trainer" / "checkpoints" / "step-00000004"
    async with TrainerCloud(tmp_path, steps=9, checkpoint_every=4) as cloud:
        await cloud.train_until(lambda c: len(tree(c)) >= 6 and committed.exists())
        cloud.deaf.add(Plane.TRAJECTORIES)  # so that no step is made
        before = lineage_ids(tmp_path / "trainer")
        await cloud.train_until(lambda c: tree(c)[-1][1:] == (4, 4))
        again = tree(cloud)[-1][0]
        for _ in range(2):
            requests = cloud.heard["BodyRequest"]
            await cloud.train_until(lambda c, n=requests: c.heard["BodyRequest"] > n)
            assert tree(cloud)[-1] == (again, 4, 4)
            assert cloud.scheduler.head == again
        assert lineage_ids(tmp_path / "trainer") == before
        stored = {m.version: m.digest for m in cloud.versions.versions(POLICY)}
        assert stored[again] == stored[4]
        cloud.deaf.clear()
        assert await cloud.train() == 0
    assert tree(cloud)[-5:] == [(again + n, again + n - 1, 4 + n) for n in range(1, 6)]
    assert len(cloud.scheduler.incarnations) == 5
    assert len(trained_jobs(cloud)) == 18


@pytest.mark.asyncio
async def test_requests_that_a_link_does_not_take_are_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: Counter[type[Message]] = Counter()
    take = PlaneLinks.send_or_raise

    def refuse_two(
        links: PlaneLinks, plane: Plane, message: Message, payload: Sequence[bytes] = ()
    ) -> None:
        if isinstance(message, BodyRequest | BatchRequest) and refused[type(message)] < 2:
            refused[type(message)] += 1
            raise WindowFull("the peer does not keep up")
        take(links, plane, message, payload)

    monkeypatch.setattr(PlaneLinks, "send_or_raise", refuse_two)
    async with TrainerCloud(tmp_path, steps=2) as cloud:
        assert await asyncio.wait_for(cloud.train(fetch_timeout_s=60.0), 10.0) == 0
    assert refused == {BodyRequest: 2, BatchRequest: 2}


@pytest.mark.asyncio
async def test_versions_the_store_missed_are_published_again_after_a_crash(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=3, checkpoint_every=1) as cloud:
        cloud.deaf.add(Plane.WEIGHTS)
        committed = tmp_path / "trainer" / "checkpoints" / "step-00000001"
        await cloud.train_until(lambda c: committed.exists())
        offered = sorted((tmp_path / "trainer" / "outbox" / "manifests").iterdir())
        assert [path.name for path in offered] == ["00000000", "00000001"]
        first = offered[1].read_bytes()
        cloud.deaf.clear()
        life = asyncio.create_task(cloud.train())
        await cloud.until(lambda c: len(c.versions.versions(POLICY)) >= 2)
        assert cloud.versions.versions(POLICY)[1].created_wall_s > 0
        assert await life == 0
    assert tree(cloud) == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3)]
    assert first
    assert len(trained_jobs(cloud)) == 6


@pytest.mark.asyncio
async def test_a_damaged_body_costs_its_group_and_not_the_run(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=2) as cloud:
        data = make_group("run/t-000001")
        cloud.scheduler.withheld.add("run/t-000001")
        cloud.scheduler.bodies[body_digest(data)] = data[:-1]
        assert await cloud.train() == 0
    assert cloud.scheduler.unusable == {1}
    assert trained_jobs(cloud)[:2] == ["run/t-000000", "run/t-000002"]


@pytest.mark.asyncio
async def test_a_refused_delta_rolls_back_to_the_checkpoint(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=4, checkpoint_every=2) as cloud:
        cloud.reject = VersionRejected(
            policy=POLICY, version=3, code="protocol.remote", message="parent 2 is unknown"
        )
        assert await cloud.train() == 0
    versions = tree(cloud)
    assert versions[:3] == [(0, None, 0), (1, 0, 1), (2, 1, 2)]
    again = versions[3][0]
    assert again > 3
    assert [(parent, step) for _, parent, step in versions[3:]] == [
        (2, 2),
        (again, 3),
        (again + 1, 4),
    ]
    assert len(cloud.scheduler.incarnations) == 2
    assert len(trained_jobs(cloud)) == 8


class PoisonedTrainer(NumpyTrainer):
    """Its first steps give weights that are not finite."""

    def __init__(self, settings: dict[str, Any], poison: list[int]) -> None:
        super().__init__(settings)
        self._poison = poison

    def published_state(self) -> dict[str, TensorBytes]:
        state = super().published_state()
        if self.step_count in self._poison:
            self._poison.remove(self.step_count)
            shape = state["bias"].shape
            state["bias"] = TensorBytes("BF16", shape, np.full(shape, 0x7F80, "<u2").tobytes())
        return state


def poisoned(*steps: int) -> Any:
    poison = list(steps)

    def make(spec: PolicySpec, table: TrainerTable) -> Trainer:
        return PoisonedTrainer(spec.settings, poison)

    return make


@pytest.mark.asyncio
async def test_weights_that_are_not_finite_are_not_published_but_rolled_back(
    tmp_path: Path,
) -> None:
    async with TrainerCloud(tmp_path, steps=4, checkpoint_every=2) as cloud:
        assert await cloud.train(trainers=poisoned(3)) == 0
    assert cloud.scheduler.unusable == {4, 5}
    assert not {"run/t-000004", "run/t-000005"} & set(trained_jobs(cloud))
    assert len(cloud.scheduler.incarnations) == 2
    for manifest in cloud.versions.versions(POLICY):
        assert is_finite(cloud.versions.reconstruct(POLICY, manifest.version))


@pytest.mark.asyncio
async def test_a_trainer_that_cannot_get_past_a_step_gives_up(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=4, checkpoint_every=2) as cloud:
        assert await cloud.train(trainers=poisoned(1, 1, 1, 1, 1)) == 1
        assert len(cloud.scheduler.incarnations) == 4
    assert tree(cloud) in ([], [(0, None, 0)])


@pytest.mark.asyncio
async def test_a_scheduler_that_falls_silent_finds_the_trainer_where_it_was(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=6, checkpoint_every=50) as cloud:
        cloud.scheduler.lost_after_s = 0.2
        life = asyncio.create_task(cloud.train())
        await cloud.until(lambda c: 2 in c.scheduler.reports)
        cloud.deaf.add(Plane.CONTROL)
        hellos = cloud.heard["Hello"]
        await cloud.until(lambda c: c.heard["Hello"] > hellos)
        cloud.deaf.clear()
        cloud.scheduler.lost_after_s = 12.0
        assert await life == 0
    assert len(cloud.scheduler.incarnations) == 1
    assert [step for _, _, step in tree(cloud)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.asyncio
async def test_a_stopped_run_is_exported_as_far_as_it_came(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=500, checkpoint_every=100) as cloud:
        life = asyncio.create_task(cloud.train())
        await cloud.until(lambda c: 2 in c.scheduler.reports)
        cloud.scheduler.stopping = True
        cloud.scheduler.known = False  # the next message is answered by HelloRequired
        assert await life == 0
    assert cloud.scheduler.final is not None
    step, version = cloud.scheduler.final
    assert 2 <= step < 500
    exported = read_model_folder(tmp_path / "trainer" / "model")
    assert state_digest(exported) == cloud.versions.versions(POLICY)[version].digest
    assert len(trained_jobs(cloud)) == 2 * step


@pytest.mark.asyncio
async def test_a_checkpoint_of_another_effort_is_refused_with_a_remedy(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=2) as cloud:
        assert await cloud.train() == 0
    async with TrainerCloud(tmp_path, steps=2) as cloud:
        policy = cloud.run.policies["solver"]
        changed = PolicySpec(model=policy.model, trainer="numpy", settings={"lr": 0.5})
        cloud.scheduler.run.policies["solver"] = changed
        with pytest.raises(ConfigError, match=r"set trainer\.folder to another folder"):
            await cloud.train()
        await cloud.until(lambda c: c.heard["Goodbye"] == 1)


@pytest.mark.asyncio
async def test_a_model_that_does_not_load_ends_the_daemon_naming_it(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path) as cloud:
        (cloud.model / "config.json").unlink()
        with pytest.raises(ModelError, match=r"config\.json"):
            await cloud.train()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"policy": "solver"}, "must be RUN/NAME"),
        ({"policy": "run/other"}, "run-other"),
        ({"key": "keys/operator.toml"}, "operator"),
    ],
)
async def test_a_wrong_table_is_refused_before_anything_starts(
    tmp_path: Path, table: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with TrainerCloud(tmp_path) as cloud:
        with pytest.raises(ConfigError, match=reason):
            await cloud.train(**table)
    assert cloud.heard["ready"] == 0


@pytest.mark.asyncio
async def test_a_folder_belongs_to_one_trainer_at_a_time(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=500) as cloud:
        stop = asyncio.Event()
        life = asyncio.create_task(cloud.train(stop))
        await cloud.until(lambda c: 1 in c.scheduler.reports)
        with pytest.raises(StoreError, match="already used by process"):
            await cloud.train()
        stop.set()
        assert await life == 0
