"""The batch of the next step: its grant, the groups that cannot be used, the bodies.

What always holds: only granted groups are fetched; a group is new to the lineage, unless the grant
says that it is to be trained on again and the lineage knows it; a group that cannot be used is
named to the scheduler as often as it is granted; the batch is complete when every granted group is
here, so a refused one must first be taken out of the grant by the scheduler.
"""

from collections.abc import Mapping

from cloud_trainer.core.backoff import Backoff
from cloud_trainer.core.effects import Effect, ForgetBodies, RenewLink, ToScheduler, ToTrajectoryLog
from cloud_trainer.core.events import BodyChecked
from cloud_trainer.core.fetching import BatchFetch
from cloud_trainer.core.settings import CoreSettings
from cloud_trainer.core.trained_jobs import TrainedJobs
from transport.messages import Body, GroupRef, GroupUnusable, Plane

TRAINED_BEFORE = "group.trained"
NOT_TRAINED = "group.not_trained"


class Batch:
    """One step's groups on their way to the trainer."""

    def __init__(self, settings: CoreSettings, step: int) -> None:
        self.step = step
        self.groups: tuple[GroupRef, ...] = ()
        self.refused: dict[str, str] = {}
        self._settings = settings
        self._fetch = BatchFetch(
            window_bytes=settings.fetch_window_bytes,
            max_open=settings.max_open_bodies,
            timeout_s=settings.fetch_timeout_s,
            missing_retry_s=settings.missing_retry_s,
            tries=settings.body_tries,
            resend=Backoff(settings.resend_s, settings.max_resend_s),
        )

    def adopt(self, groups: tuple[GroupRef, ...], trained: TrainedJobs) -> list[Effect]:
        """The step was granted, maybe again with other groups."""
        self.groups = tuple({ref.job: ref for ref in groups}.values())
        for ref in self.groups:
            if (ref.job in trained) != ref.replay:
                self.refused[ref.job] = NOT_TRAINED if ref.replay else TRAINED_BEFORE
        gone = self._fetch.adopt([ref for ref in self.groups if ref.job not in self.refused])
        forgotten: list[Effect] = [ForgetBodies(digests=gone)] if gone else []
        return forgotten + self.refusals()

    def not_sent(self, digests: tuple[str, ...], now: float) -> None:
        """The link did not take the request for these bodies."""
        self._fetch.not_sent(digests, now)

    def arrived(self, message: Body, now: float) -> bool:
        """Whether the body that came with ``message`` is to be checked."""
        return self._fetch.arrived(message.digest, message.found, now)

    def checked(self, event: BodyChecked, now: float) -> None:
        self._fetch.checked(
            event.digest,
            code=event.code,
            job=event.job,
            size_bytes=event.size_bytes,
            tokens=event.trainable_tokens,
            now=now,
        )

    def newly_bad(self) -> dict[str, str]:
        """Job and code of groups whose bodies turned out to be of no use since the last call."""
        fresh = {job: code for job, code in self._fetch.bad().items() if job not in self.refused}
        self.refused.update(fresh)
        return fresh

    def poll(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        silent = self._fetch.silent_since()
        if silent is not None and now >= silent + 2 * self._settings.fetch_timeout_s:
            self._fetch.ask_again()
            effects.append(RenewLink(plane=Plane.TRAJECTORIES))
        request = self._fetch.poll(now)
        if request is not None:
            effects.append(ToTrajectoryLog(message=request))
        return effects

    def next_deadline(self) -> float | None:
        silent = self._fetch.silent_since()
        due = self._fetch.next_deadline()
        if silent is None:
            return due
        renew = silent + 2 * self._settings.fetch_timeout_s
        return renew if due is None else min(due, renew)

    def refusals(self) -> list[Effect]:
        """Every granted group that cannot be used, as told to the scheduler."""
        return refusals(self._settings.policy, self.step, self.groups, self.refused)

    def drop(self) -> list[Effect]:
        """The batch is not wanted any more."""
        digests = self._fetch.digests
        return [ForgetBodies(digests=digests)] if digests else []

    @property
    def complete(self) -> bool:
        return self._fetch.complete and not any(ref.job in self.refused for ref in self.groups)


def refusals(
    policy: str, step: int, groups: tuple[GroupRef, ...], codes: Mapping[str, str]
) -> list[Effect]:
    """``GroupUnusable`` for every group whose job has a code."""
    return [
        ToScheduler(
            message=GroupUnusable(policy=policy, step=step, job=ref.job, code=codes[ref.job])
        )
        for ref in groups
        if ref.job in codes
    ]
