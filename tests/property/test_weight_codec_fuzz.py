"""Hostile bodies of segments: an ``IntegrityError``, or changes that fit; never anything else."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport.errors import IntegrityError
from transport.weights import kernels
from transport.weights.patch import check_change
from transport.weights.segments import CODERS, CodecSettings, decode_segment, encode_segment

FUZZ = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
pytestmark = pytest.mark.timeout(180)  # the first use compiles the kernels

TYPES = {"BF16": "<u2", "F32": "<u4", "F8_E4M3": "<u1", "I64": "<u8"}


@pytest.fixture(params=[False, True], ids=["numpy", "numba"])
def compiled(request):
    if request.param and not kernels.available():
        pytest.skip("numba is not installed")
    return request.param


def check(coder, dtype, body, olds, changed, compiled):
    kept = [old.copy() for old in olds]
    try:
        changes = decode_segment(coder, dtype, memoryview(body), olds, changed, compiled=compiled)
    except IntegrityError:
        changes = []
    for old, change in zip(olds, changes, strict=False):
        if change is not None:
            check_change(old, change)
    assert all(np.array_equal(one, other) for one, other in zip(olds, kept, strict=True))


@FUZZ
@given(
    coder=st.sampled_from(CODERS), dtype=st.sampled_from(sorted(TYPES)),
    body=st.binary(max_size=120), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    changed=st.integers(-1, 60),
)  # fmt: skip
def test_arbitrary_bodies(compiled, coder, dtype, body, sizes, changed):
    olds = [np.arange(size).astype(TYPES[dtype]) for size in sizes]
    check(coder, dtype, body, olds, changed, compiled)


@FUZZ
@given(data=st.data(), dtype=st.sampled_from(sorted(TYPES)))
def test_damaged_bodies(compiled, data, dtype):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    top = np.iinfo(TYPES[dtype]).max
    old = rng.integers(0, top, 300, dtype=TYPES[dtype], endpoint=True)
    new = old.copy()
    where = rng.random(300) < data.draw(st.sampled_from([0.01, 0.2, 0.9]))
    where[7] = True
    new[where] += rng.integers(1, 60, int(where.sum())).astype(old.dtype)
    name = data.draw(st.sampled_from(["small", "fast", "absolute"]))
    coded = encode_segment(dtype, [old], [new], CodecSettings(coder=name), compiled=compiled)
    body = bytearray(coded.body)
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "other"]))
    changed, coder = coded.changed, coded.coder
    if kind == "flip":
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    elif kind == "longer":
        body += data.draw(st.binary(min_size=1, max_size=9))
    else:
        changed += data.draw(st.integers(-3, 3))
        coder = data.draw(st.sampled_from(CODERS))
    other = data.draw(st.sampled_from([old, old[:200], new]))
    check(coder, dtype, bytes(body), [other[:150], other[150:]], changed, compiled)
