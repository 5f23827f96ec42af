"""The cheapest way through the tree of versions."""

from transport.weights.plan import STEP_S, Leg, LinkSpeed, cheapest_route, lineage


def legs_of(deltas=None, snapshots=None, composites=None, parents=None):
    """Every way by the version it leads to; a chain unless ``parents`` says otherwise."""
    legs = [
        Leg(parents[version] if parents else version - 1, version, size)
        for version, size in (deltas or {}).items()
    ]
    legs += [Leg(base, version, size) for (base, version), size in (composites or {}).items()]
    legs += [Leg(None, version, size) for version, size in (snapshots or {}).items()]
    return lambda version: [leg for leg in legs if leg.version == version]


def route(target, have=None, step_bytes=0, **ways):
    """Start, then what is taken: v for a delta or snapshot of v, (b, v) for a longer way."""
    found = cheapest_route(legs_of(**ways), have=have, target=target, step_bytes=step_bytes)
    if found is None:
        return None
    composites = ways.get("composites") or {}
    names = [
        (leg.base, leg.version) if (leg.base, leg.version) in composites else leg.version
        for leg in found.legs
    ]
    return found.start, names, found.size_bytes


CHAIN = dict.fromkeys(range(1, 9), 10)


def test_a_chain_from_what_is_held_is_taken_when_it_is_smaller():
    assert route(8, 5, deltas=CHAIN, snapshots={0: 100}) == (5, [6, 7, 8], 30)
    assert route(8, deltas=CHAIN, snapshots={0: 100}) == (None, list(range(9)), 180)
    assert route(8, deltas=CHAIN, snapshots={0: 100, 6: 100}) == (None, [6, 7, 8], 120)
    assert route(8, 8, deltas=CHAIN) == (8, [], 0)


def test_a_snapshot_is_taken_when_the_chain_is_longer_than_the_model():
    deltas = dict.fromkeys(range(1, 9), 60)
    assert route(8, 4, deltas=deltas, snapshots={0: 100, 7: 100}) == (None, [7, 8], 160)
    assert route(8, 5, deltas=deltas, snapshots={0: 100, 7: 100}) == (None, [7, 8], 160)
    assert route(8, 5, deltas=deltas, snapshots={0: 100, 6: 60}) == (5, [6, 7, 8], 180)


def test_a_gap_in_the_chain_leaves_the_snapshot_behind_it_or_nothing():
    deltas = {1: 10, 3: 10, 4: 10}
    assert route(4, 1, deltas=deltas, snapshots={0: 100, 2: 100}) == (None, [2, 3, 4], 120)
    assert route(4, 1, deltas=deltas, snapshots={0: 100}) is None
    assert route(4, deltas=deltas) is None
    assert route(4, 1, deltas=deltas, composites={(1, 2): 9}) == (1, [(1, 2), 3, 4], 29)


def test_composites_and_cumulatives_shorten_the_way():
    ways = {"deltas": CHAIN, "snapshots": {0: 100}, "composites": {(2, 4): 15, (4, 8): 25}}
    assert route(8, 2, **ways) == (2, [(2, 4), (4, 8)], 40)
    assert route(8, 1, **ways) == (1, [2, (2, 4), (4, 8)], 50)
    assert route(8, 5, **ways) == (5, [6, 7, 8], 30)
    ways["composites"] |= {(0, 6): 20}
    assert route(8, 0, **ways) == (0, [(0, 6), 7, 8], 40)
    assert route(8, **ways) == (None, [0, (0, 6), 7, 8], 140)
    assert route(8, 3, **ways) == (3, [4, (4, 8)], 35)
    ways["composites"] |= {(3, 8): 50, (4, 8): 40}
    assert route(8, 3, **ways) == (3, [(3, 8)], 50)  # of ways alike the one of fewest steps


def test_an_abandoned_version_is_no_starting_point_unless_a_bridge_leads_from_it():
    parents = {0: None, 1: 0, 2: 1, 3: 1}
    ways = {"deltas": {1: 10, 2: 10, 3: 10}, "snapshots": {0: 100}, "parents": parents}
    assert route(3, 2, **ways) == (None, [0, 1, 3], 120)
    assert route(3, 1, **ways) == (1, [3], 10)
    assert route(3, 2, composites={(2, 3): 30}, **ways) == (2, [(2, 3)], 30)
    assert lineage(parents, 3) == [0, 1, 3]
    assert lineage(parents, 9) == []


def test_with_a_known_link_the_quickest_way_is_taken():
    ways = {"deltas": CHAIN, "composites": {(0, 8): 100}}
    slow, fast = LinkSpeed(20.0, 1000.0), LinkSpeed(1e6, 1000.0)
    assert LinkSpeed().step_bytes(100) == 0
    assert slow.step_bytes(100) == int(20 * (STEP_S + 0.1))
    assert LinkSpeed(2e3).step_bytes(100) == int(2e3 * STEP_S)
    assert route(8, 0, step_bytes=slow.step_bytes(100), **ways)[1] == [(0, 8)]
    assert route(8, 0, step_bytes=fast.step_bytes(100), **ways)[1] == [(0, 8)]
    assert route(8, 0, **ways)[1] == list(range(1, 9))
    assert route(8, 0, step_bytes=2, **ways)[1] == list(range(1, 9))
    assert route(8, 0, step_bytes=3, **ways)[1] == [(0, 8)]
    assert LinkSpeed(1e15, 1e-300).step_bytes(1 << 53) < 1e19
    # Held wins over nothing at the same cost.
    assert route(1, 0, deltas={1: 10}, snapshots={1: 10}) == (0, [1], 10)
