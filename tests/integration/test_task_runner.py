"""Task sources as processes: answered requests whatever happens to the process."""

import asyncio
import json
import os
import random
import signal
import sys

import msgspec
import pytest
from service_world import until

from scheduler.core.events import ItemsProduced, TaskSourceFailed
from scheduler.task_runner import TaskRunner
from scheduler.task_source import check_job_sizes
from transport.errors import TaskError
from transport.messages import Item
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec


def run_spec(task: TaskSpec, items_per_job: int = 8) -> RunSpec:
    return RunSpec(
        name="sums",
        seed=4,
        policies={"solver": PolicySpec(model="model")},
        task=task,
        workflow=WorkflowSpec(policies=("solver",)),
        evaluation=EvaluationSpec(items_per_job=items_per_job),
    )


@pytest.fixture
def task(tmp_path) -> TaskSpec:
    path = tmp_path / "items.jsonl"
    lines = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(100)]
    path.write_text("\n".join(lines))
    return TaskSpec(source="jsonl", path=str(path), reward="exact")


class Runner:
    def __init__(self, **options) -> None:
        self.events: list[ItemsProduced | TaskSourceFailed] = []
        self.runner = TaskRunner(
            self.events.append, random.Random(1), first_restart_s=0.01, **options
        )

    def pid(self) -> int | None:
        process = self.runner._runs["sums"]._process
        return None if process is None else process.pid

    def indices(self, kind: str) -> list[int]:
        produced = [e for e in self.events if isinstance(e, ItemsProduced) and e.kind == kind]
        return [item.index for event in produced for item in event.items]


@pytest.mark.asyncio
async def test_requests_are_answered_and_the_evaluation_space_ends_with_an_empty_answer(task):
    r = Runner()
    r.runner.start(run_spec(task))
    r.runner.start(run_spec(task))
    r.runner.produce("sums", "train", 0, 1500)
    r.runner.produce("sums", "eval", 0, 64)
    r.runner.produce("sums", "eval", 64, 8)
    r.runner.produce("unknown", "train", 0, 1)
    await until(lambda: len(r.events) == 4)
    assert r.indices("train") == list(range(1500))
    assert 5 < len(r.indices("eval")) < 40
    assert r.events[-1] == ItemsProduced("sums", "eval", 64, ())
    await r.runner.close()


@pytest.mark.asyncio
async def test_a_killed_process_is_restarted_and_gives_the_same_items(task):
    r = Runner()
    r.runner.start(run_spec(task))
    r.runner.produce("sums", "train", 0, 5)
    await until(lambda: len(r.events) == 1)
    killed = r.pid()
    os.kill(killed, signal.SIGSTOP)
    r.runner.produce("sums", "train", 0, 5)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(r.events) == 2)
    assert r.events[0] == r.events[1]
    assert r.pid() != killed
    await r.runner.close()


@pytest.mark.asyncio
async def test_a_process_that_dies_again_and_again_fails_the_run_with_its_last_words(task):
    r = Runner(argv=("sh", "-c", "echo no such luck >&2; exit 3"), max_deaths=2)
    r.runner.start(run_spec(task))
    r.runner.produce("sums", "train", 0, 5)
    await until(lambda: bool(r.events))
    [failed] = r.events
    assert failed.code == "task.process"
    assert "ended 2 times (status 3): no such luck" in failed.message
    await r.runner.close()
    r = Runner(argv=("/no/such/program",))
    r.runner.start(run_spec(task))
    await until(lambda: bool(r.events))
    assert r.events[0].message.startswith("cannot start /no/such/program")
    await r.runner.close()


SEARCHES_TWICE = """
import sys
from scheduler.task_source import *
out = sys.stdout.buffer
read_frame(sys.stdin.buffer)
searched = 0
while (data := read_frame(sys.stdin.buffer)) is not None:
    request = msgspec.msgpack.decode(data, type=SourceRequest)
    searched += request.kind == "eval"
    found = request.kind == "train" or searched > 2
    items = (Item(index=request.start, prompt="p", answer="a"),) if found else ()
    out.write(frame(SourceItems(kind=request.kind, start=request.start, items=items)))
    out.flush()
"""


@pytest.mark.asyncio
async def test_an_unfinished_search_is_asked_again_behind_what_waits_and_is_no_end(task):
    r = Runner(argv=(sys.executable, "-c", SEARCHES_TWICE))
    r.runner.start(run_spec(task))
    r.runner.produce("sums", "eval", 0, 8)
    r.runner.produce("sums", "train", 5, 1)
    await until(lambda: len(r.events) == 2)
    assert [(event.kind, len(event.items)) for event in r.events] == [("train", 1), ("eval", 1)]
    await r.runner.close()


@pytest.mark.asyncio
async def test_a_wrong_task_fails_the_run_and_stopping_ends_the_process(task):
    wrong = msgspec.structs.replace(task, path=task.path + ".gone")
    r = Runner()
    r.runner.start(run_spec(wrong))
    await until(lambda: bool(r.events))
    assert r.events[0].code == "task"
    assert "items.jsonl.gone: No such file" in r.events[0].message
    r.runner.stop("sums")
    r.runner.start(run_spec(task))
    await until(lambda: r.pid() is not None)
    pid = r.pid()
    r.runner.stop("sums")
    await r.runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await asyncio.sleep(0)


def test_an_evaluation_job_that_fits_no_frame_is_refused_with_a_size_that_does():
    items = tuple(Item(index=i, prompt="p", answer="a", meta="x" * 8000) for i in range(64))
    check_job_sizes(items, 16)
    with pytest.raises(TaskError, match=r"items 0 to 63 take \d+ bytes.*items_per_job to 1\d$"):
        check_job_sizes(items, 64)
