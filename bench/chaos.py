"""Kill, stop, cut and slow down real processes at random; nothing may be lost or trained twice.

    python -m bench.chaos --json [--quick] [--faults N] [--seed S]

A whole deployment of real processes (scheduler with its trajectory log and weight store, three
agents behind emulated links, one numpy trainer, fake engines) trains while faults strike, one after
another, without waiting for the last one to heal: SIGKILL, SIGSTOP for a while (a hung machine),
links that go down with and without a reset, links that crawl. Time constants are scaled down about
ten times, so that there is time for many; the terms of every row that depends on them say so. In
the end the run is stopped and audited from what the trainer's checkpoint holds.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import report
from bench.report import Row
from bench.toy import Running, counts, running, write_toy
from transport.errors import FarflowError
from transport.runtime.logs import configure_logging
from transport.runtime.processes import RestartPolicy

AGENTS = ("near", "far", "edge")
DEPLOYMENT = """
[local.agents.near]
[local.agents.far]
link = "hop"
[local.agents.edge]
link = "crawl"
[links.hop]
rtt = "40ms"
rate = "50Mbit/s"
[links.crawl]
rtt = "120ms"
rate = "10Mbit/s"
"""
SLOW = {"rtt": "400ms", "rate": "500kbit/s"}
USUAL = {"far": {"rtt": "40ms", "rate": "50Mbit/s"}, "edge": {"rtt": "120ms", "rate": "10Mbit/s"}}
STEPS = 1_000_000
MEAN_PAUSE_S = 1.5
FULL_FAULTS = 1000
QUICK_FAULTS = 15
WITHIN_S = 45.0
RESTART_DELAY_S = 0.2


@dataclass
class Tally:
    """What was done and seen."""

    faults: Counter[str] = field(default_factory=Counter)
    restarts_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    abandoned: int = 0
    trained: int = 0
    failed: int = 0


async def strike(run: Running, rng: random.Random, tally: Tally) -> None:
    """One fault; those that last are ended by a task of their own."""
    kinds: list[tuple[float, str, Callable[[], object]]] = [
        (4.0, "agent killed", lambda: _kill(run, f"agent-{rng.choice(AGENTS)}")),
        (2.0, "trainer killed", lambda: _kill(run, "trainer-solver")),
        (2.0, "scheduler killed", lambda: _kill(run, "scheduler")),
        (1.5, "trajectory log killed", lambda: _kill_service(run, "trajectory_log")),
        (1.5, "weight store killed", lambda: _kill_service(run, "weight_store")),
        (2.0, "agent hung", lambda: _hang(run, f"agent-{rng.choice(AGENTS)}", rng.uniform(0.2, 3))),
        (1.0, "trainer hung", lambda: _hang(run, "trainer-solver", rng.uniform(0.2, 3.0))),
        (1.0, "scheduler hung", lambda: _hang(run, "scheduler", rng.uniform(0.2, 2.0))),
        (1.5, "link down", lambda: _link(run, rng, {"down": rng.uniform(0.2, 3.0)})),
        (1.5, "link cut", lambda: _link(run, rng, {"down": rng.uniform(0.1, 1.0), "reset": True})),
        (1.0, "link slow", lambda: _link(run, rng, {"profile": SLOW})),
        (1.5, "link as usual", lambda: _heal(run)),
        (1.0, "agent asked to stop", lambda: _terminate(run, f"agent-{rng.choice(AGENTS)}")),
    ]
    [(_, name, act)] = rng.choices(kinds, [weight for weight, _, _ in kinds])
    with contextlib.suppress(FarflowError, ProcessLookupError, FileNotFoundError, OSError):
        act()  # what is being started again at this moment cannot be struck
        tally.faults[name] += 1


async def chaos(folder: Path, faults: int, seed: int, tell: Callable[[str], None]) -> Tally:
    """Run until ``faults`` have struck, stop, audit."""
    rng = random.Random(seed)
    tally = Tally()
    file = write_toy(folder, steps=STEPS, agents=DEPLOYMENT)
    restart = RestartPolicy(first_delay_s=RESTART_DELAY_S, max_delay_s=RESTART_DELAY_S)
    async with running(file, folder / "run", restart=restart, most_restarts=10**6) as run:
        await run.reach_step(2, within_s=WITHIN_S)
        step = 0
        while tally.faults.total() < faults:
            await asyncio.sleep(rng.expovariate(1.0 / MEAN_PAUSE_S))
            await strike(run, rng, tally)
            if tally.faults.total() % 10 == 0:
                _heal(run)
                # Whatever has struck, training must go on.
                goal = step + 1
                status = await run.until(
                    f"step {goal} after {dict(tally.faults)}",
                    lambda s, goal=goal: run.policy(s).step >= goal,
                    WITHIN_S,
                )
                step = run.policy(status).step
                tell(f"{tally.faults.total()} faults, step {step}, term {status.term}")
        _heal(run)
        await _restart_scheduler(run, tally)
        await run.operator.command(run.prepared.spec.name, "stop")
        summary = await run.finish(within_s=2 * WITHIN_S)
    row = counts(summary)
    tally.problems += summary.problems
    left = {name: row[name] for name in ("queued", "in_flight", "buffered", "taken") if row[name]}
    if left:
        tally.problems.append(f"left over: {left}")
    tally.trained, tally.abandoned, tally.failed = row["trained"], row["abandoned"], row["failed"]
    tally.steps = summary.policies[0].steps
    if tally.trained != 4 * tally.steps:
        tally.problems.append(f"{tally.trained} groups trained in {tally.steps} steps of 4")
    return tally


async def _restart_scheduler(run: Running, tally: Tally) -> None:
    """Kill the scheduler a few times with nothing else wrong; how long until it answers again."""
    clock = asyncio.get_running_loop().time
    for _ in range(5):
        before = await run.until("an answer", lambda s: True, WITHIN_S)
        killed_s = clock()
        _kill(run, "scheduler")
        await run.until("a new term", lambda s, t=before.term: s.term > t, WITHIN_S)
        tally.restarts_s.append(clock() - killed_s - RESTART_DELAY_S)


def _kill(run: Running, name: str) -> None:
    run.deployment.child(name).kill()


def _terminate(run: Running, name: str) -> None:
    os.kill(run.deployment.child(name).pid, signal.SIGTERM)


def _kill_service(run: Running, service: str) -> None:
    """SIGKILL to the scheduler's own child of that module."""
    scheduler = run.deployment.child("scheduler").pid
    children = Path(f"/proc/{scheduler}/task/{scheduler}/children").read_text().split()
    for pid in children:
        if f"scheduler.{service}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            os.kill(int(pid), signal.SIGKILL)
            return
    raise ProcessLookupError(service)


