"""Operators and a submitter in the model world: orders, dead letters, external jobs.

The submitter behaves like a careful client: it may submit anything again, fetches its results in
order and confirms them by asking for what comes after. What it was promised: every job that was
taken gets one result (one more for each replay), numbers rise by one and come in order, nothing
that was confirmed comes again, and the body of an accepted result is there until it is confirmed.
"""

from typing import Any

from core_builders import make_items
from core_world import World
from core_world_links import Broken

from scheduler.core.effects import Reply
from transport.messages import (
    AgentOrder,
    ExternalJob,
    JobCancel,
    JobReplay,
    JobResult,
    JobSubmit,
    Message,
    ResultsRequest,
)
from transport.runs import RunSpec

SUBMITTER = "s"


class PeopleWorld(World):
    """Every verb is one thing that somebody may ask."""

    def __init__(self, spec: RunSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.taken = 0
        self.replayed = 0
        self.received: list[JobResult] = []

    def submits(self, number: int, deadline_s: float = 0.0, pin: int = -1) -> None:
        """The same number is always the same job."""
        policies = sorted(self.spec.workflow.policies)
        job = ExternalJob(
            id=f"j{number}",
            items=make_items(number, 1 + number % 2),
            group_size=1 + number % 3,
            deadline_s=deadline_s,
            pinned={policies[0]: pin} if pin >= 0 else {},
            priority=number % 2,
        )
        reply = self._asks(JobSubmit(run=self.spec.name, jobs=(job, job)), SUBMITTER)
        states = [receipt.state for receipt in reply.receipts]
        if states[1] == "queued":
            raise Broken(f"{job.id} was taken twice")
        self.taken += states[0] == "queued"

    def cancels(self, number: int) -> None:
        self._asks(JobCancel(run=self.spec.name, ids=(f"j{number}",)), SUBMITTER)

    def fetches(self, limit: int = 256) -> bool:
        """Ask for what comes after the last result; whether there was any."""
        after = self.received[-1].number if self.received else 0
        found = self._asks(ResultsRequest(after=after, limit=limit), SUBMITTER)
        expected = list(range(after + 1, after + 1 + len(found.results)))
        if [result.number for result in found.results] != expected:
            raise Broken(f"results {[r.number for r in found.results]}, not {expected}")
        for result in found.results:
            if result.state == "accepted" and result.digest not in self.bodies:
                raise Broken(f"{result.id} was accepted and its body released")
        self.received += found.results
        return bool(found.results)

    def orders(self, agent: str, order: Any) -> None:
        self._asks(AgentOrder(agent=agent, order=order))

    def replays(self) -> None:
        """All dead letters of the run are to be queued again."""
        letters = self.scene.core._ctx.tables.dead
        before = [key for key, dead in letters.items() if dead.letter.kind == "external"]
        self._asks(JobReplay(run=self.spec.name))
        self.replayed += sum(key not in letters for key in before)

    def forgives(self) -> None:
        """Every agent may work again."""
        for name in self.agents:
            self.orders(name, "release")
            self.orders(name, "uncordon")

    def round(self) -> None:
        super().round()
        self.fetches()

    def finish(self, rounds: int = 300) -> None:
        self.forgives()
        super().finish(rounds)
        while self.fetches():
            pass
        if len(self.received) != self.taken + self.replayed:
            raise Broken(
                f"{len(self.received)} results of {self.taken} jobs, {self.replayed} replayed"
            )

    def _asks(self, message: Message, peer: str = "op") -> Any:
        before = len(self.scene.effects)
        self.scene.asks(message, peer)
        effects = self.scene.effects[before:]
        self._execute(effects)
        [reply] = [effect.message for effect in effects if isinstance(effect, Reply)]
        return reply
