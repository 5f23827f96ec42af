"""Control plane: the scheduler's own trajectory log and weight store."""

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.ids import Fence
from transport.messages.base import Count, Id, Message


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All that the scheduler sees of a group's result. ``versions`` gives per policy id the
    oldest and newest version that drew a token; ``agent`` is filled in by the trajectory log
    from the key of the link. ``truncated`` counts the sequences that were cut off at their limit;
    ``members`` are, per policy id, the places of the sequences that hold tokens of it, where not
    all do."""

    attempt: str
    fence: Fence
    job: str
    digest: str
    size_bytes: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    versions: dict[str, tuple[int, int]]
    prompt_tokens: int
    queued_s: float
    generating_s: float
    agent: str = ""
    truncated: int = 0
    members: dict[str, tuple[int, ...]] = {}


class TrajectoriesStored(Message, frozen=True, kw_only=True):
    """Durable bodies, announced until the scheduler has accepted each digest."""

    summaries: tuple[GroupSummary, ...]


class SummariesAccepted(Message, frozen=True, kw_only=True):
    """The scheduler has these summaries in its own store. Agents may have the bodies of
    ``rechecked`` until they are released: other agents find their rewards again."""

    digests: tuple[str, ...]
    rechecked: tuple[str, ...] = ()


class BodiesReleased(Message, frozen=True, kw_only=True):
    """No policy needs these bodies any more. Repeated until ``BodiesGone``."""

    digests: tuple[str, ...]


class BodiesGone(Message, frozen=True, kw_only=True):
    digests: tuple[Id, ...]


class VersionStored(Message, frozen=True, kw_only=True):
    """A version is durable in the weight store; announced until ``VersionAccepted``."""

    policy: Id
    version: Count
    parent: Count | None
    step: Count
    digest: Id
    delta_bytes: Count
    full_bytes: Count


class VersionAccepted(Message, frozen=True, kw_only=True):
    policy: str
    version: int


class PartialSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Finished turns of an attempt that still runs. ``turns`` counts those of all its siblings and
    only grows; ``oldest`` gives per policy id the oldest version that drew a token; ``agent`` is
    filled in by the trajectory log from the key of the link."""

    attempt: Id
    fence: Fence
    job: Id
    turns: Count
    digest: Id
    size_bytes: Count
    oldest: Annotated[dict[Id, Count], Meta(max_length=32)]
    agent: Id = ""


class PartialStored(Message, frozen=True, kw_only=True):
    """The newest finished turns of these attempts are durable in the log; those of the same attempt
    that were announced before are not there any more. Announced once per connection."""

    partials: Annotated[tuple[PartialSummary, ...], Meta(max_length=4096)]
