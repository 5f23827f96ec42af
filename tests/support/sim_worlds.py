"""Small worlds for tests of the simulator."""

import msgspec

from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.workload import Workload

SMALL = Scenario(
    name="small",
    sites={"near": 20.0, "far": 200.0},
    agents=AgentsSpec(
        per_site=2, slots=(2, 4), tokens_per_s=(25.0, 100.0), link_mbit=(20.0, 1000.0)
    ),
    policies={"policy": PolicyShape(batch_groups=4, max_policy_lag=2)},
    group_size=2,
    steps=6,
    limit_s=5000.0,
    workload=Workload(mean_tokens=300.0, train_s=5.0, delta_bytes=10_000_000),
)
"""Six steps within a second of real time."""


def changed(**changes: object) -> Scenario:
    """``SMALL`` with some fields replaced."""
    return msgspec.structs.replace(SMALL, **changes)
