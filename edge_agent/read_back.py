"""The engine's weights against the copy: all of them, or some cells.

What always holds: a sample is small whatever the model; large tensors are drawn more often than
small ones, and cells that a swap just wrote are among those looked at. Randomness comes in from
outside.
"""

from collections.abc import Iterable, Mapping
from random import Random
from typing import ClassVar

import numpy as np

from edge_agent.engine import Engine, Positions
from transport.errors import EngineError
from transport.weights.digest import StateDigest, tensor_kind, tensor_sum
from transport.weights.patch import CellRun, Patch
from transport.weights.tensors import TensorBytes

TENSORS = 32
CELLS = 64

Sample = dict[str, Positions]
"""Cells by tensor, at most ``TENSORS`` of ``CELLS`` each."""


class EngineDrifted(EngineError):
    """The engine holds other weights than it was given."""

    code: ClassVar[str] = "engine.weights"


def engine_digest(engine: Engine, policy: str) -> str:
    """State digest of what the engine has in use. Blocks.

    Raises:
        WeightsHidden: the engine does not show it.
    """
    sums: dict[str, bytes] = {}
    kinds: dict[str, bytes] = {}
    for name, tensor in engine.read_weights(policy):
        sums[name] = tensor_sum(name, tensor)
        kinds[name] = tensor_kind(tensor.dtype, tensor.shape)
    return StateDigest.from_sums(sums, kinds).hex


def compare_cells(
    engine: Engine, policy: str, tensors: Mapping[str, TensorBytes], samples: Iterable[Sample]
) -> None:
    """Compare the engine's cells with those of the copy's ``tensors``. Blocks.

    Raises:
        EngineDrifted: one is another; names the tensor.
        WeightsHidden: the engine does not show them.
    """
    for name, positions in (each for sample in samples for each in sample.items()):
        read = engine.read_cells(policy, name, positions)
        wrong = np.flatnonzero(read != tensors[name].cells()[positions])
        if wrong.size:
            raise EngineDrifted(
                f"{policy} version {engine.version(policy)}: {wrong.size} of {positions.size} cells"
                f" of {name!r} in the engine are not those of the copy, the first is cell"
                f" {positions[wrong[0]]}"
            )


def drawn_cells(tensors: Mapping[str, TensorBytes], rng: Random) -> Sample:
    """Cells of any tensors."""
    sizes = {name: tensor.cells().size for name, tensor in tensors.items()}
    return {name: _positions(sizes[name], rng) for name in _drawn(sizes, rng)}


def recent_cells(patch: Patch, rng: Random) -> Sample:
    """Cells that a patch writes."""
    sizes = {name: sum(c.values.size for c in changes) for name, changes in patch.items()}
    sample: Sample = {}
    for name in _drawn(sizes, rng):
        change = rng.choice([change for change in patch[name] if change.values.size])
        chosen = _positions(change.values.size, rng)
        if isinstance(change, CellRun):
            sample[name] = chosen + change.start
        else:
            sample[name] = change.positions[chosen].astype(np.int64)
    return sample


def _drawn(sizes: Mapping[str, int], rng: Random) -> set[str]:
    """Names of tensors that have cells, the larger the likelier."""
    names = [name for name, size in sizes.items() if size]
    if len(names) <= TENSORS:
        return set(names)
    return set(rng.choices(names, [sizes[name] for name in names], k=TENSORS))


def _positions(cells: int, rng: Random) -> Positions:
    return np.array([rng.randrange(cells) for _ in range(min(cells, CELLS))], np.int64)
