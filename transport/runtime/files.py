"""Files that survive a power cut, stay private, and belong to one process at a time.

What always holds:

1. ``atomic_write`` returns after the new content is on the disk; whatever happens before, the path
   holds the old content or the new, never a part.
2. A file or folder made private is not readable by others at any moment of its life.
3. A ``FolderLock`` belongs to the open file, so it ends with the process, however it ends.
4. What the operating system refuses becomes a ``StoreError`` that names the path and a remedy. The
   one exception is ``FileNotFoundError``: "not there (yet)" is for the caller to judge.

All functions block; a daemon calls them in a thread, or before its loop starts.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from transport.errors import SizeLimitExceeded, StoreError

Buffer = bytes | bytearray | memoryview

LOCK_NAME: Final = ".lock"
TEMPORARY_SUFFIX: Final = ".farflow-tmp"
_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600
_SHARED_FILE: Final = 0o644
_temporary_numbers = itertools.count()

_REMEDIES: Final[dict[int, str]] = {
    errno.ENOSPC: "free space, or move the folder to a larger disk",
    errno.EDQUOT: "the quota is used up: free space or raise it",
    errno.EROFS: "the file system is read-only: remount it, or choose another folder",
    errno.EACCES: "check who owns it and its permissions",
    errno.EPERM: "check who owns it and its permissions",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.EISDIR: "it is a folder: choose another path",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n, LimitNOFILE=)",
    errno.ENFILE: "the machine has too many open files",
    errno.ENOLCK: "this file system has no locks: choose a local folder",
    errno.EIO: "the disk reports an error: look at the kernel's log",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "its symbolic links form a loop",
}


@contextlib.contextmanager
def store_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns an ``OSError`` of the block into a ``StoreError``: what failed, where, what to do.

    ``FileNotFoundError`` passes unchanged.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        reason = error.strerror or str(error)
        raise StoreError(
            f"cannot {doing} {path}: {reason}" + (f"; {remedy}" if remedy else "")
        ) from error


def atomic_write(path: Path, data: Buffer, *, mode: int = _SHARED_FILE) -> None:
    """Replaces ``path`` by ``data``, durably; ``mode`` is narrowed by the umask.

    The folder must exist. Raises ``StoreError``, or ``FileNotFoundError`` without the folder.
    """
    number = next(_temporary_numbers)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{number}{TEMPORARY_SUFFIX}")
    with store_errors("write", path):
        try:
            # A leftover of a dead process with our number is truncated, not appended to.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, mode)
            with open(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Makes the names in a folder (new, renamed, removed files) durable; raises ``StoreError``."""
    with store_errors("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_temporaries(folder: Path) -> int:
    """Removes what interrupted writes left behind and returns how many; hold the folder's lock."""
    with store_errors("clean", folder):
        leftovers = sorted(folder.glob(f".*{TEMPORARY_SUFFIX}"))
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
    return len(leftovers)


def next_incarnation(folder: Path, wall_s: float) -> int:
    """A daemon's life number, made durable in ``folder`` before it is used: it grows with every
    start, also after the folder was lost (milliseconds, in which no process can be started, used
    and started again).

    Raises:
        StoreError: the disk refused, or the file holds no number.
    """
    path = folder / "incarnation"
    try:
        last = int(read_limited(path, 32))
    except FileNotFoundError:
        last = 0
    except ValueError as error:
        raise StoreError(f"{path} holds no number: remove it") from error
    # The time keeps numbers growing when the folder was lost; counting, when the clock jumps.
    incarnation = max(last + 1, int(1000.0 * wall_s))
    atomic_write(path, f"{incarnation}\n".encode())
    return incarnation


def open_regular(path: Path) -> BinaryIO:
    """A regular file, or a link to one, to be read.

    Raises ``OSError``, also for anything else: a pipe would block, a device may have no end.
    """
    # Non-blocking: opening a pipe that nobody writes to must not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most ``max_bytes``.

    Raises ``SizeLimitExceeded`` before reading more than that, ``StoreError`` for anything that is
    not a regular file, ``FileNotFoundError`` when there is none.
    """
    with store_errors("read", path), open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SizeLimitExceeded(f"{path} is larger than the limit of {max_bytes} bytes")
    return data


def private_dir(path: Path) -> Path:
    """Makes ``path`` (and its parents) a folder that only this user can enter, and returns it.

    An existing folder of ours is closed to others; one of another user's is a ``StoreError``.
    """
    with store_errors("create", path):
        try:
            path.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        except FileNotFoundError as error:  # a file system that makes no folders, as /proc
            raise StoreError(f"cannot create {path}; choose another folder") from error
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"{path} belongs to user {status.st_uid}, and secrets go there; "
                f"choose a folder that user {os.geteuid()} owns"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(_PRIVATE_FOLDER)
    return path


class FolderLock:
    """This process's claim on a folder; made by ``lock_folder``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Gives the folder up; idempotent. The lock file stays: removing it would be a race."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def lock_folder(path: Path) -> FolderLock:
    """Claims a folder for this process, until ``release`` or its end.

    Raises ``StoreError`` "already used by process PID" when another (or this) process holds it.
    """
    while True:
        descriptor = _locked(path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path / LOCK_NAME)):
                return FolderLock(path, descriptor)
        os.close(descriptor)  # ``borrowed_folder`` removed the file that we opened


def _locked(path: Path) -> int:
    lock = path / LOCK_NAME
    with store_errors("lock", path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(lock, flags, _PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, f"{os.getpid()}\n".encode())
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StoreError(
                f"{path} is already used by process {holder or 'unknown'}; "
                f"stop it, or choose another folder"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def borrowed_folder(path: Path) -> Iterator[None]:
    """Claims a folder for the block as ``lock_folder``; where there was no lock file, for a folder
    that no daemon has used, none stays."""
    there = (path / LOCK_NAME).exists()
    with lock_folder(path):
        try:
            yield
        finally:
            if not there:
                with contextlib.suppress(OSError):
                    (path / LOCK_NAME).unlink()


def folder_holder(path: Path) -> int | None:
    """The process that has claimed a folder; None when nobody has.

    Ask rarely: for an instant nobody else can claim the folder. Raises ``StoreError``.
    """
    try:
        with store_errors("look at the lock of", path):
            descriptor = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(holder) if holder.isdecimal() else None
    else:
        return None
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Buffer) -> None:
    """``os.write`` may take a part (a full disk does, before it refuses)."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
