"""What a life of the scheduler remembers of those who ask it: submitters and waiting requests, and
of agents' log-probabilities. Data only; ``outcomes``, ``waits`` and ``honesty`` say what it means.
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
    unconfirmed results, the characters of its open jobs' texts, and its waiting requests."""

    open: dict[str, None] = field(default_factory=dict)
    unconfirmed: dict[int, None] = field(default_factory=dict)
    remembered: deque[int] = field(default_factory=deque)
    sequences: int = 0
    characters: int = 0
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
class DriftWindow:
    """How far an agent's log-probabilities of one policy are from the trainer's: sums over the
    ``tokens`` since the last window was closed, at the end of ``step`` (0: none was) with
    ``closed_tokens``; ``mean``, ``mean_kl`` and ``mean_moved`` (nats a token) are of that one,
    ``above`` how many in a row were above the bound. ``difference`` is of groups that are not
    behind; of the others what is in ``older`` beyond what the policy itself has ``moved`` counts,
    summed up before it is compared, because each group for itself says little."""

    tokens: int = 0
    difference: float = 0.0
    kl: float = 0.0
    older: float = 0.0
    moved: float = 0.0
    step: int = 0
    closed_tokens: int = 0
    mean: float = 0.0
    mean_kl: float = 0.0
    mean_moved: float = 0.0
    above: int = 0

    def close(self, step: int, slack: float) -> None:
        """Take the means, of at least one token, and begin anew. ``slack`` times what the policy
        has moved is put down to it."""
        self.step, self.closed_tokens = step, self.tokens
        beyond = self.difference + max(0.0, self.older - slack * self.moved)
        self.mean, self.mean_kl = beyond / self.tokens, self.kl / self.tokens
        self.mean_moved = self.moved / self.tokens
        self.tokens, self.difference, self.kl, self.older, self.moved = 0, 0.0, 0.0, 0.0, 0.0
