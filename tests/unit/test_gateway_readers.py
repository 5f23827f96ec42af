"""What the gateway reads beside the scheduler: steps of a run and pages of jobs; and the map."""

from pathlib import Path

import msgspec
import pytest

from scheduler.core.state import Attempt, Job
from scheduler.gateway import jobs
from scheduler.gateway.history import run_history
from scheduler.gateway.jobs import job_page
from scheduler.store import SchedulerStore
from sim.geography import javascript
from transport.errors import StoreError
from transport.status import StepStatus

ROOT = Path(__file__).parents[2]


def step(number: int, policy: str = "sums/solver", reward: float = 0.5) -> bytes:
    status = StepStatus(
        policy=policy,
        step=number,
        version=number,
        reward_mean=reward,
        policy_lag_mean=1.0,
        policy_lag_max=2,
        response_tokens=100,
        busy_s=1.0,
        waiting_s=0.5,
        delta_bytes=10,
        full_bytes=100,
        at_s=float(number),
    )
    facts = {"type": "step", **msgspec.to_builtins(status), "metrics": {"loss": 1.0}, "wall_s": 1.0}
    return msgspec.json.encode(facts) + b"\n"


def written(folder: Path, *lines: bytes) -> Path:
    path = folder / "runs" / "sums" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(lines))
    return folder


def test_history_is_what_the_surviving_lineage_did(tmp_path):
    folder = written(
        tmp_path,
        step(1),
        step(2, reward=0.1),
        step(3, reward=0.1),
        b'{"type": "evaluation"}\n',
        step(1, "sums/verifier"),
        step(2, reward=0.9),  # went back to a checkpoint of step 1
        b'{"type": "step", "st',
    )
    history = run_history(folder, "sums")
    assert history is not None
    assert [(s.policy, s.step, s.reward_mean) for s in history.steps] == [
        ("sums/solver", 1, 0.5),
        ("sums/solver", 2, 0.9),
        ("sums/verifier", 1, 0.5),
    ]
    assert run_history(folder, "other") is None


def test_a_long_history_is_thinned_evenly_and_keeps_both_ends(tmp_path):
    folder = written(tmp_path, *(step(number) for number in range(1, 1001)))
    history = run_history(folder, "sums", most=11)
    assert history is not None
    assert (history.steps[0].step, history.steps[-1].step, len(history.steps)) == (1, 1000, 11)
    gaps = [b.step - a.step for a, b in zip(history.steps, history.steps[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1


@pytest.fixture
def store(tmp_path):
    store = SchedulerStore.open(tmp_path)
    rows = []
    for run, state, numbers in (("sums", "queued", range(25)), ("two", "in_flight", range(25, 30))):
        for number in numbers:
            job = Job(
                id=f"{run}/t-{number:06d}",
                run=run,
                kind="train",
                index=number,
                sequences=8,
                items=(),
                copies={},
                created_s=float(number),
                state=state,
                attempts=[] if state == "queued" else [attempt(number)],
            )
            rows.append((Job.table, job.id, msgspec.msgpack.encode(job)))
    store.commit(rows, 40.0)
    yield store
    store.close()


def attempt(number: int) -> Attempt:
    return Attempt(id=f"two/t-{number:06d}#1", agent="paris", fence=(1, 1))


def ids(page) -> list[str]:
    return [line.id for line in page.jobs]


def test_jobs_are_paged_while_the_scheduler_has_its_store_open(store):
    folder = store.path.parent
    first = job_page(folder, run="sums", limit=10)
    assert (len(first.jobs), first.more) == (10, True)
    second = job_page(folder, run="sums", after=first.after, limit=10)
    third = job_page(folder, run="sums", after=second.after, limit=10)
    assert not third.more
    assert ids(first) + ids(second) + ids(third) == [f"sums/t-{n:06d}" for n in range(25)]
    assert first.jobs[3].age_s == 37.0


def test_jobs_by_state_and_beginning_of_their_id(store):
    folder = store.path.parent
    found = job_page(folder, state="in_flight", limit=100)
    assert ids(found) == [f"two/t-{n:06d}" for n in range(25, 30)]
    assert found.jobs[0].agents == ("paris",)
    assert ids(job_page(folder, prefix="sums/t-00002", limit=100)) == [
        f"sums/t-{n:06d}" for n in range(20, 25)
    ]
    assert job_page(folder, prefix="nothing", limit=5) == jobs.JobPage(
        jobs=(), more=False, after=""
    )


def test_a_page_looks_at_so_many_rows_and_says_that_there_are_more(store, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_LOOKED_AT", 7)
    folder = store.path.parent
    found, after, pages = [], "", 0
    while True:
        page = job_page(folder, state="in_flight", after=after, limit=100)
        found += ids(page)
        pages += 1
        if not page.more:
            break
        after = page.after
    assert (len(found), pages) == (5, 5)


def test_a_store_that_cannot_be_read_is_said_with_a_remedy(tmp_path):
    with pytest.raises(StoreError, match="ask again"):
        job_page(tmp_path, limit=5)
    (tmp_path / "scheduler.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="cannot be read"):
        job_page(tmp_path, limit=5)


def test_the_dashboards_map_is_the_simulators():
    made = (ROOT / "scheduler" / "dashboard" / "geography.js").read_text()
    assert made == javascript(), "run: python -m sim.geography > scheduler/dashboard/geography.js"
