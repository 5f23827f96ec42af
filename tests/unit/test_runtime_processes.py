"""Child processes: their lines, their ends, their logs and their restarts."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transport.errors import StoreError
from transport.runtime.processes import (
    MAX_LINE_BYTES,
    MAX_PENDING_LINES,
    ChildProcess,
    ChildSpec,
    ProcessFailed,
    RestartPolicy,
    describe_status,
    rotate_log,
    start_child,
    supervise,
)
from transport.runtime.shutdown import ShutdownSignal

pytestmark = pytest.mark.asyncio

ECHO = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"
STUBBORN = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(60)"
)


def child_of(tmp_path: Path, script: str, **fields: object) -> ChildSpec:
    defaults: dict[str, object] = {"capture_stdout": True, "grace_s": 5.0}
    return ChildSpec(
        name="store",
        argv=(sys.executable, "-c", script),
        log_path=tmp_path / "store.log",
        **(defaults | fields),  # type: ignore[arg-type]
    )


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], object]) -> None:
    """Returns once ``condition`` holds; fails the test if it does not within five seconds."""
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


async def test_lines_go_in_and_come_out(tmp_path: Path) -> None:
    child = await start_child(child_of(tmp_path, ECHO))
    child.write_line(b"hello")
    assert await child.read_line(5) == b"got hello"
    assert child.returncode is None
    assert await child.terminate() in (0, -signal.SIGTERM)
    assert await child.terminate() == child.returncode


async def test_the_end_of_its_input_stops_a_child(tmp_path: Path) -> None:
    script = (
        "import asyncio\n"
        "from transport.runtime.shutdown import ShutdownSignal, stop_on_stdin_eof\n"
        "async def main():\n"
        "    with ShutdownSignal() as stop:\n"
        "        print('ready', flush=True)\n"
        "        await stop_on_stdin_eof(stop)\n"
        "        print(stop.reason, flush=True)\n"
        "asyncio.run(main())\n"
    )
    child = await start_child(child_of(tmp_path, script))
    assert await child.read_line(5) == b"ready"
    child.close_input()
    assert await child.read_line(5) == b"standard input closed"
    assert await child.wait() == 0


async def test_a_childs_input_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent_script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from transport.runtime.processes import ChildSpec, start_child\n"
        "async def main():\n"
        "    argv = (sys.executable, '-c', 'import sys; sys.stdin.read()')\n"
        "    log = Path(sys.argv[1]) / 'grandchild.log'\n"
        "    child = await start_child(ChildSpec(name='x', argv=argv, log_path=log))\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    spec = child_of(tmp_path, parent_script)
    spec = ChildSpec(
        name="parent",
        argv=(*spec.argv, str(tmp_path)),
        log_path=spec.log_path,
        capture_stdout=True,
    )
    parent = await start_child(spec)
    # The parent logs that it started the child, then says its process number.
    while not (line := await parent.read_line(5)).isdigit():
        pass
    grandchild = int(line)
    assert alive(grandchild)
    os.kill(parent.pid, signal.SIGKILL)  # not its group: the grandchild leads its own
    await parent.wait()
    await until(lambda: not alive(grandchild))


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_period(
    tmp_path: Path,
) -> None:
    child = await start_child(child_of(tmp_path, STUBBORN))
    assert await child.read_line(5) == b"ready"
    assert await child.terminate(grace_s=0.05) == -signal.SIGKILL
    assert describe_status(-signal.SIGKILL) == "killed by SIGKILL"


async def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
        "sys.exit(3)  # crashes and leaves its worker, which holds the pipe\n"
    )
    child = await start_child(child_of(tmp_path, script))
    worker = int(await child.read_line(5))
    assert await child.wait() == 3
    await until(lambda: not alive(worker))


async def test_errors_quote_the_status_and_the_log(tmp_path: Path) -> None:
    script = "import sys; sys.stderr.write('no such device\\n'); sys.exit(4)"
    child = await start_child(child_of(tmp_path, script))
    with pytest.raises(ProcessFailed, match=r"(?s)store \(process \d+\) ended .*no such device"):
        await child.read_line(5)
    assert await child.wait() == 4
    assert "(status 4)" in str(child.failure("ended"))
    with pytest.raises(ProcessFailed, match="takes no input"):
        child.write_line(b"x")


async def test_a_silent_child_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    child = await start_child(child_of(tmp_path, ECHO))
    with pytest.raises(ProcessFailed, match=r"said nothing within 0\.02 s"):
        await child.read_line(0.02)
    await child.terminate()


async def test_lines_that_nobody_reads_are_bounded_in_number_and_length(tmp_path: Path) -> None:
    script = (
        f"print('x' * {MAX_LINE_BYTES * 4})\n"
        f"for n in range({MAX_PENDING_LINES + 10}): print(n)\n"
        "print('last', flush=True)\nimport sys; sys.stdin.read()"
    )
    child = await start_child(child_of(tmp_path, script))
    await until(lambda: child.dropped_lines == 12)  # one too long, eleven too many
    got = [await child.read_line(1) for _ in range(MAX_PENDING_LINES)]
    assert (got[0], got[-1]) == (b"11", b"last")
    await child.terminate()


async def test_output_goes_to_the_log_unless_it_is_captured(tmp_path: Path) -> None:
    script = "import sys; print('out', flush=True); sys.stderr.write('err')"
    child = await start_child(child_of(tmp_path, script, capture_stdout=False))
    assert await child.wait() == 0
    assert (tmp_path / "store.log").read_text() == "out\nerr"


async def test_a_long_log_is_moved_aside_and_the_child_writes_on(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.stderr.write('x' * 5000); sys.stderr.flush(); print('', flush=True)\n"
        "sys.stdin.readline(); sys.stderr.write('after'); sys.stderr.flush()"
    )
    child = await start_child(child_of(tmp_path, script))
    await child.read_line(5)
    log = tmp_path / "store.log"
    assert not rotate_log(log, 5000)
    assert rotate_log(log, 4999)
    child.write_line(b"go on")
    await child.wait()
    assert (tmp_path / "store.log.1").stat().st_size == 5000
    assert log.read_text() == "after"


async def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    spec = ChildSpec(name="x", argv=("/no/such/program",), log_path=tmp_path / "x.log")
    with pytest.raises(ProcessFailed, match="cannot start x: /no/such/program: No such file"):
        await start_child(spec)
    spec = ChildSpec(name="x", argv=("true",), log_path=tmp_path / "no" / "x.log")
    with pytest.raises(StoreError, match=r"no folder .*: create it"):
        await start_child(spec)


async def test_back_off_doubles_up_to_its_cap() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0)
    assert [policy.delay_s(k) for k in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_a_child_that_dies_is_started_again_until_the_stop(tmp_path: Path) -> None:
    stop = ShutdownSignal()
    pids: list[int] = []

    async def on_started(child: ChildProcess) -> None:
        assert json.loads(await child.read_line(5)) == {"ready": True}
        pids.append(child.pid)
        if len(pids) < 3:
            os.kill(child.pid, signal.SIGKILL)
        else:
            stop.request("test")

    script = "import sys; print('{\"ready\": true}', flush=True); sys.stdin.read()"
    async with asyncio.timeout(20):
        await supervise(
            child_of(tmp_path, script),
            stop,
            policy=RestartPolicy(first_delay_s=0.001),
            on_started=on_started,
        )
    assert len(set(pids)) == 3
    assert not any(alive(pid) for pid in pids)


async def test_a_child_that_dies_too_often_is_given_up_with_its_last_words(
    tmp_path: Path,
) -> None:
    spec = ChildSpec(
        name="store",
        argv=("sh", "-c", "echo no luck >&2; exit 5"),
        log_path=tmp_path / "store.log",
    )
    policy = RestartPolicy(first_delay_s=0.001, max_restarts=2)
    with pytest.raises(
        ProcessFailed, match=r"(?s)ended 3 times within 600 s \(status 5\).*no luck"
    ):
        await supervise(spec, ShutdownSignal(), policy=policy)
    assert spec.log_path.read_text().count("no luck") == 3


async def test_a_child_that_refuses_its_configuration_is_not_started_again(
    tmp_path: Path,
) -> None:
    spec = ChildSpec(
        name="store",
        argv=("sh", "-c", "echo bad key >&2; exit 78"),
        log_path=tmp_path / "store.log",
    )
    with pytest.raises(ProcessFailed, match=r"(?s)refuses its configuration.*bad key"):
        await supervise(spec, ShutdownSignal())
    assert spec.log_path.read_text().count("bad key") == 1


async def test_a_stop_ends_the_child_and_the_wait_for_its_restart(tmp_path: Path) -> None:
    stop = ShutdownSignal()
    spec = ChildSpec(name="x", argv=("false",), log_path=tmp_path / "x.log")
    running = asyncio.create_task(supervise(spec, stop, policy=RestartPolicy(first_delay_s=30)))
    await until((tmp_path / "x.log").exists)
    stop.request("test")
    async with asyncio.timeout(5):
        await running
