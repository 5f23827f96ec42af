"""What the weight store makes beside the trainer's deltas: cumulatives, composites, bridges,
snapshots; and what agents gain by it."""

import threading
from functools import partial

import msgspec
import numpy as np
import pytest
from version_store import (
    POLICY,
    TRUSTED,
    Publisher,
    add,
    filled,
    follow,
    make_all,
    opened,
    shape,
    tensors,
)

from scheduler.weight_composites import Before, CompositeJob, Former, SnapshotJob, perform
from scheduler.weight_policy import WalkFailed
from scheduler.weight_upkeep import Asked
from transport.errors import ChecksumMismatch, StoreError
from transport.weights.patch import CellList, CellRun, patched
from transport.weights.plan import LinkSpeed, check_plan
from transport.weights.tensors import TensorBytes


@pytest.fixture
def publisher(tmp_path):
    return Publisher(tmp_path / "model")


@pytest.fixture
def open_store(tmp_path):
    return partial(opened, tmp_path / "store")


def held(publisher, version):
    return version, publisher.publications[version].manifest.digest


def plan_bytes(plan):
    return sum(entry.size_bytes for step in check_plan(plan, TRUSTED) for entry in step.files)


def chain_bytes(publisher, start, end):
    deltas = (publisher.publications[v].manifest.delta for v in range(start + 1, end + 1))
    return sum(delta.size_bytes for delta in deltas)


def test_whoever_missed_versions_or_holds_the_first_moves_fewer_bytes(
    open_store, publisher, tmp_path
):
    store = filled(open_store(), publisher, 0)
    for version in range(1, 66):
        add(store, publisher.next(version))
        make_all(store, *([Asked(version - 40, version)] if version > 40 else []))
    start = follow(store, store.plan(POLICY, upto=0), tmp_path / "first")
    for missed in (1, 4, 16, 64, 65):
        have = 65 - missed
        plan = store.plan(POLICY, *held(publisher, have))
        chain = chain_bytes(publisher, have, 65)
        assert plan_bytes(plan) <= chain
        if missed > 4:
            assert plan_bytes(plan) < 0.8 * chain
    assert shape(plan)[:2] == [(64, ()), (64, ("delta-from-00000000.safetensors",))]
    assert follow(store, plan, tmp_path / "agent", start).tensors == publisher.states[65]
    nothing = store.plan(POLICY)
    assert plan_bytes(nothing) < 1.25 * 24_000
    assert follow(store, nothing, tmp_path / "new").tensors == publisher.states[65]


def test_composites_lead_where_they_say_whatever_they_start_from(open_store, publisher, tmp_path):
    store = filled(open_store(cumulative_every=6), publisher, 16)
    made = make_all(store, Asked(12, 16))
    assert made == [(0, 12, True), (8, 16, True), (12, 16, True), (14, 16, True)]
    for base in (8, 12, 14):
        agent = follow(store, store.plan(POLICY, upto=base), tmp_path / f"{base}")
        plan = store.plan(POLICY, *held(publisher, base))
        assert [version for version, _ in shape(plan)] == [16, 16]
        assert follow(store, plan, tmp_path / f"{base}", agent).tensors == publisher.states[16]
    assert make_all(store, Asked(12, 16)) == []


def test_after_a_rollback_the_abandoned_get_a_bridge(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 5)
    agent = follow(store, store.plan(POLICY), tmp_path / "agent")
    add(store, publisher.next(6, parent=2))
    add(store, publisher.next(7))
    assert store.awaits_bridge(POLICY, *held(publisher, 5))
    assert not store.awaits_bridge(POLICY, *held(publisher, 5), upto=4)
    assert not store.awaits_bridge(POLICY, *held(publisher, 2))
    assert not store.awaits_bridge(POLICY, 5, "0" * 64)
    assert not store.awaits_bridge("r/q", *held(publisher, 5))
    assert shape(store.plan(POLICY, *held(publisher, 5)))[0][0] == 0
    assert make_all(store, Asked(5, 7)) == [(5, 7, True)]
    assert not store.awaits_bridge(POLICY, *held(publisher, 5))
    add(store, publisher.next(8))
    store.maintain(POLICY)
    assert make_all(store, Asked(5, 8)) == []
    plan = store.plan(POLICY, *held(publisher, 5))
    assert [version for version, _ in shape(plan)] == [7, 7, 8]
    assert plan_bytes(plan) < 2000
    assert follow(store, plan, tmp_path / "agent", agent).tensors == publisher.states[8]


def test_a_known_link_gets_fewer_steps_where_decoding_costs_more(open_store, publisher):
    store = filled(open_store(), publisher, 4)
    store.adopt(perform(store.next_job(POLICY, [Asked(0, 4)]), threading.Event()))
    have = held(publisher, 0)
    assert len(check_plan(store.plan(POLICY, *have, link=LinkSpeed(1e9, 1e3)), TRUSTED)) == 1
    assert len(check_plan(store.plan(POLICY, *have, link=LinkSpeed(1e3, 1e9)), TRUSTED)) == 1


