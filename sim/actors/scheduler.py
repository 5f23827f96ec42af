"""The rollout scheduler: its production core, a task source, rows that are taken and thrown away.

Commits as the daemon does (rows of changed entities after every event); the rows can be kept to
restart from. Nothing is decided here.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from scheduler.core import effects as do
from scheduler.core.events import (
    Event,
    FromOperator,
    FromService,
    ItemsProduced,
    Tick,
)
from scheduler.core.machine import SchedulerCore
from scheduler.core.settings import CoreSettings
from scheduler.data.algorithms import DataAlgorithms
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.kernel import WALL_START_S, Alarm, Kernel
from sim.network import Network
from sim.workload import make_items
from transport.messages import CommandReply, HeartbeatReply, Message, RunSubmit
from transport.runs import RunSpec

if TYPE_CHECKING:
    from transport.status import StepStatus

FromPeer = Callable[[str, Message], Event]


class SchedulerActor:
    """One scheduler. ``ended`` maps runs to the reason with which they finished; ``steps`` are
    those that the core recorded, as the daemon writes them to ``metrics.jsonl``; ``recorded`` takes
    all events with their times, unless it is None. Runs may name data functions of
    ``data_modules``."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        kernel: Kernel,
        network: Network,
        items_s: float,
        seed: int,
        check: bool,
        data_modules: Sequence[str] = (),
    ) -> None:
        self.core = SchedulerCore(
            settings,
            term=1,
            rng=random.Random(seed),  # noqa: S311
            build="sim",
            now=kernel.now,
        )
        self._data = DataAlgorithms(data_modules)
        self.ended: dict[str, str] = {}
        self.steps: list[StepStatus] = []
        self.recorded: list[tuple[Event, float]] | None = None
        self.handled = 0
        self._kernel = kernel
        self._network = network
        self._items_s = items_s
        self._check = check
        self._peers: dict[str, FromPeer] = {LOG: FromService, STORE: FromService}
        self._replies: list[Message] = []
        self._alarm = Alarm(kernel, self._tick)

    def know(self, name: str, from_peer: FromPeer) -> None:
        """``name`` is the key of an agent (``FromAgent``) or trainer (``FromTrainer``)."""
        self._peers[name] = from_peer

    def submit(self, spec: RunSpec) -> CommandReply:
        """Hand in a run, as an operator does."""
        self.feed(FromOperator("sim", 1, RunSubmit(run=spec)))
        reply = self._replies.pop()
        assert isinstance(reply, CommandReply)  # noqa: S101
        return reply

    def receive(self, source: str, message: Message, _: object) -> None:
        self.feed(self._peers[source](source, message))

    def feed(self, event: Event) -> None:
        """Let the core handle an event, commit, carry out what it wants."""
        core = self.core
        event = self._data.prepare(core, event)
        if self.recorded is not None:
            self.recorded.append((event, self._kernel.now))
        effects = core.handle(event, self._kernel.now)
        self.handled += 1
        core.take_changes()
        if self._check:
            core.check()
        send = self._network.send
        for effect in effects:
            if type(effect) is do.Send:
                message = effect.message
                if type(message) is HeartbeatReply:
                    message = self._stamped(message)
                send(SCHEDULER, effect.peer, message)
            else:
                self._perform(effect)
        self._alarm.set(core.next_deadline())

    def _stamped(self, reply: HeartbeatReply) -> HeartbeatReply:
        """With the wall clock, as the control plane does."""
        wall_s = self._kernel.now + WALL_START_S
        return msgspec.structs.replace(reply, received_s=wall_s, replied_s=wall_s)

    def _perform(self, effect: do.Effect) -> None:
        match effect:
            case do.ProduceItems():
                self._kernel.after(self._items_s, self._produced, effect)
            case do.Reply(message=message):
                self._replies.append(message)
            case do.RecordStep(step=step):
                self.steps.append(step)
            case do.RunEnded(run=run, reason=reason):
                self.ended[run] = reason
            case _:
                pass  # task sources start and stop at once

    def _produced(self, asked: Any) -> None:
        items = make_items(asked.start, asked.count)
        self.feed(ItemsProduced(asked.run, asked.kind, asked.start, items, asked.evaluation))

    def _tick(self) -> None:
        self.feed(Tick())
