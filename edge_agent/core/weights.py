"""The ladders of all policies that an agent hosts, and what their events mean."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from edge_agent.core.effects import Effect
from edge_agent.core.events import (
    CopyDiscarded,
    CopyOpened,
    Event,
    PlanStaged,
    PolicyLost,
    StageFailed,
    SwapFailed,
    VerifyFailed,
    WeightsSwapped,
    WeightsVerified,
)
from edge_agent.core.journal import Journal
from edge_agent.core.ladder import Ladder, Speed
from edge_agent.core.settings import AgentSettings
from transport.errors import InvariantViolation
from transport.messages import VersionRef, WeightsPlan

if TYPE_CHECKING:
    from random import Random


class Weights:
    """Ladders by policy id. A policy that the scheduler no longer wants takes no new work; it is
    dropped once it was not wanted for ``linger_s`` and its last attempt is over."""

    def __init__(self, settings: AgentSettings, journal: Journal, rng: "Random") -> None:
        self._settings = settings
        self._journal = journal
        self._rng = rng
        self._tickets = count(1)
        self._speed = Speed()
        self._ladders: dict[str, Ladder] = {}
        self._repeat_s = settings.request_repeat_s
        self.upto: dict[str, int] = {}
        """Versions that the scheduler wants kept for now, by policy."""

    def __iter__(self) -> Iterator[Ladder]:
        return iter(tuple(self._ladders.values()))

    def pace(self, heartbeat_s: float) -> None:
        """Repeat requests no more often than heartbeats, whose interval grows with the fleet: ten
        thousand agents would ask two thousand times a second for what is not there yet."""
        self._repeat_s = max(self._settings.request_repeat_s, heartbeat_s)
        for ladder in self._ladders.values():
            ladder.repeat_s = self._repeat_s

    def find(self, policy: str) -> Ladder | None:
        return self._ladders.get(policy)

    def of(self, policies: tuple[str, ...]) -> list[Ladder]:
        """The ladders of those policies that are here."""
        return [self._ladders[policy] for policy in policies if policy in self._ladders]

    def serving(self) -> dict[str, VersionRef]:
        found = {name: ladder.serving() for name, ladder in self._ladders.items()}
        return {name: ref for name, ref in found.items() if ref is not None}

    def host(self, policies: tuple[str, ...], now: float) -> list[Effect]:
        """Host exactly ``policies`` from now on."""
        effects: list[Effect] = []
        for ladder in self._ladders.values():
            ladder.host(ladder.policy in policies, now)
        for policy in policies:
            if policy not in self._ladders:
                self._ladders[policy] = Ladder(
                    policy, self._settings, self._rng, self._tickets, self._speed
                )
                self._ladders[policy].repeat_s = self._repeat_s
                effects += self._ladders[policy].open()
        return effects

    def bound(self, policy: str, pinned: int | None) -> int | None:
        """What a copy must not pass: what pinned work needs, and what the scheduler wants kept."""
        wanted = self.upto.get(policy)
        if pinned is None or wanted is None:
            return wanted if pinned is None else pinned
        return min(pinned, wanted)

    def planned(self, plan: WeightsPlan) -> list[Effect]:
        ladder = self._ladders.get(plan.policy)
        if ladder is None:
            self._journal.count("weights.unknown_plan")
            return []
        return ladder.planned(plan)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what the shell reports about a copy; unknown policies are ignored."""
        match event:
            case CopyOpened(policy=policy, version=version, digest=digest):
                ladder = self._ladders.get(policy)
                self._journal.note(policy, f"opened at {version}")
                return [] if ladder is None else ladder.opened(version, digest, now)
            case PlanStaged(policy=policy, ticket=ticket):
                ladder = self._ladders.get(policy)
                return [] if ladder is None else ladder.staged(ticket)
            case StageFailed(policy=policy, ticket=ticket, code=code, detail=detail):
                ladder = self._ladders.get(policy)
                self._journal.count("weights.stage_failed")
                self._journal.note(policy, f"stage failed: {code}: {detail}")
                return [] if ladder is None else ladder.stage_failed(ticket, code, now)
            case WeightsSwapped(policy=policy, version=version):
                ladder = self._ladders.get(policy)
                self._journal.note(policy, f"swapped to {version}")
                return [] if ladder is None else ladder.swapped(event, now)
            case SwapFailed(policy=policy, ticket=ticket, code=code, detail=detail):
                ladder = self._ladders.get(policy)
                self._journal.count("weights.swap_failed")
                self._journal.note(policy, f"swap failed: {code}: {detail}")
                return [] if ladder is None else ladder.swap_failed(ticket)
            case WeightsVerified(policy=policy, ticket=ticket):
                ladder = self._ladders.get(policy)
                if ladder is not None:
                    ladder.verified(ticket)
                return []
            case VerifyFailed(policy=policy, ticket=ticket, code=code, detail=detail):
                ladder = self._ladders.get(policy)
                self._journal.count("weights.verify_failed")
                self._journal.note(policy, f"verification failed: {code}: {detail}")
                return [] if ladder is None else ladder.verify_failed(ticket)
            case PolicyLost(policy=policy):
                ladder = self._ladders.get(policy)
                self._journal.count("weights.policy_lost")
                self._journal.note(policy, "lost: the engine died")
                return [] if ladder is None else ladder.lost()
            case CopyDiscarded(policy=policy):
                return self._discarded(policy, now)
            case _:
                raise InvariantViolation(f"unknown event {type(event).__name__}")

    def _discarded(self, policy: str, now: float) -> list[Effect]:
        ladder = self._ladders.get(policy)
        if ladder is None:
            return []
        if ladder.released:
            del self._ladders[policy]
            return []
        return ladder.discarded(now)
