"""The seam for trainers of several processes (torchrun).

Rank 0 holds the core, the links and the folder. Everything that touches the model goes through
``Trainer``, so that is what the ranks share: ``LeadTrainer`` announces each call to all ranks and
then makes it itself; the others sit in ``follow`` and make the same calls in the same order, which
is what collective operations need. Results are those of rank 0.

    rank 0     LeadTrainer.step(groups) -> ranks.send(StepOrder(groups)) -> trainer.step(groups)
    rank 1..   follow: ranks.receive() -> trainer.step(groups)            (result dropped)

What always holds: every rank sees every order, in one order; ``follow`` ends with ``CloseOrder``
and with nothing else; an error on any rank ends its process, and torchrun then ends the others.
Arrays of a checkpoint are no part of an order: ranks other than 0 are told to restore and get
their share of each tensor while they do.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cloud_trainer.trainer import Arrays, Trainer, TrainingSequence
from transport.messages import GroupDrift
from transport.runs import PolicySpec
from transport.weights.tensors import TensorBytes


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One call that all ranks make."""


class MakeOrder(Order, frozen=True, kw_only=True):
    """A new trainer, which takes the place of the last one."""

    spec: PolicySpec


class LoadOrder(Order, frozen=True, kw_only=True):
    folder: str


class RestoreOrder(Order, frozen=True, kw_only=True):
    meta: dict[str, Any]


class StepOrder(Order, frozen=True, kw_only=True):
    groups: tuple[tuple[TrainingSequence, ...], ...]


class PublishOrder(Order, frozen=True, kw_only=True):
    pass


class StateOrder(Order, frozen=True, kw_only=True):
    pass


class IdleOrder(Order, frozen=True, kw_only=True):
    """Nothing to do, but rank 0 is there."""


class CloseOrder(Order, frozen=True, kw_only=True):
    pass


AnyOrder = (
    MakeOrder
    | LoadOrder
    | RestoreOrder
    | StepOrder
    | PublishOrder
    | StateOrder
    | IdleOrder
    | CloseOrder
)


class Ranks(Protocol):
    """How orders get from rank 0 to the others."""

    rank: int
    world_size: int

    def turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around one order and what all ranks do for it, on every rank; ``what`` names it."""
        ...

    def send(self, order: AnyOrder) -> None:
        """On rank 0: give ``order`` to every other rank, in the order of calling."""
        ...

    def receive(self) -> AnyOrder:
        """On the others: wait for the next order."""
        ...


class SingleRank:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def turn(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing to keep in step with."""
        return contextlib.nullcontext()

    def send(self, order: AnyOrder) -> None:
        """Nobody else to tell."""

    def receive(self) -> AnyOrder:
        """Nobody gives orders to rank 0; it is told to end."""
        return CloseOrder()


def follow(ranks: Ranks, make: Callable[[PolicySpec], Trainer]) -> None:
    """Make the calls that rank 0 makes, on trainers of our own, until it closes."""
    trainer: Trainer | None = None
    while True:
        order = ranks.receive()
        if isinstance(order, CloseOrder):
            return
        with ranks.turn(type(order).__name__):
            if isinstance(order, MakeOrder):
                trainer = make(order.spec)
            elif trainer is not None:
                _obey(order, trainer)


def _obey(order: AnyOrder, trainer: Trainer) -> None:
    match order:
        case LoadOrder(folder=folder):
            trainer.load(Path(folder))
        case RestoreOrder(meta=meta):
            trainer.load_state_dict({}, meta)
        case StepOrder(groups=groups):
            trainer.step(groups)
        case PublishOrder():
            trainer.published_state()
        case StateOrder():
            trainer.state_dict()
        case _:
            pass


class LeadTrainer:
    """``Trainer`` on rank 0: every call is made on all ranks, which make theirs of ``spec``."""

    def __init__(self, trainer: Trainer, ranks: Ranks, spec: PolicySpec) -> None:
        self._trainer = trainer
        self._ranks = ranks
        with ranks.turn("make"):
            ranks.send(MakeOrder(spec=spec))

    @property
    def step_count(self) -> int:
        return self._trainer.step_count

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._trainer.step_count = value

    def load(self, folder: Path) -> None:
        with self._ranks.turn("load"):
            self._ranks.send(LoadOrder(folder=str(folder)))
            self._trainer.load(folder)

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        whole = tuple(tuple(group) for group in groups)
        with self._ranks.turn("step"):
            self._ranks.send(StepOrder(groups=whole))
            return self._trainer.step(whole)

    def drifts(self) -> tuple[GroupDrift, ...]:
        return self._trainer.drifts()

    def moved(self) -> float | None:
        return self._trainer.moved()

    def published_state(self) -> dict[str, TensorBytes]:
        with self._ranks.turn("publish"):
            self._ranks.send(PublishOrder())
            return self._trainer.published_state()

    def artefacts(self) -> dict[str, bytes]:
        return self._trainer.artefacts()  # nothing to gather

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        with self._ranks.turn("save"):
            self._ranks.send(StateOrder())
            return self._trainer.state_dict()

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        with self._ranks.turn("restore"):
            self._ranks.send(RestoreOrder(meta=meta))
            self._trainer.load_state_dict(arrays, meta)

    def export(self, folder: Path) -> None:
        # Files are rank 0's; the others take part in gathering what goes into them.
        with self._ranks.turn("export"):
            self._ranks.send(PublishOrder())
            self._trainer.export(folder)
