"""One policy's way to its weights.

What always holds: at most one fetch or swap is under way, named by a ticket that is never used
again, so that a late answer to a cancelled one is recognised; the version only moves when the
engine has taken verified weights; copy and engine are checked against each other on schedule;
``ready`` is false from the moment the weights become doubtful until a whole verified version has
been swapped in; a failure is followed by a back-off with full jitter; while ``upto`` is set no
version beyond it is fetched or swapped in.

    OPENING -> IDLE -> FETCHING -> SWAPPING -> IDLE
                 ^        |            |
                 +- BACKING OFF <- DISCARDING      (network trouble skips DISCARDING)

A check is no stage: the shell does it before whatever else follows for the policy. One that fails
leads to DISCARDING from wherever the ladder is.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from edge_agent.core.effects import (
    CancelFetch,
    DiscardCopy,
    Effect,
    FetchPlan,
    OpenCopy,
    SwapWeights,
    ToScheduler,
    ToWeightStore,
    VerifyWeights,
)
from edge_agent.core.events import WeightsSwapped
from edge_agent.core.settings import AgentSettings
from transport.messages import VersionRef, VersionServing, WeightsPlan, WeightsRequest

if TYPE_CHECKING:
    from random import Random

_INTEGRITY_PATIENCE = 2
"""Failed verifications in a row before the copy itself is suspected: the first may be a chunk
damaged on the way."""


class Stage(StrEnum):
    OPENING = "opening"
    IDLE = "idle"
    FETCHING = "fetching"
    SWAPPING = "swapping"
    DISCARDING = "discarding"
    BACKING_OFF = "backing off"


class Speed:
    """What this agent was last seen to fetch and to decode in a second; 0 before the first."""

    def __init__(self) -> None:
        self.rate_bytes_s = 0.0
        self.decode_cells_s = 0.0

    def note(self, rate_bytes_s: float, decode_cells_s: float) -> None:
        """A measurement of 0 leaves what was known."""
        self.rate_bytes_s = rate_bytes_s or self.rate_bytes_s
        self.decode_cells_s = decode_cells_s or self.decode_cells_s


class Ladder:
    """The weights of one policy on this agent; ``hosted`` false: the scheduler wants it no more,
    and it is released at ``linger_until_s``; ``released``: it is gone with its copy. A standing
    request is repeated every ``repeat_s``."""

    def __init__(
        self,
        policy: str,
        settings: AgentSettings,
        rng: "Random",
        tickets: Iterator[int],
        speed: Speed,
    ) -> None:
        self.policy = policy
        self.hosted = True
        self.released = False
        self.linger_until_s: float | None = None
        self.stage = Stage.OPENING
        self.version: int | None = None
        self.digest = ""
        self.target: int | None = None
        self.failures = 0
        self.upto: int | None = None
        self.repeat_s = settings.request_repeat_s
        self._settings = settings
        self._rng = rng
        self._tickets = tickets
        self._speed = speed
        self._ticket = 0
        self._doubtful = False
        self._integrity_failures = 0
        self._swaps = 0
        self._verifying: int | None = None
        self._due_s: float | None = None

    @property
    def ready(self) -> bool:
        """Whether verified weights are in the engine and trusted."""
        return self.version is not None and not self._doubtful

    @property
    def healing(self) -> bool:
        """Whether the last tries failed and nothing trustworthy is in use meanwhile."""
        return self.failures > 0 and not self.ready

    def serving(self) -> VersionRef | None:
        if self.version is None or not self.ready:
            return None
        return VersionRef(version=self.version, digest=self.digest)

    def passes(self, version: int) -> bool:
        """Whether this copy is, or can no longer be kept from going, beyond ``version``."""
        if self.version is not None and self.version > version:
            return True
        return self.stage is Stage.SWAPPING and self.target is not None and self.target > version

    def host(self, wanted: bool, now: float) -> None:
        """Note whether the scheduler wants the policy here."""
        if wanted:
            self.linger_until_s, self.released = None, False
        elif self.hosted:
            self.linger_until_s = now + self._settings.linger_s
        self.hosted = wanted

    def open(self) -> list[Effect]:
        self.stage = Stage.OPENING
        return [OpenCopy(policy=self.policy)]

    def opened(self, version: int | None, digest: str, now: float) -> list[Effect]:
        if self.stage is not Stage.OPENING:
            return []
        self.version, self.digest = version, digest
        effects: list[Effect] = []
        if version is not None:
            effects.append(self._announce(0.0, 0, 0.0))
        return [*effects, *self._request(now)]

    def hold(self, upto: int | None, now: float) -> list[Effect]:
        """Pinned work bounds the copy to ``upto`` (None: no bound)."""
        if upto == self.upto:
            return []
        self.upto = upto
        effects: list[Effect] = []
        if self.stage is Stage.FETCHING and self._beyond(self.target):
            effects.append(CancelFetch(policy=self.policy, ticket=self._ticket))
            self.stage, self.target = Stage.IDLE, None
            self._ticket = next(self._tickets)
        if self.stage is Stage.IDLE:
            effects += self._request(now)
        return effects

    def planned(self, plan: WeightsPlan) -> list[Effect]:
        """A plan came. One that is late, empty or beyond the bound is ignored: the standing
        request is repeated anyway."""
        stale = self.version is not None and plan.version <= self.version
        if self.stage is not Stage.IDLE or stale or not plan.steps or self._beyond(plan.version):
            return []
        self._ticket = next(self._tickets)
        self.stage, self.target = Stage.FETCHING, plan.version
        self._due_s = None
        return [FetchPlan(policy=self.policy, ticket=self._ticket, plan=plan)]

    def staged(self, ticket: int) -> list[Effect]:
        if self.stage is not Stage.FETCHING or ticket != self._ticket:
            return []
        self.stage = Stage.SWAPPING
        return [SwapWeights(policy=self.policy, ticket=ticket)]

    def stage_failed(self, ticket: int, code: str, now: float) -> list[Effect]:
        if self.stage is not Stage.FETCHING or ticket != self._ticket:
            return []
        self.target = None
        self.failures += 1
        if code.startswith("integrity"):
            self._integrity_failures += 1
        if code == "integrity.base" or self._integrity_failures >= _INTEGRITY_PATIENCE:
            return self._discard()
        self._back_off(now)
        return []

    def swapped(self, event: WeightsSwapped, now: float) -> list[Effect]:
        if self.stage is not Stage.SWAPPING or event.ticket != self._ticket:
            return []
        self.version, self.digest = event.version, event.digest
        self.target, self.failures, self._integrity_failures = None, 0, 0
        self._doubtful = False
        self._swaps += 1
        self._speed.note(event.rate_bytes_s, event.decode_cells_s)
        announcement = self._announce(event.pause_s, event.fetched_bytes, event.fetch_s)
        return [announcement, *self._verify(event.full_digest), *self._request(now)]

    def swap_failed(self, ticket: int) -> list[Effect]:
        if self.stage is not Stage.SWAPPING or ticket != self._ticket:
            return []
        self.target = None
        self.failures += 1
        return self._discard()

    def verified(self, ticket: int) -> None:
        if ticket == self._verifying:
            self._verifying = None

    def verify_failed(self, ticket: int) -> list[Effect]:
        """Copy or engine have other bits: start from nothing, whatever was under way."""
        if ticket != self._verifying:
            return []
        self.failures += 1
        effects: list[Effect] = []
        if self.stage is Stage.FETCHING:
            effects.append(CancelFetch(policy=self.policy, ticket=self._ticket))
        return [*effects, *self._discard()]

    def discarded(self, now: float) -> list[Effect]:
        """The copy is gone: start from nothing, after a pause if something had failed."""
        if self.stage is not Stage.DISCARDING:
            return []
        if self.failures:
            self._back_off(now)
            return []
        return self._request(now)

    def lost(self) -> list[Effect]:
        """The engine holds the policy no more: open the copy again, which loads it."""
        if self.version is None:
            return []  # whatever is under way ends with loading it
        effects: list[Effect] = []
        if self.stage is Stage.FETCHING:
            effects.append(CancelFetch(policy=self.policy, ticket=self._ticket))
        self._ticket = next(self._tickets)
        self._verifying, self._due_s = None, None
        self.version, self.digest, self.target = None, "", None
        return [*effects, *self.open()]

    def release(self) -> list[Effect]:
        """Nobody wants or uses the policy any more: drop the copy, the engine's weights and
        whatever is under way. A copy that is being dropped is dropped once more, for the engine's
        sake: the work that kept its weights there is over now."""
        self.linger_until_s = None
        self.released = True
        self.failures = 0
        effects: list[Effect] = []
        if self.stage is Stage.FETCHING:
            effects.append(CancelFetch(policy=self.policy, ticket=self._ticket))
        return [*effects, *self._discard(unload=True)]

    def advance(self, now: float) -> list[Effect]:
        """What is due: the next try after a back-off, the repeated standing request."""
        if self._due_s is None or now < self._due_s:
            return []
        return self._request(now)

    def link_up(self, now: float) -> list[Effect]:
        """The store may not know our standing request any more."""
        return self._request(now) if self.stage is Stage.IDLE else []

    def expired(self, now: float) -> bool:
        """Whether nobody has wanted the policy for long enough."""
        return self.linger_until_s is not None and now >= self.linger_until_s

    def deadline(self, in_use: bool) -> float | None:
        """When ``advance`` or, unless attempts still use the policy, ``expired`` has news."""
        due_s, linger_s = self._due_s, None if in_use else self.linger_until_s
        if due_s is None or linger_s is None:
            return linger_s if due_s is None else due_s
        return min(due_s, linger_s)

    def _beyond(self, version: int | None) -> bool:
        return self.upto is not None and version is not None and version > self.upto

    def _announce(self, pause_s: float, fetched_bytes: int, fetch_s: float) -> Effect:
        message = VersionServing(
            policy=self.policy,
            version=self.version or 0,
            digest=self.digest,
            pause_s=pause_s,
            fetched_bytes=fetched_bytes,
            fetch_s=fetch_s,
        )
        return ToScheduler(message=message)

    def _request(self, now: float) -> list[Effect]:
        self.stage = Stage.IDLE
        self._due_s = now + self.repeat_s
        request = WeightsRequest(
            policy=self.policy,
            have_version=self.version,
            have_digest=self.digest,
            upto=self.upto,
            rate_bytes_s=self._speed.rate_bytes_s,
            decode_cells_s=self._speed.decode_cells_s,
        )
        return [ToWeightStore(message=request)]

    def _verify(self, full_digest: bool) -> list[Effect]:
        every, swaps = self._settings.verify_every_swaps, self._swaps
        some = self._settings.read_back_every_swaps
        rescan = every > 0 and (full_digest or swaps % every == 0)
        # The first may have been a load, which reads everything back anyway.
        read_back = some > 0 and (swaps <= 2 or swaps % some == 0)
        if not rescan and not read_back:
            return []
        self._verifying = next(self._tickets)
        return [
            VerifyWeights(
                policy=self.policy, ticket=self._verifying, rescan=rescan, read_back=read_back
            )
        ]

    def _discard(self, *, unload: bool = False) -> list[Effect]:
        self._doubtful = True
        self._integrity_failures = self._swaps = 0
        self._verifying = None
        self.version, self.digest, self.target = None, "", None
        self.stage = Stage.DISCARDING
        self._due_s = None
        self._ticket = next(self._tickets)
        return [DiscardCopy(policy=self.policy, unload=unload)]

    def _back_off(self, now: float) -> None:
        self.stage = Stage.BACKING_OFF
        ceiling = self._settings.backoff_s * 2.0 ** min(self.failures - 1, 30)
        self._due_s = now + self._rng.uniform(0.0, min(ceiling, self._settings.backoff_max_s))
