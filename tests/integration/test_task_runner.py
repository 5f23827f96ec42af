"""Task sources as processes: answered requests whatever happens to the process."""

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

import msgspec
import pytest
from service_world import until

from scheduler.core.events import Event, FromOperator, ItemsProduced, TaskSourceFailed
from scheduler.submissions import MAX_OPEN, Submissions
from scheduler.task_runner import TaskRunner
from transport.messages import RunSubmit, StatusRequest
from transport.runs import EvaluationSpec, PolicySpec, RunSpec, TaskSpec, WorkflowSpec


def run_spec(task: TaskSpec, **evaluations: EvaluationSpec) -> RunSpec:
    return RunSpec(
        name="sums",
        seed=4,
        policies={"solver": PolicySpec(model="model")},
        task=task,
        workflow=WorkflowSpec(policies=("solver",)),
        evaluation=EvaluationSpec(),
        evaluations=evaluations,
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
        talk = self.runner._runs["sums"]._talk
        return None if talk is None else talk.pid

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
@pytest.mark.parametrize("ends", ["", "; sys.stdin.read(); time.sleep(60)"])
async def test_a_process_that_floods_its_output_leaves_nothing_open(task, ends):
    flood = "import sys, time; sys.stdout.buffer.write(b'x' * 2_000_000); sys.stdout.flush()"
    open_before = len(os.listdir("/proc/self/fd"))
    r = Runner(argv=(sys.executable, "-c", flood + ends), max_deaths=1)
    r.runner.start(run_spec(task))
    r.runner.produce("sums", "train", 0, 1)
    if not ends:
        await until(lambda: r.events)
    else:
        await until(lambda: r.pid() is not None)
    await r.runner.close()
    assert len(os.listdir("/proc/self/fd")) <= open_before


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


OWN_TASK = """
def numbers(seed, first):
    print("whatever it says goes to standard error")
    for number in range(first, first + 40):
        yield {"prompt": f"say {number}", "answer": str(number)}

def broken(seed):
    yield {"prompt": "one", "answer": "1"}
    raise OSError("the data base is gone")
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "own_task_of_a_user.py").write_text(OWN_TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "own_task_of_a_user"


@pytest.mark.asyncio
async def test_evaluations_with_a_task_of_their_own_get_items_of_it(task, own):
    function = TaskSpec(
        source="python", function=f"{own}:numbers", settings={"first": 100}, reward="exact"
    )
    r = Runner(modules=(own,))
    r.runner.start(run_spec(task, numbers=EvaluationSpec(task=function)))
    r.runner.produce("sums", "eval", 0, 64, "numbers")
    r.runner.produce("sums", "eval", 0, 64)
    r.runner.produce("sums", "train", 0, 3)
    await until(lambda: len(r.events) == 3)
    numbers, held_out, training = r.events
    assert (numbers.evaluation, held_out.evaluation) == ("numbers", "held-out")
    assert [item.prompt for item in numbers.items] == [f"say {n}" for n in range(100, 140)]
    assert 5 < len(held_out.items) < 40
    assert all(item.prompt.endswith("+ 1 =") for item in (*held_out.items, *training.items))
    await r.runner.close()


@pytest.mark.asyncio
async def test_an_error_in_an_evaluations_task_is_told_with_its_name(task, own):
    for function, modules, expected in (
        ("broken", (own,), f"evaluations.mine.task.function: '{own}:broken' pass 0, item 1: OSE"),
        ("numbers", (), f"evaluations.mine.task.function: '{own}:numbers': module '{own}' is not"),
    ):
        broken = TaskSpec(source="python", function=f"{own}:{function}", reward="exact")
        r = Runner(modules=modules)
        r.runner.start(run_spec(task, mine=EvaluationSpec(task=broken)))
        r.runner.produce("sums", "eval", 0, 8, "mine")
        await until(lambda: bool(r.events))  # noqa: B023 - awaited before the next turn
        [failed] = r.events
        assert isinstance(failed, TaskSourceFailed)
        assert failed.message.startswith(expected), failed.message
        await r.runner.close()


# ---- before a run is submitted -------------------------------------------------------------------


def runner(**options: Any) -> TaskRunner:
    return TaskRunner(lambda _: None, random.Random(1), **options)


@pytest.mark.asyncio
async def test_a_check_opens_the_sources_in_a_process_that_ends(task):
    checks = runner()
    assert await checks.check(run_spec(task)) == ""
    wrong = msgspec.structs.replace(task, path=task.path + ".gone")
    assert "items.jsonl.gone: No such file" in await checks.check(run_spec(wrong))
    own = run_spec(task, mine=EvaluationSpec(task=wrong))
    assert (await checks.check(own)).startswith("evaluations.mine.task.path: ")


@pytest.mark.parametrize("program", ["exit 3", "head -c 100 /dev/urandom", "echo gone >&2"])
@pytest.mark.asyncio
async def test_a_check_that_cannot_say_finds_nothing(task, program: str):
    assert await runner(argv=("sh", "-c", program)).check(run_spec(task)) == ""
    assert await runner(argv=("/no/such/program",)).check(run_spec(task)) == ""


class Core:
    """What a submission comes to."""

    def __init__(self, runner: TaskRunner, check_s: float = 10.0) -> None:
        self.events: list[Event] = []
        known = {"known"}.__contains__
        self.submissions = Submissions(runner, self.events.append, known, check_s=check_s)

    def submit(self, run: RunSpec) -> FromOperator:
        event = FromOperator("op", 1, RunSubmit(run=run))
        self.submissions.put(event)
        return event


class Broken(TaskRunner):
    async def check(self, run: RunSpec) -> str:
        raise ValueError(f"not foreseen of {run.name}")


@pytest.mark.asyncio
async def test_a_submission_comes_to_the_core_whatever_looking_at_it_meets(task):
    core = Core(Broken(lambda event: None, random.Random(1)))
    event = core.submit(run_spec(task))
    await until(lambda: core.events == [event])


@pytest.mark.asyncio
async def test_a_submission_comes_to_the_core_with_what_is_wrong_with_its_sources(task):
    core = Core(runner())
    wrong = run_spec(msgspec.structs.replace(task, path=task.path + ".gone"))
    event = core.submit(wrong)
    assert core.events == [], "nobody waits for the process"
    other = FromOperator("op", 2, StatusRequest())
    core.submissions.put(other)
    assert core.events == [other]
    await until(lambda: len(core.events) == 2)
    assert core.events[1].fault.startswith("task.path: ")
    assert msgspec.structs.replace(core.events[1], fault="") == event
    good = core.submit(run_spec(task))
    await until(lambda: len(core.events) == 3)
    assert core.events[2] is good
    known = core.submit(msgspec.structs.replace(wrong, name="known"))
    assert core.events[3] is known, "the core knows it, whatever has become of its file"
    await core.submissions.close()


@pytest.mark.asyncio
async def test_a_source_that_opens_slowly_holds_a_submission_up_for_a_while_only(task):
    core = Core(runner(argv=("sleep", "60")), check_s=0.05)
    events = [core.submit(run_spec(task)) for _ in range(MAX_OPEN + 1)]
    assert core.events == [events[-1]], "more than a few are not looked at"
    await until(lambda: len(core.events) == len(events))
    assert not any(event.fault for event in core.events)
    stays = Core(runner(argv=("sleep", "60")))
    stays.submit(run_spec(task))
    await asyncio.sleep(0)
    await stays.submissions.close()
    assert stays.events == []
