"""How few bytes a lossless delta can have: the bound that the delta bench measures against.

Both ends hold the old weights. Given a context ``c`` that both can compute from them, positions
and steps of independent changes cost at least

    sum over c of  n_c * H_b(s_c) + k_c * H(step | c)   bits

where ``n_c`` cells have the context, ``k_c = s_c * n_c`` of them changed, ``H_b`` is the entropy of
a yes or no, and a step is the difference of the bit patterns as integers. *Order 0* knows no
context; the *exponent* bound takes the old value's exponent, on which the chance of a change
depends, as rounding hides what is below half a unit in the last place.

What always holds: counts are exact (nothing is sampled or fitted), and adding tensors one by one
gives the same as adding them at once.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transport.weights.tensors import Cells

_EXPONENTS = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F32": (23, 0xFF)}
"""By dtype: how many mantissa bits there are, and the mask of the exponent above them."""


def binary_entropy(share: float) -> float:
    """Bits that one yes or no of probability ``share`` carries."""
    if not 0 < share < 1:
        return 0.0
    return float(-share * np.log2(share) - (1 - share) * np.log2(1 - share))


@dataclass
class _Context:
    cells: int = 0
    changed: int = 0
    steps: dict[int, int] = field(default_factory=dict)

    def add(self, cells: int, steps: Cells) -> None:
        self.cells += cells
        self.changed += steps.size
        values, counts = np.unique(steps, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.steps[value] = self.steps.get(value, 0) + count

    def bits(self) -> float:
        if not self.changed:
            return 0.0
        counts = np.array(list(self.steps.values()), np.float64)
        steps = float((counts * np.log2(self.changed / counts)).sum())
        return self.cells * binary_entropy(self.changed / self.cells) + steps


class Bound:
    """Counts of one delta; add every tensor, then read the bounds."""

    def __init__(self) -> None:
        self._whole: dict[str, _Context] = {}
        self._by_exponent: dict[tuple[str, int], _Context] = {}

    def add(self, dtype: str, old: Cells, new: Cells) -> None:
        """Count one tensor, given as bit patterns of equal length."""
        where = np.flatnonzero(old != new)
        before = old[where]
        steps: Cells = new[where] - before
        self._whole.setdefault(dtype, _Context()).add(old.size, steps)
        shift, mask = _EXPONENTS.get(dtype, (0, 0))
        cells = np.bincount(_exponents(old, shift, mask), minlength=mask + 1)
        moved = _exponents(before, shift, mask)
        for exponent in np.flatnonzero(cells).tolist():
            context = self._by_exponent.setdefault((dtype, exponent), _Context())
            context.add(int(cells[exponent]), steps[moved == exponent])

    @property
    def changed(self) -> int:
        """Changed cells so far."""
        return sum(context.changed for context in self._whole.values())

    @property
    def cells(self) -> int:
        """Cells so far."""
        return sum(context.cells for context in self._whole.values())

    def order_zero_bytes(self) -> float:
        """The bound for whoever knows only which tensor types there are."""
        return sum(context.bits() for context in self._whole.values()) / 8

    def exponent_bytes(self) -> float:
        """The bound for whoever looks at the old exponents."""
        return sum(context.bits() for context in self._by_exponent.values()) / 8


def _exponents(cells: Cells, shift: int, mask: int) -> npt.NDArray[np.uint8]:
    exponents: npt.NDArray[np.uint8] = ((cells >> shift) & mask).astype(np.uint8)
    return exponents
