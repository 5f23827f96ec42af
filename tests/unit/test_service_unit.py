"""Units for systemd: what they hold, that systemd takes them, what the commands do with them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from cloud_trainer.cli import trainer_group
from scheduler.cli import scheduler_group
from transport.errors import ConfigError, ProcessFailed, StoreError
from transport.relay_cli import relay_group
from transport.runtime import service_install
from transport.runtime.service_install import Place, find_place, install, systemd_version, uninstall
from transport.runtime.service_unit import MARK, Service, unit_text

KNOWN = {
    "Unit": {"Description", "StartLimitIntervalSec", "Wants", "After"},
    "Service": {
        *("Type", "ExecStart", "WorkingDirectory", "User", "Environment", "KillMode"),
        *("TimeoutStopSec", "Restart", "RestartPreventExitStatus", "RestartSec", "RestartSteps"),
        *("RestartMaxDelaySec", "NoNewPrivileges", "ProtectSystem", "ProtectHome"),
        *("RestrictSUIDSGID", "RestrictRealtime", "LockPersonality", "SystemCallArchitectures"),
        *("RestrictAddressFamilies", "UMask", "LimitNOFILE", "PrivateTmp"),
        *("CapabilityBoundingSet", "ProtectKernelModules", "ProtectControlGroups"),
        *("PrivateDevices", "ProtectClock", "ProtectKernelTunables", "ProtectKernelLogs"),
        *("ProtectHostname", "RestrictNamespaces", "ReadWritePaths"),
    },
    "Install": {"WantedBy"},
}
"""Directives of systemd 252 and 254 that a unit of ours may have."""


def service(folder: Path = Path("/var/lib/x"), **changes: object) -> Service:
    facts = {
        "name": "farflow-test",
        "description": "farflow test",
        "argv": (sys.executable, "-P", "-m", "farflow", "agent", "run"),
        "folder": folder,
        "writable": (folder,),
        "stop_s": 75.0,
        "user": "root",
    }
    return Service(**{**facts, **changes})  # type: ignore[arg-type]


KINDS = {
    "scheduler": {},
    "trainer": {"devices": True},
    "agent": {"devices": True, "sandboxes": True, "environment": (("XDG_CACHE_HOME", "/a b/c"),)},
    "own": {"user": "", "devices": True, "sandboxes": True},
    "own scheduler": {"user": ""},
}


def directives(text: str) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(heading[1], {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [252, 256])
def test_a_unit_has_only_directives_that_systemd_knows(kind: str, version: int) -> None:
    found = directives(unit_text(service(**KINDS[kind]), version))
    assert {name: set(keys) - KNOWN[name] for name, keys in found.items()} == {
        "Unit": set(),
        "Service": set(),
        "Install": set(),
    }
    body = found["Service"]
    assert body["NoNewPrivileges"] == ["yes"]
    assert body["ProtectSystem"] == ["strict"]
    assert body["PrivateTmp"] == ["yes"]
    assert body["ReadWritePaths"] == ['"/var/lib/x"']
    assert body["Restart"] == ["on-failure"]
    assert body["RestartPreventExitStatus"] == ["78"]
    assert body["TimeoutStopSec"] == ["75"]
    assert body["LimitNOFILE"] == ["65536"]
    assert ("RestartSteps" in body) == (version >= 254)
    assert ("PrivateDevices" in body) == (kind == "scheduler")
    assert ("RestrictNamespaces" in body) == (kind not in ("agent", "own"))
    # A user's manager may not take capabilities: the daemon would not start (218/CAPABILITIES).
    assert ("CapabilityBoundingSet" in body) == ("User" in body) == (not kind.startswith("own"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["/srv/plain", '/srv/a b %h $HOME "q" \\x'])
def test_systemd_takes_the_unit(tmp_path: Path, kind: str, folder: str) -> None:
    one = service(Path(folder), **KINDS[kind])
    one = one._replace(argv=(*one.argv, "--config", f"{folder}/agent.toml"))
    path = tmp_path / "farflow-test.service"
    path.write_text(unit_text(one, systemd_version()))
    own = ["--user"] if kind.startswith("own") else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *own, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    about_us = [line for line in done.stderr.splitlines() if "farflow" in line]
    assert about_us == []


def test_a_private_tmp_does_not_hide_the_daemons_own_folder() -> None:
    assert "PrivateTmp" not in unit_text(service(Path("/tmp/trial")), 252)  # noqa: S108


def test_what_no_unit_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="plainer path"):
        unit_text(service(Path("/srv/a\nExecStart=/bin/sh")), 252)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that writes down what it is told, and refuses when there is a file ``refuse``."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "systemd 254 (254.1)" && exit\n'
        f'echo "$@" >> {tmp_path}/told\n'
        f'[ ! -e {tmp_path}/refuse ] || {{ echo "no such thing" >&2; exit 5; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "told"


def test_installing_starts_the_daemon_and_again_is_an_upgrade(tmp_path: Path, told: Path) -> None:
    place = Place(tmp_path / "units", True, True, "")
    one = service(tmp_path / "state", user="")
    first = install(one, place)
    unit = tmp_path / "units" / "farflow-test.service"
    assert first[0] == f"wrote: {unit}"
    assert "RestartSteps=6" in unit.read_text()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert told.read_text().splitlines() == [
        "--user --no-pager daemon-reload",
        "--user --no-pager enable farflow-test.service",
        "--user --no-pager restart farflow-test.service",
    ]
    assert install(one, place)[0] == f"unchanged: {unit}"
    assert install(one._replace(stop_s=80.0), place)[0] == f"wrote: {unit}"
    told.unlink()
    assert uninstall("farflow-test", place, 5.0, component="agent")[0].startswith(
        f"removed: {unit}"
    )
    assert told.read_text().splitlines() == [
        "--user --no-pager disable --now farflow-test.service",
        "--user --no-pager daemon-reload",
    ]
    assert (tmp_path / "state").is_dir()
    with pytest.raises(ConfigError, match="no such unit; name it with --service"):
        uninstall("farflow-test", place, 5.0, component="agent")


def test_what_systemd_refuses_is_said(tmp_path: Path, told: Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(ProcessFailed, match=r"daemon-reload: no such thing"):
        install(service(tmp_path / "state"), Place(tmp_path / "units", True, False, "root"))


def test_where_systemd_does_not_run_nothing_is_started(tmp_path: Path, told: Path) -> None:
    lines = install(service(tmp_path / "s", user=""), Place(tmp_path / "units", False, True, ""))
    assert "not started" in lines[1]
    assert lines[2].endswith("-P -m farflow agent run")
    assert not told.exists()


def test_options_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="leave --user out"):
        find_place(user_units=True, run_as="root", unit_folder=None)
    with pytest.raises(ConfigError, match="no-such-user: no such user"):
        find_place(user_units=False, run_as="no-such-user", unit_folder=None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="use sudo, or --user"):
        find_place(user_units=False, run_as="root", unit_folder=None)


def test_a_users_units_go_where_its_manager_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(service_install, "RUNNING", tmp_path)
    place = find_place(user_units=True, run_as="", unit_folder=None)
    assert place == Place(tmp_path / "systemd" / "user", True, True, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_root_gives_the_daemons_folders_to_its_user(tmp_path: Path) -> None:
    (tmp_path / "state" / "keys").mkdir(parents=True)
    (tmp_path / "state" / "keys" / "agent.toml").touch(mode=0o600)
    (tmp_path / "state" / "away").symlink_to("/etc/hostname")
    install(service(tmp_path / "state"), Place(tmp_path / "units", False, False, "nobody"))
    key = tmp_path / "state" / "keys" / "agent.toml"
    assert (key.owner(), key.parent.owner()) == ("nobody", "nobody")
    assert Path("/etc/hostname").owner() == "root"
    with pytest.raises(ConfigError, match="too close to the root"):
        service_install.give([Path("/var")], "nobody")


@pytest.mark.parametrize(
    ("group", "table", "writable", "stop_s"),
    [
        (scheduler_group, '[scheduler]\nfolder = "s"\n', ["s", "keys"], "90"),
        (trainer_group, '[trainer]\nfolder = "t"\n', ["t"], "900"),
        (relay_group, '[relay]\nfolder = "r"\n', ["r"], "60"),
    ],
)
def test_each_daemon_installs_and_uninstalls_its_unit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: click.Group,
    table: str,
    writable: list[str],
    stop_s: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.toml").write_text(table)
    where = ["--user", "--unit-folder", "units", "--service", "farflow-second"]

    def run(*argv: str) -> Result:
        return CliRunner().invoke(group, argv, catch_exceptions=False)

    assert run("install", "--config", "d.toml", *where).exit_code == 0
    unit = tmp_path / "units" / "farflow-second.service"
    body = directives(unit.read_text())["Service"]
    assert body["ReadWritePaths"] == [" ".join(f'"{tmp_path / name}"' for name in writable)]
    assert body["TimeoutStopSec"] == [stop_s]
    assert body["WorkingDirectory"] == [str(tmp_path)]
    assert body["ExecStart"][0].endswith(f'"{group.name}" "run" "--config" "{tmp_path}/d.toml"')
    assert run("uninstall", *where).exit_code == 0
    assert not unit.exists()
    missing = run("uninstall", *where)
    assert (missing.exit_code, "no such unit" in missing.stderr) == (78, True)
    (tmp_path / "d.toml").write_text("[relays]\n")
    assert run("install", "--config", "d.toml", *where).exit_code == 78


def _both_refuse(tmp_path: Path, place: Place, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        uninstall("farflow-test", place, 1.0, component="agent")
    with pytest.raises(ConfigError, match=said):
        install(service(tmp_path / "state", user=""), place)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[Service]\nExecStart=/usr/sbin/nginx\n", "is not farflow's"),
        ("[Service]\nExecStart=/bin/logger farflow agent run\n", "is not farflow's"),
        ('[Service]\nExecStart="/bin/sh\n', "is not farflow's"),
        ("[Service]\nExecStart=/x/farflow relay run\n", "is of the relay, not of the agent"),
        (f"{MARK}\n[Service]\nExecStart=/x/farflow relay run\n", "is of the relay, not of the"),
        (f"{MARK}\n[Service]\nExecStart=/x/other\n", "is of some daemon, not of the agent"),
    ],
)
def test_a_unit_of_somebody_else_is_neither_overwritten_nor_removed(
    tmp_path: Path, text: str, said: str
) -> None:
    unit = tmp_path / "farflow-test.service"
    unit.write_text(text)
    _both_refuse(tmp_path, Place(tmp_path, False, True, "", True), said)
    assert unit.read_text() == text


@pytest.mark.timeout(10)
def test_what_is_no_plain_file_is_no_unit_of_ours(tmp_path: Path) -> None:
    place = Place(tmp_path, False, True, "", True)
    unit = tmp_path / "farflow-test.service"
    (tmp_path / "target").write_text(f"{MARK}\n[Service]\nExecStart=/x/farflow agent run\n")
    for target in (tmp_path / "target", Path("/dev/null"), tmp_path / "gone"):
        unit.symlink_to(target)
        _both_refuse(tmp_path, place, "a symbolic link")
        unit.unlink()
    os.mkfifo(unit)
    _both_refuse(tmp_path, place, "not a regular file")


def test_a_unit_without_our_mark_that_starts_our_daemon_is_upgraded(tmp_path: Path) -> None:
    unit = tmp_path / "farflow-test.service"
    unit.write_text('[Service]\nExecStart="/x/python" "-P" "-m" "farflow" "agent" "run" "-v"\n')
    place = Place(tmp_path, False, True, "", True)
    assert install(service(tmp_path / "state", user=""), place)[0] == f"wrote: {unit}"
    assert unit.read_text().startswith(MARK)


def test_a_unit_that_ours_would_hide_keeps_it_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "farflow-test.service").write_text("[Service]\nExecStart=/usr/sbin/nginx\n")
    monkeypatch.setattr(service_install, "_SHIPPED", {True: (str(shipped),)})
    with pytest.raises(ConfigError, match=f"{shipped}/farflow-test.service: is not farflow's"):
        install(service(tmp_path / "s", user=""), Place(tmp_path / "units", False, True, ""))
    assert not (tmp_path / "units").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot create /proc/farflow; choose another folder"):
        install(service(tmp_path, user=""), Place(Path("/proc/farflow"), False, True, "", True))
