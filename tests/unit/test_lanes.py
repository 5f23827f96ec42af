"""When another connection is opened, kept and closed."""

from transport.delivery_window import DeliveryWindow
from transport.lanes import AGAIN_S, IDLE_S, LANE_BYTES_S, TRIAL_S, LanePlan, too_narrow


def measured(rate_bytes_s, rtt_s, bound=1 << 30):
    """A window that has seen a path of this rate for long enough."""
    window = DeliveryWindow(max_window_bytes=bound)
    now, sent = 0.0, 0
    size = int(rate_bytes_s * rtt_s) or 1
    for _ in range(12):
        now += rtt_s
        window.delivered(size, sent_s=now - rtt_s, delivered_at_send=sent, lone=True, now=now)
        sent = window.delivered_bytes
    assert not window.starting
    return window


def test_a_lane_is_too_narrow_at_its_bound_or_at_what_one_connection_can_carry():
    assert not too_narrow(DeliveryWindow())
    assert not too_narrow(measured(6e6, 0.18))
    assert too_narrow(measured(6e6, 0.18, bound=1 << 20))
    assert too_narrow(measured(LANE_BYTES_S, 0.001))
    assert too_narrow(measured(30e6, 0.18))  # more than kernels keep for one connection


def test_one_lane_more_at_a_time_while_each_brings_something():
    plan, wide = LanePlan(4), measured(30e6, 0.18)
    assert plan.wanted([wide], busy=False, now=0.0) == 1
    assert plan.wanted([wide], busy=True, now=1.0) == 2
    assert plan.wanted([wide, DeliveryWindow()], busy=True, now=2.0) == 2  # on trial
    both = [wide, measured(29e6, 0.18)]
    assert plan.wanted(both, busy=True, now=6.0) == 2
    assert plan.wanted(both, busy=True, now=7.0) == 3
    assert plan.wanted(both, busy=True, now=12.0) == 2  # the third brought nothing
    assert plan.wanted(both, busy=True, now=12.0 + AGAIN_S - 1) == 2
    assert plan.wanted(both, busy=True, now=12.0 + AGAIN_S) == 3


def test_there_are_never_more_than_allowed():
    plan, now = LanePlan(2), 0.0
    for lanes in (1, 2, 3):
        windows = [measured(30e6 * lanes, 0.18) for _ in range(lanes)]
        assert plan.wanted(windows, busy=True, now=now) <= 2
        now += 10 * TRIAL_S
    assert LanePlan(1).wanted([measured(30e6, 0.18)], busy=True, now=0.0) == 1


def test_a_slow_path_gets_one_lane_and_idle_lanes_are_closed():
    plan = LanePlan(4)
    assert plan.wanted([measured(6e6, 0.18)], busy=True, now=0.0) == 1
    wide = [measured(30e6, 0.18), measured(30e6, 0.18)]
    assert plan.wanted(wide[:1], busy=True, now=1.0) == 2
    assert plan.wanted(wide, busy=True, now=6.0) == 2
    assert plan.wanted(wide, busy=False, now=6.0 + IDLE_S - 1) == 2
    assert plan.wanted(wide, busy=False, now=6.0 + IDLE_S) == 1
