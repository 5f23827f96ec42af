"""Rows of the lease bench that need no fleet: the core, memory, restart and the disk.

python -m bench.leases_rows core|memory     one object of numbers, in a fresh process
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from bench.leases_core import CoreWorld, decision_s, leases, queue
from bench.leases_world import cpu_s, make_world, scheduler, with_port
from bench.report import Row
from scheduler.interpreter import tune
from scheduler.operator import Operator
from scheduler.store import Change, SchedulerStore

EVENTS_S: Final = 50_000.0
DECISION_S: Final = 150e-6
JOB_BYTES: Final = 2000.0
RESTART_S: Final = 2.0
CORE_AGENTS, MANY_AGENTS = 1000, 10_000
QUICK_LEASES, FULL_LEASES = 3000, 20_000
QUICK_QUEUED, FULL_QUEUED = 20_000, 100_000
SYNCS: Final = 200
SYNC_BYTES: Final = 64 * 1024
CHILD_S: Final = 300.0


def fdatasync_s(folder: Path) -> float:
    """Median of syncing 64 KiB more of a file."""
    took = []
    descriptor = os.open(folder / "sync", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for _ in range(SYNCS):
            os.write(descriptor, bytes(SYNC_BYTES))
            began = time.perf_counter()
            os.fdatasync(descriptor)
            took.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    return sorted(took)[len(took) // 2]


def core_rows(quick: bool) -> list[Row]:
    count = QUICK_LEASES if quick else FULL_LEASES
    found = _child("core", count)
    events_s, decision = found["events_s"], found["decision_s"]
    queued = QUICK_QUEUED if quick else FULL_QUEUED
    job_bytes = _child("memory", queued)["job_bytes"]
    return [
        Row(
            metric=f"leases.core events per CPU second, {CORE_AGENTS} agents",
            value=round(events_s),
            unit="events/s",
            target=f">= {EVENTS_S:.0f}",
            ok=events_s >= EVENTS_S,
        ),
        Row(
            metric=f"leases.core CPU per lease, {CORE_AGENTS} agents",
            value=round(found["lease_s"] * 1e6, 1),
            unit="us",
        ),
        Row(
            metric=f"leases.core CPU from job to offer, {MANY_AGENTS} agents",
            value=round(decision * 1e6, 1),
            unit="us",
            target=f"<= {DECISION_S * 1e6:.0f}",
            ok=decision <= DECISION_S,
        ),
        Row(
            metric=f"leases.core memory per queued job, prompts on disk, {queued} jobs",
            value=round(job_bytes),
            unit="bytes",
            target=f"<= {JOB_BYTES:.0f}",
            ok=job_bytes <= JOB_BYTES,
        ),
    ]


def restart_row(quick: bool) -> Row:
    """The whole daemon, from the start of its process to its answer to a status request, with a
    store full of queued jobs."""
    count = QUICK_QUEUED if quick else FULL_QUEUED
    with tempfile.TemporaryDirectory(prefix="farflow-leases-") as scratch:
        world = make_world(Path(scratch), 1)
        store = SchedulerStore.open(Path(world.config.scheduler.folder))
        waiting: list[Change] = []
        core = CoreWorld(0, max_jobs=count)
        core.on_changes = waiting.extend
        queue(core, count)
        waiting += [(table, key, value) for table, key, value in core.core.dump()]
        store.commit(waiting, core.now)
        store.close()
        del core, waiting
        began = time.monotonic()
        with scheduler(world, real_log=False) as started:
            transport = with_port(world, started.control_port)

            async def served() -> int:
                async with Operator(transport, world.operator) as operator:
                    return sum(run.external_open for run in (await operator.status()).runs)

            open_jobs = asyncio.run(served())
            took_s = time.monotonic() - began
            spent_s = cpu_s(started.process.pid)
        assert open_jobs == count, f"{open_jobs} of {count} jobs came back"
    return Row(
        metric=f"leases.restart with {count} queued jobs, start to answer ({spent_s:.1f} CPU s)",
        value=round(took_s, 2),
        unit="s",
        target=f"<= {RESTART_S:g}",
        ok=took_s <= RESTART_S,
    )


def _child(what: str, count: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.leases_rows", what, str(count)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=CHILD_S,
    )
    return msgspec.json.decode(done.stdout, type=dict[str, float])


def _measure(what: str, count: int) -> dict[str, float]:
    if what == "memory":
        return {"job_bytes": queue(CoreWorld(0, max_jobs=count), count)}
    tune()
    world = CoreWorld(CORE_AGENTS)
    leases(world, count // 10)
    event_s, lease_s = leases(world, count)
    many = CoreWorld(MANY_AGENTS)
    decision_s(many, 100)
    return {
        "events_s": 1.0 / event_s,
        "lease_s": lease_s,
        "decision_s": decision_s(many, count // 10),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
