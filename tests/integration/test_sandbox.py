"""Programs in the real sandbox: what they may do, and what they try in vain."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_bench import it_runs, limits_of_its_own, need_sandbox, nothing_is_left, processes_of

from edge_agent import sandbox
from edge_agent.sandbox import (
    AT_ONCE,
    MAX_CODE_BYTES,
    ProgramTooLarge,
    SandboxFailed,
    SandboxLimits,
    SandboxUnavailable,
    probe_sandbox,
    run_python,
    sandbox_works,
)
from edge_agent.tools import python_tool

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def box() -> None:
    await need_sandbox()


# ---- programs that mean no harm ----------------------------------------------------------------


@pytest.mark.usefixtures("box")
async def test_a_program_reads_and_prints_and_fails_as_anywhere() -> None:
    done = await run_python("print(input()[::-1])\nprint('über', file=open(2, 'w'))", stdin="abc\n")
    assert (done.status, done.stdout, done.stderr) == ("ok", "cba\n", "über\n")
    failed = await run_python("def f():\n    return 1 / 0\nf()")
    assert (failed.status, failed.exit_status) == ("error", 1)
    assert "ZeroDivisionError" in failed.stderr
    assert "line 2, in f" in failed.stderr
    assert "inside.py" not in failed.stderr
    assert (await run_python("import sys; sys.exit(7)")).exit_status == 7
    assert "SyntaxError" in (await run_python("1 +")).stderr


@pytest.mark.usefixtures("box")
async def test_the_standard_library_works_in_there() -> None:
    code = """
import dataclasses, inspect, json, multiprocessing.dummy, os, random, subprocess, sys, tempfile
@dataclasses.dataclass
class Point:
    x: int
with tempfile.TemporaryFile("w+") as file:
    json.dump(dataclasses.asdict(Point(1)), file)
with open(os.devnull, "w") as nothing:
    print(len(random.SystemRandom().randbytes(4)), file=nothing)
print(multiprocessing.dummy.Pool(2).map(abs, [-1, 2]), inspect.getsource(Point).count("x"))
print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True).stdout)
if __name__ == "__main__":
    print(sys.argv)
"""
    done = await run_python(code)
    assert done.status == "ok", done.stderr
    assert done.stdout == "[1, 2] 1\nb'42\\n'\n['/tmp/program.py']\n"


@pytest.mark.usefixtures("box")
async def test_the_tool_answers_with_what_a_program_prints() -> None:
    assert await python_tool("print(6 * 7)") == "42"
    assert (await python_tool("1 / 0")).endswith("division by zero\n(exit status 1)")
    limits = SandboxLimits(wall_s=0.3)
    shown = await python_tool("print(1, flush=True)\nwhile True: pass", limits=limits)
    assert shown.startswith("1\n(ended: over the time limit")


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("code", "check", "status", "checked"),
    [
        ("def f(): return 3", "assert f() == 3", "ok", True),
        ("def f(): return 3\nprint('x', end='')", "assert f() == 3", "ok", True),
        ("def f(): return 4", "assert f() == 3", "error", False),
        ("import sys; sys.exit(0)", "assert f() == 3", "ok", False),
        ("import os; os._exit(0)", "assert f() == 3", "ok", False),
        ("f = 3\nif __name__ == '__main__': f = 4", "assert f == 3", "ok", True),
    ],
)
async def test_a_check_counts_only_when_it_came_to_its_end(
    code: str, check: str, status: str, checked: bool
) -> None:
    done = await run_python(code, check=check)
    assert (done.status, done.checked) == (status, checked)
    assert done.stdout == ("x" if "print" in code else "")


# ---- programs that do --------------------------------------------------------------------------


@pytest.mark.usefixtures("box")
async def test_there_is_no_network() -> None:
    arrived = asyncio.Event()
    server = await asyncio.start_server(lambda *_: arrived.set(), "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    name = f"\0farflow-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        code = f"""
