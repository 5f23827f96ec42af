"""A disk of some hundred KiB that can be full, larger or read-only, where mounting is allowed.

A module that uses ``small_disk`` imports it by name.
"""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from transport.messages import GroupSummary

KIB = 1024


class SmallDisk:
    """A tmpfs; ``folder`` is on it."""

    def __init__(self, mount: Path, size_kib: int) -> None:
        self._mount = mount
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "farflow-test", str(mount)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, timeout=10)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode != 0:
            pytest.skip("mounting takes root")
        self.folder = mount / "data"
        self.folder.mkdir()

    def fill(self) -> None:
        """Leave no room at all."""
        with open(self._mount / "ballast", "ab", buffering=0) as file:
            size_bytes = 64 * KIB
            while size_bytes:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size_bytes))
                size_bytes //= 2

    def make_room(self) -> None:
        (self._mount / "ballast").unlink()

    def set(self, option: str) -> None:
        """``ro``, ``rw`` or ``size=...k``."""
        command = ["mount", "-o", f"remount,{option}", str(self._mount)]
        subprocess.run(command, check=True, timeout=10)

    def gone(self) -> None:
        subprocess.run(["umount", "-l", str(self._mount)], check=True, timeout=10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """384 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    disk = SmallDisk(mount, 384)
    yield disk
    disk.gone()


def files_in(folder: Path) -> int:
    """How many regular files there are, temporary ones included."""
    return sum(len(names) for _, _, names in os.walk(folder))


def entry(number: int, size_bytes: int = 20_000) -> tuple[GroupSummary, bytes]:
    """A body with its own bytes and its summary."""
    body = hashlib.sha256(str(number).encode()).digest() * (size_bytes // 32)
    summary = GroupSummary(
        attempt=f"r/t-{number:06d}#1",
        fence=(1, number),
        job=f"r/t-{number:06d}",
        digest=hashlib.sha256(body).hexdigest(),
        size_bytes=len(body),
        rewards=(1.0,),
        lengths=(3,),
        versions={"r/p": (0, 0)},
        prompt_tokens=1,
        queued_s=0.0,
        generating_s=1.0,
    )
    return summary, body
