"""What all commands of ``farflow`` have in common: JSON, exit status, near matches, completion."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from status_views import status

from farflow import connect
from farflow.cli import cli
from farflow.connect import names_of, with_client, with_operator
from farflow.lazy import did_you_mean
from scheduler.operator import RequestRefused
from transport.errors import ConfigError
from transport.keys import create_keys
from transport.runtime.build import build_id, installed_build, version
from transport.runtime.origin import PACKAGES

TEXT_ONLY = {
    *("up", "top", "completion", "wire decode"),
    *("config reference", "config metrics", "config alerts"),
    *("agent run", "scheduler run", "trainer run", "relay run", "sim link run"),
    *("trainer numpy-model", "sim experiment"),
}
"""Daemons (which say JSON by themselves), views for people, and commands that print a document."""


def commands(
    command: click.Command, path: str, context: click.Context
) -> Iterator[tuple[str, set[str]]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(
                found, f"{path} {name}".strip(), click.Context(found, parent=context)
            )
    else:
        yield path, {option for parameter in command.params for option in parameter.opts}


ALL = dict(commands(cli, "", click.Context(cli)))


def farflow(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farflow", *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("name", sorted(set(ALL) - TEXT_ONLY))
def test_every_command_that_a_script_would_use_speaks_json(name: str) -> None:
    assert "--json" in ALL[name]


def test_the_exceptions_are_still_there() -> None:
    assert set(ALL) >= TEXT_ONLY
    assert not [name for name in TEXT_ONLY if "--json" in ALL[name]]


@pytest.mark.parametrize(
    ("argv", "exit_status", "said"),
    [
        (["--help"], 0, ""),
        (["keys", "revoke", "nobody"], 78, "farflow keys create"),
        (["status", "--set", "transport.keys=NOWHERE"], 78, "operator key NOWHERE"),
        (["statsu"], 2, "Did you mean 'status'"),
        (["run", "lst"], 2, "Did you mean 'ls'"),
        (["sim", "nonsense-that-is-like-nothing"], 2, "No such command"),
        (["status", "--jsn"], 2, "--json"),
        (["config", "check", "no-such-file"], 2, "does not exist"),
    ],
)
def test_the_exit_status_says_what_went_wrong(
    tmp_path: Path, argv: list[str], exit_status: int, said: str
) -> None:
    done = farflow(*argv, PYTHONPATH=os.getcwd())
    assert (done.returncode, said in done.stderr) == (exit_status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_are_spelt_alike_are_offered() -> None:
    assert did_you_mean("box3", ["box1", "box2", "paris"]) in (
        " Did you mean 'box1' or 'box2'?",
        " Did you mean 'box2' or 'box1'?",
    )
    assert did_you_mean("x", ["paris"]) == ""
    assert names_of(status(agents=1)) == ["box0", "first", "first/solver"]


@pytest.mark.parametrize(
    ("code", "subject", "offered"),
    [
        ("agent.unknown", "bos1", True),
        ("subject.unknown", "frist", True),
        ("subject.unknown", "zzzz", False),
        ("refused.role", "bos1", False),
    ],
)
def test_a_subject_that_is_not_known_is_answered_with_what_is_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, subject: str, offered: bool
) -> None:
    class Scheduler:
        def __init__(self, *_: object) -> None: ...
        async def __aenter__(self) -> "Scheduler":
            return self

        async def __aexit__(self, *_: object) -> None: ...
        async def status(self) -> object:
            return status()

    async def refuse(_: object) -> None:
        raise RequestRefused(f"{code}: no {subject}")

    create_keys(tmp_path / "keys")
    monkeypatch.setattr("scheduler.operator.Operator", Scheduler)
    with pytest.raises(RequestRefused, match=f"^{code}: no {subject}") as caught:
        with_operator((), (f"transport.keys={tmp_path}/keys",), None, refuse, subject=subject)
    assert ("Did you mean" in str(caught.value)) == offered
    assert connect.names_of(status())


@pytest.mark.parametrize(("ask", "role"), [(with_client, "submitter"), (with_operator, "operator")])
def test_a_key_that_is_not_there_comes_with_how_to_make_it(
    tmp_path: Path, ask: Callable[..., object], role: str
) -> None:
    with pytest.raises(ConfigError, match=f"{role} key .*no such file") as caught:
        ask((), (f"transport.keys={tmp_path}",), None, None)
    assert f"farflow keys add {role} --role {role}" in str(caught.value)
    assert "give the deployment's file with --config FILE" in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        "status",
        "run ls",
        "keys ls",
        "weights verify",
        "token ls",
        "token revoke a",
        "token http ls",
        "scheduler backup o",
        "gc",
    ],
)
def test_outside_a_deployment_a_command_asks_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli, argv.split())
    what = f"{said.exception} {said.output}"
    assert said.exit_code in (1, 78)  # 1: what the entry point makes 78
    assert "no such file" in what or "no such folder" in what or "no server.toml" in what
    assert "--config FILE" in what


def test_the_version_comes_with_the_build_that_tells_installations_of_it_apart() -> None:
    said = CliRunner().invoke(cli, ["--version"])
    assert said.exit_code == 0
    assert said.output == f"farflow {version()}, build {installed_build()}\n"
    assert installed_build().startswith(f"{build_id()}.")
    assert build_id().startswith(f"{version()}+")


def test_what_changes_outside_the_deciding_source_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PACKAGES:
        (tmp_path / name / "__pycache__").mkdir(parents=True)
    (tmp_path / "scheduler" / "core").mkdir()
    (tmp_path / "transport" / "messages").mkdir()
    for name in ("runs", "status", "ids"):
        (tmp_path / "transport" / f"{name}.py").write_text("")
    monkeypatch.setattr("transport.runtime.build._ROOT", tmp_path)

    def builds() -> tuple[str, str]:
        return build_id.__wrapped__(), installed_build.__wrapped__()

    empty = builds()
    (tmp_path / "edge_agent" / "__pycache__" / "doctor.pyc").write_text("not source")
    assert builds() == empty
    (tmp_path / "edge_agent" / "doctor.py").write_text("one")
    one = builds()
    (tmp_path / "edge_agent" / "doctor.py").rename(tmp_path / "edge_agent" / "install.py")
    other = builds()
    assert one[0] == other[0] == empty[0]
    assert len({empty[1], one[1], other[1]}) == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command_that_is_installed(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_FARFLOW_COMPLETE={shell}_complete" in result.stdout


def test_the_command_completes(tmp_path: Path) -> None:
    done = farflow(
        _FARFLOW_COMPLETE="bash_complete", COMP_WORDS="farflow agent ins", COMP_CWORD="2"
    )
    assert done.stdout.splitlines() == ["plain,install"]


def test_answers_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*argv: str) -> list[dict[str, object]]:
        result = CliRunner().invoke(cli, [*argv, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    assert told("keys", "create", "keys") == [{"keys": "keys"}]
    assert told("keys", "add", "--role", "viewer", "eve")[0]["file"] == "keys/eve.toml"
    assert told("keys", "revoke", "eve")[0]["state"] == "revoked"
    (token,) = told("token", "create", "--lifetime", "30min")
    assert (token["lifetime_s"], token["host"]) == (1800.0, "127.0.0.1")
    assert str(token["id"]) in str(token["token"])
    (filed,) = told("token", "create", "--out", "file.token")
    assert (filed["file"], "token" in filed) == ("file.token", False)
    assert filed["install"] == ["farflow agent install --token-file file.token"]
    plain = CliRunner().invoke(cli, ["token", "create", "--out", "gpu.token"])
    line = "farflow agent install --token-file gpu.token"
    assert f"on the box: {line}\n" in plain.stderr
    assert f"on one with a GPU: {line} --engine vllm --device cuda --slots 0\n" in plain.stderr
    http = ("http.enabled=true", "http.port=7780", "http.wheel=dist/farflow-1.whl")
    wheel = [part for setting in http for part in ("--set", setting)]
    wheel += ["--host", "::1"]
    (handed,) = told("token", "create", "--out", "b.token", *wheel)
    assert handed["install"] == [
        "python3 -m pip install http://[::1]:7780/v1/wheel/farflow-1.whl",
        "farflow agent install --token-file b.token",
    ]
    assert told("token", "revoke", str(token["id"])) == [{"id": token["id"], "state": "revoked"}]
    assert told("keys", "rotate-server")[0]["server_key"]
    (tmp_path / "d.toml").write_text("[log]\nlevel = 'debug'\n")
    assert told("config", "check", "d.toml")[0]["valid"] is True
    shown = {row["key"]: row for row in told("config", "show", "d.toml")}
    assert (shown["log.level"]["value"], shown["log.level"]["origin"]) == ("debug", "d.toml")
    (health,) = told("doctor")
    assert health["healthy"] is True
    units = ("--unit-folder", "u", "--user")
    assert told("scheduler", "install", "--config", "d.toml", *units)[0]["lines"]
    assert told("scheduler", "uninstall", *units)[0]["lines"]
