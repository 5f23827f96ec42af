"""What the trainer core is told: facts, in the past tense."""

import msgspec

from transport.messages import Message, VersionOffer


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class FromScheduler(Event):
    """A message of the control plane arrived."""

    message: Message


class FromTrajectoryLog(Event):
    """A message of the trajectories plane arrived. The payload of a ``Body`` stays in the shell,
    which checks it when ``CheckBody`` says so and forgets it otherwise."""

    message: Message


class FromWeightStore(Event):
    """A message of the weights plane arrived. ``ChunkRequest`` is answered by the shell; the core
    only takes it as a sign of life."""

    message: Message


class ModelReady(Event):
    """The model of the checkpoint (or the initial one) is loaded."""


class BodyChecked(Event):
    """A body was hashed and unpacked. ``code`` is empty when the bytes are those of ``digest``
    and well-formed; then the other fields say what they hold."""

    digest: str
    code: str = ""
    job: str = ""
    size_bytes: int = 0
    trainable_tokens: int = 0


class StepFinished(Event):
    """The optimizer step that ``RunStep`` asked for is done and its weights are captured.
    ``finite`` says whether they may be published."""

    step: int
    metrics: dict[str, float] = {}
    finite: bool = True


class VersionReady(Event):
    """The files of a version are durable on this host; ``offer`` announces them."""

    version: int
    offer: VersionOffer


class CheckpointWritten(Event):
    """Everything of a checkpoint is durable, but it does not count yet."""

    step: int


class CheckpointCommitted(Event):
    """The checkpoint counts: a restart begins here."""

    step: int


class ModelExported(Event):
    """The final model folder is written."""


class StopRequested(Event):
    """This process is asked to leave; the run goes on without it."""


class Tick(Event):
    """The deadline of ``next_deadline`` has passed."""