import socket
for family, address in ((socket.AF_INET, {address!r}), (socket.AF_INET, ("192.0.2.1", 80)),
                        (socket.AF_UNIX, {name!r})):
    try:
        socket.socket(family).connect(address)
    except OSError as error:
        print(type(error).__name__)
try:
    socket.getaddrinfo("example.org", 80)
except OSError:
    print("no names")
"""
        done = await run_python(code)
    assert done.stdout == "ConnectionRefusedError\nOSError\nConnectionRefusedError\nno names\n"
    assert done.status == "ok"
    assert not arrived.is_set()
    server.close()
    await server.wait_closed()


@pytest.mark.usefixtures("box")
async def test_nothing_of_ours_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "keys" / "agent.toml"
    secret.parent.mkdir()
    secret.write_text("secret")
    monkeypatch.setenv("FARFLOW_SECRET", "secret")
    with secret.open() as held:
        os.set_inheritable(held.fileno(), True)
        code = f"""
import os
for place in ("/etc/passwd", "/etc/shadow", "/proc/self/environ", "/sys", "/home", "/bin/sh",
              "/root/.bashrc", "/usr/bin", {str(secret)!r}, {str(Path.home() / ".profile")!r},
              {str(Path(__file__))!r}):
    try:
        print(place, os.listdir(place) if os.path.isdir(place) else open(place).read())
    except FileNotFoundError:
        pass
print(sorted(os.environ))
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
print([number for number in range(64) if is_open(number)])
"""
        done = await run_python(code)
    assert done.stdout == "['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'PWD']\n[0, 1, 2]\n"


@pytest.mark.usefixtures("box")
async def test_it_writes_nowhere_but_in_its_bounded_tmp() -> None:
    code = f"""
import errno, os
for place in ("/x", "/usr/lib/x", "/dev/x", "/inside.py", "/etc/x", {sys.prefix!r} + "/x",
              {sys.base_prefix!r} + "/lib/x"):
    try:
        open(place, "w")
        print("wrote", place)
    except OSError:
        pass
def fill(name):
    try:
        with open(name, "wb") as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError as error:
        return errno.errorcode[error.errno], os.path.getsize(name)
print(fill("/tmp/a"))
print([fill(f"/tmp/b{{number}}")[0] for number in range(4)])
"""
    limits = SandboxLimits(file_bytes=2**20, disk_bytes=2 * 2**20)
    done = await run_python(code, limits=limits)
    assert done.status == "ok", done.stderr
    assert done.stdout == f"('EFBIG', {2**20})\n{['ENOSPC'] * 4}\n"


@pytest.mark.usefixtures("box")
async def test_it_has_no_rights_and_gets_none() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/tmp"))
print(libc.sethostname(b"x", 1), libc.umount2(b"/", 2))
# Own name spaces would give it file systems without a bound; such memory is charged to nobody.
print(libc.unshare(0x10000000), libc.shmget(0, 4096, 0o1666), libc.memfd_create(b"x", 0))
import socket
try:
    socket.socket(40, socket.SOCK_STREAM)
    print("virtual machines")
except OSError:
    pass
try:
    os.setuid(0)
    print("root")
except OSError:
    print("not root")
import resource
for name in ("RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE"):
    try:
        resource.setrlimit(getattr(resource, name), (2**40, 2**40))
        print("raised", name)
    except ValueError:
        pass
"""
    done = await run_python(code)
    assert done.stdout == "-1 -1\n-1 -1\n-1 -1 -1\nnot root\n", done.stderr


