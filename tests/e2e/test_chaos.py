"""Forty random faults on real processes: nothing is lost and nothing is trained twice.

``python -m bench.chaos`` does the same a thousand times.
"""

import pytest

from bench.chaos import chaos

FAULTS = 40


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.asyncio
async def test_forty_random_faults_lose_nothing(tmp_path):
    tally = await chaos(tmp_path, FAULTS, seed=7, tell=print)
    assert tally.problems == []
    assert tally.failed == 0
    assert tally.faults.total() >= FAULTS
    assert tally.steps > 0
