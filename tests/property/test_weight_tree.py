"""From any version that an agent may hold there is a way to any version that is kept."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from signing import signing_key
from version_store import make_all

from edge_agent.weight_copy import WeightCopies
from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.weights.folder import write_model_folder
from transport.weights.manifest import sign
from transport.weights.plan import Leg, cheapest_route
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.tensors import TensorBytes

KEY = signing_key()
POLICY = "r/p"
TRUSTED = {KEY.key_id: KEY.public}


@st.composite
def trees(draw):
    """Parents of the versions, and every way to come to one: deltas, composites from any earlier
    version (of another branch too), snapshots."""
    parents = {0: None}
    for version in range(1, draw(st.integers(1, 12))):
        parents[version] = draw(st.sampled_from(sorted(parents)[-4:]))
    sizes = st.integers(0, 30)
    legs = [Leg(parents[v], v, draw(sizes)) for v in parents if v and draw(st.integers(0, 9))]
    for version in parents:
        bases = draw(st.sets(st.integers(0, version - 1), max_size=2)) if version else ()
        legs += [Leg(base, version, draw(sizes)) for base in sorted(bases)]
    legs += [Leg(None, v, draw(sizes) + 20) for v in parents if not draw(st.integers(0, 3))]
    return parents, draw(st.permutations(legs))


def every_way(legs, have, version):
    """(bytes, steps, from nothing) of every way to ``version``, by brute force."""
    if version == have:
        yield 0, 0, False
    for leg in legs:
        if leg.version != version:
            continue
        before = [(0, 0, True)] if leg.base is None else every_way(legs, have, leg.base)
        for size, steps, from_nothing in before:
            yield size + leg.size_bytes, steps + 1, from_nothing


@settings(deadline=None, derandomize=True, max_examples=200)
@given(trees(), st.data())
def test_the_route_taken_is_the_cheapest_of_all(tree, data):
    parents, legs = tree
    target = data.draw(st.sampled_from(sorted(parents)))
    have = data.draw(st.sampled_from([None, *sorted(parents)]))
    step = data.draw(st.sampled_from([0, 7]))

    def legs_to(version):
        return [leg for leg in legs if leg.version == version]

    route = cheapest_route(legs_to, have=have, target=target, step_bytes=step)
    ways = [
        (size + step * steps, steps, from_nothing)
        for size, steps, from_nothing in every_way(legs, have, target)
    ]
    assert (route is None) == (not ways)
    if route is None:
        return
    from_nothing = route.start is None
    cost = route.size_bytes + step * len(route.legs)
    assert (cost, len(route.legs), from_nothing) == min(ways)
    at = route.start
    for leg in route.legs:
        assert leg in legs
        assert leg.base == at
        at = leg.version
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
                root / "store", trusted=TRUSTED, cumulative_every=2, keep_versions=3
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
                make_all(store, Asked(max(number - 4, 0), number))
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
                if held and store.awaits_bridge(POLICY, held.version, held.digest):
                    made = make_all(store, Asked(held.version, number))
                    assert (held.version, number) in [pair[:2] for pair in made]
                plan = store.plan(POLICY, held and held.version, held.digest if held else "")
                if plan is not None:
                    assert deliver(store, copies, plan).version == number
                assert copies.tensors(POLICY) == states[number]
        assert store.warnings == []
        for manifest in store.versions(POLICY)[-3:]:
            assert store.reconstruct(POLICY, manifest.version) == states[manifest.version]
