"""What the core is told. Peers' names are the names of their keys, unique over all roles; the
shell has checked that the peer's role may say the message.

Every event may come twice, late or never.
"""

from typing import Literal

import msgspec

from transport.messages import Item, Message


class FromAgent(msgspec.Struct, frozen=True):
    """An agent's control message arrived."""

    agent: str
    message: Message


class AgentRevoked(msgspec.Struct, frozen=True):
    """The agent's key was taken back and its connections are closed."""

    agent: str


class FromTrainer(msgspec.Struct, frozen=True):
    """A trainer's control message arrived."""

    trainer: str
    message: Message


class FromService(msgspec.Struct, frozen=True):
    """The trajectory log or the weight store said something."""

    service: str
    message: Message


class FromOperator(msgspec.Struct, frozen=True):
    """A person or script asks; exactly one ``Reply`` with the same peer and ``request`` follows.
    ``request`` is the shell's number for it."""

    peer: str
    request: int
    message: Message


class ItemsProduced(msgspec.Struct, frozen=True):
    """Items ``start`` and following of one index space of a run's task source.

    Fewer items than were asked for are asked for again; none at all says that the space ends at
    ``start`` (held-out items of a small file; the training space never ends).
    """

    run: str
    kind: Literal["train", "eval"]
    start: int
    items: tuple[Item, ...]


class TaskSourceFailed(msgspec.Struct, frozen=True):
    """The run's task source cannot go on; ``message`` is for people."""

    run: str
    code: str
    message: str


class Tick(msgspec.Struct, frozen=True):
    """``next_deadline`` has passed. Timers fire only here: a shell that was held up feeds what
    has arrived first, so that nobody is taken for lost while their messages wait in a queue."""


Event = (
    FromAgent
    | AgentRevoked
    | FromTrainer
    | FromService
    | FromOperator
    | ItemsProduced
    | TaskSourceFailed
    | Tick
)
