"""Changing keys of a scenario from the command line."""

import pytest

from sim.overrides import override, parse_range, parse_values, with_value
from sim.scenario import Scenario, load_scenario
from transport.errors import ConfigError

BASE = Scenario(name="base", sites={"near": 20.0})


def test_settings_are_applied_in_order_with_the_checks_of_a_file() -> None:
    changed = override(
        BASE,
        [
            "workload.train_s=5",
            "agents.slots=[4, 8]",
            "policies.policy.max_policy_lag=7",
            "sites.far=150",
            "scheduler.lease_s=30.0",
            "name=other",
            "workload.train_s=6.5",
        ],
    )
    assert changed.workload.train_s == 6.5
    assert changed.agents.slots == (4, 8)
    assert changed.policies["policy"].max_policy_lag == 7
    assert changed.sites == {"near": 20.0, "far": 150.0}
    assert changed.core_settings("nearest").lease_s == 30.0
    assert changed.name == "other"
    assert BASE.workload.train_s != 6.5


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("workload.train=5", r"workload\.train: .*did you mean .*workload\.train_s"),
        ("train_s=5", r"train_s: .*workload\.train_s"),
        ("policies.solver.max_policy_lag=5", r"did you mean policies\.policy\.max_policy_lag"),
        ("agents.per_site=many", r"agents\.per_site = 'many': Expected `int`"),
        ("agents.per_site=0", r"agents\.per_site = 0: .*>= 1"),
        ("nic_mbit.x=0", r"nic_mbit\.x: a scenario has no such key"),
        ("workload", "write it as table.field=value"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        override(BASE, [setting])


def test_values_are_split_at_commas_outside_of_lists() -> None:
    assert parse_values("workload.train_s=1,2.5, 4") == ("workload.train_s", [1, 2.5, 4])
    assert parse_values("agents.slots=[4, 8],[2]") == ("agents.slots", [[4, 8], [2]])
    assert parse_values("regions=aws12-2020,aws12-2022")[1] == ["aws12-2020", "aws12-2022"]
    for wrong in ("workload.train_s", "=1,2", "key="):
        with pytest.raises(ConfigError, match="key=v1,v2,v3"):
            parse_values(wrong)


def test_ranges_have_both_ends() -> None:
    assert parse_range("a=0:10:5") == ("a", [0, 2.5, 5, 7.5, 10])
    assert parse_range("a=1:4:4") == ("a", [1, 2, 3, 4])
    assert all(isinstance(value, int) for value in parse_range("a=1:4:4")[1])
    assert parse_range("a=1:10000:5log")[1] == [1, 10, 100, 1000, 10000]
    assert parse_range("a=0.1:0.2:3")[1] == [0.1, 0.15, 0.2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a=1:2", "from:to:count"),
        ("a=1:2:x", "from:to:count"),
        ("a=1:2:1", "count is 2"),
        ("a=0:2:3log", "0 < from < to"),
        ("1:2:3", "from:to:count"),
    ],
)
def test_other_ranges_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_range(text)


def test_every_shipped_scenario_comes_back_the_same() -> None:
    scenario = load_scenario("aws12-mixed")
    assert with_value(scenario, "steps", scenario.steps) == scenario