ENDED = [
    ("endless loop", "while True: pass", {"wall_s": 0.3}, "timeout"),
    ("sleep", "import time; time.sleep(600)", {"wall_s": 0.3}, "timeout"),
    ("processor time", "while True: pass", {"cpu_s": 1, "wall_s": 25.0}, "killed"),
    (
        "deaf to signals",
        "import signal\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        {"wall_s": 0.5},
        "timeout",
    ),
    ("memory", "x = [bytes(1 << 20) for _ in range(1 << 20)]", {}, "killed"),
    ("memory at once", "x = bytearray(1 << 40)", {}, "killed"),
    ("endless output", "while True: print('x' * 1000)", {}, "output_limit"),
    ("endless errors", "import os\nwhile True: os.write(2, bytes(1000))", {}, "output_limit"),
    (
        "fork bomb",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"wall_s": 1.0},
        "timeout",
    ),
    (
        "silent",
        "import os, time\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass\n"
        "time.sleep(600)",
        {"wall_s": 0.3},
        "timeout",
    ),
    ("crash", "import ctypes; ctypes.string_at(0)", {}, "error"),
    ("suicide", "import os; os.kill(os.getpid(), 9)", {}, "killed"),
    ("deep", "def f(): return f()\nf()", {}, "error"),
]


@pytest.mark.usefixtures("box")
@pytest.mark.parametrize(
    ("code", "changes", "status"), [case[1:] for case in ENDED], ids=[case[0] for case in ENDED]
)
async def test_what_takes_too_much_is_ended_and_leaves_nothing(
    code: str, changes: dict[str, float], status: str
) -> None:
    limits = limits_of_its_own(**changes)
    done = await run_python(code, limits=limits)
    assert done.status == status, done
    assert len(done.stdout) + len(done.stderr) <= limits.output_bytes
    await nothing_is_left(limits)


@pytest.mark.usefixtures("box")
async def test_a_fork_bomb_has_no_more_processes_than_allowed() -> None:
    limits = limits_of_its_own(processes=8)
    code = """
import os, time
children = 0
try:
    while True:
        if not os.fork():
            time.sleep(600)
        children += 1
except BlockingIOError:
    print(children)
"""
    done = await run_python(code, limits=limits)
    assert done.status == "ok"
    assert 1 <= int(done.stdout) <= 8
    await nothing_is_left(limits)


@pytest.mark.usefixtures("box")
async def test_it_cannot_signal_us_nor_its_neighbours() -> None:
    neighbour = asyncio.create_task(run_python("print(input())", stdin="alive"))
    code = f"""
import os, signal
for process in (os.getppid(), 1, {os.getpid()}, {os.getppid()}, -1):
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
print("still here")
"""
    done = await run_python(code)
    assert (done.status, done.stdout) == ("ok", "still here\n")
    assert (await neighbour).stdout == "alive\n"


@pytest.mark.usefixtures("box")
async def test_a_process_left_behind_ends_with_its_program() -> None:
    limits = limits_of_its_own()
    code = """
import os, signal, time
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number in (0, 1, 2):
            os.close(number)
        os.write(writer, b"x")
        time.sleep(600)
    os._exit(0)
os.read(reader, 1)
print("done")
"""
    done = await run_python(code, limits=limits)
    assert (done.status, done.stdout) == ("ok", "done\n")
    await nothing_is_left(limits)


