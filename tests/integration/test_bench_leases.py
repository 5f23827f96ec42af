"""The lease and wire benches at a size that proves that they measure what they say."""

import os

import pytest

from bench.leases import FleetProcess, bench
from bench.leases_core import CoreWorld, decision_s, leases, queue
from bench.leases_rows import restart_row
from bench.wire_ends import Way, messages_s


def test_the_core_bench_runs_leases_to_their_confirmation():
    world = CoreWorld(20)
    event_s, lease_s = leases(world, 200)
    assert lease_s > event_s > 0.0
    counters = world.core._ctx.counters()
    assert counters["external.accepted"] == 200
    assert world.confirmed >= 150
    assert decision_s(world, 50) > 0.0
    world.core.check()


def test_queued_jobs_of_the_memory_row_all_wait():
    world = CoreWorld(0, max_jobs=500)
    queue(world, 500)
    assert world.core._ctx.external_open == 500


@pytest.mark.parametrize(
    "way",
    [
        Way("link", curve=False),
        Way("link", curve=True),
        Way("link", curve=True, outward=True),
        Way("blocking", curve=True),
    ],
)
@pytest.mark.slow
def test_every_way_of_the_wire_bench_delivers_all_messages(way):
    assert messages_s(way, [bytes(2), bytes(254)], 3000) > 0.0


@pytest.mark.slow
def test_the_whole_path_serves_every_job_and_batches_its_offers():
    with bench(20) as running:
        phase = running.by_window(100, 1.5)
        assert running.load.drain(20.0) == 0
        load = running.load
        assert phase.jobs_s > 0.0
        assert phase.refused == 0
        assert 0.0 < phase.p50_s <= phase.p99_s
        assert phase.offers_per_frame >= 1.0
        assert load.done == sum(s.submitted for s in load._submitters)
        assert {state for s in load._submitters for state in s.states} == {"accepted"}
        assert isinstance(running.agents, FleetProcess)
        assert running.pids["submitters"] == os.getpid()


@pytest.mark.slow
def test_the_restart_row_finds_every_queued_job_again(monkeypatch):
    monkeypatch.setattr("bench.leases_rows.QUICK_QUEUED", 1000)
    row = restart_row(True)
    assert row.value > 0.0
