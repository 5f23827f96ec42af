"""Where a model's parameters are: whole in one process, or cut over the ranks by FSDP2.

What always holds: names and values do not depend on the number of ranks; a tensor is put together
from its shards, and cut into them, one at a time; every rank calls the same methods in the same
order. ``fully_shard`` cuts each parameter along its first dimension, block by block, so that no
more than a block and what is around the blocks is whole on a device while the model computes.

The gradient of a batch is a sum over micro batches, which are dealt out to the ranks. FSDP2 takes
the mean of the ranks' gradients, so the sum is that times their number. Every forward and backward
pass is a collective operation: ranks that are dealt less do empty work.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cloud_trainer.model_blocks import blocks_of
from cloud_trainer.process_group import ProcessRanks
from cloud_trainer.ranks import Ranks
from transport.errors import ModelError
from transport.runtime.model_folder import torch_type
from transport.weights.digest import state_digest
from transport.weights.folder import read_model_folder

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Spread(Protocol):
    """How a model lies over ``ranks`` processes, of which this is number ``rank``."""

    rank: int
    ranks: int
    device: str
    """Of this process."""
    load_device: str
    """Where a model is loaded, before it is spread."""

    def check_same(self, folder: Path) -> None:
        """Whether every rank reads the same weights: each has a folder of its own host.

        Raises:
            ModelError: they differ; names the ranks.
        """
        ...

    def place(
        self, model: Any, parameters: "Mapping[str, torch.nn.Parameter]"
    ) -> "dict[str, torch.nn.Parameter]":
        """Spread the model; its parameters of the same names afterwards."""
        ...

    def whole(self, values: "torch.Tensor", dtype: str | None = None) -> "torch.Tensor":
        """A parameter, or what belongs to one, as one tensor; if it has to travel, already rounded
        to ``dtype`` (of safetensors)."""
        ...

    def cut(self, whole: "torch.Tensor | None", like: "torch.Tensor") -> "torch.Tensor":
        """The inverse of ``whole``; ``whole`` is rank 0's and lies in host memory."""
        ...

    def share(self, work: Sequence[T], blank: Callable[[T], T]) -> list[T]:
        """What this rank does of ``work``: as many pieces as every other rank, some of them
        ``blank``."""
        ...

    def sum_gradients(self, parameters: "Sequence[torch.nn.Parameter]") -> None:
        """After the backward passes: from the ranks' mean to their sum."""
        ...

    def total(self, facts: Mapping[str, float]) -> dict[str, float]:
        """The sums over all ranks, which have the same names."""
        ...


class OneProcess:
    """Everything is here, on ``device``."""

    rank = 0
    ranks = 1

    def __init__(self, device: str) -> None:
        self.device = self.load_device = device

    def check_same(self, folder: Path) -> None:
        """Nobody else reads it."""

    def place(
        self, model: Any, parameters: "Mapping[str, torch.nn.Parameter]"
    ) -> "dict[str, torch.nn.Parameter]":
        return dict(parameters)

    def whole(self, values: "torch.Tensor", dtype: str | None = None) -> "torch.Tensor":
        return values.detach()

    def cut(self, whole: "torch.Tensor | None", like: "torch.Tensor") -> "torch.Tensor":
        assert whole is not None  # noqa: S101 - we are rank 0
        return whole.to(self.device)

    def share(self, work: Sequence[T], blank: Callable[[T], T]) -> list[T]:
        return list(work)

    def sum_gradients(self, parameters: "Sequence[torch.nn.Parameter]") -> None:
        """They are the sum."""

    def total(self, facts: Mapping[str, float]) -> dict[str, float]:
        return dict(facts)


class ShardedOverRanks:
    """FSDP2 over all ranks of the process group."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self.rank = ranks.rank
        self.ranks = ranks.world_size
        # A whole model need not fit on a device: fully_shard moves block by block.
        self.load_device = "cpu"
        self.device = ranks.device

    def check_same(self, folder: Path) -> None:
        import torch
        from torch import distributed

        own = bytes.fromhex(state_digest(read_model_folder(folder, mapped=True)))
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        distributed.all_gather(found, mine)
        others = [rank for rank, digest in enumerate(found) if not digest.equal(found[0])]
        if others:
            raise ModelError(
                f"{folder}: the weights that ranks {others} find there are not those of rank 0; "
                "copy the same model folder to every host"
            )

    def place(
        self, model: Any, parameters: "Mapping[str, torch.nn.Parameter]"
    ) -> "dict[str, torch.nn.Parameter]":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.partition(":")[0], (self.ranks,))
        own_names = {id(parameter): name for name, parameter in model.named_parameters()}
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to(self.device)  # buffers; the parameters are there already
        sharded = dict(model.named_parameters())  # other objects than before
        return {name: sharded[own_names[id(old)]] for name, old in parameters.items()}

    def whole(self, values: "torch.Tensor", dtype: str | None = None) -> "torch.Tensor":
        sharded: Any = values.detach()
        if dtype is not None:
            sharded = sharded.to(torch_type(dtype))
        gathered: torch.Tensor = sharded.full_tensor()
        return gathered

    def cut(self, whole: "torch.Tensor | None", like: "torch.Tensor") -> "torch.Tensor":
        import torch
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = like
        if whole is None:  # what rank 0 has is what counts; here only the shape does
            whole = torch.empty(like.shape, dtype=like.dtype)
        return distribute_tensor(whole.to(self.device), sharded.device_mesh, sharded.placements)

    def share(self, work: Sequence[T], blank: Callable[[T], T]) -> list[T]:
        # Dealt like cards: pieces are sorted by length, so the ranks compute equally long ones at
        # the same time.
        mine = list(work[self.rank :: self.ranks])
        rounds = -(-len(work) // self.ranks)
        return mine + [blank(piece) for piece in work[: rounds - len(mine)]]

    def sum_gradients(self, parameters: "Sequence[torch.nn.Parameter]") -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.ranks)

    def total(self, facts: Mapping[str, float]) -> dict[str, float]:
        import torch
        from torch import distributed

        names = sorted(facts)
        sums = torch.tensor([facts[name] for name in names], dtype=torch.float64)
        distributed.all_reduce(sums)
        return {name: float(value) for name, value in zip(names, sums.tolist(), strict=True)}


def spread_over(ranks: Ranks, device: str) -> Spread:
    """The way in which a model lies over ``ranks``; ``device`` is that of the only one."""
    return ShardedOverRanks(ranks) if isinstance(ranks, ProcessRanks) else OneProcess(device)
