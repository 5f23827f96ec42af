"""The trainer daemon against a scripted cloud: real threads, disk, model and publication."""

import asyncio
from pathlib import Path

import pytest
from trainer_cloud import POLICY, TrainerCloud

from cloud_trainer.checkpoints import lineage_ids
from transport.weights.digest import state_digest
from transport.weights.folder import read_model_folder


@pytest.mark.asyncio
async def test_a_run_is_trained_published_checkpointed_and_exported(tmp_path: Path) -> None:
    async with TrainerCloud(tmp_path, steps=5, checkpoint_every=2) as cloud:
        assert await cloud.train() == 0
        stored = cloud.versions.versions(POLICY)
        assert [(m.version, m.parent, m.step) for m in stored] == [
            (0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 5),
        ]  # fmt: skip
        assert len({m.digest for m in stored}) == 6
        assert cloud.scheduler.final == (5, 5)
        assert cloud.scheduler.reports == {step: step for step in range(1, 6)}
        exported = read_model_folder(tmp_path / "trainer" / "model")
        assert state_digest(exported) == stored[-1].digest
        lineage = lineage_ids(tmp_path / "trainer")
        assert [step for step, _ in lineage] == [1, 2, 3, 4, 5]
        assert sorted(job for _, jobs in lineage for job in jobs) == [
            f"run/t-{number:06d}" for number in range(10)
        ]
