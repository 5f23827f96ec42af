"""Which checkpoint counts, and when the scheduler may be told.

What always holds: checkpoints are written one at a time and in rising steps; one counts only after
its state and the files of its version are durable, so a restart can always publish what it begins
with; it is reported only after the weight store has its version too. ``trained`` are exactly the
steps since the checkpoint that counts.

    writing -> written -> committing -> committed -> reported
                 waits for the version's files         waits for the weight store
"""

from enum import Enum

from cloud_trainer.core.effects import (
    CommitCheckpoint,
    Effect,
    LineageStep,
    ToScheduler,
    WriteCheckpoint,
)
from cloud_trainer.core.publishing import Publications
from transport.messages import CheckpointReport, TrainerInventory


class _Stage(Enum):
    WRITING = "writing"
    WRITTEN = "written"
    COMMITTING = "committing"


class Checkpoints:
    """The last committed checkpoint and the one that is being made."""

    def __init__(self, policy: str, step: int, version: int) -> None:
        self._policy = policy
        self.step = step
        self.version = version
        self.trained: list[LineageStep] = []
        self._open: tuple[int, int] | None = None
        self._stage = _Stage.WRITING
        self._unreported: tuple[int, int] | None = None

    @property
    def busy(self) -> bool:
        return self._open is not None

    def write(self, step: int, version: int) -> Effect:
        """Begin a checkpoint; none may be open."""
        self._open, self._stage = (step, version), _Stage.WRITING
        return WriteCheckpoint(step=step, version=version, trained=tuple(self.trained))

    def written(self, step: int) -> None:
        if self._open is not None and self._open[0] == step and self._stage is _Stage.WRITING:
            self._stage = _Stage.WRITTEN

    def committed(self, step: int) -> bool:
        """The checkpoint counts; false when it is not the one that is being made."""
        if self._open is None or self._open[0] != step or self._stage is not _Stage.COMMITTING:
            return False
        self.step, self.version = self._open
        self.trained = [entry for entry in self.trained if entry.step > step]
        self._unreported, self._open = self._open, None
        return True

    def poll(self, publications: Publications) -> list[Effect]:
        if self._open is None or self._stage is not _Stage.WRITTEN:
            return []
        if not publications.is_ready(self._open[1]):
            return []
        self._stage = _Stage.COMMITTING
        return [CommitCheckpoint(step=self._open[0])]

    def reports(self, publications: Publications) -> list[Effect]:
        """What the scheduler may now be told, once."""
        found = self._unreported
        if found is None or not publications.is_durable(found[1]):
            return []
        self._unreported = None
        report = CheckpointReport(policy=self._policy, step=found[0], version=found[1])
        return [ToScheduler(message=report)]

    def inventory(self) -> TrainerInventory:
        """Where a new incarnation would begin."""
        return TrainerInventory(
            policy=self._policy, checkpoint_step=self.step, checkpoint_version=self.version
        )
