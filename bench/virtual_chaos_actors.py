"""Actors of the chaos world that can be killed, beside those of ``sim.actors``, and its links.

What always holds: a process that is down hears nothing; what it had on disk is there when it comes
back (``wipe`` takes an agent's disk as well); a message is repeated or overtaken only as a broken
connection can do it: what arrived over the old one is handed over again or late, and never to
another process than the one whose connection it was.
"""

import random
from collections.abc import Callable
from typing import Any, Final

from edge_agent.core import effects as agent_do
from edge_agent.core import events as agent_on
from sim.actors.agent import AgentActor
from sim.actors.modelled import Spooled
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.actors.services import ModelledVersion, TrajectoryLogActor, WeightStoreActor
from sim.actors.trainer import TrainerActor
from sim.fair_share import Pipe
from sim.kernel import Kernel
from sim.network import Host, Network, Receive
from transport.messages import (
    ExternalJob,
    Item,
    JobCancel,
    JobReceipts,
    JobResult,
    JobSubmit,
    Message,
    Plane,
    Results,
    ResultsRequest,
)

BACK_AFTER_S: Final = 3.0
"""A process that ended by itself is started again after so long."""

ASK_AGAIN_S: Final = 8.0


class ChaosNetwork(Network):
    """``broken`` are pairs of hosts that do not reach each other; to a host in ``twice`` or
    ``late`` (until a time) messages are handed over again, or late, with some chance."""

    def __init__(self, kernel: Kernel, *args: Any, mischief: random.Random, **options: Any) -> None:
        super().__init__(kernel, *args, **options)
        self.broken: dict[tuple[str, str], float] = {}
        self.twice: dict[str, float] = {}
        self.late: dict[str, float] = {}
        self.repeated = 0
        self.overtaken = 0
        self.severed = 0
        self._usual_s: dict[tuple[str, str], float] = {}
        self._clock = kernel
        self._mischief = mischief

    def add(self, name: str, site: str, up: Pipe, down: Pipe, receive: Receive) -> Host:
        host: Host

        def arrive(source: str, message: Message, extra: object) -> None:
            now, rng = self._clock.now, self._mischief
            pair = (source, name) if source < name else (name, source)
            if self.broken.get(pair, 0.0) > now:
                self.severed += 1
                return
            parcel = (host.epoch, source, message, extra)
            if self.late.get(name, 0.0) > now and rng.random() < 0.3:
                self.overtaken += 1
                self._clock.after(rng.uniform(0.0, 3.0), again, parcel)
                return
            if self.twice.get(name, 0.0) > now and rng.random() < 0.5:
                self.repeated += 1
                self._clock.after(rng.uniform(0.0, 6.0), again, parcel)
            receive(source, message, extra)

        def again(parcel: tuple[int, str, Message, object]) -> None:
            epoch, source, message, extra = parcel
            if epoch == host.epoch and not host.cut:
                receive(source, message, extra)

        host = super().add(name, site, up, down, arrive)
        return host

    def end_process(self, name: str) -> None:
        """Messages to and from it are lost; transfers wait: what arrived of one is on disk."""
        self._hosts[name].epoch += 1
        self.cut(name)

    def slow_down(self, name: str, extra_s: float, scale: float) -> None:
        """Another delay for all that this host says and hears, another rate for its transfers;
        0 and 1 undo it."""
        for other in (SCHEDULER, LOG, STORE):
            for pair in ((name, other), (other, name)):
                path = self._path(*pair)
                usual_s = self._usual_s.setdefault(pair, path.delay_s)
                path.delay_s = usual_s + extra_s
        host = self._hosts[name]
        self.scale(host.up, scale)
        self.scale(host.down, scale)

    def mend(self) -> None:
        """No more mischief."""
        self.broken.clear()
        self.twice.clear()
        self.late.clear()


