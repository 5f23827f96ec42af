"""Reports of steps that the scheduler may not have seen, with the time of work and of waiting.

A grant of a later step, which answers a request that was sent after the report, confirms it;
until then it is sent again with every request and after every ``Welcome``.
"""

from collections import deque

from cloud_trainer.core.effects import Effect, ToScheduler
from cloud_trainer.core.events import StepFinished
from transport.messages import MAX_DRIFTS, GroupRef, StepReport

_MOST = 64


class StepReports:
    """The latest unconfirmed reports of one policy, oldest first."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._open: deque[StepReport] = deque(maxlen=_MOST)
        self._sent: dict[int, float] = {}
        self._idle_since = 0.0
        self._started = 0.0

    def waiting(self, now: float) -> None:
        """There is nothing to train on, from now on."""
        self._idle_since = now

    def started(self, now: float) -> None:
        """A step begins."""
        self._started = now

    def add(
        self,
        done: StepFinished,
        *,
        version: int,
        held: int,
        groups: tuple[GroupRef, ...],
        now: float,
    ) -> StepReport:
        """The report of the step over ``groups``, at least one, that ends now; waiting begins.
        What ``held``, the version before it, did not draw is not comparable with its weights."""
        lags = [ref.policy_lag for ref in groups]
        report = StepReport(
            policy=self._policy,
            step=done.step,
            version=version,
            busy_s=now - self._started,
            waiting_s=self._started - self._idle_since,
            metrics={
                **done.metrics,
                "groups": float(len(groups)),
                "policy_lag_mean": sum(lags) / len(lags),
                "policy_lag_max": float(max(lags)),
            },
            drifts=tuple(drift for drift in done.drifts if drift.version == held)[:MAX_DRIFTS],
        )
        if len(self._open) == _MOST:
            self._sent.pop(self._open[0].step, None)
        self._open.append(report)
        self._idle_since = now
        return report

    def granted(self, step: int) -> None:
        """Everything before ``step`` is known to the scheduler."""
        while self._open and self._open[0].step < step:
            self._sent.pop(self._open.popleft().step, None)

    def take(self, now: float) -> list[Effect]:
        """Send what is unconfirmed, but nothing twice at one moment."""
        due = [report for report in self._open if self._sent.get(report.step) != now]
        self._sent.update((report.step, now) for report in due)
        return [ToScheduler(message=report) for report in due]
