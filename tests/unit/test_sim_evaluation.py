"""The evaluation before training in simulated worlds: it is of the version that training began
from, however fast the steps are and however few agents there are."""

import msgspec
import pytest
from sim_worlds import SMALL

from scheduler.core import keepers
from sim.run import Simulation
from sim.scenario import AgentsSpec, PolicyShape, Scenario
from sim.workload import Workload
from transport.runs import EvaluationSpec
from transport.status import EvaluationStatus


class Evaluated(Scenario, frozen=True):
    """Jobs of as many sequences as an agent has slots: one at a time is the evaluation's part."""

    def run_spec(self, seed):
        evaluation = EvaluationSpec(items=40, items_per_job=4)
        return msgspec.structs.replace(super().run_spec(seed), evaluation=evaluation)


def evaluated(agents: int, seed: int) -> EvaluationStatus:
    """What the evaluation said after twenty steps of 0.2 s; generation takes half a second."""
    world = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__} | {
        "sites": {"near": 20.0},
        "agents": AgentsSpec(
            per_site=agents, slots=(4, 4), tokens_per_s=(200.0, 200.0), link_mbit=(1000.0, 1000.0)
        ),
        "policies": {"policy": PolicyShape(batch_groups=2, max_policy_lag=3)},
        "steps": 20,
        "workload": Workload(mean_tokens=100.0, train_s=0.2, delta_bytes=10**5, full_bytes=10**7),
    }
    simulation = Simulation(Evaluated(**world), seed=seed)
    simulation.run()
    assert simulation.problems() == []
    assert simulation.steps_made >= 20
    [policy] = simulation._status().runs[0].policies
    return policy.evaluations[0]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("agents", [1, 2])
def test_the_evaluation_before_training_is_of_the_version_before_training(agents, seed):
    status = evaluated(agents, seed)
    assert (status.version, status.step, status.scored, status.done) == (0, 0, 40, True)


def test_without_a_keeper_it_is_passed_over(monkeypatch):
    """What the test above would say: all agents go on between two of its jobs."""
    monkeypatch.setattr(keepers, "look", lambda ctx: None)
    assert evaluated(1, 0).version > 0
