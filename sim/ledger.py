"""What became of every token and group, counted where it happens and not by the scheduler.

What always holds: ``drawn`` = tokens in bodies + ``aborted_tokens`` + those of sequences that still
run; a body that is no longer wanted was either trained on or is wasted.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.recording import Recorder


@dataclass(slots=True)
class Step:
    """A finished optimizer step; ``lags`` of its groups in versions."""

    step: int
    at_s: float
    lags: tuple[int, ...]
    waiting_s: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Tokens and groups of one simulation; ``turnaround_s`` is from an attempt's
    acceptance to its durable body."""

    drawn_tokens: int = 0
    aborted_tokens: int = 0
    aborted_attempts: int = 0
    made_groups: int = 0
    made_tokens: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    wasted_groups: int = 0
    wasted_tokens: int = 0
    twice: int = 0
    trained: dict[str, dict[str, None]] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    turnaround_s: list[float] = field(default_factory=list)
    recorder: "Recorder | None" = None
    _tokens: dict[str, int] = field(default_factory=dict)

    def body_made(self, tokens: int) -> None:
        self.made_groups += 1
        self.made_tokens += tokens

    def body_trained(self, policy: str, digest: str, tokens: int) -> None:
        """A step of ``policy`` has used a body."""
        users = self.trained.setdefault(digest, {})
        if policy in users:
            self.twice += 1
        elif not users:
            self._tokens[digest] = tokens
            self.trained_groups += 1
            self.trained_tokens += tokens
        users[policy] = None
        if self.recorder is not None:
            self.recorder.judged(digest, "trained")

    def lineage_left(self, policy: str, digests: tuple[str, ...]) -> None:
        """The steps that used these bodies were lost with their trainer."""
        for digest in digests:
            tokens, users = self._tokens[digest], self.trained[digest]
            users.pop(policy, None)
            if not users:
                del self.trained[digest]
                if self.recorder is not None:
                    self.recorder.judged(digest, "open")
                self.trained_groups -= 1
                self.trained_tokens -= tokens

    def attempt_aborted(self, tokens: int) -> None:
        """An attempt was stopped that had drawn so many tokens; none: it had not begun."""
        if tokens > 0:
            self.aborted_attempts += 1
            self.aborted_tokens += tokens

    def body_gone(self, digest: str, tokens: int) -> None:
        """Nobody wants a body any more."""
        if digest not in self.trained:
            self.wasted_groups += 1
            self.wasted_tokens += tokens
            if self.recorder is not None:
                self.recorder.judged(digest, "wasted")

    @property
    def wasted_share(self) -> float:
        """Of the attempts that began and whose fate is known, those that were not trained on:
        results that came too late or twice, and attempts that were stopped."""
        wasted = self.wasted_groups + self.aborted_attempts
        return wasted / max(1, wasted + self.trained_groups)

    @property
    def wasted_token_share(self) -> float:
        """The same in tokens."""
        wasted = self.wasted_tokens + self.aborted_tokens
        return wasted / max(1, wasted + self.trained_tokens)
