"""The wheel holds exactly our packages, installs beside nothing else and works from elsewhere."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cloud_trainer", "edge_agent", "farflow", "scheduler", "sim", "transport")


def run(*argv: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_package_list_is_what_is_on_disk() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = sorted(
        str(init.parent.relative_to(ROOT)).replace(os.sep, ".")
        for name in PACKAGES
        for init in (ROOT / name).rglob("__init__.py")
    )
    assert sorted(listed) == found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_installs_and_works_from_another_folder(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("*.whl")
    run(str(Path(sys.executable).parent / "check-wheel-contents"), str(wheel))
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    constraints = str(ROOT / "requirements" / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, str(wheel))
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = str(tmp_path / "venv" / "bin" / "farflow")
    assert "packages come from one place" in run(command, "doctor", cwd=elsewhere, env=clean)
    assert "placement" in run(command, "config", "reference", cwd=elsewhere, env=clean)
    profiles = run(command, "sim", "link", "profiles", cwd=elsewhere, env=clean)
    assert "wan-180ms" in profiles
    assert run(command, "--version", cwd=elsewhere, env=clean) == run(
        sys.executable, "-m", "farflow", "--version"
    )
    code = (
        "import importlib.metadata as m, json;"
        f"print(json.dumps({{n: m.packages_distributions()[n] for n in {PACKAGES!r}}}))"
    )
    owners = json.loads(run(python, "-c", code, cwd=elsewhere, env=clean))
    assert owners == {name: ["farflow"] for name in PACKAGES}
