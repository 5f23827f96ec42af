"""Max-min fairness of any set of transfers over any links."""

from hypothesis import given
from hypothesis import strategies as st

from sim.fair_share import UNLIMITED, Pipe, max_min

SLACK = 1e-6


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[list[Pipe]], list[float]]:
    rates = draw(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=6))
    pipes = [Pipe(f"p{i}", rate) for i, rate in enumerate(rates)]
    for pipe in pipes:
        pipe.scale = draw(st.sampled_from((1.0, 1.0, 0.5, 0.0)))
    chosen = st.lists(st.sampled_from(pipes), max_size=3, unique_by=id)
    paths = draw(st.lists(chosen, max_size=12))
    bounds = [draw(st.sampled_from((UNLIMITED, 1.0, 1000.0))) for _ in paths]
    return paths, bounds


@given(transfers())
def test_no_link_is_overfull_and_everybody_is_held_by_a_full_one(
    drawn: tuple[list[list[Pipe]], list[float]],
) -> None:
    paths, bounds = drawn
    rates = max_min(paths, bounds)
    load: dict[Pipe, float] = {}
    most: dict[Pipe, float] = {}
    for path, rate in zip(paths, rates, strict=True):
        for pipe in path:
            load[pipe] = load.get(pipe, 0.0) + rate
            most[pipe] = max(most.get(pipe, 0.0), rate)
    for pipe, total in load.items():
        assert total <= pipe.capacity * (1 + SLACK) + SLACK
    for path, bound, rate in zip(paths, bounds, rates, strict=True):
        assert rate <= bound
        # Full, and nobody on it has more: taking from those with less would be the only way up.
        held = any(
            load[pipe] >= pipe.capacity * (1 - SLACK) - SLACK
            and rate >= most[pipe] * (1 - SLACK) - SLACK
            for pipe in path
        )
        assert held or rate >= bound * (1 - SLACK)


@given(transfers())
def test_the_order_of_transfers_does_not_matter(
    drawn: tuple[list[list[Pipe]], list[float]],
) -> None:
    paths, bounds = drawn
    rates = max_min(paths, bounds)
    turned = max_min(paths[::-1], bounds[::-1])[::-1]
    for rate, other in zip(rates, turned, strict=True):
        assert abs(rate - other) <= SLACK * max(1.0, rate)
