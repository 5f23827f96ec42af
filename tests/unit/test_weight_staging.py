"""A plan on its way into the copy: decoded as it comes in, taken back when it fails."""

import time

import msgspec
import numpy as np
import pytest
from published_versions import CELLS, POLICY, TRUSTED, Versions, after, tensors

from edge_agent import weight_staging
from edge_agent.changed_cells import ChangedCells, difference
from edge_agent.copy_folder import CopyDrifted
from edge_agent.weight_copy import WeightCopies
from transport.errors import BaseVersionMismatch, IntegrityError, RemoteProtocolError, StoreError
from transport.messages import WeightsPlan
from transport.runtime.clock import SystemClock
from transport.weights.patch import CellList, CellRun
from transport.weights.tensors import TensorBytes

CHUNK = 256
CLOCK = SystemClock()


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "model", sparse=True, segment_cells=100, chunk_bytes=CHUNK)


@pytest.fixture
def open_copies(tmp_path):
    def opening(**options):
        return WeightCopies(tmp_path / "copies", trusted=TRUSTED, **options)

    return opening


def write(versions, copies, intake, entry, numbers):
    """Chunks of a file arrive, in this order."""
    data = versions.file(entry)
    for number in numbers:
        part = data[number * CHUNK : (number + 1) * CHUNK]
        copies.blobs(POLICY).write_chunk(entry, number, part)
        intake.staging.chunk_written(entry, number)


def until(condition, within_s=5.0):
    ends = CLOCK.monotonic_s() + within_s
    while not condition():
        assert CLOCK.monotonic_s() < ends
        time.sleep(0.001)


def numbers_of(entry):
    return range(len(entry.chunk_digests))


def segments_within(entry, chunks):
    return sum(offset + size <= chunks * CHUNK for offset, size in entry.segments)


