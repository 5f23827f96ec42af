"""Removing things below a folder, and nowhere else.

What always holds: below the folder that is named no symbolic link is followed, neither one that was
there before nor one that somebody puts there meanwhile.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import Final

LINKED: Final = "a symbolic link, which is not followed"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def link_below(root: Path, path: Path) -> Path | None:
    """The first part of ``path`` below ``root`` that is a symbolic link."""
    found = root
    for part in path.relative_to(root).parts:
        found = found / part
        if found.is_symlink():
            return found
    return None


def remove_below(root: Path, path: Path) -> None:
    """Remove the file or folder ``path``, below ``root``.

    Raises:
        OSError: it cannot be removed, or a folder on the way to it is a link.
    """
    *folders, name = path.relative_to(root).parts
    descriptor = os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
