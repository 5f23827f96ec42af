"""Folders of this process for what its vLLM needs on disk, gone with it.

What always holds: such a folder is closed to others and locked while its process lives; what a
killed process left is removed by the next one that makes a folder of that prefix there.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from transport.errors import StoreError
from transport.runtime.files import lock_folder

_FRESH_S: Final = 3.0


class PrivateFolder:
    """A new folder ``path`` whose name begins with ``prefix``, in ``place`` or where the system has
    temporary files.

    Raises:
        StoreError: it cannot be made.
    """

    def __init__(self, prefix: str, place: Path | None = None) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            self._lock = lock_folder(self.path)
            self._remove_left_over(prefix)
        except OSError as error:
            where = place or tempfile.gettempdir()
            raise StoreError(
                f"no folder {prefix}* for vLLM in {where}: {error}; make room there, or name"
                " another place for temporary files with the environment's TMPDIR"
            ) from error

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def _remove_left_over(self, prefix: str) -> None:
        """Nobody holds the lock of what was left any more. One that is as young as our own may not
        be locked yet."""
        for other in self.path.parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError, StoreError):
                own_s, other_s = os.stat(self.path).st_mtime, os.stat(other).st_mtime
                if own_s - other_s > _FRESH_S:
                    with lock_folder(other):
                        shutil.rmtree(other, ignore_errors=True)
