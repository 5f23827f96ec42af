"""``farflow agent drain`` and the process that it finds through its folder."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_agent.cli import agent_group
from edge_agent.draining import NOTE_NAME, ask_to_drain, take_note, wait_for_end
from transport.errors import StoreError
from transport.runtime.files import folder_holder, lock_folder

HOLDER = """
import asyncio, sys
from pathlib import Path
from edge_agent.draining import take_note
from transport.runtime.files import lock_folder
from transport.runtime.shutdown import ShutdownSignal

async def main():
    with ShutdownSignal() as stop, lock_folder(Path(sys.argv[1])):
        print("ready", flush=True)
        await stop.wait()
        print(take_note(Path(sys.argv[1])), flush=True)
        if sys.argv[2] == "stays":
            await asyncio.Event().wait()

asyncio.run(main())
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that holds the folder until it is told to stop."""
    started: list[subprocess.Popen[str]] = []

    def begin(how: str = "leaves") -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", HOLDER, str(tmp_path), how]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def drain(folder: Path, *options: str) -> tuple[int, str]:
    argv = ["drain", "--set", f"agent.folder={folder}", *options]
    result = CliRunner().invoke(agent_group, argv)
    return result.exit_code, result.output


def test_the_holder_of_the_folder_gets_the_deadline_and_the_signal(
    tmp_path: Path, start: Start
) -> None:
    process = start()
    assert folder_holder(tmp_path) == process.pid
    status, said = drain(tmp_path, "--deadline", "90s")
    assert (status, said) == (0, f"the agent (process {process.pid}) has left\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "DrainNote(deadline_s=90.0)\n"
    assert process.wait() == 0
    assert folder_holder(tmp_path) is None
    assert not (tmp_path / NOTE_NAME).exists()


def test_without_a_deadline_the_agents_own_setting_counts(tmp_path: Path, start: Start) -> None:
    process = start("stays")
    status, said = drain(tmp_path, "--no-wait")
    assert (status, said) == (0, f"the agent (process {process.pid}) was told to drain\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "DrainNote(deadline_s=None)\n"


def test_waiting_ends_and_says_that_the_agent_still_runs(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.draining.CLOSING_S", 0.05)
    process = start("stays")
    status, said = drain(tmp_path, "--deadline", "50ms")
    assert (status, said) == (1, f"the agent (process {process.pid}) still runs after 0.1 s\n")


def test_nobody_on_the_folder_is_an_error_and_no_note_stays(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        pass
    for folder in (tmp_path, tmp_path / "never"):
        with pytest.raises(StoreError, match=r"no agent runs on .*--set agent\.folder=FOLDER"):
            ask_to_drain(folder, None)
        assert drain(folder)[0] == 1
    assert not (tmp_path / NOTE_NAME).exists()


def test_a_damaged_note_is_no_note_and_is_gone(tmp_path: Path) -> None:
    assert take_note(tmp_path) is None
    for data in (b"{", b'{"deadline_s": "soon"}', b"x" * 5000):
        (tmp_path / NOTE_NAME).write_bytes(data)
        assert take_note(tmp_path) is None
        assert not (tmp_path / NOTE_NAME).exists()
    assert drain(tmp_path, "--deadline", "soon")[0] == 78


def test_the_end_of_a_process_that_is_gone_needs_no_waiting() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert wait_for_end(process.pid, 5.0)