def test_segments_are_decoded_while_later_ones_still_come(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    intake = copies.begin(versions.plan(2, have=0))
    first, second = intake.wanted
    assert len(first.segments) >= 6
    half = len(first.chunk_digests) - 1
    assert 0 < segments_within(first, half) < len(first.segments)
    write(versions, copies, intake, first, range(half))
    until(lambda: intake.staging.progress == (0, segments_within(first, half)))
    write(versions, copies, intake, second, range(half))
    assert intake.staging.progress[0] == 0
    write(versions, copies, intake, first, [half])
    until(lambda: intake.staging.progress == (1, segments_within(second, half)))
    assert copies.held() == {POLICY: versions.ref(0)}
    write(versions, copies, intake, second, [half])
    until(lambda: intake.staging.progress == (2, 0))
    staged = copies.finish(intake)
    assert after(versions.states[0], staged.changed) == versions.states[2]
    copies.commit(staged)
    assert open_copies().tensors(POLICY) == versions.states[2]


def test_chunks_in_any_order_and_twice_lead_to_the_same(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    intake = copies.begin(versions.plan(3, have=0))
    rng = np.random.default_rng(0)
    for entry in reversed(intake.wanted):
        numbers = [*numbers_of(entry), *numbers_of(entry)]
        write(versions, copies, intake, entry, rng.permutation(numbers))
    copies.commit(copies.finish(intake))
    assert copies.tensors(POLICY) == versions.states[3]


def test_a_fetch_that_was_cut_goes_on_with_what_is_on_disk(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    intake = copies.begin(versions.plan(1, have=0))
    (entry,) = intake.wanted
    write(versions, copies, intake, entry, range(2))
    copies.close()
    copies = open_copies()
    intake = copies.begin(versions.plan(1, have=0))
    assert intake.present == {entry.digest: {0, 1}}
    write(versions, copies, intake, entry, numbers_of(entry)[2:])
    copies.commit(copies.finish(intake))
    assert copies.tensors(POLICY) == versions.states[1]


def test_a_plan_given_up_halfway_leaves_the_held_version(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    intake = copies.begin(versions.plan(2, have=0))
    write(versions, copies, intake, intake.wanted[0], numbers_of(intake.wanted[0]))
    until(lambda: intake.staging.progress[0] == 1)
    intake.staging.stop()
    later = copies.begin(versions.plan(1, have=0))
    assert copies.tensors(POLICY) == versions.states[0]
    with pytest.raises(StoreError):
        copies.finish(intake)
    write(versions, copies, later, versions.delta(1), numbers_of(versions.delta(1)))
    copies.commit(copies.finish(later))
    assert copies.tensors(POLICY) == versions.states[1]


@pytest.mark.parametrize("undo_share", [0.5, 0.0], ids=["undone", "read anew"])
@pytest.mark.parametrize("damage", ["segment", "header", "torn", "gone"])
def test_a_step_that_fails_takes_all_of_the_plan_back(
    open_copies, versions, monkeypatch, damage, undo_share
):
    monkeypatch.setattr(weight_staging, "UNDO_SHARE", undo_share)
    copies = open_copies()
    versions.bring(copies, 0)
    versions.bring(copies, 1, have=0)
    plan = versions.plan(4, have=1)
    versions.deliver(copies, plan)
    last = copies.blobs(POLICY).path(versions.delta(4).digest)
    data = bytearray(last.read_bytes())
    data[-1 if damage == "segment" else 20] ^= 1
    if damage == "gone":
        last.unlink()
    else:
        last.write_bytes(data[:-5] if damage == "torn" else data)
    with pytest.raises((IntegrityError, StoreError)) as caught:
        copies.stage(plan)
    assert caught.value.code.startswith(("integrity", "store"))
    assert copies.held() == {POLICY: versions.ref(1)}
    assert copies.tensors(POLICY) == versions.states[1]
    assert open_copies().tensors(POLICY) == versions.states[1]
    versions.bring(copies, 4, have=1)
    assert copies.tensors(POLICY) == versions.states[4]


# ---- composites ------------------------------------------------------------------------------


def plan_of(target, *steps):
    return WeightsPlan(policy=POLICY, version=target, steps=tuple(steps))


def test_composites_and_deltas_lead_to_the_target_and_survive_a_restart(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    steps = versions.composite(0, 4), versions.composite(4, 6), [versions.step(7)]
    plan = plan_of(7, *(step for part in steps for step in part))
    staged = versions.follow(copies, plan)
    assert after(versions.states[0], staged.changed) == versions.states[7]
    assert copies.tensors(POLICY) == versions.states[7]
    again = open_copies()
    assert again.held() == {POLICY: versions.ref(7)}
    assert again.tensors(POLICY) == versions.states[7]
    again.folder(POLICY)
    assert open_copies().tensors(POLICY) == versions.states[7]
    versions.bring(again, 8, have=7)
    assert open_copies().held() == {POLICY: versions.ref(8)}


def test_a_joiner_goes_from_version_0_by_one_composite(open_copies, versions):
    copies = open_copies()
    plan = plan_of(8, versions.step(0), *versions.composite(0, 8))
    staged = versions.follow(copies, plan)
    assert after(tensors(9), staged.changed) == versions.states[8]
    assert copies.held() == {POLICY: versions.ref(8)}
    assert open_copies().tensors(POLICY) == versions.states[8]


def test_a_composite_to_other_weights_is_refused_and_the_chain_heals(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    plan = plan_of(4, *versions.composite(0, 4, lie=versions.states[3]))
    versions.deliver(copies, plan)
    with pytest.raises(IntegrityError, match="digest"):
        copies.stage(plan)
    assert copies.tensors(POLICY) == versions.states[0]
    versions.bring(copies, 4, have=0)
    assert copies.tensors(POLICY) == versions.states[4]


def test_a_composite_from_another_version_is_refused_before_it_is_fetched(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 1)
    with pytest.raises(BaseVersionMismatch):
        copies.begin(plan_of(4, *versions.composite(2, 4)))
    proof, catalogue = versions.composite(1, 4)
    manifest = msgspec.msgpack.decode(catalogue.manifest)
    manifest["base_digest"] = versions.ref(2).digest
    lying = msgspec.structs.replace(catalogue, manifest=msgspec.msgpack.encode(manifest))
    with pytest.raises(BaseVersionMismatch):
        copies.begin(plan_of(4, proof, lying))
    assert copies.tensors(POLICY) == versions.states[1]


# ---- the copy and what changed in it -----------------------------------------------------------


def test_memory_that_changed_by_itself_is_found_by_a_rescan(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    staged = versions.bring(copies, 2, have=0)
    copies.rescan(POLICY)
    arena = staged.arena
    flipped = CellList(np.array([7]), arena.tensors["c"].cells()[7:8] ^ np.uint16(4))
    arena.apply({"c": (flipped,)}, arena.version, arena.digests)
    with pytest.raises(CopyDrifted) as caught:
        copies.rescan(POLICY)
    assert caught.value.code == "integrity.copy"
    copies.discard(POLICY)
    with pytest.raises(StoreError):
        copies.rescan(POLICY)


def test_changed_cells_count_once_and_have_the_last_value():
    before = tensors(0)
    few = {
        "a": (CellList(np.array([3, 9]), before["b"].cells()[:2]),),
        "b": (CellRun(5, before["a"].cells()[:4]),),
    }
    again = {"a": (CellList(np.array([2, 9]), before["c"].cells()[:2]),)}
    now = after(after(before, few), again)
    changed = ChangedCells()
    changed.add(few, now)
    changed.add(again, now)
    patch = changed.patch(now)
    assert after(before, patch) == now
    assert [list(change.positions) for change in patch["a"]] == [[2, 3, 9]]
    most = {"b": (CellRun(0, before["c"].cells()[:200]),)}
    changed.add(most, after(now, most))
    (whole,) = changed.patch(after(now, most))["b"]
    assert whole.values.size == CELLS
    assert changed.patch(now)["a"][0].positions.tolist() == [2, 3, 9]


def test_the_difference_of_two_states_is_what_makes_one_the_other():
    old, new = tensors(0), {**tensors(0), "b": tensors(1)["b"]}
    cells = old["c"].cells().copy()
    cells[[4, 8]] ^= np.uint16(1)
    new["c"] = TensorBytes("BF16", (CELLS,), cells.tobytes())
    found = difference(new, old)
    assert found.keys() == {"b", "c"}
    assert found["c"][0].positions.tolist() == [4, 8]
    assert after(old, found) == new
    assert difference(new, {}).keys() == {"a", "b", "c"}


def test_repeated_and_reordered_deltas_are_refused_and_change_nothing(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 2)
    good = versions.plan(4, have=2)
    for steps in (good.steps[::-1], good.steps[:1] * 2, (*good.steps, *good.steps)):
        with pytest.raises(RemoteProtocolError):
            copies.begin(msgspec.structs.replace(good, steps=steps))
    versions.follow(copies, good)
    with pytest.raises(BaseVersionMismatch):
        copies.begin(good)
    assert copies.held() == {POLICY: versions.ref(4)}
    assert copies.tensors(POLICY) == versions.states[4]
