"""Which farflow this is.

What always holds: the same source has the same name, installed or in a checkout, on every machine.
"""

import functools
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

from transport.runtime.origin import PACKAGES

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_DECIDING: Final = (
    "scheduler/core",
    "transport/messages",
    "transport/runs.py",
    "transport/status.py",
    "transport/ids.py",
)
_INSTALLED: Final = frozenset((".py", ".toml", ".css", ".html", ".js", ".svg"))
_DIGITS: Final = 12


@functools.cache
def version() -> str:
    """The installed version, "0" in a checkout that is not installed."""
    try:
        return metadata.version("farflow")
    except metadata.PackageNotFoundError:
        return "0"


@functools.cache
def build_id() -> str:
    """Version and a digest of the source that decides, as ``0.1.0+3f9c2a7d01b4``: the name under
    which the scheduler's event logs can be replayed bit for bit."""
    digest = sha256()
    for name in _DECIDING:
        path = _ROOT / name
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{version()}+{digest.hexdigest()[:_DIGITS]}"


@functools.cache
def installed_build() -> str:
    """``build_id`` and a digest of everything that is installed of farflow, as
    ``0.1.0+3f9c2a7d01b4.77aa01c2d3e4``. Reads all of that, some 4 MB, and a daemon asks at its
    start: later there may be another one on the disk than the one that runs."""
    digest = sha256()
    for package in PACKAGES:
        for file in sorted((_ROOT / package).rglob("*")):
            if file.suffix not in _INSTALLED:
                continue
            name = file.relative_to(_ROOT).as_posix()
            digest.update(f"{name}\0".encode() + sha256(file.read_bytes()).digest())
    return f"{build_id()}.{digest.hexdigest()[:_DIGITS]}"