class ChaosAgent(AgentActor):
    """An agent that a supervisor starts again when it ends by itself."""

    resting = False

    @property
    def spooled(self) -> int:
        return len(self._spool)

    def notice(self, plane: Plane) -> None:
        """The connection of one plane is up again."""
        if self.alive:
            self.feed(agent_on.LinkUp(plane=plane))

    def _exit(self, effect: agent_do.Exit) -> None:
        super()._exit(effect)
        life = self._incarnation

        def back(_: object) -> None:
            if not self.alive and not self.resting and self._incarnation == life:
                self.start()

        self._kernel.after(BACK_AFTER_S, back)


class ChaosTrainer(TrainerActor):
    """``trained`` are the jobs along its surviving lineage, oldest first."""

    def lineage(self) -> list[str]:
        return [job for entry in self._lineage for job in entry.jobs]

    @property
    def step(self) -> int:
        steps = self._ledger.steps.get(self.policy, [])
        return steps[-1].step if steps else 0


class ChaosLog(TrajectoryLogActor):
    """A trajectory log that can die; what it acknowledged it has."""

    alive = True
    _died_s = -1.0

    def die(self) -> None:
        self.alive = False
        self._died_s = self._kernel.now
        self._released.clear()

    def back(self, rng: random.Random) -> None:
        """Its notes of what the scheduler has accepted may lag behind: some are said again."""
        self.alive = True
        self.start()
        said = [digest for digest in self.bodies if rng.random() < 0.3]
        again = tuple(dict.fromkeys([*self._unaccepted, *said]))
        if again:
            self._announce(again)

    def receive(self, source: str, message: Message, extra: object) -> None:
        if self.alive:
            super().receive(source, message, extra)

    def _stored(self, put: tuple[str, Spooled]) -> None:
        if self.alive and self._kernel.now - self._workload.store_s > self._died_s:
            super()._stored(put)

    def _announce_again(self) -> None:
        if self.alive:
            super()._announce_again()


class ChaosStore(WeightStoreActor):
    """A weight store that can die; a version counts once it is durable."""

    alive = True
    _died_s = -1.0

    def die(self) -> None:
        self.alive = False
        self._died_s = self._kernel.now
        self._standing.clear()

    def back(self) -> None:
        self.alive = True
        self.start()
        self._announce_again()

    def receive(self, source: str, message: Message, extra: object) -> None:
        if self.alive:
            super().receive(source, message, extra)

    def _durable(self, taken: tuple[str, ModelledVersion]) -> None:
        if not self.alive or self._kernel.now - self._workload.store_s <= self._died_s:
            self._taking.clear()
        else:
            super()._durable(taken)

    def _announce_again(self) -> None:
        if self.alive:
            super()._announce_again()


class Person:
    """Somebody who asks the scheduler; ``heard`` gets each reply with the number asked under."""

    def __init__(self, name: str, kernel: Kernel, network: Network) -> None:
        self.name = name
        self._kernel = kernel
        self._network = network
        self._number = 0

    def ask(self, message: Message) -> int:
        self._number += 1
        self._network.send(self.name, SCHEDULER, message, extra=self._number)
        return self._number

    def receive(self, source: str, message: Message, extra: Any) -> None:
        self.heard(message, extra)

    def heard(self, message: Message, number: int) -> None:
        """Operators look at what happens, not at replies."""


