"""``farflow init``: a file that loads, says every key, and is never replaced."""

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cloud_trainer.config import TrainerConfig
from edge_agent.config import AgentConfig
from farflow.cli import cli
from farflow.deployment import DeploymentConfig
from farflow.init_command import deployment_text
from transport.relay_config import RelayConfig
from transport.runtime.config import convert, load_config
from transport.runtime.config_text import commented_toml, toml_value


def run(*argv: str) -> str:
    result = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_init_writes_a_file_that_passes_the_check_and_keys(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    said = run("init", str(folder), "--host", "203.0.113.5", "--trainer", "first/solver")
    file = folder / "deployment.toml"
    assert run("config", "check", str(file)).endswith("ok\n")
    data = tomllib.loads(file.read_text())
    assert data["transport"] == {"host": "0.0.0.0", "keys": str(folder / "keys")}  # noqa: S104
    for name in ("server", "operator", "submitter", "trainer-first-solver"):
        assert (folder / "keys" / f"{name}.toml").stat().st_mode & 0o777 == 0o600
    assert "token create" in said
    assert "--host 203.0.113.5" in said
    assert "farflow trainer run --set transport.host=203.0.113.5" in said
    assert "--set trainer.key=keys/trainer-first-solver.toml" in said
    for name in ("server.public", "trainer-first-solver", "signing/trainer-first-solver"):
        assert f"{folder / 'keys' / name}.toml" in said  # what to bring to its host


def test_init_says_how_a_trainer_starts_here_and_how_one_gets_keys(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    assert f"farflow init {folder} --trainer RUN/POLICY" in run("init", str(folder))
    said = run("init", str(folder), "--trainer", "first/solver")
    [line] = [line.strip() for line in said.splitlines() if "trainer run" in line]
    argv = shlex.split(line, comments=True)[3:]
    files = [Path(value) for flag, value in pairwise(argv) if flag == "--config"]
    overrides = [value for flag, value in pairwise(argv) if flag == "--set"]
    config = load_config(TrainerConfig, files, overrides, environ={}).value
    assert config.trainer.policy == "first/solver"
    for path in (config.trainer.key, config.trainer.signing_key):
        assert Path(path).is_file()
    assert (Path(config.transport.keys) / "server.public.toml").is_file()


def test_init_again_adds_keys_and_replaces_nothing(tmp_path: Path) -> None:
    run("init", str(tmp_path / "d"))
    file = tmp_path / "d" / "deployment.toml"
    file.write_text("[log]\n")
    key = (tmp_path / "d" / "keys" / "server.toml").read_bytes()
    facts = json.loads(run("init", str(tmp_path / "d"), "--trainer", "a/b", "--json"))
    assert facts == {"file": str(file), "written": False, "keys": str(tmp_path / "d" / "keys")}
    assert file.read_text() == "[log]\n"
    assert (tmp_path / "d" / "keys" / "server.toml").read_bytes() == key
    assert (tmp_path / "d" / "keys" / "trainer-a-b.toml").exists()


@pytest.mark.parametrize("kind", [DeploymentConfig, AgentConfig, TrainerConfig, RelayConfig])
def test_every_commented_setting_is_a_default(kind: type[msgspec.Struct]) -> None:
    text = commented_toml(kind, "A file.", {})
    assert convert(tomllib.loads(text), kind) == kind()
    settings = re.sub(r"(?m)^#(?=\w)", "", text)
    data = tomllib.loads(settings)
    assert convert(data, kind) == kind()
    for name in kind.__struct_fields__:  # every key that has a default that TOML can say is there
        table = getattr(kind(), name)
        said = {k for k in table.__struct_fields__ if getattr(table, k) is not None}
        assert set(data[name]) == said


def test_a_deployment_listens_on_loopback_only_when_reached_there(tmp_path: Path) -> None:
    for host, listens in (("127.0.0.1", "127.0.0.1"), ("box.example", "0.0.0.0"), ("fd::1", "::")):  # noqa: S104
        data = tomllib.loads(deployment_text(tmp_path, host))
        assert data["transport"]["host"] == listens


def test_a_value_that_a_table_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="slot"):
        commented_toml(AgentConfig, "", {"agent": {"slot": 1}})
    with pytest.raises(ValueError, match="agents"):
        commented_toml(AgentConfig, "", {"agents": {}})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("disk_bytes", 64 * 2**20, '"64MiB"'),
        ("disk_bytes", 1000, '"1000B"'),
        ("disk_bytes", 0, "0"),
        ("name", 'a"b\\c\n', '"a\\"b\\\\c\\n"'),
        ("names", ("a", "b"), '["a", "b"]'),
        ("shares", {"a b": 1.5}, '{"a b" = 1.5}'),
        ("on", True, "true"),
    ],
)
def test_values_are_written_as_toml(key: str, value: object, text: str) -> None:
    assert toml_value(key, value) == text
    tomllib.loads(f"v = {text}")
