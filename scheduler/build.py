"""Which farflow this is: the name under which its event logs can be replayed bit for bit."""

import functools
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

_DECIDING: Final = (
    "scheduler/core",
    "transport/messages",
    "transport/runs.py",
    "transport/status.py",
    "transport/ids.py",
)


@functools.cache
def build_id() -> str:
    """Version and a digest of the source that decides: ``0.1.0+3f9c2a7d01b4``."""
    try:
        version = metadata.version("farflow")
    except metadata.PackageNotFoundError:  # run from a checkout
        version = "0"
    root = Path(__file__).resolve().parent.parent
    digest = sha256()
    for name in _DECIDING:
        path = root / name
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{version}+{digest.hexdigest()[:12]}"
