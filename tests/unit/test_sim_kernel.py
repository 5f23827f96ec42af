"""Virtual time: order, alarms, bounds."""

import pytest

from sim.kernel import Alarm, History, Kernel
from transport.errors import InvariantViolation


def test_events_run_in_time_order_and_equal_times_as_they_were_scheduled() -> None:
    kernel, seen = Kernel(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        kernel.at(at_s, lambda name: seen.append((kernel.now, name)), name)
    assert kernel.run(10.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert kernel.events == 4


def test_what_is_due_in_the_past_runs_now() -> None:
    kernel, seen = Kernel(), []
    kernel.at(5.0, lambda _: kernel.at(1.0, lambda _: seen.append(kernel.now)))
    kernel.run(10.0)
    assert seen == [5.0]


def test_run_stops_at_its_time_its_bound_and_on_request() -> None:
    kernel, seen = Kernel(), []
    for at_s in (1.0, 2.0, 3.0, 4.0):
        kernel.at(at_s, seen.append, at_s)
    assert not kernel.run(1.5)
    assert (seen, kernel.now) == ([1.0], 1.5)
    assert not kernel.run(10.0, max_events=1)
    assert seen == [1.0, 2.0]
    kernel.at(3.5, lambda _: kernel.stop())
    assert kernel.run(10.0)
    assert seen == [1.0, 2.0, 3.0]
    assert kernel.run(10.0)
    assert seen[-1] == 4.0


def test_an_endless_instant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.kernel.MAX_AT_ONCE", 100)
    kernel = Kernel()

    def again(_: object) -> None:
        kernel.after(0.0, again)

    kernel.at(1.0, again)
    with pytest.raises(InvariantViolation, match=r"events at 1\.0 s"):
        kernel.run(2.0)


def test_an_alarm_fires_once_at_its_latest_time() -> None:
    kernel, fired = Kernel(), []
    alarm = Alarm(kernel, lambda: fired.append(kernel.now))
    alarm.set(1.0)
    alarm.set(5.0)
    alarm.set(3.0)
    kernel.run(4.0)
    assert fired == [3.0]
    alarm.set(6.0)
    alarm.set(None)
    kernel.run(10.0)
    assert fired == [3.0]
    alarm.set(12.0)
    alarm.set(11.0)
    kernel.run(20.0)
    assert fired == [3.0, 11.0]


def test_a_history_tells_times_speakers_and_contents_apart() -> None:
    def digest(now_s: float, names: bytes, content: bytes) -> str:
        history = History()
        history.add(now_s, names, content)
        return history.digest()

    digests = {digest(1.0, b"a>b\0", b"x"), digest(2.0, b"a>b\0", b"x")}
    digests |= {digest(1.0, b"b>a\0", b"x"), digest(1.0, b"a>b\0", b"y")}
    assert len(digests) == 4
    assert digest(1.0, b"a>b\0", b"x") in digests
