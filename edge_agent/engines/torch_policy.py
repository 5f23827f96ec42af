"""A policy that an engine hosts: model, tokenizer and the weights in use.

What always holds: what is staged fits in name, position and type and is finite, lies on the device
in the type that is computed with, and cannot fail any more: so a failed change has changed nothing.

Two ways to swap. By reference: changed tensors are copied, written and then exchanged between two
steps; the pause is the same for every model (well below a millisecond), and meanwhile the changed
tensors are in memory twice. In place: changed cells are written between two steps (a tensor that is
replaced whole is exchanged); beyond the model this takes memory for the changed cells only, a
position of 8 bytes and a value each, and the pause is the time of these writes. A CPU, where
scattered writes are slow and memory is not, goes by reference, an accelerator in place.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_agent.engine import GenerationRequest, Positions, inside
from edge_agent.engines.chat_tokenizer import ChatTokenizer
from edge_agent.engines.request_check import request_fault
from edge_agent.engines.torch_bases import Base
from edge_agent.engines.torch_decoding import Forward, Row, end_tokens
from transport.errors import GenerationFailed, IntegrityError, ModelError, WeightApplyFailed
from transport.runtime.adapted_model import adapt
from transport.runtime.model_folder import (
    ComputeType,
    ModelWeights,
    load_model,
    load_tokenizer,
    published_tensor,
    torch_tensor,
    vocabulary_of,
)
from transport.weights.patch import CellRun, Patch, TensorChange, check_change, patched
from transport.weights.tensors import ITEM_BYTES, Cells, TensorBytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """New values of one tensor, to be written from ``start`` on or at ``positions``."""

    tensor: str
    start: int
    positions: "torch.Tensor | None"
    values: "torch.Tensor"

    def onto(self, flat: "torch.Tensor") -> None:
        """Write into a tensor's cells."""
        if self.positions is None:
            flat[self.start : self.start + self.values.numel()] = self.values
        else:
            flat[self.positions] = self.values


class HostedPolicy:
    """A loaded policy: a model, or an adapter on ``base``, and then the weights are the adapter's.
    Blocks while it loads.

    Raises:
        ModelError: the folder does not load; names the file and what is wrong.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        version: int,
        *,
        device: str,
        compute: ComputeType,
        in_place: bool,
        base: Base | None = None,
    ) -> None:
        if base is None:
            loaded = load_model(folder, device=device, compute=compute)
        else:
            loaded = adapt(base.loaded, folder, compute=compute)
            folder = base.folder
        self._base = base  # others on the same model find it as long as we have it
        self.name = name
        self._in_place = in_place
        self._vocabulary = vocabulary_of(loaded.model)
        tokenizer = load_tokenizer(folder, vocabulary=self._vocabulary)
        self.tokenizer = ChatTokenizer(name, tokenizer)
        try:
            self.forward = Forward(loaded.model)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
        self._stop_tokens = end_tokens(loaded.model, tokenizer)
        self._context_tokens = getattr(loaded.model.config, "max_position_embeddings", math.inf)
        self._weights: ModelWeights = loaded.weights
        for parameter in self._weights.parameters.values():
            parameter.data = parameter.data.contiguous()  # cells are written through flat views
        self.version = version

    def row(self, request: GenerationRequest, sibling: int) -> Row:
        """One sibling of a request, with what ends it."""
        stop = self._stop_tokens | frozenset(request.sampling.stop_token_ids)
        return Row(request, sibling, stop, self.tokenizer.ends_in)

    def check(self, request: GenerationRequest) -> None:
        """Raises GenerationFailed for what would fail, or spoil others in the batch, later."""
        problem = request_fault(request, self._vocabulary, self._context_tokens)
        if problem:
            raise GenerationFailed(f"{request.request_id}: {problem}")

    def read_weights(self) -> Iterator[tuple[str, TensorBytes]]:
        """All tensors in canonical order, in their published types; copies."""
        return self._weights.published()

    def read_cells(self, name: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``."""
        import torch

        fixed, parameter = self._weights.fixed.get(name), self._weights.parameters.get(name)
        if fixed is not None and inside(positions, fixed.cells().size):
            return fixed.cells()[positions]
        if parameter is None or not inside(positions, parameter.numel()):
            raise WeightApplyFailed(f"{self.name}: no such cells of a tensor {name!r}")
        chosen = parameter.data.view(-1)[torch.from_numpy(positions.copy()).to(parameter.device)]
        return published_tensor(chosen, self._weights.dtypes[name]).cells()

    def stage(self, version: int, patch: Patch) -> list[StagedWrite]:
        """What to write, checked, on the device and in the type that is computed with.

        Raises:
            WeightApplyFailed: names the first tensor that does not fit.
        """
        where = f"{self.name} version {version}"
        staged: list[StagedWrite] = []
        for name, changes in patch.items():
            try:
                if name in self._weights.fixed:
                    if patched(self._weights.fixed[name], changes) != self._weights.fixed[name]:
                        raise WeightApplyFailed(f"{where}: tensor {name!r} is no parameter")
                elif name not in self._weights.parameters:
                    raise WeightApplyFailed(f"{where}: the model has no tensor {name!r} to change")
                else:
                    writes = [self._staged(name, change) for change in changes]
                    staged += writes if self._in_place else [self._written(name, writes)]
            except (RuntimeError, IntegrityError, ValueError) as error:  # or out of memory
                raise WeightApplyFailed(f"{where}: tensor {name!r}: {error}") from error
        return staged

    def _staged(self, name: str, change: TensorChange) -> StagedWrite:
        import torch

        dtype, parameter = self._weights.dtypes[name], self._weights.parameters[name].data
        # One cell that looks like all of the tensor's: enough to check against.
        one = np.zeros(1, f"<u{ITEM_BYTES[dtype]}")
        check_change(np.broadcast_to(one, parameter.numel()), change)
        start, positions = 0, None
        if isinstance(change, CellRun):
            start = change.start
        else:
            positions = torch.from_numpy(change.positions.astype(np.int64)).to(parameter.device)
        values = np.ascontiguousarray(change.values)
        raw = TensorBytes(dtype, (values.size,), values.view(np.uint8).data)
        staged = torch_tensor(raw, dtype=parameter.dtype, device=parameter.device)
        if not bool(torch.isfinite(staged).all()):
            raise ValueError("has values that are not finite")
        return StagedWrite(name, start, positions, staged)

    def _written(self, name: str, writes: Sequence[StagedWrite]) -> StagedWrite:
        """The whole tensor as the writes make it, to be exchanged."""
        old = self._weights.parameters[name].data
        if (
            len(writes) == 1
            and writes[0].positions is None
            and (writes[0].values.numel() == old.numel())
        ):
            return writes[0]
        flat = old.view(-1).clone()
        for write in writes:
            write.onto(flat)
        return StagedWrite(name, 0, None, flat)

    def swap(self, version: int, writes: Sequence[StagedWrite]) -> "list[torch.Tensor]":
        """Put staged values in use; between two forward passes only. Returns the tensors that are
        in use no more: freeing large ones takes longer than the swap, so that comes after it."""
        replaced: list[torch.Tensor] = []
        for write in writes:
            parameter = self._weights.parameters[write.tensor]
            if write.positions is None and write.values.numel() == parameter.numel():
                replaced.append(parameter.data)
                parameter.data = write.values.view(parameter.shape)
            else:
                write.onto(parameter.data.view(-1))
        self.version = version
        return replaced
