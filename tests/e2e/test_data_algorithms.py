"""Filters, replay and curators in a whole deployment, with trainer and scheduler killed in between.

Real processes, real sockets with CURVE, real SQLite; the fake engine and the numpy trainer.
"""

from pathlib import Path

import pytest

from bench.toy import counts, running, write_toy
from sim.replay import replay, term_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEPS = 20
DATA = """
[policies.solver.data]
filters = [{ name = "my_filters:every_fifth" }]
[policies.solver.data.replay]
ratio = 0.5
max_uses = 2
select = { name = "uniform" }
[[run.curators]]
name = "greso"
settings = { hard = 0.9 }
"""
MODULE = '''"""A filter of the user's own."""

from scheduler.data.registry import NoSettings, filter_function
from scheduler.data.views import GroupView


@filter_function("every_fifth")
def every_fifth(group: GroupView, settings: NoSettings) -> bool:
    return group.index % 5 == 0
'''


@pytest.mark.asyncio
async def test_data_algorithms_survive_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "my_filters.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = write_toy(work, steps=STEPS)
    file.write_text(file.read_text() + DATA)
    overrides = ('scheduler.data_modules=["my_filters"]',)
    async with running(file, tmp_path / "run", overrides) as run:
        await run.reach_step(6)
        run.deployment.child("trainer-solver").kill()
        before = await run.reach_step(10)
        run.deployment.child("scheduler").kill()
        await run.until("a new term", lambda s: s.term > before.term, 10.0)
        summary = await run.finish()
    assert summary.problems == ()
    row = counts(summary)
    assert row["replayed"] > 0
    assert row["filtered"] > 0
    # Every step trained on four groups, those trained on again included.
    assert row["trained"] + row["replayed"] == STEPS * 4
    # What the functions said is in the log: the core alone makes the same of it.
    for term in (1, 2):
        assert replay(term_folder(tmp_path / "run", term)).equal
