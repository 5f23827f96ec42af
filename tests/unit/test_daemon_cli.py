"""The command line that all daemons share."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from transport.errors import ConfigError, FarflowError, StoreError
from transport.runtime.daemon_cli import daemon_command, foreseen_errors
from transport.runtime.settings import DaemonConfig
from transport.runtime.shutdown import Stop

Life = Callable[[DaemonConfig, asyncio.Event], Coroutine[Any, Any, int]]


def run(life: Life, *arguments: str) -> Result:
    async def serve(
        config: DaemonConfig, *, stop: asyncio.Event, on_ready: Callable[[dict[str, Any]], None]
    ) -> int:
        on_ready({"ready": True, "ports": {}})
        return await life(config, stop)

    command = daemon_command("tester", lambda: (DaemonConfig, serve), help="Tests.")
    return CliRunner().invoke(command, arguments)


async def until_stopped(config: DaemonConfig, stop: asyncio.Event) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    return 0


async def returns_settings(config: DaemonConfig, stop: asyncio.Event) -> int:
    return config.transport.control_port


def test_a_daemon_says_ready_once_and_stops_in_order_on_sigterm() -> None:
    result = run(until_stopped)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"ready": True, "ports": {}}


def test_a_daemon_that_still_works_hears_of_every_further_sigterm() -> None:
    async def insists(config: DaemonConfig, stop: asyncio.Event) -> int:
        assert isinstance(stop, Stop)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert not stop.again.is_set()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.again.wait()
            stop.again.clear()
        return 0

    assert run(insists).exit_code == 0


def test_a_child_stops_when_its_standard_input_ends() -> None:
    async def waits(config: DaemonConfig, stop: asyncio.Event) -> int:
        await stop.wait()
        return 3

    assert run(waits, "--stop-on-eof").exit_code == 3


def test_later_files_and_then_overrides_win(tmp_path: Path) -> None:
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    one.write_text("[transport]\ncontrol_port = 1\n")
    two.write_text("[transport]\ncontrol_port = 2\n")
    files = ("--config", str(one), "--config", str(two))
    assert run(returns_settings, *files).exit_code == 2
    assert run(returns_settings, *files, "--set", "transport.control_port=3").exit_code == 3


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("port: no"), 78, "tester: port: no\n"),
        (StoreError("disk: full"), 1, "tester: disk: full (store)\n"),
    ],
)
def test_foreseen_errors_are_one_line_and_a_status(
    error: FarflowError, status: int, text: str
) -> None:
    async def fails(config: DaemonConfig, stop: asyncio.Event) -> int:
        raise error

    result = run(fails)
    assert (result.exit_code, result.stderr) == (status, text)


def test_other_errors_are_not_hidden() -> None:
    @click.command()
    def broken() -> None:
        with foreseen_errors("tester"):
            raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(broken).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "group",
    [
        "cloud_trainer.cli:trainer_group",
        "edge_agent.cli:agent_group",
        "scheduler.cli:scheduler_group",
    ],
)
def test_help_imports_nothing_heavy(group: str) -> None:
    module, _, name = group.partition(":")
    code = (
        f"import sys; from {module} import {name}\n"
        f"try: {name}(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'zmq', 'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--stop-on-eof" in done.stdout


@pytest.mark.parametrize(
    ("group", "bad", "where"),
    [
        ("cloud_trainer.cli:trainer_group", "trainer.policy=solver", "trainer.policy"),
        ("cloud_trainer.cli:trainer_group", "trainer.polic=a/b", "trainer.polic: unknown key"),
        ("edge_agent.cli:agent_group", "agent.slots=-1", "agent.slots"),
        ("scheduler.cli:scheduler_group", "scheduler.lease_s=no", "scheduler.lease_s"),
    ],
)
def test_a_wrong_configuration_exits_with_78_and_says_why(group: str, bad: str, where: str) -> None:
    module, _, name = group.partition(":")
    found = getattr(__import__(module, fromlist=[name]), name)
    result = CliRunner().invoke(found, ["run", "--set", bad])
    assert result.exit_code == 78
    assert where in result.stderr
