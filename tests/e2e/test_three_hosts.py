"""docs/getting-started.md, "On three hosts": its own commands, typed in three network namespaces by
``examples/three-hosts/stand.py``."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND = ROOT / "examples" / "three-hosts" / "stand.py"
CANNOT = 77
MUST_RUN = "FARFLOW_TESTS_NEED_NAMESPACES"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def stand(*argv: str) -> tuple[int, str, str]:
    """Run the stand; whatever happens, nothing that it started is left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(STAND), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == CANNOT:
        if os.environ.get(MUST_RUN) == "1":
            pytest.fail(f"{MUST_RUN}=1, but {err}")
        pytest.skip(err.strip())
    return process.returncode, out, err


def test_the_pages_commands_make_three_hosts_learn() -> None:
    status, out, err = stand()
    assert status == 0, f"{out}\n{err}"
    for line in (
        r"trainer: ended with exit status 0",
        r"    first\tfinished\tfirst/solver 12/12\tcompleted",
        r"     12 .* box1 *",
        r"box: sent [1-9]\d{4,} bytes through tbf, listens on nothing",
        r"trainer: sent [1-9]\d{4,} bytes through tbf, listens on nothing",
        r"box: stopped with exit status 0",
        r"cloud: stopped with exit status 0",
    ):
        assert re.search(f"(?m)^{line}$", out), f"{line!r} is not in:\n{out}"


def test_a_command_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\n# on every host\ncd /srv/farflow\n. .venv/bin/activate\n```\n"
        "```sh\n# on box\nfarflow agent doctor --config agent/agent.toml\n```\n"
    )
    status, out, err = stand("--page", str(page))
    assert status == 1, out
    assert "exit status 2" in err
