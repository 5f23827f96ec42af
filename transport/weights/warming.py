"""Everything that is compiled for large models, compiled ahead of need.

What always holds: the results are those of numpy, as everywhere; nothing but time is spent.
"""

import numpy as np

from transport.weights import kernels
from transport.weights.cell_access import exchange, rising, take
from transport.weights.cell_sums import difference, list_sum, run_sum
from transport.weights.segments import CodecSettings, decode_segment, encode_segment


def warm() -> None:
    """Compile what cells of 2 bytes need, or load it from the cache: seconds, once a process.
    Nothing without numba. For services that know early that their model is large."""
    if not kernels.available():
        return
    old = np.arange(64, dtype=np.uint16)
    new = old ^ np.uint16(1)
    for settings in (CodecSettings(coder="small"), CodecSettings(coder="fast")):
        changed = np.where(old == 7, new, old)
        coded = encode_segment("BF16", [old], [changed], settings, compiled=True)
        body = memoryview(coded.body)
        decode_segment(coded.coder, "BF16", body, [old], coded.changed, compiled=True)
    positions = np.arange(64, dtype=np.int32)
    rising(positions, 64, compiled=True)
    exchange(old, positions, take(new, positions, compiled=True), compiled=True)
    list_sum(0, np.arange(64, dtype=np.int32), new, compiled=True)
    difference(0, 0, old, new, compiled=True)
    run_sum(0, 0, np.zeros(kernels.KERNEL_CELLS, np.uint16))