class Submitter(Person):
    """A careful client: it says again what was not answered, keeps results before it confirms them,
    and knows what it may expect of them.
    """

    def __init__(
        self,
        name: str,
        run: str,
        kernel: Kernel,
        network: Network,
        rng: random.Random,
        has_body: Callable[[str], bool],
    ) -> None:
        super().__init__(name, kernel, network)
        self.wanted: dict[str, ExternalJob] = {}
        self.taken: dict[str, None] = {}
        self.results: dict[int, JobResult] = {}
        self.cancelled: dict[str, None] = {}
        self.problems: list[str] = []
        self._run = run
        self._rng = rng
        self._has_body = has_body
        self._asked: dict[int, int] = {}
        self._due_s = 0.0

    @property
    def last(self) -> int:
        return max(self.results, default=0)

    @property
    def unanswered(self) -> list[str]:
        """Jobs without a result."""
        done = {result.id for result in self.results.values()}
        return [id for id in self.wanted if id not in done]

    def submit(self) -> None:
        """Some new jobs."""
        for _ in range(self._rng.randint(1, 3)):
            number = len(self.wanted)
            items = tuple(
                Item(index=n, prompt=f"external {number} " * 20, answer="1")
                for n in range(self._rng.randint(1, 2))
            )
            self.wanted[f"j{number}"] = ExternalJob(
                id=f"j{number}",
                items=items,
                group_size=self._rng.randint(1, 3),
                priority=self._rng.randint(0, 1),
                deadline_s=self._rng.choice([0.0, 0.0, 0.0, 30.0]),
            )
        self._say(new=True)

    def cancel(self) -> None:
        """One that is under way is wanted no more."""
        for id in self.unanswered:
            if id in self.taken:
                self.cancelled[id] = None
                self.ask(JobCancel(run=self._run, ids=(id,)))
                return

    def beat(self, _: object = None) -> None:
        """Once a second: what is not known to have been taken is submitted again."""
        self._say(new=False)
        if self._kernel.now >= self._due_s:
            self._fetch()
        self._kernel.after(1.0, self.beat)

    def _say(self, *, new: bool) -> None:
        open_ones = [job for id, job in self.wanted.items() if id not in self.taken][:16]
        if not new and self.taken and self._rng.random() < 0.1:
            open_ones.append(self.wanted[self._rng.choice(list(self.taken))])
        if open_ones:
            self.ask(JobSubmit(run=self._run, jobs=tuple(open_ones)))

    def _fetch(self) -> None:
        self._due_s = self._kernel.now + ASK_AGAIN_S
        after = self.last
        wanted = ResultsRequest(after=after, limit=self._rng.choice([1, 4, 256]), wait_s=5.0)
        self._asked[self.ask(wanted)] = after

    def heard(self, message: Message, number: int) -> None:
        match message:
            case JobReceipts(receipts=receipts):
                for receipt in receipts:
                    if receipt.state == "refused" and receipt.code != "job.unknown":
                        self.problems.append(f"{receipt.id}: {receipt.code}: {receipt.message}")
                    elif receipt.state in ("queued", "known"):
                        self.taken[receipt.id] = None
            case Results(results=results, last=last):
                after = self._asked[number]
                if last < after:
                    self.problems.append(f"results up to {last}, and {after} were confirmed")
                self._take(results, after)
            case _:
                self.problems.append(f"unexpected {message}")

    def _take(self, results: tuple[JobResult, ...], after: int) -> None:
        numbers = [result.number for result in results]
        first = numbers[0] if numbers else after + 1
        # A request that comes late is answered without what a newer one has confirmed.
        if (
            numbers != list(range(first, first + len(numbers)))
            or not after < first <= self.last + 1
        ):
            self.problems.append(f"results {numbers} after {after}, {self.last} were known")
        before = {result.id for result in self.results.values()}
        for result in results:
            known = self.results.get(result.number)
            if known is not None:
                if known != result:
                    self.problems.append(f"result {result.number} was {known}, is {result}")
                continue
            if result.number <= self.last:
                self.problems.append(f"result {result.number} came after {self.last}")
            if result.id in before or result.id not in self.wanted:
                self.problems.append(f"result of {result.id} again, or of nobody's job")
            if result.state == "cancelled" and result.id not in self.cancelled:
                self.problems.append(f"{result.id} was cancelled by nobody")
            if result.state == "accepted" and not self._has_body(result.digest):
                self.problems.append(f"{result.id} was accepted and its body is gone")
            self.results[result.number] = result
        if results:
            self._fetch()
