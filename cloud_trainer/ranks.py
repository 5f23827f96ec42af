"""The seam for trainers of several processes (torchrun).

Rank 0 holds the core, the links and the folder. Everything that touches the model goes through
``Trainer``, so that is what the ranks share: ``LeadTrainer`` announces each call to all ranks and
then makes it itself; the others sit in ``follow`` and make the same calls in the same order, which
is what collective operations need. Results are those of rank 0.

    rank 0     LeadTrainer.step(groups) -> ranks.send(StepOrder(groups)) -> trainer.step(groups)
    rank 1..   follow: ranks.receive() -> trainer.step(groups)            (result dropped)

What always holds: every rank sees every order, in one order; ``follow`` ends with ``CloseOrder``
and with nothing else; an error on any rank ends its process, and torchrun then ends the others.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cloud_trainer.trainer import Arrays, Trainer, TrainingSequence
from transport.errors import ConfigError
from transport.weights.tensors import TensorBytes


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One call that all ranks make."""


class LoadOrder(Order, frozen=True, kw_only=True):
    folder: str


class RestoreOrder(Order, frozen=True, kw_only=True):
    arrays: Arrays
    meta: dict[str, Any]


class StepOrder(Order, frozen=True, kw_only=True):
    groups: tuple[tuple[TrainingSequence, ...], ...]


class PublishOrder(Order, frozen=True, kw_only=True):
    pass


class StateOrder(Order, frozen=True, kw_only=True):
    pass


class CloseOrder(Order, frozen=True, kw_only=True):
    pass


class Ranks(Protocol):
    """How orders get from rank 0 to the others."""

    rank: int
    world_size: int

    def send(self, order: Order) -> None:
        """On rank 0: give ``order`` to every other rank, in the order of calling."""
        ...

    def receive(self) -> Order:
        """On the others: wait for the next order."""
        ...


class SingleRank:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def send(self, order: Order) -> None:
        """Nobody else to tell."""

    def receive(self) -> Order:
        """Nobody gives orders to rank 0; it is told to end."""
        return CloseOrder()


def ranks_from(environment: Mapping[str, str]) -> Ranks:
    """The ranks that this process belongs to, as torchrun describes them in the environment.

    Raises:
        ConfigError: more than one, which needs a trainer that shards its model.
    """
    world_size = environment.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE is {world_size}: a trainer of several ranks needs FSDP2 support, which "
            "this version does not have; start one process without torchrun"
        )
    return SingleRank()


def follow(ranks: Ranks, trainer: Trainer) -> None:
    """Make the calls that rank 0 makes, until it closes."""
    while True:
        match ranks.receive():
            case LoadOrder(folder=folder):
                trainer.load(Path(folder))
            case RestoreOrder(arrays=arrays, meta=meta):
                trainer.load_state_dict(arrays, meta)
            case StepOrder(groups=groups):
                trainer.step(groups)
            case PublishOrder():
                trainer.published_state()
            case StateOrder():
                trainer.state_dict()
            case _:
                return


class LeadTrainer:
    """``Trainer`` on rank 0: every call is made on all ranks."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks

    @property
    def step_count(self) -> int:
        return self._trainer.step_count

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._trainer.step_count = value

    def load(self, folder: Path) -> None:
        self._ranks.send(LoadOrder(folder=str(folder)))
        self._trainer.load(folder)

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        whole = tuple(tuple(group) for group in groups)
        self._ranks.send(StepOrder(groups=whole))
        return self._trainer.step(whole)

    def published_state(self) -> dict[str, TensorBytes]:
        self._ranks.send(PublishOrder())
        return self._trainer.published_state()

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        self._ranks.send(StateOrder())
        return self._trainer.state_dict()

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        self._ranks.send(RestoreOrder(arrays=arrays, meta=meta))
        self._trainer.load_state_dict(arrays, meta)

    def export(self, folder: Path) -> None:
        # Files are rank 0's; the others take part in gathering what goes into them.
        self._ranks.send(PublishOrder())
        self._trainer.export(folder)

    def close(self) -> None:
        """The other ranks end."""
        self._ranks.send(CloseOrder())
