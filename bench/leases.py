"""Durable leases per second: jobs of submitters through the real daemon to a thousand agents.

    submit --> rows on disk --> offer --> accepted --> result on disk --> outcome on disk
           --> read by the submitter --> confirmed

One lease is all of that. Durable means power loss: SQLite's write-ahead log is synced (``FULL``)
before any offer, receipt or result leaves, in one transaction for everything that was decided
meanwhile. Agents and submitters are simulated (``leases_agents``, ``leases_load``), the daemon, its
store, its sockets and CURVE are the real ones. Everything shares this machine's cores.
"""

import asyncio
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench.leases_agents import Fleet, Seen, run_fleet
from bench.leases_load import Load, Served
from bench.leases_rows import core_rows, fdatasync_s, restart_row
from bench.leases_world import POLICY, Started, World, cpu_s, make_world, scheduler, with_port
from bench.report import Row, main
from scheduler.operator import Operator
from transport.runtime.logs import configure_logging
from transport.zmq_socket import raise_file_limit

AGENTS: Final = 1000
SLOTS: Final = 8
WORK_S: Final = 0.25
WINDOW: Final = 2000
"""Jobs open at once when the rate is what comes out; a quarter of the slots."""

RATE_S: Final = 5000.0
SLOW_S: Final = 1000.0
SUSTAINED: Final = 0.9
FULL_P99_S, SLOW_P99_S = 0.05, 0.005
QUICK_S, FULL_S, WARM_S = 3.0, 15.0, 2.0
QUICK_TASKS, FULL_TASKS = 1000, 10_000
READY_S, DRAIN_S, DASK_S = 60.0, 30.0, 300.0
_SPAWN: Final = multiprocessing.get_context("spawn")