class Wild(Publisher):
    """Changes nearly all weights every time, as a toy model at a toy learning rate."""

    def changed(self, old, version):
        return tensors(100 + version)


def test_where_cumulatives_do_not_pay_snapshots_are_made(open_store, tmp_path):
    publisher = Wild(tmp_path / "model")
    store = filled(open_store(cumulative_every=4), publisher, 3)
    assert make_all(store, Asked(0, 3)) == [(0, 2, False)]
    for version in range(4, 10):
        add(store, publisher.next(version))
    assert make_all(store) == [(None, 8, True)]
    store.maintain(POLICY)
    plan = store.plan(POLICY)
    assert shape(plan)[:3] == [
        (0, ("config.json", "tokenizer.json")),
        (8, ()),
        (8, ("model.safetensors",)),
    ]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[9]
    for version in range(10, 13):
        add(store, publisher.next(version))
    assert make_all(store) == [(None, 12, True)]


def test_what_the_store_made_and_finds_damaged_it_makes_again(open_store, publisher, tmp_path):
    store = filled(open_store(cumulative_every=4), publisher, 6)
    assert make_all(store, Asked(3, 6)) == [(0, 4, True), (4, 6, True)]
    for base, version in ((0, 4), (4, 6)):
        (entry,) = store._policies[POLICY].composites[base, version].manifest.files
        store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
        assert store.read_chunk(entry.digest, 0) is None
        assert version not in [v for v, files in shape(store.plan(POLICY)) if not files]
    assert make_all(store, Asked(3, 6)) == []
    store.maintain(POLICY)
    assert make_all(store, Asked(3, 6)) == [(0, 4, True), (4, 6, True)]
    plan = store.plan(POLICY)
    assert [version for version, _ in shape(plan)] == [0, 4, 4, 6, 6]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[6]


def test_a_job_that_meets_damage_or_is_stopped_leaves_nothing(open_store, publisher):
    store = filled(open_store(cumulative_every=4), publisher, 5)
    job = store.next_job(POLICY)
    assert isinstance(job, CompositeJob)
    before = set(store.blobs(POLICY).folder.iterdir())
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoreError, match="stops"):
        perform(job, stop)
    wrong = msgspec.structs.replace(job.version, digest="d" * 64)
    with pytest.raises(ChecksumMismatch, match="not these versions"):
        perform(CompositeJob(job.blobs, job.base, wrong, job.to_fork, (), job.to_version),
                threading.Event())  # fmt: skip
    entry = publisher.publications[3].manifest.delta
    store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    with pytest.raises(WalkFailed) as caught:
        perform(job, threading.Event())
    assert set(store.blobs(POLICY).folder.iterdir()) == before
    store.job_failed(POLICY, job, caught.value)
    assert store.suspects == {POLICY}
    assert store.next_job(POLICY) is None  # no way to version 4 is left
    with pytest.raises(StoreError):
        store.plan(POLICY)
    store.maintain(POLICY)
    assert shape(store.plan(POLICY))[-1] == (5, ("model.safetensors",))
    # From the snapshot of 5 on, cumulatives are made again.
    for version in range(6, 10):
        add(store, publisher.next(version))
    assert make_all(store) == [(0, 8, True)]


def test_a_snapshot_job_whose_way_is_gone_says_so(open_store, tmp_path):
    publisher = Wild(tmp_path / "model")
    store = filled(open_store(cumulative_every=2), publisher, 2)
    assert not store.adopt(perform(store.next_job(POLICY), threading.Event()))
    job = store.next_job(POLICY)
    assert isinstance(job, SnapshotJob)
    store.blobs(POLICY).path(publisher.publications[1].manifest.delta.digest).unlink()
    with pytest.raises(WalkFailed):
        perform(job, threading.Event())


def test_former_values_are_the_first_ones_of_every_cell():
    rng = np.random.default_rng(3)
    first = {
        name: TensorBytes("BF16", (500,), rng.integers(0, 1 << 16, 500, "<u2").tobytes())
        for name in ("few", "many", "none")
    }
    now, former = dict(first), Former()
    for _ in range(6):
        positions = np.unique(rng.integers(0, 40, 12))
        patch = {
            "few": (
                CellList(positions, rng.integers(0, 1 << 16, positions.size, "<u2")),
                CellRun(38, rng.integers(0, 1 << 16, 4, "<u2")),
            ),
            "many": (CellRun(10, rng.integers(0, 1 << 16, 300, "<u2")),),
        }
        former.note(now, patch)
        now.update({name: patched(now[name], changes) for name, changes in patch.items()})
    assert isinstance(former.patch()["few"][0], CellList)
    assert isinstance(former.patch()["many"][0], CellRun)
    before = Before(now, former.patch(), {})
    assert {name: bytes(t.data) for name, t in before.items()} == {
        name: bytes(t.data) for name, t in first.items()
    }
    assert len(before) == 3
    assert before["few"] is before["few"]
    assert before["none"] is now["none"]
