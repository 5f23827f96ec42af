"""The interpreter's settings of the scheduler's processes, and what they are for."""

import gc
import sys
import threading
import time

import pytest

from scheduler import interpreter
from scheduler.store import SchedulerStore


@pytest.fixture
def as_before():
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("as_before")
def test_what_is_made_while_the_collector_pauses_is_not_looked_at_later():
    gc.collect()
    before = gc.get_freeze_count()
    with interpreter.collector_paused():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


@pytest.mark.usefixtures("as_before")
def test_a_collector_that_was_off_stays_off_also_after_an_error():
    gc.disable()
    with pytest.raises(RuntimeError), interpreter.collector_paused():
        raise RuntimeError
    assert not gc.isenabled()


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_a_commit_beside_a_busy_loop_does_not_wait_for_the_loop_once_per_row(tmp_path):
    interpreter.tune()
    store = SchedulerStore.open(tmp_path, "process-crash")
    rows = [("job", f"{number:04d}", bytes(200)) for number in range(400)]
    took: list[float] = []

    def commit() -> None:
        for turn in range(5):
            began = time.perf_counter()
            store.commit(rows, float(turn))
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=commit)
    thread.start()
    while thread.is_alive():
        for number in range(100):
            hash(str(number))
    store.close()
    # One call per row would wait for the interpreter's lock 400 times: 0.2 s at the least.
    assert min(took) < len(rows) * interpreter.SWITCH_S, took