class FleetProcess:
    """The agents' process and its pipe."""

    def __init__(
        self,
        world: World,
        port: int,
        *,
        slots: int,
        work_s: float,
        sites: tuple[str, ...] = (),
        spread: float = 0.0,
    ) -> None:
        log = world.services["trajectory-log"]
        fleet = Fleet(
            endpoint=f"tcp://127.0.0.1:{port}",
            server_key=world.server_key,
            agents=tuple((k.name, k.public_key, k.secret_key) for k in world.agents.values()),
            log_key=(log.public_key, log.secret_key),
            slots=slots,
            work_s=work_s,
            policy=POLICY,
            folder=str(world.folder),
            sites=sites,
            spread=spread,
        )
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=run_fleet, args=(fleet, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def seen(self) -> Seen:
        """What happened since the last question."""
        self._pipe.send("seen")
        return msgspec.msgpack.decode(self._pipe.recv(), type=Seen)

    def close(self) -> None:
        self._pipe.send("end")
        self.process.join(10.0)
        self.process.kill()
        self._pipe.close()


@contextmanager
def fleet(
    world: World,
    started: Started,
    *,
    slots: int,
    work_s: float,
    sites: tuple[str, ...] = (),
    spread: float = 0.0,
) -> Iterator[FleetProcess]:
    """Agents, all of them ready, at ``sites`` in turn."""
    asyncio.run(_submit_run(world, started.control_port))
    agents = FleetProcess(
        world, started.control_port, slots=slots, work_s=work_s, sites=sites, spread=spread
    )
    try:
        deadline = time.monotonic() + READY_S
        while agents.seen().ready < len(world.agents):
            if time.monotonic() > deadline:
                raise RuntimeError("not all agents became ready")
            time.sleep(0.1)
        yield agents
    finally:
        agents.close()


async def _submit_run(world: World, port: int) -> None:
    async with Operator(with_port(world, port), world.operator) as operator:
        await operator.submit(world.run)


class Phase(NamedTuple):
    """One load. Offer delays in seconds, from the submitter's send to the agent's receipt; ``cpu``
    in cores by process."""

    jobs_s: float
    p50_s: float
    p99_s: float
    offers_per_frame: float
    refused: int
    open_jobs: int
    cpu: dict[str, float]


class Bench(NamedTuple):
    """Everything that runs."""

    agents: FleetProcess
    load: Load
    pids: dict[str, int]

    def measured(self, serve: Callable[[], Served]) -> Phase:
        self.agents.seen()
        before = {name: cpu_s(pid) for name, pid in self.pids.items()}
        began = time.monotonic()
        served = serve()
        took_s = time.monotonic() - began
        cpu = {name: (cpu_s(pid) - before[name]) / took_s for name, pid in self.pids.items()}
        seen = self.agents.seen()
        return Phase(
            served.jobs_s,
            quantile(seen.offer_s, 0.5),
            quantile(seen.offer_s, 0.99),
            seen.offers / max(1, seen.offer_frames),
            served.refused,
            served.open_jobs,
            cpu,
        )

    def by_window(self, window: int, seconds: float) -> Phase:
        return self.measured(lambda: self.load.by_window(window, seconds))

    def at_rate(self, jobs_s: float, seconds: float) -> Phase:
        """Evenly, after the queue of the phase before is empty."""
        left = self.load.drain(DRAIN_S)
        assert not left, f"{left} jobs never ended"
        return self.measured(lambda: self.load.at_rate(jobs_s, seconds))


@contextmanager
def bench(agents: int, *, profile: Path | None = None) -> Iterator[Bench]:
    """A scheduler, its fleet and submitters, all on this machine."""
    with tempfile.TemporaryDirectory(prefix="farflow-leases-") as scratch:
        world = make_world(Path(scratch), agents)
        with (
            scheduler(world, real_log=False, profile=profile) as started,
            fleet(world, started, slots=SLOTS, work_s=WORK_S) as running,
        ):
            endpoint = f"tcp://127.0.0.1:{started.control_port}"
            load = Load(endpoint, world.server_key, list(world.submitters.values()))
            pids = {
                "scheduler": started.process.pid,
                "agents": running.process.pid or 0,
                "submitters": os.getpid(),
            }
            try:
                load.by_window(WINDOW // 20, WARM_S)
                yield Bench(running, load, pids)
            finally:
                load.close()


def fleet_rows(quick: bool) -> list[Row]:
    """Rows of the whole path, beside dask in the same minutes."""
    seconds = QUICK_S if quick else FULL_S
    with bench(AGENTS) as running:
        full = running.by_window(WINDOW, seconds)
        rate = min(RATE_S, SUSTAINED * full.jobs_s)
        at_full = running.at_rate(rate, seconds)
        at_slow = running.at_rate(min(SLOW_S, rate), seconds)
        assert not running.load.drain(DRAIN_S), "jobs never ended"
    dask = _dask_tasks_s(QUICK_TASKS if quick else FULL_TASKS)
    cores = os.cpu_count() or 1
    scheduler_us = full.cpu["scheduler"] / full.jobs_s * 1e6
    return [
        Row(
            metric=f"leases.durable, {AGENTS} agents, {cores} shared cores",
            value=round(full.jobs_s),
            unit="leases/s",
            reference=dask.name,
            ratio=round(full.jobs_s / dask.tasks_s, 2) if dask.tasks_s else None,
            target=f">= {RATE_S:.0f}",
            ok=full.jobs_s >= RATE_S,
        ),
        Row(metric=f"leases.{dask.name}", value=round(dask.tasks_s), unit="tasks/s"),
        Row(
            metric="leases.scheduler process, CPU per durable lease",
            value=round(scheduler_us),
            unit="us",
        ),
        Row(
            metric="leases.agents and submitters, CPU per durable lease",
            value=round((full.cpu["agents"] + full.cpu["submitters"]) / full.jobs_s * 1e6),
            unit="us",
        ),
        Row(
            metric="leases.offers per frame at full rate",
            value=round(full.offers_per_frame, 2),
            unit="offers",
        ),
        _delay_row(f"leases.offer p99 at full rate, {round(rate)}/s", at_full, FULL_P99_S),
        _delay_row(f"leases.offer p99 at {round(min(SLOW_S, rate))}/s", at_slow, SLOW_P99_S),
    ]


def _delay_row(name: str, phase: Phase, most_s: float) -> Row:
    return Row(
        metric=f"{name}, p50 {phase.p50_s * 1e3:.1f} ms",
        value=round(phase.p99_s * 1e3, 1),
        unit="ms",
        target=f"<= {most_s * 1e3:g}",
        ok=phase.p99_s <= most_s,
    )


class Dask(NamedTuple):
    name: str
    tasks_s: float


def _dask_tasks_s(tasks: int) -> Dask:
    """The reference; 0 where it is not installed."""
    if importlib.util.find_spec("distributed") is None:
        return Dask("dask.distributed skipped: pip install 'farflow[bench]'", 0.0)
    done = subprocess.run(
        [sys.executable, "-m", "bench.leases_dask", str(tasks)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=DASK_S,
    )
    found = json.loads(done.stdout)
    return Dask(f"dask.distributed {found['version']}, no-op, not durable", found["tasks_s"])


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    raise_file_limit()
    rows = fleet_rows(quick)
    with tempfile.TemporaryDirectory(prefix="farflow-leases-") as scratch:
        sync_s = fdatasync_s(Path(scratch))
    rows.append(
        Row(metric="leases.fdatasync of 64 KiB, p50", value=round(sync_s * 1e3, 3), unit="ms")
    )
    return [*rows, *core_rows(quick), restart_row(quick)]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


if __name__ == "__main__":
    main("leases", measure)
