"""The sketch of turnaround times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.turnaround import BUCKETS, LEAST_S, Durations


def test_nothing_has_no_quantile() -> None:
    assert Durations().quantile(0.5) is None


@given(
    st.lists(st.floats(2 * LEAST_S, 1e6), min_size=1, max_size=200),
    st.floats(0.0, 1.0),
)
def test_quantiles_are_within_a_bucket_of_the_true_ones(times: list[float], share: float) -> None:
    sketch = Durations()
    for time_s in times:
        sketch.add(time_s)
    true = sorted(times)[min(len(times) - 1, int(share * len(times)))]
    assert sketch.quantile(share) == pytest.approx(true, rel=0.0101)


@given(st.lists(st.floats(min_value=0.0, allow_infinity=False, allow_nan=False), max_size=50))
def test_anything_is_counted_and_memory_is_bounded(times: list[float]) -> None:
    sketch = Durations()
    for time_s in times:
        sketch.add(time_s)
    assert sketch.count == len(times)
    assert len(sketch._buckets) <= BUCKETS
