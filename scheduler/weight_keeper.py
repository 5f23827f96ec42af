"""What the weight store does while nobody waits: retention, and making shorter ways.

What always holds: one thing at a time is made, in a thread of its own, so that plans and chunks
go on; nothing is removed meanwhile; after a failure nothing is tried again for that policy until
something has changed; what a turn costs, and what is held in memory, grows with the policies in
use and not with those of runs that are over, of which one is read again at each turn.
"""

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Final

import structlog

from scheduler.service import Worker
from scheduler.weight_composites import Job, perform
from scheduler.weight_plans import ASKED_LATELY_S, Planner
from scheduler.weight_policy import WalkFailed
from scheduler.weight_upkeep import CpuShare
from scheduler.weight_versions import WeightVersions
from transport.errors import IntegrityError, StoreError
from transport.runtime.clock import Clock

MAINTAIN_S: Final = 5.0

SCRUB_BYTES: Final = 32 << 20
"""Read again of each policy's files at every turn: about 20 ms, and 20 GB in an hour."""

IDLE_S: Final = ASKED_LATELY_S
"""For so long after its last version came in, or an agent asked for it, a policy is in use."""

_log = structlog.get_logger()


class Keeper:
    """``library`` is the thread that ``versions`` belongs to; ``uploading`` gives the digests
    of the files that are coming in for a policy."""

    def __init__(
        self,
        versions: WeightVersions,
        library: Worker,
        planner: Planner,
        clock: Clock,
        *,
        cpu_share: float,
        uploading: Callable[[str], Collection[str]],
    ) -> None:
        self._versions = versions
        self._library = library
        self._planner = planner
        self._clock = clock
        self._share = CpuShare(cpu_share)
        self._uploading = uploading
        self._composer = Worker("weight-composer")
        self._stop = threading.Event()
        self._dirty: set[str] = set()
        self._given_up: set[str] = set()
        self._settled: set[str] = set()  # not in use, and nothing more to be made of them
        self._used_s: dict[str, float] = {}
        self._read_last = ""  # of the policies that are not in use
        self._urgent = asyncio.Event()

    def has_changed(self, policy: str, *, urgent: bool = False) -> None:
        """Look after a policy at the next turn, or at once."""
        self._dirty.add(policy)
        self._given_up.discard(policy)
        self._settled.discard(policy)
        if urgent:
            self._urgent.set()

    def used(self, policy: str) -> None:
        """A version of it came in."""
        self._used_s[policy] = self._clock.monotonic_s()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(MAINTAIN_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            self._urgent.clear()
            self._planner.forget_silent()
            dirty, self._dirty = sorted(self._dirty), set()
            for policy in dirty:
                await self._library.run(self._maintain, policy)
                self._planner.changed(policy)
            in_use = self._in_use()
            policies = await self._library.run(self._versions.policies)
            for policy in self._to_scrub(policies, in_use):
                await self._library.run(self._versions.scrub, policy, SCRUB_BYTES)
            for policy in policies:
                if policy in in_use:
                    await self._keep_head(policy)
                else:
                    await self._library.run(self._versions.rest, policy)
            self.look_after_damage()
            for policy in await self._library.run(self._versions.policies):
                if policy in self._given_up or policy in self._settled:
                    continue
                if await self._make_more(policy):
                    self.has_changed(policy, urgent=True)
                elif policy not in in_use and policy not in self._dirty:
                    self._settled.add(policy)

    async def close(self) -> None:
        """Stops what is being made; nothing of it is kept."""
        self._stop.set()
        await asyncio.to_thread(self._composer.close)

    def look_after_damage(self) -> None:
        """Plan again without what was found damaged, and make it again where that is possible."""
        while self._versions.suspects:
            policy = self._versions.suspects.pop()
            self.has_changed(policy, urgent=True)
            self._planner.changed(policy)
        self.log_warnings()

    def log_warnings(self) -> None:
        warnings, self._versions.warnings[:] = list(self._versions.warnings), []
        for warning in warnings:
            _log.error("weights.damaged", reason=warning)

    def _in_use(self) -> set[str]:
        now = self._clock.monotonic_s()
        self._used_s.update(dict.fromkeys(self._planner.asking(), now))
        self._used_s = {policy: at for policy, at in self._used_s.items() if now - at < IDLE_S}
        self._settled -= self._used_s.keys()
        return set(self._used_s)

    def _to_scrub(self, policies: Collection[str], in_use: Collection[str]) -> list[str]:
        """Those in use, and the next of the others."""
        others = [policy for policy in policies if policy not in in_use]
        following = [policy for policy in others if policy > self._read_last] or others
        self._read_last = following[0] if following else ""
        return [*(policy for policy in policies if policy in in_use), *following[:1]]

    def _maintain(self, policy: str) -> None:
        """In the library's thread."""
        try:
            removed = self._versions.maintain(
                policy, acked=self._planner.holders(policy), uploading=self._uploading(policy)
            )
        except StoreError as error:
            _log.error("weights.not_maintained", policy=policy, reason=str(error))
        else:
            _log.debug("weights.maintained", policy=policy, removed=removed)

    async def _keep_head(self, policy: str) -> None:
        """After a start, bring the newest weights into memory."""

        def go_on() -> bool:
            return not self._stop.is_set()

        build = await self._library.run(self._versions.way_to_head, policy, go_on)
        if build is None:
            return
        try:
            arena = await self._composer.run(build)
            await self._library.run(self._versions.take_head, policy, arena)
        except WalkFailed as error:
            await self._library.run(self._versions.way_failed, policy, error)
        except StoreError as error:  # the store stops
            _log.debug("weights.head_not_built", policy=policy, reason=str(error))

    async def _make_more(self, policy: str) -> bool:
        """Make at most one thing; whether there is something new."""
        composites = self._share.may_start(self._clock.monotonic_s())
        job = await self._library.run(self._next_job, policy, composites)
        if job is None:
            return False
        started_s = self._clock.monotonic_s()
        try:
            made = await self._composer.run(perform, job, self._stop)
            offered = await self._library.run(self._versions.adopt, made)
        except (IntegrityError, StoreError) as error:
            _log.warning("weights.not_made", policy=policy, reason=str(error))
            await self._library.run(self._versions.job_failed, policy, job, error)
            if not isinstance(error, WalkFailed):  # there may be another way
                self._given_up.add(policy)
            return isinstance(error, WalkFailed)
        finally:
            now_s = self._clock.monotonic_s()
            self._share.spent(now_s - started_s, now_s)
        size_bytes = sum(entry.size_bytes for entry in made.files)
        _log.info(
            "weights.made",
            policy=policy,
            version=made.version,
            base=None if made.composite is None else made.parent,
            size_bytes=size_bytes,
            seconds=round(now_s - started_s, 3),
            offered=offered,
        )
        return True

    def _next_job(self, policy: str, composites: bool) -> Job | None:
        """In the library's thread."""
        asked = self._planner.asked_lately(policy)
        return self._versions.next_job(policy, asked, composites=composites)
