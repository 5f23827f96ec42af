"""The install guard: foreign packages under our import names are named, and not run."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from transport.runtime.origin import EXIT_CONFIG, PACKAGES, find_problem, verify_origin

ROOT = Path(__file__).resolve().parents[2]
GUARD = "from transport.runtime.origin import verify_origin; verify_origin(); print('fine')"


def guarded(*first_on_path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter elsewhere, with folders before ours on its path as site-packages is."""
    path = os.pathsep.join(map(str, (*first_on_path, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", GUARD],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def make_package(folder: Path, name: str, source: str) -> Path:
    (folder / name).mkdir(parents=True)
    init = folder / name / "__init__.py"
    init.write_text(source)
    return init


def test_our_own_packages_pass() -> None:
    assert find_problem() is None
    verify_origin()


def test_the_guard_knows_every_package_that_we_ship() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {name.partition(".")[0] for name in settings["packages"]} == set(PACKAGES)


@pytest.mark.parametrize("name", ["scheduler", "edge_agent"])
def test_a_foreign_package_is_named_with_a_remedy_and_never_executed(
    tmp_path: Path, name: str
) -> None:
    init = make_package(tmp_path / "site", name, "raise SystemExit('foreign code ran')\n")
    result = guarded(tmp_path / "site", cwd=tmp_path)
    assert result.returncode == EXIT_CONFIG == 78
    assert str(init) in result.stderr
    assert "python3 -m venv" in result.stderr
    assert "foreign code ran" not in result.stderr
    assert result.stdout == ""


def test_another_projects_mark_is_not_ours(tmp_path: Path) -> None:
    init = make_package(tmp_path / "site", "scheduler", "__project__ = 'other'\n")
    result = guarded(tmp_path / "site", cwd=tmp_path)
    assert result.returncode == 78
    assert str(init) in result.stderr


def test_the_stub_that_an_uninstalled_package_leaves_is_recognised(tmp_path: Path) -> None:
    for name in PACKAGES:
        if name != "scheduler":
            source = ROOT / name
            (tmp_path / "site").mkdir(exist_ok=True)
            (tmp_path / "site" / name).symlink_to(source)
    (tmp_path / "site" / "scheduler" / "core").mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", GUARD],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 78
    assert "'scheduler'" in result.stderr
    assert "no __init__.py" in result.stderr


def test_two_mixed_copies_of_farflow_are_told_apart(tmp_path: Path) -> None:
    make_package(tmp_path / "site", "scheduler", '__project__ = "farflow"\n')
    result = guarded(tmp_path / "site", cwd=tmp_path)
    assert result.returncode == 78
    assert "two copies of farflow" in result.stderr
    assert str(tmp_path / "site") in result.stderr