def _hang(run: Running, name: str, seconds: float) -> None:
    """SIGSTOP, and SIGCONT after ``seconds``."""
    pid = run.deployment.child(name).pid
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    asyncio.get_running_loop().call_later(seconds, go_on)


def _link(run: Running, rng: random.Random, command: dict[str, object]) -> None:
    run.deployment.command_link(rng.choice(tuple(USUAL)), command)


def _heal(run: Running) -> None:
    for agent, profile in USUAL.items():
        with contextlib.suppress(FarflowError, OSError):
            run.deployment.command_link(agent, {"profile": profile})


def rows(tally: Tally) -> list[Row]:
    total = tally.faults.total()
    terms = "real processes, time constants scaled down ten times"
    restart_s = max(tally.restarts_s, default=float("inf"))
    return [
        Row(
            metric=f"faults ({terms})",
            value=total,
            unit="; ".join(f"{n} {name}" for name, n in sorted(tally.faults.items())),
        ),
        Row(
            metric="groups lost, miscounted or trained twice",
            value=len(tally.problems) + tally.failed,
            unit="; ".join(tally.problems) or "groups",
            target="0",
            ok=not tally.problems and not tally.failed,
        ),
        Row(metric="steps of the surviving lineage", value=tally.steps, unit="steps"),
        Row(metric="consumptions of lineages that were left", value=tally.abandoned, unit="groups"),
        Row(
            metric="scheduler killed to answering (longest of 5)",
            value=restart_s,
            unit="s",
            reference="median",
            ratio=restart_s / statistics.median(tally.restarts_s or [restart_s]),
            target="< 2 s",
            ok=restart_s < 2.0,
        ),
    ]


def measure(faults: int, seed: int) -> list[Row]:
    configure_logging("error", component="chaos")
    with tempfile.TemporaryDirectory(prefix="farflow-chaos-") as folder:
        said = asyncio.run(
            chaos(Path(folder), faults, seed, lambda text: print(text, file=sys.stderr))
        )
    return rows(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    report.main(
        "chaos",
        lambda quick: measure(own.faults or (QUICK_FAULTS if quick else FULL_FAULTS), own.seed),
    )
