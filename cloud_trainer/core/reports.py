"""Reports of steps that the scheduler may not have seen.

A grant of a later step, which answers a request that was sent after the report, confirms it;
until then it is sent again with every request and after every ``Welcome``.
"""

from collections import deque

from transport.messages import GroupRef, StepReport

_MOST = 64


class StepReports:
    """The latest unconfirmed reports of one policy, oldest first."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._open: deque[StepReport] = deque(maxlen=_MOST)

    def add(
        self,
        *,
        step: int,
        version: int,
        busy_s: float,
        waiting_s: float,
        metrics: dict[str, float],
        groups: tuple[GroupRef, ...],
    ) -> StepReport:
        """The report of a step over ``groups``, at least one."""
        lags = [ref.policy_lag for ref in groups]
        report = StepReport(
            policy=self._policy,
            step=step,
            version=version,
            busy_s=busy_s,
            waiting_s=waiting_s,
            metrics={
                **metrics,
                "groups": float(len(groups)),
                "policy_lag_mean": sum(lags) / len(lags),
                "policy_lag_max": float(max(lags)),
            },
        )
        self._open.append(report)
        return report

    def granted(self, step: int) -> None:
        while self._open and self._open[0].step < step:
            self._open.popleft()

    def unconfirmed(self) -> tuple[StepReport, ...]:
        return tuple(self._open)
