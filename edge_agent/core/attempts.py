"""The attempts that an agent has accepted and not yet turned into a spooled result.

What always holds: an attempt is waiting, running or scoring; it holds its policies' weights to the
versions it is pinned to until its last token is drawn; sequences of waiting and running attempts
add up to at most ``slots + prefetch_sequences`` unless a single attempt is larger than that. The
engine keeps to its slots by itself: a started attempt may run in waves, or wait for a few slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from transport.ids import Fence
from transport.messages import HeldAttempt, LeaseOffer

MAX_NEW_TOKENS = 1 << 20


class AttemptState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SCORING = "scoring"


@dataclass(slots=True)
class Attempt:
    """One accepted offer; ``pinned`` is by policy id. What follows from the offer is worked out
    once: it is looked at with every event."""

    offer: LeaseOffer
    accepted_s: float
    pinned: dict[str, int]
    state: AttemptState = AttemptState.WAITING
    name: str = field(init=False)
    fence: Fence = field(init=False)
    policies: tuple[str, ...] = field(init=False)
    sequences: int = field(init=False)

    def __post_init__(self) -> None:
        offer = self.offer
        self.name, self.fence = offer.attempt, offer.fence
        self.policies = tuple(sorted(set(offer.policies.values())))
        self.sequences = sequences_of(offer)


def sequences_of(offer: LeaseOffer) -> int:
    return len(offer.items) * offer.group_size


def pins_of(offer: LeaseOffer) -> dict[str, int]:
    """Pinned versions by policy id; the offer may use the policies' names in its workflow."""
    return {offer.policies.get(key, key): version for key, version in offer.pinned.items()}


def fault_of(offer: LeaseOffer) -> str:
    """Why an offer makes no sense, or nothing."""
    if not offer.attempt or not offer.items or offer.group_size < 1 or not offer.policies:
        return "empty attempt, items, policies or group"
    if not 1 <= offer.max_new_tokens <= MAX_NEW_TOKENS or not 0.0 <= offer.temperature < float(
        "inf"
    ):
        return "impossible sampling parameters"
    if not set(pins_of(offer)) <= set(offer.policies.values()):
        return "pinned to a policy that it does not use"
    return ""


class Attempts:
    """Held attempts by name, oldest first."""

    def __init__(self) -> None:
        self._held: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._held.values()))

    def find(self, name: str, fence: Fence | None = None) -> Attempt | None:
        """The held attempt of that name, and of that fence if one is given."""
        attempt = self._held.get(name)
        if attempt is None or (fence is not None and attempt.fence != fence):
            return None
        return attempt

    def add(self, attempt: Attempt) -> None:
        self._held[attempt.name] = attempt

    def remove(self, attempt: Attempt) -> None:
        del self._held[attempt.name]

    def use(self, policy: str) -> bool:
        """Whether any of them needs the policy's weights."""
        return any(policy in held.policies for held in self._held.values())

    def waiting(self) -> list[Attempt]:
        """Those that have not started, oldest first."""
        waiting = AttemptState.WAITING
        return [held for held in self._held.values() if held.state is waiting]

    def inventory(self) -> list[HeldAttempt]:
        return [
            HeldAttempt(
                attempt=held.name,
                fence=held.fence,
                started=held.state is not AttemptState.WAITING,
            )
            for held in self._held.values()
        ]

    def sequences(self, *states: AttemptState) -> int:
        total = 0
        for held in self._held.values():
            if held.state in states:
                total += held.sequences
        return total

    def bound(self, policy: str) -> int | None:
        """The version that pinned work keeps ``policy`` from passing; None without such work."""
        least: int | None = None
        for held in self._held.values():
            if held.pinned and policy in held.pinned and held.state is not AttemptState.SCORING:
                version = held.pinned[policy]
                least = version if least is None else min(least, version)
        return least
