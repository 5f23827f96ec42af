"""The trainer daemon as several ranks: real processes, sockets, our launcher and FSDP2."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from torch_models import random_qwen3
from trainer_cloud import POLICY, TrainerCloud

from cloud_trainer.checkpoints import lineage_ids
from transport.runtime.origin import EXIT_CONFIG
from transport.runtime.processes import ChildProcess, ChildSpec, start_child
from transport.weights.digest import state_digest
from transport.weights.folder import read_model_folder
from transport.zmq_links import ZmqNetwork

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def cloud_of(folder: Path, *, steps: int, checkpoint_every: int = 1) -> TrainerCloud:
    random_qwen3(folder / "model")
    return TrainerCloud(
        folder,
        steps=steps,
        checkpoint_every=checkpoint_every,
        trainer="torch",
        network=ZmqNetwork(),
    )


async def start(cloud: TrainerCloud, *more: str) -> ChildProcess:
    config = cloud.config()
    settings = {
        "transport.host": '"127.0.0.1"',
        "transport.keys": f'"{config.transport.keys}"',
        "transport.control_port": config.transport.control_port,
        "transport.trajectories_port": config.transport.trajectories_port,
        "transport.weights_port": config.transport.weights_port,
        "trainer.policy": f'"{POLICY}"',
        "trainer.folder": f'"{config.trainer.folder}"',
        "trainer.ranks": 2,
        "trainer.rank_timeout_s": 60,
    }
    texts = [f"{key}={value}" for key, value in settings.items()]
    argv = [sys.executable, "-m", "farflow", "trainer", "run", "--stop-on-eof"]
    for text in (*texts, *more):
        argv += ["--set", text]
    return await start_child(
        ChildSpec(
            name="trainer",
            argv=tuple(argv),
            log_path=cloud.folder / "trainer.log",
            capture_stdout=True,
            environment={"PYTHONPATH": str(ROOT)},
            grace_s=60.0,
        )
    )


def ranks_of(child: ChildProcess) -> list[int]:
    """Process ids of its ranks, rank 0 first."""
    own = f"/proc/{child.pid}/task/{child.pid}/children"
    found = [int(pid) for pid in Path(own).read_text().split()]
    by_rank = {}
    for pid in found:
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"RANK":
                by_rank[int(value)] = pid
    return [by_rank[rank] for rank in sorted(by_rank)]


def log_of(cloud: TrainerCloud) -> str:
    return (cloud.folder / "trainer.log").read_text()


async def ended(pid: int) -> None:
    """Returns when a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


@pytest.mark.asyncio
async def test_two_ranks_train_one_model_whatever_happens_to_a_rank_or_the_launcher(
    tmp_path: Path,
) -> None:
    async with cloud_of(tmp_path, steps=8) as cloud:
        child = await start(cloud)
        assert b'"ready": true' in await child.read_line(120)
        await cloud.until(lambda c: 2 in c.scheduler.reports)
        rank_0, rank_1 = ranks_of(child)
        os.kill(rank_1, signal.SIGKILL)
        assert await child.wait() == 1, log_of(cloud)
        await ended(rank_0)
        assert log_of(cloud).splitlines()[-1] == "trainer: rank 1 was killed by SIGKILL"

        child = await start(cloud)
        await cloud.until(lambda c: 4 in c.scheduler.reports)
        ranks = ranks_of(child)
        os.kill(child.pid, signal.SIGKILL)  # its ranks have sessions of their own
        for pid in ranks:
            await ended(pid)

        child = await start(cloud)
        await cloud.until(lambda c: 6 in c.scheduler.reports)
        assert await child.terminate() == 0, log_of(cloud)
        saved = [step for step, _ in lineage_ids(tmp_path / "trainer")]
        assert saved[-1] >= 6

        child = await start(cloud)
        assert await child.wait() == 0, log_of(cloud)
    assert "rank.following" in log_of(cloud)
    lineage = lineage_ids(tmp_path / "trainer")
    assert [step for step, _ in lineage] == list(range(1, 9))
    jobs = [job for _, jobs in lineage for job in jobs]
    assert len(set(jobs)) == len(jobs) == 16
    newest = cloud.versions.versions(POLICY)[-1]
    assert newest.step == 8
    exported = read_model_folder(tmp_path / "trainer" / "model")
    assert state_digest(exported) == newest.digest


@pytest.mark.asyncio
async def test_what_rank_0_refuses_is_a_wrong_configuration_and_the_last_that_is_said(
    tmp_path: Path,
) -> None:
    async with TrainerCloud(tmp_path, network=ZmqNetwork()) as cloud:  # of one process
        child = await start(cloud)
        assert await child.wait() == EXIT_CONFIG
    last = log_of(cloud).splitlines()[-1]
    assert last.startswith("trainer: trainer.ranks: 2 ranks, but trainer = 'numpy'")
