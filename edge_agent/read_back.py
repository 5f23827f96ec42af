"""Which cells of the engine are compared with the copy.

What always holds: a sample is small whatever the model; large tensors are drawn more often than
small ones, and cells that a swap just wrote are among those looked at. Randomness comes in from
outside.
"""

from collections.abc import Mapping
from random import Random

import numpy as np

from edge_agent.engine import Positions
from transport.weights.patch import CellRun, Patch
from transport.weights.tensors import TensorBytes

TENSORS = 32
CELLS = 64

Sample = dict[str, Positions]
"""Cells by tensor, at most ``TENSORS`` of ``CELLS`` each."""


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