# ---- our side ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("box")
async def test_a_cancelled_run_ends_with_all_its_processes() -> None:
    limits = limits_of_its_own(wall_s=600.0)
    code = "import os, time\nos.fork()\nos.setsid() if os.getpid() > 2 else 0\ntime.sleep(600)"
    task = asyncio.create_task(run_python(code, limits=limits))
    await it_runs(limits, processes=4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_is_left(limits)


@pytest.mark.usefixtures("box")
async def test_when_the_box_runs_out_of_memory_the_sandboxes_go_first() -> None:
    limits = limits_of_its_own(wall_s=600.0)
    task = asyncio.create_task(run_python("import time; time.sleep(600)", limits=limits))
    await it_runs(limits)
    scores = [await asyncio.to_thread(_oom_score_adj, pid) for pid in processes_of(limits)]
    assert scores == [1000, 1000, 1000]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.usefixtures("box")
async def test_a_sandbox_that_somebody_ends_says_nothing_about_its_program() -> None:
    limits = limits_of_its_own(wall_s=600.0)
    code = "import os, time; os.fork(); time.sleep(600)"
    task = asyncio.create_task(run_python(code, limits=limits))
    await it_runs(limits, processes=4)
    os.kill(min(processes_of(limits)), signal.SIGKILL)
    with pytest.raises(SandboxFailed, match="ended from outside"):
        await task
    await nothing_is_left(limits)


def _oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.usefixtures("box")
async def test_an_agent_that_is_killed_leaves_no_program_behind() -> None:
    limits = limits_of_its_own(wall_s=600.0)
    code = f"""
import asyncio
from edge_agent.sandbox import SandboxLimits, run_python
limits = SandboxLimits(wall_s=600.0, file_bytes={limits.file_bytes})
asyncio.run(run_python("import time; time.sleep(600)", limits=limits))
"""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await it_runs(limits)
    agent.kill()
    await agent.wait()
    await nothing_is_left(limits)


@pytest.mark.usefixtures("box")
async def test_so_many_at_once_and_the_next_when_one_ends() -> None:
    limits = [limits_of_its_own(wall_s=600.0) for _ in range(AT_ONCE + 1)]
    tasks = [
        asyncio.create_task(run_python("import time; time.sleep(600)", limits=each))
        for each in limits
    ]
    try:
        for each in limits[:AT_ONCE]:
            await it_runs(each)
        assert processes_of(limits[AT_ONCE]) == []
        tasks[0].cancel()
        await it_runs(limits[AT_ONCE])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for each in limits:
        await nothing_is_left(each)


async def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ProgramTooLarge, match=f"{MAX_CODE_BYTES} bytes"):
        await run_python("#" * (MAX_CODE_BYTES + 1))


@pytest.fixture
def fake_bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in bubblewrap's place, and forgets what was found before."""

    def put(script: str | None) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        if script is not None:
            path = tmp_path / "bwrap"
            path.write_text(script)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setattr(sandbox, "_found", None)
    return put


async def test_without_bubblewrap_nothing_is_run(fake_bwrap) -> None:
    fake_bwrap(None)
    assert "install bubblewrap" in (await probe_sandbox()).remedy
    assert not sandbox_works()
    with pytest.raises(SandboxUnavailable, match="no bwrap here: install bubblewrap"):
        await run_python("print(1)")


async def test_a_bubblewrap_that_may_not_work_is_told_with_the_remedy(fake_bwrap) -> None:
    fake_bwrap("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    found = await probe_sandbox()
    assert "No permissions to create new namespace" in found.why
    assert "user namespaces" in found.remedy
    with pytest.raises(SandboxUnavailable):
        await run_python("print(1)")


async def test_a_sandbox_that_does_not_hold_is_none(fake_bwrap) -> None:
    fake_bwrap(
        f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index('--')\n"
        f"inside = {sandbox.sandbox_inside.__file__!r}\n"
        "words = [word.replace('/inside.py', inside) for word in sys.argv[at + 1:]]\n"
        "words[words.index('-X') + 3] = '0'\nwords[-6:] = []\nos.execv(words[0], words)\n"
    )
    try:
        found = await probe_sandbox()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sandbox.sandbox_inside.PROGRAM)
    assert "does not hold" in found.why
    assert "there is a network" in found.why or "is not bounded" in found.why


async def test_a_sandbox_that_does_not_start_is_no_fault_of_the_program(
    fake_bwrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_bwrap("#!/bin/sh\nwhile :; do :; done\n")
    monkeypatch.setattr(sandbox, "_found", sandbox.SandboxProbe("", ""))
    monkeypatch.setattr(sandbox, "START_S", 0.2)
    with pytest.raises(SandboxFailed, match=r"did not start within 0\.2 s"):
        await run_python("print(1)")
    fake_bwrap("#!/bin/sh\necho 'this is no sandbox'\n")
    with pytest.raises(SandboxFailed, match="status 0"):
        await run_python("print(1)")
    fake_bwrap("#!/bin/sh\necho 'bwrap: Can not mount' >&2\nexit 1\n")
    with pytest.raises(SandboxFailed, match=r"status 1.*Can not mount"):
        await run_python("print(1)")
