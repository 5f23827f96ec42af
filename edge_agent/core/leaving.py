"""Draining: finish or hand back what is held within a time, then leave.

What always holds: what has not started is handed back at once, what runs has until the deadline; a
later request can only bring that forward; what is spooled stays on the disk for the next life.
"""

from edge_agent.core.attempts import AttemptState
from edge_agent.core.effects import Effect
from edge_agent.core.settings import AgentSettings
from edge_agent.core.work import Work

_MAX_DRAIN_S = 1e9


class Leaving:
    """``until_s`` is None until somebody wants the agent to leave."""

    def __init__(self, settings: AgentSettings, work: Work) -> None:
        self._settings = settings
        self._work = work
        self.until_s: float | None = None
        self.reason = ""

    def drain(self, reason: str, deadline_s: float | None, now: float) -> list[Effect]:
        """Begin, or bring the end forward; ``deadline_s`` None is the agent's own setting."""
        within_s = self._settings.drain_s if deadline_s is None else deadline_s
        until_s = now + min(max(within_s, 0.0), _MAX_DRAIN_S)
        if self.until_s is not None:
            self.until_s = min(self.until_s, until_s)
            return []
        self.until_s, self.reason = until_s, reason
        self._work.draining = True
        effects: list[Effect] = []
        for held in self._work.attempts:
            if held.state is AttemptState.WAITING:
                effects += self._work.fail(held, "agent.draining", reason)
        return effects

    def done(self, now: float) -> list[Effect] | None:
        """What to hand back before the goodbye, once it is time for it."""
        if self.until_s is None or (now < self.until_s and not self._work.idle):
            return None
        effects: list[Effect] = []
        for held in self._work.attempts:
            effects += self._work.fail(held, "agent.draining", self.reason)
        return effects
