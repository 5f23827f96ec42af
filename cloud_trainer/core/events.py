"""What the trainer core is told: facts, in the past tense."""

import msgspec

from transport.messages import GroupDrift, Message, VersionOffer


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class FromScheduler(Event, frozen=True, kw_only=True):
    """A message of the control plane arrived."""

    message: Message


class FromTrajectoryLog(Event, frozen=True, kw_only=True):
    """A message of the trajectories plane arrived. The payload of a ``Body`` stays in the shell,
    which checks it when ``CheckBody`` says so and forgets it otherwise."""

    message: Message


class FromWeightStore(Event, frozen=True, kw_only=True):
    """A message of the weights plane arrived. ``ChunkRequest`` is answered by the shell; the core
    only takes it as a sign of life."""

    message: Message


class NotSent(Event, frozen=True, kw_only=True):
    """A message could not be handed to its link (the peer is away, or does not keep up)."""

    message: Message


class ModelReady(Event, frozen=True, kw_only=True):
    """The model of the checkpoint (or the initial one) is loaded."""


class BodyChecked(Event, frozen=True, kw_only=True):
    """A body was hashed and unpacked. ``code`` is empty when the bytes are those of ``digest``
    and well-formed; then the other fields say what they hold."""

    digest: str
    code: str = ""
    job: str = ""
    size_bytes: int = 0
    trainable_tokens: int = 0


class StepFinished(Event, frozen=True, kw_only=True):
    """The optimizer step that ``RunStep`` asked for is done and its weights are captured.
    ``finite`` says whether they may be published, ``drifts`` how far groups were from the weights
    before it, ``moved`` how far the step moved the policy (nats a token; None: unknown)."""

    step: int
    metrics: dict[str, float] = {}
    finite: bool = True
    drifts: tuple[GroupDrift, ...] = ()
    moved: float | None = None


class VersionReady(Event, frozen=True, kw_only=True):
    """The files of a version are durable on this host; ``offer`` announces them."""

    version: int
    offer: VersionOffer


class CheckpointWritten(Event, frozen=True, kw_only=True):
    """Everything of a checkpoint is durable, but it does not count yet."""

    step: int


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """The checkpoint counts: a restart begins here."""

    step: int


class ModelExported(Event, frozen=True, kw_only=True):
    """The final model folder is written."""


class StopRequested(Event, frozen=True, kw_only=True):
    """This process is asked to leave; the run goes on without it."""


class Tick(Event, frozen=True, kw_only=True):
    """The deadline of ``next_deadline`` has passed."""
