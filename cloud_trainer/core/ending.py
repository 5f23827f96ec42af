"""How a trainer ends: after its last step, or because it is asked to leave.

What always holds: nothing ends before what was trained is in a checkpoint that counts; all is done
only when its versions are durable and the model is exported too; whoever leaves waits for the
weight store, but not longer than ``grace_s``.
"""

from cloud_trainer.core.checkpointing import Checkpoints
from cloud_trainer.core.effects import Effect, ExportModel
from cloud_trainer.core.publishing import Publications


class Ending:
    """The last things. ``due`` is when to look again, while somebody waits to leave."""

    def __init__(
        self, checkpoints: Checkpoints, publications: Publications, *, grace_s: float
    ) -> None:
        self.due: float | None = None
        self._checkpoints = checkpoints
        self._publications = publications
        self._grace_s = grace_s
        self._exporting = False
        self._exported = False

    def exported(self) -> None:
        """The final model folder is written."""
        self._exported = self._exporting

    def save(self, step: int, version: int) -> list[Effect]:
        """The checkpoint of the last step, if there is none and no other is being written."""
        if step > self._checkpoints.step and not self._checkpoints.busy:
            return [self._checkpoints.write(step, version)]
        return []

    def finish(self, step: int, version: int) -> list[Effect]:
        """What is to be done after the last step."""
        effects = self.save(step, version)
        if not self._exporting:
            self._exporting = True
            effects.append(ExportModel())
        return effects

    def finished(self, step: int) -> bool:
        saved = self._checkpoints.step == step and not self._publications.undurable
        return self._exported and saved

    def may_leave(self, step: int, now: float) -> bool:
        if step > self._checkpoints.step:
            return False
        if self._publications.undurable and self.due is None:
            self.due = now + self._grace_s
        return not self._publications.undurable or now >= (self.due or now)
