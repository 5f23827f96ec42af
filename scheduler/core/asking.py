"""What a life of the scheduler remembers of those who ask it: submitters and waiting requests, and
of the conduct of agents. Data only; ``outcomes``, ``waits`` and ``quarantine`` say what it means.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from transport.messages import Message

WaitKind = Literal["results", "events", "logs"]


@dataclass(slots=True)
class SubmitterLive:
    """Indexes of a submitter: its open jobs, the numbers of its results that it has not confirmed
    and of the confirmed ones that are remembered, both rising, the sequences of its open jobs and
    unconfirmed results, and its waiting requests."""

    open: dict[str, None] = field(default_factory=dict)
    unconfirmed: dict[int, None] = field(default_factory=dict)
    remembered: deque[int] = field(default_factory=deque)
    sequences: int = 0
    waiting: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Waiting:
    """A request that is answered later: as soon as there is something, at the latest by its timer
    (``wait``, its number). ``seen`` is how many transitions were looked at for it, ``agent`` whose
    answer it waits for."""

    kind: WaitKind
    peer: str
    request: int
    message: Message
    seen: int = 0
    agent: str = ""


@dataclass(slots=True)
class Conduct:
    """What an agent did lately: when it started without having said goodbye, its failures in a row
    that are its own, weighed evidence and when that was last added to."""

    starts: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    own_failures: int = 0
    weight: float = 0.0
    weighed_s: float = 0.0


@dataclass(slots=True)
class DriftWindow:
    """How far an agent's log-probabilities of one policy are from the trainer's: sums over the
    ``tokens`` since the last window was closed, at the end of ``step`` (0: none was) with
    ``closed_tokens``; ``mean`` and ``mean_kl`` (nats a token) are of that one, ``above`` how many
    in a row were above the bound."""

    tokens: int = 0
    difference: float = 0.0
    kl: float = 0.0
    step: int = 0
    closed_tokens: int = 0
    mean: float = 0.0
    mean_kl: float = 0.0
    above: int = 0

    def close(self, step: int) -> None:
        """Take the means, of at least one token, and begin anew."""
        self.step, self.closed_tokens = step, self.tokens
        self.mean, self.mean_kl = self.difference / self.tokens, self.kl / self.tokens
        self.tokens, self.difference, self.kl = 0, 0.0, 0.0
