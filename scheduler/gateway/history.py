"""What a run's steps were so far, from the file that the scheduler writes (``metrics_file``).

What always holds: of a long run only so many steps are given, evenly chosen, the latest among
them; reading is bounded by ``MAX_READ_BYTES`` from the end of the file; a line that death cut short
is left out. Blocks.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from scheduler.metrics_file import FILE_NAME
from transport.status import StepStatus

MAX_READ_BYTES: Final = 32 * 2**20
MAX_STEPS: Final = 500


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a run by policy and number, without those that a rolled-back trainer made anew."""

    run: str
    steps: tuple[StepStatus, ...]


def run_history(folder: Path, run: str, *, most: int = MAX_STEPS) -> RunHistory | None:
    """At most ``most`` steps of each policy; None where the run has no file. ``folder`` is the
    scheduler's; ``run`` is a name (``transport.ids.is_name``), which the caller has checked.

    Raises:
        OSError: the file cannot be read.
    """
    path = folder / "runs" / run / FILE_NAME
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_READ_BYTES))
            lines = file.read(MAX_READ_BYTES).splitlines()
    except FileNotFoundError:
        return None
    by_policy: dict[str, list[StepStatus]] = {}
    for line in lines:
        step = _step(line)
        if step is None:
            continue
        known = by_policy.setdefault(step.policy, [])
        while known and known[-1].step >= step.step:  # the trainer went back and did it again
            known.pop()
        known.append(step)
    steps = tuple(step for known in by_policy.values() for step in _thinned(known, most))
    return RunHistory(run=run, steps=steps)


def _step(line: bytes) -> StepStatus | None:
    try:
        facts: dict[str, Any] = msgspec.json.decode(line)
        if facts.get("type") != "step":
            return None
        return msgspec.convert(facts, StepStatus)
    except (msgspec.DecodeError, AttributeError, RecursionError):
        return None


def _thinned(steps: list[StepStatus], most: int) -> list[StepStatus]:
    if len(steps) <= most:
        return steps
    last = len(steps) - 1
    return [steps[round(place * last / (most - 1))] for place in range(most)]
