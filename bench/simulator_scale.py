"""How fast the simulator is through the real cores, and how large a fleet it carries.

    rates     ``bench.placement_speed`` on 20 steps of aws12-mixed: kernel events per second of CPU,
              against the scheduler's core alone on the same events
    fleet     10 008 agents in 12 AWS regions for one virtual hour, in a process of its own, with
              the most memory that it had

The fleet: eight slots and 50 tokens per second each, groups of eight siblings of 8 000 tokens in
the mean, 2 048 groups per batch, steps of 30 s, deltas of 150 MB over links of 1 Gbit/s, the
cloud's NIC not binding (what a fan-out tree would have to give). So a group takes minutes, as the
agentic work does for which fleets of this size are built; chats of 300 tokens would be more than
twenty times as many events.

A fleet that needs more CPU than the target is stopped there, and its row missed: ``value`` is then
what the whole hour would have taken, the time so far and the rest at the rate of the later half.
``--quick`` has 1 008 agents for two virtual minutes; its target is the hour's, by agents and time.
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Final, NamedTuple

import msgspec

from bench.placement_speed import speed_rows
from bench.report import Row, main
from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario, load_scenario
from sim.workload import Workload

HOUR_S: Final = 3600.0
TARGET_S: Final = 900.0
SITES: Final = 12
FLEET: Final = 834
"""Agents per site."""


class Load(NamedTuple):
    """What one fleet took: CPU seconds at the end of each virtual second, the first entry being the
    time to build the world."""

    agents: int
    cpu_s: tuple[float, ...]
    events: int
    trained: int
    problems: int
    most_bytes: int

    @property
    def virtual_s(self) -> int:
        return len(self.cpu_s) - 1

    def hour_s(self, virtual_s: float) -> float:
        """CPU seconds for ``virtual_s``: those so far, and the rest as in the later half."""
        half = len(self.cpu_s) // 2
        rate = (self.cpu_s[-1] - self.cpu_s[half]) / max(1, self.virtual_s - half)
        return self.cpu_s[-1] + rate * max(0.0, virtual_s - self.virtual_s)


def fleet_scenario(per_site: int, virtual_s: float) -> Scenario:
    """``SITES`` times as many agents, and work for all of them."""
    return Scenario(
        name=f"fleet of {SITES * per_site}",
        regions="aws12-2022",
        nic_mbit=1e9,
        group_size=8,
        steps=100_000,
        limit_s=virtual_s,
        agents=AgentsSpec(per_site=per_site, slots=(8,), tokens_per_s=(50.0,), link_mbit=(1000.0,)),
        policies={
            "policy": PolicyShape(
                batch_groups=max(1, 2048 * per_site // FLEET), max_policy_lag=8, train_s=30.0
            )
        },
        workload=Workload(mean_tokens=8000.0, cv_tokens=0.8, max_new_tokens=32_768),
    )


def load_of(per_site: int, virtual_s: float, budget_s: float) -> Load:
    """Simulate the fleet until the virtual time or the CPU time is over."""
    began_s = time.process_time()
    simulation = Simulation(fleet_scenario(per_site, virtual_s), seed=0)
    cpu_s = [time.process_time() - began_s]

    def second() -> None:
        cpu_s.append(time.process_time() - began_s)
        if cpu_s[-1] > budget_s:
            simulation.kernel.stop()

    simulation.on_second = second
    result = simulation.run()
    return Load(
        agents=SITES * per_site,
        cpu_s=tuple(cpu_s),
        events=result.events,
        trained=sum(row.trained + row.taken for row in result.accounting),
        problems=len(result.problems),
        most_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def apart(per_site: int, virtual_s: float, budget_s: float) -> Load:
    """The same in a fresh process, whose memory is the fleet's alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(load_of, per_site, virtual_s, budget_s).result()


def fleet_rows(load: Load, virtual_s: float, target_s: float) -> list[Row]:
    """Time, events and memory of a fleet, of which ``virtual_s`` were asked for."""
    name = f"{load.agents} agents, {virtual_s:.0f} virtual s"
    took_s = load.hour_s(virtual_s)
    whole = load.virtual_s >= virtual_s - 2.0
    said = "simulated to the end" if whole else f"from {load.virtual_s} virtual s, extrapolated"
    return [
        Row(
            metric=f"{name}: CPU time",
            value=took_s,
            unit="s",
            reference=f"virtual time; {said}",
            ratio=took_s / virtual_s,
            target=f"<= {target_s:.0f}, books balance",
            ok=took_s <= target_s and load.problems == 0,
        ),
        Row(
            metric=f"{name}: kernel events",
            value=load.events / load.cpu_s[-1],
            unit="events/s of CPU",
            reference=f"{load.events} events, {load.trained} groups used",
        ),
        Row(
            metric=f"{name}: most memory",
            value=load.most_bytes / 2**20,
            unit="MiB",
            reference=f"{load.most_bytes / load.agents / 1024:.0f} KiB per agent",
        ),
    ]


def measure(quick: bool) -> list[Row]:
    steps = msgspec.structs.replace(load_scenario("aws12-mixed"), steps=10 if quick else 20)
    rows = speed_rows(steps, repeats=1 if quick else 3)
    per_site, virtual_s = (84, 120.0) if quick else (FLEET, HOUR_S)
    target_s = TARGET_S * virtual_s / HOUR_S * per_site / FLEET
    load = apart(per_site, virtual_s, 40.0 if quick else TARGET_S)
    return rows + fleet_rows(load, virtual_s, target_s)


if __name__ == "__main__":
    main("simulator_scale", measure)
