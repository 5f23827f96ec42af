"""``farflow agent drain``: asks the agent that runs on a folder to finish, and waits for its end.

What always holds: only the process that holds the folder's lock gets the signal; the note beside it
(the time that the agent has) is on the disk before the signal leaves, and is used once; waiting is
bounded.

Everything here blocks.
"""

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Final

import msgspec

from transport.errors import SizeLimitExceeded, StoreError
from transport.runtime.files import atomic_write, folder_holder, read_limited, store_errors

NOTE_NAME: Final = "drain.json"
CLOSING_S: Final = 30.0
"""What an agent takes to close its links and engine, at most."""
_MAX_NOTE_BYTES: Final = 1024


class DrainNote(msgspec.Struct, frozen=True, kw_only=True):
    """``deadline_s`` None: the agent's own setting."""

    deadline_s: float | None = None


def ask_to_drain(folder: Path, deadline_s: float | None) -> int:
    """Tell the agent that runs on ``folder`` to finish what it holds; returns its process.

    Raises:
        StoreError: no agent runs there, or it is another user's.
    """
    pid = folder_holder(folder)
    if pid is None:
        raise StoreError(
            f"no agent runs on {folder}: name its folder with --set agent.folder=FOLDER, or its "
            "file with --config"
        )
    note = msgspec.json.encode(DrainNote(deadline_s=deadline_s))
    with store_errors("signal the agent of", folder):
        atomic_write(folder / NOTE_NAME, note, mode=0o600)
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError as error:
            raise StoreError(f"the agent on {folder} (process {pid}) has just ended") from error
    return pid


def wait_for_end(pid: int, within_s: float) -> bool:
    """Whether the process ends in time; it need not be a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1000.0 * within_s))
    finally:
        os.close(descriptor)


def take_note(folder: Path) -> DrainNote | None:
    """The note in ``folder``, which is removed; None when there is none that can be read."""
    path = folder / NOTE_NAME
    try:
        return msgspec.json.decode(read_limited(path, _MAX_NOTE_BYTES), type=DrainNote)
    except (OSError, StoreError, SizeLimitExceeded, msgspec.MsgspecError):
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
