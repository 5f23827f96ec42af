"""Coverage-guided fuzzing of what meets a peer's bytes first, for some seconds per target.

For longer: ``tests/fuzz/fuzz.py``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this Python or system")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("envelope", "trajectory", "segment", "delta", "manifest", "safetensors")
SECONDS = 8


def fuzz(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    return subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), name, str(folder), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_unexpected_comes_out_of_a_parser(tmp_path: Path, name: str) -> None:
    done = fuzz(name, tmp_path, f"-max_total_time={SECONDS}", "-seed=1", "-rss_limit_mb=2000")
    broken = [path.read_bytes()[:500] for path in tmp_path.glob(f"{name}-*")]
    assert done.returncode == 0, (broken, done.stderr[-3000:])
    covered = [int(found) for found in re.findall(r"cov: (\d+)", done.stderr)]
    assert len(covered) > 2, done.stderr[-2000:]
    # Guided: it has seen more than its seeds showed it.
    assert covered[-1] > covered[0] or covered[-1] > 50


def test_the_targets_accept_their_own_seeds() -> None:
    """Where seeds are refused at the door, the fuzzer would see the door only."""
    sys.path.insert(0, str(HERE))
    try:
        import targets
    finally:
        sys.path.remove(str(HERE))
    assert sorted(targets.TARGETS) == sorted(NAMES)
    for target, seeds in targets.TARGETS.values():
        for seed in seeds():
            target(seed)
