"""The simulator against real daemons at a small size; ``python -m bench.simulator`` in full."""

from pathlib import Path

import msgspec
import pytest

from bench.simulator import QUICK, QUICK_STEPS, compared, emulated, simulated
from farflow.emulate import emulate
from sim.scenario import load_scenario


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_simulator_and_real_daemons_agree() -> None:
    scenario = msgspec.structs.replace(load_scenario(f"calibration-{QUICK}"), steps=QUICK_STEPS)
    real = emulated(scenario)
    assert real.finished
    rows = compared(QUICK, simulated(scenario, real), real.measures)
    assert [row.metric for row in rows if not row.ok] == [], rows


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_agents_die_and_return_at_the_scenarios_times(tmp_path: Path) -> None:
    scenario = load_scenario("calibration-churn")
    faults = msgspec.structs.replace(scenario.faults, agent_mtbf_s=8.0, agent_down_s=2.0)
    scenario = msgspec.structs.replace(scenario, steps=14, faults=faults)
    said: list[str] = []
    result = await emulate(scenario, tmp_path / "out", seed=2, notice=said.append)
    assert result.finished
    assert len([text for text in said if ": crash of" in text]) >= 3
    assert result.counters.get("attempts.failed.agent.restarted", 0) >= 1
    assert result.back_s
    assert not [text for text in said if "is started again" in text]
