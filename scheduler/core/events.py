"""What the core is told. Peers' names are the names of their keys, unique over all roles; the
shell has checked that the peer's role may say the message.

Every event may come twice, late or never.
"""

from typing import Literal

import msgspec

from transport.messages import Item, Message
from transport.runs import HELD_OUT


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


class Verdict(msgspec.Struct, frozen=True):
    """What a policy's data functions say of a group that came back. ``filter`` is the one that
    objects (empty: none does), ``failed`` are those that could not say. ``score`` tells how early
    it goes when trained groups are used again; where it is ``drawn`` it is a weight to draw by."""

    filter: str = ""
    failed: tuple[str, ...] = ()
    score: float = 0.0
    drawn: bool = False


Verdicts = dict[str, Verdict]
"""By policy id; a policy that is not there has nothing to say."""


class FromService(msgspec.Struct, frozen=True):
    """The trajectory log or the weight store said something. ``verdicts`` are of the summaries in
    a ``TrajectoriesStored``, place by place, or empty."""

    service: str
    message: Message
    verdicts: tuple[Verdicts, ...] = ()


class FromOperator(msgspec.Struct, frozen=True):
    """A person or script asks; exactly one ``Reply`` with the same peer and ``request`` follows.
    ``request`` is the shell's number for it, ``fault`` what the shell found wrong with what is
    asked, for the core to refuse it with."""

    peer: str
    request: int
    message: Message
    fault: str = ""


class ItemsProduced(msgspec.Struct, frozen=True):
    """Items ``start`` and following of one index space of a run's task source.

    Fewer items than were asked for are asked for again; none at all says that the space ends at
    ``start`` (held-out items of a small file; the training space never ends). Items of kind
    ``eval`` are those of one ``evaluation``. ``verdicts`` are what curators say of training items,
    place by place, or empty: ``filter`` names the one that objects.
    """

    run: str
    kind: Literal["train", "eval"]
    start: int
    items: tuple[Item, ...]
    evaluation: str = HELD_OUT
    verdicts: tuple[Verdict, ...] = ()


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
