"""Python that a model wrote, run where it can do no harm: in a bubblewrap sandbox, or not at all.

What always holds:

1. The program sees no network, no process but its own, no environment of ours, and of the files
   only Python and the system's libraries, read-only. It can write to a file system in memory that
   is its own, bounded and gone with it.
2. Everything it may use is bounded (``SandboxLimits``), and so are the sandboxes at once
   (``AT_ONCE``). However a run ends, also when it is cancelled, all its processes end with it.
3. What the program does is a ``SandboxResult``; a sandbox that does not do its part is an error.
   Where ``probe_sandbox`` finds that it cannot work, everything here refuses: code is never run
   without it.

Memory is bounded per process and by the number of processes, hence in all by their product; where
the box has less, the kernel ends what is in sandboxes first.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import structlog
from msgspec import Meta

from edge_agent import sandbox_inside
from edge_agent.containment import ours
from transport.errors import ToolError
from transport.runtime.commands import Talk, kill_group, start_talk

Status = Literal["ok", "error", "timeout", "killed", "output_limit"]

AT_ONCE: Final = 4
"""Sandboxes at a time; more wait for their turn."""
START_S: Final = 20.0
"""A sandbox that has not started by then (a hundredth is usual) is itself at fault."""
MAX_CODE_BYTES: Final = 2**20
MAX_STDIN_BYTES: Final = 16 * 2**20
_READ_BYTES: Final = 1 << 16
_WORDS: Final = 300
"""Characters of what bubblewrap says that an error quotes."""
_WORD_BYTES: Final = 16
_KILLED: Final = (128 + 9, 128 + 24)  # SIGKILL, SIGXCPU
_FIRST_USER: Final = 64_000
_USERS: Final = 1_000
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_INSIDE: Final = "/inside.py"
_FIRST_TO_GO: Final = '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$0" "$@"'
"""Where memory runs out, the kernel is to end programs in sandboxes, not the agent."""
_ENVIRONMENT: Final = {"HOME": "/tmp", "OMP_NUM_THREADS": "1"}  # noqa: S108 - threads are counted

_log = structlog.get_logger()


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program may use. ``cpu_s``, ``memory_bytes`` (address space) and ``open_files`` are
    per process, of which there are at most ``processes`` (threads count); ``disk_bytes`` are all
    its files together, ``output_bytes`` what it prints in all."""

    wall_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    cpu_s: Annotated[int, Meta(ge=1, le=600)] = 10
    memory_bytes: Annotated[int, Meta(ge=64 * 2**20, le=64 * 2**30)] = 512 * 2**20
    processes: Annotated[int, Meta(ge=2, le=256)] = 8
    open_files: Annotated[int, Meta(ge=16, le=4096)] = 64
    file_bytes: Annotated[int, Meta(ge=2**16, le=2**30)] = 16 * 2**20
    disk_bytes: Annotated[int, Meta(ge=2 * 2**20, le=4 * 2**30)] = 64 * 2**20
    output_bytes: Annotated[int, Meta(ge=2**10, le=64 * 2**20)] = 256 * 2**10


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended: by itself with status 0 (``ok``) or another one (``error``, 128 and the
    signal's number after a signal), at its time limit, for its use of memory or processor time
    (``killed``), or because it printed too much. ``checked`` says that the check ran to its end."""

    status: Status
    stdout: str
    stderr: str
    wall_s: float
    exit_status: int | None = None
    checked: bool = False


class SandboxUnavailable(ToolError):
    """No sandbox can work here, so nothing is run."""

    code: ClassVar[str] = "sandbox.unavailable"


class SandboxFailed(ToolError):
    """The sandbox, not the program in it, did not do its part."""

    code: ClassVar[str] = "sandbox.failed"


class ProgramTooLarge(ToolError):
    """More than a sandbox takes."""

    code: ClassVar[str] = "sandbox.too_large"


class SandboxProbe(NamedTuple):
    """Why there is no sandbox here and what to do about it; both empty where it works."""

    why: str
    remedy: str


_NO_BWRAP: Final = SandboxProbe(
    "no bwrap here", "install bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
)
_REMEDY: Final = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces above 0,"
    " kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), or in a"
    " container give it CAP_SYS_ADMIN"
)
_PROBE: Final = """
import os, socket, time
assert [name for _, name in socket.if_nameindex()] in ([], ["lo"]), "there is a network"
try:
    for _ in range({processes}):
        if not os.fork():
            time.sleep(60)
except BlockingIOError:
    print("works")
else:
    raise SystemExit("the number of processes is not bounded")
"""
_found: SandboxProbe | None = None
_users = itertools.count(os.getpid())
_permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def probe_sandbox() -> SandboxProbe:
    """Whether a sandbox works here, found out once per process by running a program in one."""
    global _found
    if _found is None:
        _found = await _probe()
        if _found.why:
            _log.warning("sandbox.unavailable", reason=_found.why, remedy=_found.remedy)
    return _found


def sandbox_works() -> bool:
    """What ``probe_sandbox`` has found; False before."""
    return _found is not None and not _found.why


async def run_python(
    code: str, *, stdin: str = "", check: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Runs a program; returns how it ended and what it printed, cut at the limit.

    With ``check``, the program is run as a module called ``program``, and then ``check`` in its
    name space. The check is nowhere in a file, and only one that came to its end is ``checked``;
    but a program that looks for it in its interpreter can find it.

    Raises:
        SandboxUnavailable: there is no sandbox here.
        SandboxFailed: the sandbox did not start, or was ended by somebody else.
        ProgramTooLarge: code or input are above their limits.
    """
    texts = [code.encode("utf-8", "replace"), check.encode("utf-8", "replace")]
    given = stdin.encode("utf-8", "replace")
    if sum(map(len, texts)) > MAX_CODE_BYTES or len(given) > MAX_STDIN_BYTES:
        raise ProgramTooLarge(
            f"a program has at most {MAX_CODE_BYTES} bytes and {MAX_STDIN_BYTES} of input"
        )
    found = await probe_sandbox()
    if found.why:
        raise SandboxUnavailable(f"{found.why}: {found.remedy}")
    with ours():  # a workflow that is given up must not take our tasks with it
        return await _run(texts, given, limits or SandboxLimits())


async def _probe() -> SandboxProbe:
    if await asyncio.to_thread(shutil.which, "bwrap") is None:
        return _NO_BWRAP
    limits = SandboxLimits(wall_s=START_S)
    code = _PROBE.format(processes=limits.processes)
    try:
        result = await _run([code.encode(), b""], b"", limits)
    except ToolError as error:
        old = "Unknown option" in str(error)
        return SandboxProbe(str(error), "install bubblewrap 0.7 or newer" if old else _REMEDY)
    if result.status == "ok" and result.stdout == "works\n":
        return SandboxProbe("", "")
    said = (result.stderr or result.stdout).strip()[-_WORDS:]
    return SandboxProbe(f"the sandbox does not hold ({result.status}): {said}", _REMEDY)


async def _run(texts: list[bytes], given: bytes, limits: SandboxLimits) -> SandboxResult:
    permits = _permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    word = secrets.token_hex(_WORD_BYTES // 2).encode()
    head = sandbox_inside.FRAME.pack(*(len(text) for text in (*texts, word)))
    async with permits:
        command = await asyncio.to_thread(lambda: list(_command(limits)))  # it looks at the disk
        try:
            talk = await start_talk(command, environment=_ENVIRONMENT)
        except OSError as error:
            raise SandboxFailed(f"bwrap cannot be started: {error.strerror or error}") from error
        try:
            watch = _Watch(talk, limits, word)
            return await watch.run(b"".join((head, *texts, word, given)))
        finally:
            await talk.end()


class _Watch:
    """One run, from the start of bubblewrap to its end."""

    def __init__(self, talk: Talk, limits: SandboxLimits, word: bytes) -> None:
        self._talk = talk
        self._limits = limits
        self._word = word
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self._room = limits.output_bytes + len(word)
        self._said = {"stdout": bytearray(), "stderr": bytearray()}

    async def run(self, given: bytes) -> SandboxResult:
        """Feeds the program, reads what it says and waits for its end, within the limits."""
        late = False
        try:
            async with asyncio.timeout(START_S) as limit:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed(given))
                    tasks.create_task(self._listen("stderr", self._talk.stderr, None))
                    tasks.create_task(self._listen("stdout", self._talk.stdout, limit))
                await self._talk.wait()
        except TimeoutError:
            late = True
        if self._began_s is None:
            said = self._text("stderr").strip()[-_WORDS:]
            how = f"within {START_S:g} s" if late else f"(status {self._talk.returncode})"
            raise SandboxFailed(f"the sandbox did not start {how}: {said or 'no word'}")
        return self._result(self._loop.time() - self._began_s, late=late)

    def _result(self, wall_s: float, *, late: bool) -> SandboxResult:
        exit_status = self._talk.returncode
        stdout = self._said["stdout"]
        at = stdout.rfind(self._word)  # what a program leaves behind may still print after it
        checked = at >= 0
        if checked:
            del stdout[at : at + len(self._word)]
        status: Status
        if self._room < 0:
            status = "output_limit"
        elif late:
            status = "timeout"
        elif exit_status is None or exit_status < 0:  # no program can reach bubblewrap's own
            raise SandboxFailed(f"the sandbox was ended from outside (status {exit_status})")
        elif exit_status in _KILLED:
            status = "killed"
        else:
            status = "error" if exit_status else "ok"
        return SandboxResult(
            status=status,
            stdout=self._text("stdout"),
            stderr=self._text("stderr"),
            wall_s=wall_s,
            exit_status=exit_status,
            checked=checked,
        )

    async def _feed(self, given: bytes) -> None:
        stdin = self._talk.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stdin.write(given)
                await stdin.drain()
            stdin.close()

    async def _listen(
        self, name: str, stream: asyncio.StreamReader | None, limit: asyncio.Timeout | None
    ) -> None:
        """Keeps what a stream says while there is room; ends the program when there is not."""
        while stream is not None and (read := await stream.read(_READ_BYTES)):
            if limit and self._began_s is None and read.startswith(sandbox_inside.READY):
                self._began_s = self._loop.time()
                limit.reschedule(self._began_s + self._limits.wall_s)
                read = read.removeprefix(sandbox_inside.READY)
            if self._room < 0:
                continue
            self._said[name] += read[: self._room]
            self._room -= len(read)
            if self._room < 0:
                kill_group(self._talk.pid)

    def _text(self, name: str) -> str:
        said = bytes(self._said[name][: self._limits.output_bytes])
        return said.decode("utf-8", "replace")


def _command(limits: SandboxLimits) -> Iterator[str]:
    """bubblewrap around Python around ``sandbox_inside``, which applies the limits per process."""
    root = os.getuid() == 0
    yield from ("/bin/sh", "-c", _FIRST_TO_GO, shutil.which("bwrap") or "bwrap")
    yield from ("--die-with-parent", "--new-session")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--hostname", "sandbox")
    if not root:  # root has no use for it, and would be nobody else in there: see _user
        yield "--unshare-user"
    python = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    places = dict.fromkeys((*_SYSTEM, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"))
    folders = {str(up) for place in (*places, *_DEVICES, python) for up in Path(place).parents}
    for folder in sorted(folders - {"/"}):  # those that bubblewrap makes are closed to _user
        yield from ("--perms", "0755", "--dir", folder)
    for place in places:
        if os.path.islink(place):
            yield from ("--symlink", os.readlink(place), place)
        elif os.path.exists(place):
            yield from ("--ro-bind", place, place)
    yield from ("--ro-bind", os.path.realpath(python), python)
    yield from ("--ro-bind", str(Path(sandbox_inside.__file__).resolve()), _INSIDE)
    for device in _DEVICES:
        yield from ("--dev-bind", device, device)
    yield from ("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp")  # noqa: S108
    yield from ("--symlink", "/tmp", "/dev/shm")  # noqa: S108 - for multiprocessing
    yield from ("--chdir", "/tmp", "--remount-ro", "/", "--")  # noqa: S108
    yield from (python, "-I", "-B", "-X", "utf8", _INSIDE, str(_user() if root else 0))
    for name, limit in (
        ("RLIMIT_CPU", limits.cpu_s),
        ("RLIMIT_AS", limits.memory_bytes),
        ("RLIMIT_NPROC", limits.processes),
        ("RLIMIT_NOFILE", limits.open_files),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_CORE", 0),
    ):
        yield f"{name}={limit}"


def _user() -> int:
    """A user of its own for a sandbox that root starts: the kernel bounds no processes of root's,
    and counts those of one user together."""
    return _FIRST_USER + next(_users) % _USERS
