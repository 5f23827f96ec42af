"""What tests of the sandbox share: they need a real one, and see what it leaves behind."""

import asyncio
import itertools
import os
from pathlib import Path

import pytest

from edge_agent.sandbox import SandboxLimits, probe_sandbox

MUST_RUN = "FARFLOW_TESTS_NEED_SANDBOX"
"""Set where a missing sandbox is a failure, as in CI."""

_numbers = itertools.count(os.getpid() * 1000)


async def need_sandbox() -> None:
    """Skips the test where no sandbox works, unless it must run here."""
    found = await probe_sandbox()
    if found.why and os.environ.get(MUST_RUN):
        pytest.fail(f"{MUST_RUN} is set, but {found.why}: {found.remedy}")
    if found.why:
        pytest.skip(f"no sandbox: {found.why}: {found.remedy}")


def limits_of_its_own(**changes: object) -> SandboxLimits:
    """Limits whose ``file_bytes`` no other run has, so that its processes can be told."""
    return SandboxLimits(**{"file_bytes": 2**20 + next(_numbers) % 2**28, **changes})


def processes_of(limits: SandboxLimits) -> list[int]:
    """Every process of the run with these limits, in whatever name space it is."""
    word = f"RLIMIT_FSIZE={limits.file_bytes}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
    return found


async def nothing_is_left(limits: SandboxLimits) -> None:
    """Waits for the kernel, which ends the processes of a name space a moment after its first."""
    async with asyncio.timeout(10):
        while processes_of(limits):
            await asyncio.sleep(0.01)


async def it_runs(limits: SandboxLimits, *, processes: int = 3) -> None:
    """Waits until bubblewrap, its first process and the program are all there."""
    async with asyncio.timeout(20):
        while len(processes_of(limits)) < processes:
            await asyncio.sleep(0.01)
