"""From any version that an agent may hold there is a way to any version that is kept."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import signing_key

from edge_agent.weight_copy import WeightCopies
from scheduler.weight_versions import WeightVersions
from transport.weights.folder import write_model_folder
from transport.weights.manifest import sign
from transport.weights.plan import cheapest_route
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.tensors import TensorBytes

KEY = signing_key()
POLICY = "r/p"
TRUSTED = {KEY.key_id: KEY.public}


@st.composite
def trees(draw):
    parents = {0: None}
    for version in range(1, draw(st.integers(1, 14))):
        parents[version] = draw(st.sampled_from(sorted(parents)[-4:]))
    sizes = st.integers(0, 30)
    deltas = {v: draw(sizes) for v in parents if v and draw(st.integers(0, 9))}
    snapshots = {v: draw(sizes) + 20 for v in parents if not draw(st.integers(0, 3))}
    return parents, deltas, snapshots


def every_way(parents, deltas, snapshots, have, version):
    """Cost of every way to ``version``, by brute force."""
    ways = [0] if version == have else []
    if version in snapshots:
        ways.append(snapshots[version])
    if version in deltas:
        before = every_way(parents, deltas, snapshots, have, parents[version])
        ways.extend(cost + deltas[version] for cost in before)
    return ways


@settings(deadline=None, derandomize=True, max_examples=150)
@given(trees(), st.data())
def test_the_route_taken_is_the_cheapest_of_all(tree, data):
    parents, deltas, snapshots = tree
    target = data.draw(st.sampled_from(sorted(parents)))
    have = data.draw(st.sampled_from([None, *sorted(parents)]))
    route = cheapest_route(parents, deltas.get, snapshots.get, have=have, target=target)
    ways = every_way(parents, deltas, snapshots, have, target)
    assert (route is None) == (not ways)
    if route is None:
        return
    assert route.size_bytes == min(ways)
    assert route.start in snapshots if route.from_snapshot else route.start == have
    at = route.start
    for version in route.deltas:
        assert parents[version] == at
        at = version
    assert at == target


def changed(tensors, rng):
    name = "ab"[int(rng.integers(2))]
    cells = tensors[name].cells().copy()
    cells[rng.integers(0, cells.size, 40)] ^= np.uint16(3)
    return {**tensors, name: TensorBytes("BF16", (cells.size,), cells.tobytes())}


def deliver(store, copies, plan):
    blobs = copies.blobs(POLICY)
    for entry in copies.wanted(plan):
        for index in range(len(entry.chunk_digests)):
            part = store.read_chunk(entry.digest, index)
            assert part is not None
            blobs.write_chunk(entry, index, part)
        blobs.complete(entry)
    staged = copies.stage(plan)
    copies.commit(staged)
    return staged


@settings(deadline=None, derandomize=True, max_examples=4)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from(["step", "step", "rollback", "maintain", "restart"]), max_size=12),
)
def test_every_agent_reaches_the_head_through_any_history(seed, history):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tensors = {
            name: TensorBytes("BF16", (2000,), rng.integers(0x3B00, 0x3D00, 2000, "<u2").tobytes())
            for name in "ab"
        }
        write_model_folder(root / "model", tensors, {"config.json": b"{}"})

        def opened():
            return WeightVersions(
                root / "store", trusted=TRUSTED, snapshot_every=2, keep_versions=3
            )

        store = opened()
        first = build_version0(root / "model", run="r", policy=POLICY, created_wall_s=0.0)
        store.add_version(sign(first.manifest, KEY), first.files)
        states, number = {0: tensors}, 0
        faithful = WeightCopies(root / "faithful", trusted=TRUSTED, fold_every=3)
        lagging = WeightCopies(root / "lagging", trusted=TRUSTED)
        parent = 0
        for event in history:
            if event == "maintain":
                store.maintain(POLICY)
            elif event == "restart":
                store = opened()
                faithful = WeightCopies(root / "faithful", trusted=TRUSTED, fold_every=3)
            else:
                if event == "rollback":
                    parent = max(max(states) - 2, 0)
                number += 1
                states[number] = changed(states[parent], rng)
                publication = build_delta_version(
                    states[parent],
                    states[number],
                    run="r",
                    policy=POLICY,
                    version=number,
                    parent=parent,
                    step=number,
                    created_wall_s=0.0,
                )
                store.add_version(sign(publication.manifest, KEY), publication.files)
                parent = number
            agents = [faithful]
            if event == "maintain":
                agents += [lagging, WeightCopies(root / f"new{number}", trusted=TRUSTED)]
            for copies in agents:
                held = copies.held().get(POLICY)
                plan = store.plan(POLICY, held and held.version, held.digest if held else "")
                if plan is not None:
                    assert deliver(store, copies, plan).version == number
                assert copies.tensors(POLICY) == states[number]
        assert store.warnings == []
        for manifest in store.versions(POLICY)[-3:]:
            assert store.reconstruct(POLICY, manifest.version) == states[manifest.version]
