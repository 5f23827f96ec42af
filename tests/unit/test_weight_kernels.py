"""Compiled loops where numba is not what it should be."""

import importlib.util
import sys

import numpy as np
import pytest

from transport.weights import kernels
from transport.weights.cell_sums import run_sum
from transport.weights.segments import CodecSettings, decode_segment, encode_segment


@pytest.fixture
def forgotten():
    """What this process knows of numba is forgotten, before and after."""
    cached = (kernels._numba, kernels.compiled)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_numba_that_cannot_be_imported_leaves_the_work_to_numpy(forgotten, monkeypatch):
    class Broken:
        """Finds numba, and fails as it does beside a numpy that is too new."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "numba":
                raise ImportError("Numba needs NumPy 2.2 or less")
            return None

    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    assert not kernels.available()
    assert "needs NumPy" in kernels.why_not()
    monkeypatch.setattr(kernels, "KERNEL_CELLS", 1000)
    old = np.zeros(5000, "<u2")
    new = old.copy()
    new[::100] = 1
    coded = encode_segment("BF16", [old], [new], CodecSettings(coder="small"))
    [changes] = decode_segment(coded.coder, "BF16", memoryview(coded.body), [old], coded.changed)
    assert changes is not None
    assert run_sum(1, 0, new) == run_sum(1, 0, new.copy())


@pytest.mark.timeout(60)
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_a_cache_that_refuses_costs_only_the_cache(forgotten, monkeypatch):
    from numba.core.caching import FunctionCache

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FunctionCache, "load_overload", full)
    monkeypatch.setattr(FunctionCache, "save_overload", full)
    gaps = np.array([3, 0, 500], np.uint32)
    symbols = np.zeros(3, np.uint8)
    extra = np.zeros(3 + kernels.SPARE_WORDS, np.uint32)
    assert kernels.compiled(kernels.pack_gaps)(gaps, symbols, extra) > 0
    assert len(kernels.compiled(kernels.pack_gaps).signatures) == 1
