"""Weights as reinforcement learning moves them, without a model: what the delta bench encodes.

Two generators, both in the published type BF16:

* ``simulate``: float32 masters under Adam (arXiv:1412.6980) fed with noise plus a small persistent
  component, rounded to BF16 at chosen steps. Ten equal tensors: an embedding, of which a fifth of
  the rows gets a gradient in a step, and nine matrices whose standard deviations run
  geometrically from 0.010 to 0.040. Every learning rate sees the same gradients.
* ``one_step``: masters that lie anywhere between two BF16 values move once, by as much as makes a
  wanted share of the cells change. As in the simulation a cell changes with probability
  |update| / ulp; it is cheap enough for a billion cells. It resembles late training: in the
  simulation, as in a run that starts from a released model, the masters of large weights have not
  yet left the middle between two roundings, so fewer of them change.

What always holds: equal arguments give equal bits; memory is the versions asked for plus some
megabytes, as blocks of cells go through all steps one after the other. Gradient noise is drawn
from one pool of normal values at an offset that is random by block and step.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from transport.weights.tensors import TensorBytes

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]

ROW_CELLS = 1024
BLOCK_CELLS = 32 * ROW_CELLS
ACTIVE_ROWS = 0.2
PERSISTENT = 0.1  # standard deviation of the persistent gradient, in units of the noise
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
_POOL_CELLS = 1 << 21

Versions = dict[int, dict[str, TensorBytes]]
"""Tensors by step; step 0 is the model before training, on the BF16 grid."""


def to_bf16(values: Floats) -> Bits:
    """Round float32 to the bit patterns of BF16, half to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    """The float32 values of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class _Kind:
    name: str
    sigma: float
    active_rows: float


def _kinds() -> list[_Kind]:
    kinds = [_Kind("model.embed_tokens.weight", 0.015, ACTIVE_ROWS)]
    for number, sigma in enumerate(np.geomspace(0.010, 0.040, 9)):
        kinds.append(_Kind(f"model.layers.{number}.mlp.down_proj.weight", float(sigma), 1.0))
    return kinds


def tensor_bytes(bits: Bits) -> TensorBytes:
    """BF16 cells as a tensor of rows of ``ROW_CELLS``, without copying them."""
    data = bits.view(np.uint8).data
    return TensorBytes("BF16", (bits.size // ROW_CELLS, ROW_CELLS), data)


def simulate(
    cells: int, rates: Sequence[float], steps: Sequence[int], *, seed: int = 1, threads: int = 2
) -> dict[float, Versions]:
    """Versions at ``steps`` of a model of about ``cells`` cells, for each learning rate."""
    kinds = _kinds()
    rows = max(1, round(cells / len(kinds) / ROW_CELLS))
    pool = np.random.default_rng(seed).standard_normal(_POOL_CELLS + BLOCK_CELLS, np.float32)
    # How strong the gradient is varies from step to step, for all cells alike.
    scales = np.exp(0.3 * np.random.default_rng([seed, 1]).standard_normal(max(steps) + 1))
    made: dict[float, Versions] = {rate: {step: {} for step in steps} for rate in rates}
    with ThreadPoolExecutor(threads) as workers:
        for number, kind in enumerate(kinds):
            shots = {
                (rate, step): np.empty(rows * ROW_CELLS, np.uint16)
                for rate in rates
                for step in steps
            }
            starts = range(0, rows * ROW_CELLS, BLOCK_CELLS)
            done = [
                workers.submit(_block, kind, start, shots, pool, scales, [seed, 2, number, start])
                for start in starts
            ]
            for future in done:
                future.result()
            for (rate, step), bits in shots.items():
                made[rate][step][kind.name] = tensor_bytes(bits)
    return made


def _block(
    kind: _Kind,
    start: int,
    shots: dict[tuple[float, int], Bits],
    pool: Floats,
    scales: npt.NDArray[np.float64],
    seed: list[int],
) -> None:
    """Take one block of one tensor through all steps and write it into ``shots``."""
    rng = np.random.default_rng(seed)
    total = next(iter(shots.values())).size
    size = min(BLOCK_CELLS, total - start)
    first = from_bf16(to_bf16(rng.standard_normal(size, np.float32) * np.float32(kind.sigma)))
    persistent = rng.standard_normal(size, np.float32) * np.float32(PERSISTENT)
    rates = sorted({rate for rate, _ in shots})
    masters = {rate: first.copy() for rate in rates}
    mean, square = np.zeros(size, np.float32), np.zeros(size, np.float32)
    gradient, scratch = np.empty(size, np.float32), np.empty(size, np.float32)
    last = max(step for _, step in shots)
    for step in range(last + 1):
        if step:
            offset = int(rng.integers(_POOL_CELLS))
            np.add(pool[offset : offset + size], persistent, out=gradient)
            gradient *= np.float32(scales[step])
            if kind.active_rows < 1:
                rows = rng.random(size // ROW_CELLS) < kind.active_rows
                gradient.reshape(-1, ROW_CELLS)[~rows] = 0
            mean *= np.float32(BETA1)
            np.multiply(gradient, np.float32(1 - BETA1), out=scratch)
            mean += scratch
            square *= np.float32(BETA2)
            np.multiply(gradient, gradient, out=gradient)
            gradient *= np.float32(1 - BETA2)
            square += gradient
            np.multiply(square, np.float32(1 / (1 - BETA2**step)), out=scratch)
            np.sqrt(scratch, out=scratch)
            scratch += np.float32(EPSILON)
            np.divide(mean, scratch, out=scratch)
            correction = 1 / (1 - BETA1**step)
            for rate in rates:
                np.multiply(scratch, np.float32(rate * correction), out=gradient)
                masters[rate] -= gradient
        for rate in rates:
            shot = shots.get((rate, step))
            if shot is not None:
                shot[start : start + size] = to_bf16(masters[rate])


def one_step(
    cells: int, share: float, *, seed: int = 1, tensors: int = 4, folder: Path | None = None
) -> tuple[dict[str, TensorBytes], dict[str, TensorBytes]]:
    """Old and new weights of which ``share`` (within some per cent of it) differ.

    ``tensors`` equal ones of standard deviation 0.02, whole rows, together about ``cells`` cells;
    in memory, or as mapped files in ``folder``.
    """
    rows = max(1, round(cells / tensors / ROW_CELLS))
    update = update_for(share)
    old: dict[str, TensorBytes] = {}
    new: dict[str, TensorBytes] = {}

    def fill(before: Bits, after: Bits, number: int, start: int) -> None:
        part = slice(start, start + BLOCK_CELLS)
        rng = np.random.default_rng([seed, number, start])
        before[part], after[part] = _moved(before[part].size, update, rng)

    with ThreadPoolExecutor(2) as workers:
        for number in range(tensors):
            name = f"model.layers.{number:02}.weight"
            before, after = (
                _bits(rows * ROW_CELLS, None if folder is None else folder / f"{side}.{name}")
                for side in ("old", "new")
            )
            done = [
                workers.submit(fill, before, after, number, start)
                for start in range(0, before.size, BLOCK_CELLS)
            ]
            for future in done:
                future.result()
            old[name], new[name] = tensor_bytes(before), tensor_bytes(after)
    return old, new


def _bits(cells: int, path: Path | None) -> Bits:
    if path is None:
        return np.empty(cells, np.uint16)
    return np.memmap(path, np.uint16, "w+", shape=(cells,))


def _moved(size: int, update: float, rng: np.random.Generator) -> tuple[Bits, Bits]:
    masters = rng.standard_normal(size, np.float32) * np.float32(0.02)
    moves = rng.standard_normal(size, np.float32) * np.float32(update)
    return to_bf16(masters), to_bf16(masters + moves)


def update_for(share: float) -> float:
    """Standard deviation of the update that changes ``share`` of the cells of ``one_step``."""
    low, high = 1e-9, 1e-1
    for _ in range(30):
        middle = (low * high) ** 0.5
        before, after = _moved(1 << 18, middle, np.random.default_rng(0))
        if np.count_nonzero(before != after) < share * before.size:
            low = middle
        else:
            high = middle
    return high
