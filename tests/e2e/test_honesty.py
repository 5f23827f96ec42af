"""A whole deployment in which one agent lies about rewards: the others find it out."""

from pathlib import Path

import pytest

from bench.toy import counts, running, write_toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

SUPPORT = Path(__file__).parents[1] / "support"
AGENTS = """
[local.agents.near]
[local.agents.far]
[local.agents.liar]
workflows = ["lying_rewards:unused"]
"""
STEPS = 30


@pytest.mark.asyncio
async def test_an_agent_that_lies_about_rewards_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    work = tmp_path / "work"
    work.mkdir()
    file = write_toy(work, steps=STEPS, agents=AGENTS)
    async with running(file, tmp_path / "run", ("run.recheck_rewards=0.5",)) as run:
        status = await run.until(
            "the liar is excluded",
            lambda s: any(a.name == "liar" and a.quarantined for a in s.agents),
            25.0,
        )
        agents = {agent.name: agent for agent in status.agents}
        assert agents["liar"].quarantined == "reward.differs"
        assert len(agents["liar"].evidence) >= 2
        assert all("for response" in line for line in agents["liar"].evidence)
        assert agents["near"].evidence == agents["far"].evidence == ()
        summary = await run.finish()
        assert summary.problems == ()
        assert counts(summary)["trained"] == STEPS * 4


@pytest.mark.asyncio
async def test_honest_agents_agree_about_every_reward(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    file = write_toy(work, steps=STEPS)
    async with running(file, tmp_path / "run", ("run.recheck_rewards=0.5",)) as run:
        status = await run.until(
            "rewards were found again", lambda s: s.counters.get("rechecks.agree", 0) >= 10, 25.0
        )
        assert "rechecks.differ" not in status.counters
        assert all(agent.evidence == () for agent in status.agents)
        summary = await run.finish()
        assert summary.problems == ()
