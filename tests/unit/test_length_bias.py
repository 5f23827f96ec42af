"""The watch over the lengths of what is trained on."""

import random

import pytest

from scheduler.core.bias import MIN_GROUPS, WINDOW, LengthWatch


def lengths(rng, count):
    return [rng.lognormvariate(6.0, 0.8) for _ in range(count)]


def test_there_is_no_verdict_on_too_little():
    watch = LengthWatch()
    for _ in range(MIN_GROUPS - 1):
        watch.returned(10.0)
        watch.trained(10.0)
    assert watch.verdict() is None


@pytest.mark.parametrize("seed", range(5))
def test_training_on_everything_is_not_biased(seed):
    rng = random.Random(seed)
    watch = LengthWatch()
    for length in lengths(rng, 1500):
        watch.returned(length)
        if rng.random() < 0.8:  # dropped whatever its length
            watch.trained(length)
    verdict = watch.verdict()
    assert not verdict.biased
    assert verdict.ratio == pytest.approx(1.0, abs=0.1)


def test_dropping_what_is_long_is_found():
    rng = random.Random(1)
    watch = LengthWatch()
    for length in lengths(rng, 1000):
        watch.returned(length)
        if length < 900.0 or rng.random() < 0.3:
            watch.trained(length)
    verdict = watch.verdict()
    assert verdict.biased
    assert verdict.ratio < 0.9


def test_a_difference_that_means_nothing_is_no_bias():
    watch = LengthWatch()
    for index in range(1000):
        watch.returned(100.0 + index % 7)
        watch.trained(103.5 + index % 7)
    verdict = watch.verdict()
    assert verdict.distance > verdict.limit
    assert not verdict.biased


def test_it_forgets_what_is_long_ago():
    watch = LengthWatch()
    for _ in range(WINDOW):
        watch.returned(1000.0)
        watch.trained(10.0)
    for _ in range(WINDOW):
        watch.returned(50.0)
        watch.trained(50.0)
    verdict = watch.verdict()
    assert verdict.ratio == pytest.approx(1.0)
    assert not verdict.biased
