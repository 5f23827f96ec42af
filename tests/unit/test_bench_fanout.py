"""The arithmetic of ``bench.fanout``: ideals, offers, payloads and what it counts."""

import numpy as np
import pytest

from bench.fanout_catchup import VERSIONS, _offers
from bench.fanout_link import CRAWL, NEAR, REGION, SLOW_OCEAN, PlainServer, plain_times
from bench.fanout_model import ModelSize, two_versions
from bench.fanout_swap import _count, patch_between
from bench.fanout_transport import SETUPS, opaque
from edge_agent.engine import Completion
from sim.link_profile import profile_from_table
from transport.weights.digest import first_non_finite
from transport.weights.patch import patched
from transport.weights.plan import Leg

SMALL = ModelSize(hidden=128, layers=1)


@pytest.mark.parametrize("path", [SLOW_OCEAN, REGION, NEAR, CRAWL])
def test_a_link_of_the_bench_is_the_emulators_profile_of_that_rate_and_round_trip(path):
    profile = profile_from_table("bench", path.table())
    assert profile.rate_down_bits_per_s == path.rate_bits_s
    assert profile.rtt_s == pytest.approx(path.rtt_s)


def test_the_ideal_is_the_bytes_at_the_links_rate_and_a_round_trip():
    assert SLOW_OCEAN.ideal_s(4_000_000) == pytest.approx(0.64 + 0.18)


def test_setups_have_agents_of_different_names():
    names = [name for setup in SETUPS for name in setup.agents]
    assert len(set(names)) == len(names) == 10


def test_an_opaque_payload_is_finite_and_another_one_for_another_seed():
    first, second = opaque(100_000, 1), opaque(100_000, 2)
    assert first_non_finite(first) is None
    assert np.mean(first["weight"].cells() == second["weight"].cells()) < 0.001


def chain(sizes: dict[int, int]) -> dict[int, list[Leg]]:
    return {v: [Leg(v - 1, v, sizes.get(v, 10))] for v in range(1, VERSIONS + 1)}


def test_single_plans_are_the_chain_one_shortcut_and_deltas_or_a_snapshot_and_deltas():
    legs = {0: [Leg(None, 0, 500)], **chain({})}
    legs[98].append(Leg(90, 98, 25))
    legs[98].append(Leg(94, 98, 15))
    legs[99].append(Leg(None, 99, 60))
    assert sorted(_offers(legs, 90)) == [45, 70, 100]
    assert sorted(_offers(legs, None)) == [70, 10 * VERSIONS + 500]


def test_versions_of_a_model_have_its_shapes_and_differ_in_about_a_hundredth_of_the_cells():
    two = two_versions(SMALL)
    assert {name: tensor.shape for name, tensor in two.new.items()} == SMALL.shapes()
    patch = patch_between(two)
    changed = sum(change.values.size for changes in patch.values() for change in changes)
    assert 0.005 < changed / two.cells < 0.02
    for name, changes in patch.items():
        assert patched(two.old[name], changes) == two.new[name]


def test_a_token_without_its_version_or_of_an_older_one_again_is_counted_apart():
    def completion(*versions: int, tokens: int = 4) -> Completion:
        return Completion(
            tokens=(1,) * tokens,
            logprobs=(0.0,) * tokens,
            versions=versions,
            finish_reason="length",
        )

    counts = {"old": 0, "new": 0, "other": 0}
    _count(counts, [completion(3, 3, 4, 4)], 3, 4)
    assert counts == {"old": 2, "new": 2, "other": 0}
    _count(counts, [completion(3, 4, 3), completion(5, 4, 4, 4)], 3, 4)
    assert counts["other"] == 3


@pytest.mark.asyncio
async def test_a_plain_transfer_gives_every_client_all_bytes():
    server = await PlainServer.start()
    try:
        assert len(await plain_times(server.port, [1, 300_000], clients=3)) == 2
    finally:
        await server.close()
