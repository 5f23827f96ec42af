"""What the live view knows beyond one status: every step since it began, and rates.

A status holds only the latest step; the records of all of them are read from the scheduler's
``metrics.jsonl`` as it grows, so nothing is missed between two looks. From another machine, where
there is no such file, the latest step of each status has to do.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farflow import view
from farflow.evaluation_text import evaluation_line
from transport.status import EvaluationStatus, SchedulerStatus, StepStatus

REWARD_HISTORY = 200
RATE_SPAN_S = 2.0
"""Rates are averages over at least this long."""
_MAX_READ_BYTES = 1 << 20
_MAX_ALERTS = 100
"""New ones that are told at one look."""


class _Typed(msgspec.Struct):
    type: str = ""


class MetricsTail:
    """New whole lines of a growing file; what was there at the start is not new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = b""
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[bytes]:
        """Lines since the last call, at most 1 MiB of them; damaged ones are the caller's."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines


class Watch:
    """Takes statuses and records in, gives lines for a log and what the view draws."""

    def __init__(self, metrics: Path | None) -> None:
        self.rates: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._rewards: dict[str, deque[float]] = {}
        self._tokens: dict[str, tuple[float, int]] = {}
        self._told: set[tuple[str, str]] = set()
        self._tail = None if metrics is None else MetricsTail(metrics)

    def update(self, status: SchedulerStatus, now: float) -> list[str]:
        """Lines about what is new: one per step, finished evaluation and alert (each once)."""
        for agent in status.agents:
            at, tokens = self._tokens.setdefault(agent.name, (now, agent.tokens_generated))
            if now - at >= RATE_SPAN_S:
                self.rates[agent.name] = max(0.0, (agent.tokens_generated - tokens) / (now - at))
                self._tokens[agent.name] = (now, agent.tokens_generated)
        if self._tail is None:
            self._take_last_steps(status)
            return []
        lines = self._new_alerts(status)
        for line in self._tail.read():
            try:
                kind = msgspec.json.decode(line, type=_Typed).type
                if kind == "step":
                    step = msgspec.json.decode(line, type=StepStatus)
                    self._reward(step)
                    lines.append(view.step_line(step))
                elif kind == "evaluation":
                    evaluation = msgspec.json.decode(line, type=EvaluationStatus)
                    if evaluation.done or evaluation.failure:
                        lines.append(evaluation_line(evaluation))
            except (msgspec.DecodeError, RecursionError):
                continue  # a line that a crash cut short
        return lines

    def _new_alerts(self, status: SchedulerStatus) -> list[str]:
        new = [a for a in status.alerts if (a.code, a.subject) not in self._told]
        self._told.update((alert.code, alert.subject) for alert in new[:_MAX_ALERTS])
        return [f"ALERT {line}" for line in view.alert_lines(new[:_MAX_ALERTS], ())]

    def _take_last_steps(self, status: SchedulerStatus) -> None:
        for run in status.runs:
            for policy in run.policies:
                step = policy.last_step
                if step is not None and self._steps.get(step.policy) != step.step:
                    self._steps[step.policy] = step.step
                    self._reward(step)

    def _reward(self, step: StepStatus) -> None:
        history = self._rewards.setdefault(step.policy, deque(maxlen=REWARD_HISTORY))
        history.append(step.reward_mean)

    def rewards(self) -> dict[str, Sequence[float]]:
        """Recent mean training rewards by policy id, oldest first."""
        return {policy: list(values) for policy, values in self._rewards.items()}
