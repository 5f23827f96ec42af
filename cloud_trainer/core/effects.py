"""What the trainer core wants done: commands for the shell, to be carried out in order."""

import msgspec

from transport.messages import GroupRef, Message, Plane, StepReport
from transport.runs import RunSpec


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all effects."""


class ToScheduler(Effect, frozen=True, kw_only=True):
    message: Message


class ToTrajectoryLog(Effect, frozen=True, kw_only=True):
    message: Message


class ToWeightStore(Effect, frozen=True, kw_only=True):
    message: Message


class RenewLink(Effect, frozen=True, kw_only=True):
    """Close the link of a plane and make it again: its peer has been silent for too long."""

    plane: Plane


class LoadModel(Effect, frozen=True, kw_only=True):
    """Load the model that the run names, then the state of the checkpoint; ends in
    ``ModelReady``."""

    run: RunSpec


class CheckBody(Effect, frozen=True, kw_only=True):
    """Hash and unpack the body that has just arrived, and keep it; ends in ``BodyChecked``."""

    digest: str


class ForgetBodies(Effect, frozen=True, kw_only=True):
    """These bodies will not be trained on."""

    digests: tuple[str, ...]


class RunStep(Effect, frozen=True, kw_only=True):
    """Train on these groups, in this order, then capture the weights; the bodies are used up.
    Ends in ``StepFinished``."""

    step: int
    groups: tuple[GroupRef, ...]


class RecordStep(Effect, frozen=True, kw_only=True):
    """Keep the facts of a step for people."""

    report: StepReport


class BuildVersion(Effect, frozen=True, kw_only=True):
    """Make the files of a version durable on this host; ends in ``VersionReady``. With ``whole``
    it holds full weights and depends on no other version; with ``again`` it holds the weights of
    its parent, the checkpoint's version, under a new number."""

    version: int
    parent: int | None
    step: int
    whole: bool = False
    again: bool = False


class ForgetVersion(Effect, frozen=True, kw_only=True):
    """The weight store has this version; its files are not needed here any more."""

    version: int


class LineageStep(msgspec.Struct, frozen=True, array_like=True):
    """The jobs that one step trained on for the first time. Array-like under the segments' format
    number."""

    step: int
    jobs: tuple[str, ...]


class WriteCheckpoint(Effect, frozen=True, kw_only=True):
    """Write the state after ``step``, before anything changes it; ends in ``CheckpointWritten``.
    ``trained`` are the steps since the last checkpoint that counts."""

    step: int
    version: int
    trained: tuple[LineageStep, ...]


class CommitCheckpoint(Effect, frozen=True, kw_only=True):
    """Make a written checkpoint count; ends in ``CheckpointCommitted``."""

    step: int


class ExportModel(Effect, frozen=True, kw_only=True):
    """Write the model as it is now as a Hugging Face folder; ends in ``ModelExported``."""


class Rollback(Effect, frozen=True, kw_only=True):
    """What was trained since the last checkpoint is lost: start again from there, as a new
    incarnation. With ``republish`` the checkpoint's version must be published whole, because the
    weight store does not have what its successors would be based on. Nothing follows."""

    code: str
    message: str
    republish: bool = False


class Exit(Effect, frozen=True, kw_only=True):
    """Leave with this status. Nothing follows."""

    status: int
    code: str
    message: str
