"""What a run did, step by step, for people and plots: ``FOLDER/runs/RUN/metrics.jsonl``.

One JSON object per line: ``{"type": "step", ...}`` with the fields of ``StepStatus`` and the
trainer's ``metrics``, ``{"type": "evaluation", ...}`` with those of ``EvaluationStatus``,
``{"type": "end", "reason", "cost_usd", "tokens"}``; each with ``wall_s``. What always holds: a line
that is there is whole (one that death cut short is closed by the next); nothing depends on the
file: when the disk refuses, lines are missing.
"""

import os
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from scheduler.core.effects import RecordEvaluation, RecordStep, RunEnded
from transport.ids import is_name
from transport.runtime.clock import Clock

FILE_NAME: Final = "metrics.jsonl"
_log = structlog.get_logger()


class MetricsFiles:
    """Appends records; blocks, so it is used in a thread, by one at a time."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder / "runs"
        self._clock = clock
        self._checked: set[str] = set()

    def record(self, effect: RecordStep | RecordEvaluation | RunEnded) -> None:
        """Append one line to the run's file."""
        facts: dict[str, Any]
        match effect:
            case RecordStep(run, step, metrics):
                facts = {"type": "step", **msgspec.to_builtins(step), "metrics": metrics}
            case RecordEvaluation(run, evaluation):
                facts = {"type": "evaluation", **msgspec.to_builtins(evaluation)}
            case RunEnded(run, reason, cost_usd, tokens):
                facts = {"type": "end", "reason": reason}
                facts |= {"cost_usd": cost_usd, "tokens": tokens}
        facts["wall_s"] = self._clock.wall_s()
        if not is_name(run):  # would be a path of its own making
            return
        path = self._folder / run / FILE_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                torn = run not in self._checked and _is_torn(path)
                self._checked.add(run)
                file.write((b"\n" if torn else b"") + msgspec.json.encode(facts) + b"\n")
        except OSError as error:
            _log.warning("metrics.not_written", path=str(path), reason=str(error))


def _is_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
