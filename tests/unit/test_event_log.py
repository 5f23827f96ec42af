"""The event log: what is written comes back, bounded, whatever happened to its end."""

import random

import pytest

from scheduler.core.effects import Send, StopTaskSource
from scheduler.core.events import (
    AgentRevoked,
    FromAgent,
    FromOperator,
    FromService,
    FromTrainer,
    ItemsProduced,
    TaskSourceFailed,
    Tick,
    Verdict,
)
from scheduler.core.settings import CoreSettings
from scheduler.event_log import (
    EventLog,
    EventLogStart,
    RecordedTerm,
    effects_digest,
    pack_event,
    recorded_terms,
    unpack_event,
)
from transport.errors import StoreError
from transport.messages import (
    BodiesGone,
    Goodbye,
    Heartbeat,
    HeldAttempt,
    Item,
    Ping,
    StatusRequest,
    TrajectoriesStored,
)

EVENTS = [
    FromAgent(
        "a", Heartbeat(sequence=1, sent_s=0.5, held=(HeldAttempt(attempt="x#1", fence=(1, 2)),))
    ),
    AgentRevoked("a"),
    FromTrainer("t", Ping(sequence=3, sent_s=1e9)),
    FromService("trajectory-log", BodiesGone(digests=("ab",))),
    FromOperator("op", 7, StatusRequest()),
    ItemsProduced("run", "eval", 5, (Item(index=5, prompt="p", answer="a", meta="{}"),)),
    ItemsProduced("run", "train", 5, ()),
    ItemsProduced(
        "run",
        "train",
        5,
        (Item(index=5, prompt="p", answer="a"),),
        verdicts=(Verdict(filter="solved_out", failed=("m:f",)),),
    ),
    FromService(
        "trajectory-log",
        TrajectoriesStored(summaries=()),
        ({"run/solver": Verdict(score=0.5, drawn=True)}, {}),
    ),
    FromOperator("op", 7, StatusRequest(), "curators[0].name: no"),
    TaskSourceFailed("run", "task", "t.jsonl:3: prompt: is empty"),
    Tick(),
]
EFFECTS = [Send("a", Goodbye(reason="x")), StopTaskSource("run")]
ROWS = [("jobs", f"{i:03d}", bytes(i)) for i in range(50)]


def start(term: int = 1) -> EventLogStart:
    return EventLogStart(
        build="b",
        term=term,
        now=12.5,
        seed=2**60,
        settings=CoreSettings(lease_s=7.0),
        wall_s=1.0,
        rows=len(ROWS),
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_comes_back_as_it_was(event):
    assert unpack_event(pack_event(event)) == event


@pytest.mark.parametrize(
    "packed", [[], ["agent", "a", 0xFF, b""], ["agent", "a", 5, b"\xc1"], ["later", 1], ["tick", 1]]
)
def test_events_of_another_farflow_are_a_clear_error(packed):
    with pytest.raises(StoreError, match="event log: "):
        unpack_event(packed)


def test_start_rows_and_batches_come_back_in_order(tmp_path):
    log = EventLog(tmp_path)
    log.begin(start(), ROWS)
    for number in range(20):
        log.append([(number + 0.5, EVENTS[number % len(EVENTS)])], EFFECTS[: number % 3])
    log.close()
    [folder] = recorded_terms(tmp_path)
    term = RecordedTerm(folder)
    assert (term.start, list(term.rows())) == (start(), ROWS)
    batches = list(term.batches())
    assert [batch.number for batch in batches] == list(range(20))
    assert [unpack_event(batch.inputs[0][1]) for batch in batches[: len(EVENTS)]] == EVENTS
    assert batches[4].inputs[0][0] == 4.5
    assert batches[5].effects_digest == effects_digest(EFFECTS) != effects_digest(EFFECTS[:1])
    assert term.complete


def test_a_log_that_was_never_closed_gives_every_batch(tmp_path):
    log = EventLog(tmp_path)
    log.begin(start(), ROWS)
    for number in range(20):
        log.append([(float(number), Tick())], [])
    assert len(list(RecordedTerm(recorded_terms(tmp_path)[0]).batches())) == 20
    segment = tmp_path / "term-00000001" / "events-000000"
    segment.write_bytes(segment.read_bytes()[:-3])
    assert len(list(RecordedTerm(recorded_terms(tmp_path)[0]).batches())) == 19
    log.close()


def noise(rng: random.Random) -> FromAgent:
    return FromAgent("a", Goodbye(reason=rng.randbytes(400).hex()))


def test_the_log_is_bounded_and_keeps_its_beginning_and_its_end(tmp_path):
    rng = random.Random(1)
    old = EventLog(tmp_path, max_bytes=60_000, segment_bytes=5_000)
    old.begin(start(1), ROWS)
    for number in range(30):
        old.append([(float(number), noise(rng))], [])
    old.close()
    log = EventLog(tmp_path, max_bytes=60_000, segment_bytes=5_000)
    log.begin(start(2), ROWS)
    for number in range(400):
        log.append([(float(number), noise(rng))], [])
    log.close()
    [folder] = recorded_terms(tmp_path)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 70_000
    term = RecordedTerm(folder)
    numbers = [batch.number for batch in term.batches()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 30
    assert not term.complete
    newest = sorted(folder.glob("events-*"))[-1]
    assert int(newest.name[-6:]) > 30


def test_a_disk_that_refuses_ends_the_log_and_nothing_else(tmp_path):
    (tmp_path / "events").write_bytes(b"a file where the folder should be")
    log = EventLog(tmp_path / "events")
    log.begin(start(), ROWS)
    log.append([(1.0, Tick())], [])
    log.close()
    assert not log.recording


def test_a_folder_without_a_log_is_a_clear_error(tmp_path):
    with pytest.raises(StoreError, match="no event log"):
        RecordedTerm(tmp_path)
