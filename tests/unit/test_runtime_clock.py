"""The clocks that shells read."""

import math

import pytest

from transport.errors import InvariantViolation
from transport.runtime.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_never_goes_back_and_knows_the_century() -> None:
    clock: Clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.wall_s() > 1_700_000_000


def test_a_manual_clock_moves_only_when_told_to() -> None:
    clock: Clock = ManualClock(monotonic_s=5.0, wall_s=100.0)
    assert (clock.monotonic_s(), clock.wall_s()) == (5.0, 100.0)
    assert clock.advance(2.5) == 7.5  # type: ignore[attr-defined]
    assert clock.advance_to(8.0) == 8.0  # type: ignore[attr-defined]
    assert (clock.monotonic_s(), clock.wall_s()) == (8.0, 103.0)


@pytest.mark.parametrize("step", [-0.1, math.nan, math.inf])
def test_a_manual_clock_refuses_to_go_back(step: float) -> None:
    with pytest.raises(InvariantViolation):
        ManualClock().advance(step)


def test_the_wall_clock_may_jump_while_monotonic_time_does_not() -> None:
    clock = ManualClock(monotonic_s=5.0)
    clock.set_wall(10.0)
    assert (clock.monotonic_s(), clock.wall_s()) == (5.0, 10.0)
