"""Data algorithms in the simulator: the same functions, the same core, and a log that replays."""

import msgspec
import pytest
from recorded_log import recorded, write_log
from sim_worlds import SMALL

from sim.replay import replay, term_folder
from sim.run import Result, Simulation
from sim.scenario import PolicyShape, Scenario
from transport.errors import ConfigError
from transport.runs import AlgorithmSpec, DataSpec, ReplaySpec

ZERO = AlgorithmSpec(name="zero_advantage")


def world(**data) -> Scenario:
    shape = PolicyShape(batch_groups=4, max_policy_lag=3, data=DataSpec(**data))
    return msgspec.structs.replace(SMALL, policies={"policy": shape}, steps=12)


def run(scenario: Scenario) -> Result:
    """With every core's invariants checked after each of its events."""
    result = Simulation(scenario, seed=1, check=True).run()
    assert result.finished
    assert result.problems == ()
    assert all(row.balance == 0 for row in result.accounting)
    return result


def test_filtered_groups_are_replaced_and_steps_go_on():
    [row] = run(world(filters=(ZERO,))).accounting
    # Rewards are fair coins, so that half of the pairs are equal.
    assert 0.3 < row.filtered / (row.filtered + row.trained + row.taken + row.buffered) < 0.7


def test_replay_makes_the_same_steps_of_fewer_groups():
    plain, again = run(world()), run(world(replay=ReplaySpec(ratio=0.5, max_uses=2)))
    assert again.accounting[0].replayed > 0
    assert again.accounting[0].submitted < 0.8 * plain.accounting[0].submitted


def test_a_scenario_may_name_functions_of_its_own_modules():
    own = world(filters=(AlgorithmSpec(name="data_functions:even_items"),))
    with pytest.raises(ConfigError, match="module 'data_functions' is not one"):
        Simulation(own).run()
    [row] = run(msgspec.structs.replace(own, data_modules=("data_functions",))).accounting
    assert row.filtered > 0


def test_a_recorded_run_with_data_algorithms_replays_bit_by_bit(tmp_path):
    scenario = world(
        filters=(ZERO,),
        order="fifo",
        replay=ReplaySpec(ratio=0.5, select=AlgorithmSpec(name="prioritised")),
    )
    _, told = recorded(scenario)
    write_log(tmp_path, scenario, told)
    found = replay(term_folder(tmp_path))
    assert found.equal
    assert found.counters["filtered.zero_advantage"] > 0
