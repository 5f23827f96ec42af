"""The ranks of a trainer: one process group, orders as MessagePack bytes.

What always holds:

1. What travels between ranks is tensors: orders are MessagePack in byte tensors, never a pickle.
2. Only one thing is going on in the group: an order and what all ranks do for it is one turn, and
   turns do not overlap, whichever thread takes them.
3. Nothing waits for ever: a collective operation, and so the wait for the next order, ends after
   ``timeout_s``. Between orders rank 0 says that it is still there, so only a lost or hanging rank
   lets that time pass. A rank that ends closes its connections, which the others notice at once.

On GPUs, tensors on the device go through NCCL, those in host memory (orders) through gloo.
"""

import contextlib
import datetime
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cloud_trainer.ranks import AnyOrder, CloseOrder, IdleOrder, Ranks, SingleRank
from transport.errors import ConfigError, FarflowError, SizeLimitExceeded
from transport.runtime.model_folder import require_torch

if TYPE_CHECKING:
    import torch

STORE = "FARFLOW_RANK_STORE"
"""Names the file through which ranks that we started meet (``cloud_trainer.launch``)."""

MAX_ORDER_BYTES = 1 << 31
"""An order holds the tokens of a batch, about 25 bytes each."""

_MESSAGE_BYTES = 1 << 28
"""Of one broadcast; longer orders go in pieces."""

IDLES_PER_TIMEOUT = 4
"""How often rank 0 says that it is there within the time after which the others give up."""

_DECODER = msgspec.msgpack.Decoder(AnyOrder)


class RankLost(FarflowError):
    """Another rank ended, hangs, or did not keep in step."""

    code = "trainer.rank_lost"


class ProcessRanks:
    """This process among ``world_size`` of them; ``device`` is its own."""

    def __init__(
        self, *, rank: int, world_size: int, device: str, timeout_s: float, store: str = ""
    ) -> None:
        """Joins the group that meets through the file ``store``, or without one that which the
        environment describes (``MASTER_ADDR``, ``MASTER_PORT``); blocks until all ranks are there.

        Raises:
            RankLost: they did not meet within ``timeout_s``.
        """
        import torch
        from torch import distributed

        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.in_step = True
        """No turn was left by an error: the others wait for an order."""
        self._turn = threading.Lock()
        try:
            if device.startswith("cuda"):
                torch.cuda.set_device(device)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
                rank=rank,
                world_size=world_size,
                store=_file_store(store, world_size) if store else None,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"rank {rank}: the {world_size} ranks did not meet within {timeout_s:g} s: "
                f"{_short(error)}"
            ) from error

    @contextlib.contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """See ``Ranks.turn``; raises RankLost when a collective operation fails."""
        with self._turn, self._in_turn(what):
            yield

    @contextlib.contextmanager
    def _in_turn(self, what: str) -> Iterator[None]:
        """Whoever holds the turn."""
        import torch

        try:
            self.in_step = False
            if self.device.startswith("cuda"):
                torch.cuda.set_device(self.device)  # it belongs to the thread
            yield
            self.in_step = True
        except RuntimeError as error:  # what torch raises for a lost peer and for a timeout
            raise RankLost(
                f"rank {self.rank} of {self.world_size} failed in {what!r}: {_short(error)}; "
                "the first rank that failed says why"
            ) from error

    def send(self, order: AnyOrder) -> None:
        """See ``Ranks.send``.

        Raises:
            SizeLimitExceeded: the order is larger than ``MAX_ORDER_BYTES``.
        """
        import torch

        data = bytearray(msgspec.msgpack.encode(order))
        if len(data) > MAX_ORDER_BYTES:
            raise SizeLimitExceeded(
                f"an order to the ranks of {len(data)} bytes, at most {MAX_ORDER_BYTES}; make "
                "batch_groups smaller"
            )
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(torch.frombuffer(data, dtype=torch.uint8))

    def receive(self) -> AnyOrder:
        """See ``Ranks.receive``.

        Raises:
            RankLost: rank 0 is gone or says nothing for ``timeout_s``.
        """
        import torch

        try:
            size = torch.zeros(1, dtype=torch.int64)
            self._broadcast(size)
            data = torch.empty(int(size.item()), dtype=torch.uint8)
            self._broadcast(data)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank}: no order from rank 0 within {self.timeout_s:g} s, or it is "
                f"gone: {_short(error)}"
            ) from error
        order: AnyOrder = _DECODER.decode(data.numpy().data)
        return order

    def idle(self) -> None:
        """On rank 0, now and then: say that we are there, unless a turn is being taken, which
        says as much."""
        if self._turn.acquire(blocking=False):
            self._turn.release()
            with self.turn("idle"):
                self.send(IdleOrder())

    def close(self, *, tell: bool) -> None:
        """Leave the group. With ``tell`` on rank 0 the others end as well, once no turn is taken;
        not when one was left by an error: they notice that we are gone, and we just end."""
        from torch import distributed

        if tell:
            with self._turn:
                if not self.in_step:
                    return
                with self._in_turn("close"):
                    self.send(CloseOrder())
        distributed.destroy_process_group()

    def _broadcast(self, tensor: "torch.Tensor") -> None:
        from torch import distributed

        for at in range(0, len(tensor), _MESSAGE_BYTES):
            distributed.broadcast(tensor[at : at + _MESSAGE_BYTES], 0)


def ranks_from(
    environment: Mapping[str, str], *, device: str = "cpu", timeout_s: float = 600.0
) -> Ranks:
    """The ranks that this process belongs to, as torchrun describes them in the environment.

    ``device`` is the trainer's: with several ranks ``cuda`` stands for one GPU each.

    Raises:
        ConfigError: the environment or ``device`` does not fit several ranks, or torch is missing.
        RankLost: the ranks did not meet in time.
    """
    world_size = _number(environment, "WORLD_SIZE", 1)
    if world_size == 1:
        return SingleRank()
    require_torch(f"WORLD_SIZE = {world_size}")
    rank = _number(environment, "RANK", -1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK: {rank} is none of {world_size} ranks; start us with torchrun")
    kind, _, index = device.partition(":")
    if index:
        raise ConfigError(
            f"trainer.device: {device!r} is one device for {world_size} ranks; write {kind!r}, "
            "which gives each rank its own"
        )
    own = f"cuda:{_number(environment, 'LOCAL_RANK', rank)}" if kind == "cuda" else device
    return ProcessRanks(
        rank=rank,
        world_size=world_size,
        device=own,
        timeout_s=timeout_s,
        store=environment.get(STORE, ""),
    )


def _file_store(path: str, world_size: int) -> Any:
    from torch import distributed

    return getattr(distributed, "FileStore")(path, world_size)  # noqa: B009 - torch exports it so


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environment.get(name, default))
    except ValueError as error:
        raise ConfigError(f"{name}: {environment[name]!r} is no number") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
