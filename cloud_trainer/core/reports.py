"""Reports of steps that the scheduler may not have seen, with the time of work and of waiting.

A grant of a later step, which answers a request that was sent after the report, confirms it;
until then it is sent again with every request and after every ``Welcome``.

How far the policy has come since a version is the sum over the steps in between, as far as this
incarnation made them (``cloud_trainer.honesty`` has the formula): groups of versions before it, or
of another lineage, are not compared.
"""

import math
from collections import deque

import msgspec

from cloud_trainer.core.effects import Effect, ToScheduler
from cloud_trainer.core.events import StepFinished
from transport.messages import MAX_DRIFTS, GroupDrift, GroupRef, StepReport

_MOST = 64
_MOST_VERSIONS = 256
"""That the way to them is remembered of."""


class StepReports:
    """The latest unconfirmed reports of one policy, oldest first."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._open: deque[StepReport] = deque(maxlen=_MOST)
        self._sent: dict[int, float] = {}
        self._idle_since = 0.0
        self._started = 0.0
        self._way: dict[int, float] = {}
        """Nats a token from where this incarnation began to the versions that it made, in order."""

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
        ``held`` is the version before it, which the groups' drifts are from."""
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
            older=self._older(done.drifts, held)[:MAX_DRIFTS],
        )
        self._go(held, version, done.moved)
        if len(self._open) == _MOST:
            self._sent.pop(self._open[0].step, None)
        self._open.append(report)
        self._idle_since = now
        return report

    def _older(self, drifts: tuple[GroupDrift, ...], held: int) -> tuple[GroupDrift, ...]:
        """Those of older versions, with how far it is from there to ``held``."""
        here = self._way.get(held, 0.0)
        return tuple(
            msgspec.structs.replace(drift, moved=here - self._way[drift.version])
            for drift in drifts
            if held in self._way and drift.version < held and drift.version in self._way
        )

    def _go(self, held: int, version: int, moved: float | None) -> None:
        """A step led from one version to another."""
        if moved is None or not math.isfinite(moved):
            self._way = {}
            return
        if held not in self._way:
            self._way = {held: 0.0}
        self._way[version] = self._way[held] + moved
        while len(self._way) > _MOST_VERSIONS:
            del self._way[next(iter(self._way))]

    def granted(self, step: int) -> None:
        """Everything before ``step`` is known to the scheduler."""
        while self._open and self._open[0].step < step:
            self._sent.pop(self._open.popleft().step, None)

    def take(self, now: float) -> list[Effect]:
        """Send what is unconfirmed, but nothing twice at one moment."""
        due = [report for report in self._open if self._sent.get(report.step) != now]
        self._sent.update((report.step, now) for report in due)
        return [ToScheduler(message=report) for report in due]
