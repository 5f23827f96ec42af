"""The client of submitters against a scripted scheduler, and what it does on its own."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from scripted_hub import ScriptedHub

from farflow.client import BodyGone, Client, ExternalJob, JobResult, job
from transport.asking import RequestRefused
from transport.envelope import CONTROL_FRAME_BYTES
from transport.errors import (
    ChecksumMismatch,
    ConfigError,
    LocalProtocolError,
    PeerUnreachable,
    StoreError,
    TaskError,
)
from transport.memory_links import MemoryNetwork
from transport.messages import (
    Body,
    BodyRequest,
    CommandReply,
    JobCancel,
    JobReceipt,
    JobReceipts,
    JobSubmit,
    Message,
    Plane,
    Results,
    ResultsRequest,
)
from transport.trajectory import body_digest

WAIT_S = 10.0
Answers = list[tuple[Message, list[bytes]]]


class Scheduler:
    """Numbered results and their bodies, as the real one keeps them."""

    def __init__(self, count: int = 0) -> None:
        self.results = [result(number) for number in range(1, count + 1)]
        self.confirmed = 0
        self.open_jobs = 0
        self.last = count
        self.bodies: dict[str, bytes] = {}
        self.silent = 0
        self.refuse = ""

    def __call__(self, name: str, message: Message) -> Answers:
        if self.silent:
            self.silent -= 1
            return []
        if self.refuse:
            return [(CommandReply(ok=False, code=self.refuse, message="not you"), [])]
        match message:
            case JobSubmit(jobs=jobs):
                receipts = tuple(JobReceipt(id=each.id, state="queued") for each in jobs)
                return [(JobReceipts(receipts=receipts), [])]
            case JobCancel(ids=ids):
                receipts = tuple(JobReceipt(id=each, state="known") for each in ids)
                return [(JobReceipts(receipts=receipts), [])]
            case ResultsRequest(after=after, limit=limit):
                if after <= self.last:
                    self.confirmed = max(self.confirmed, after)
                found = [r for r in self.results if r.number > max(after, self.confirmed)]
                page = Results(
                    results=tuple(found[:limit]), last=self.last, open_jobs=self.open_jobs
                )
                return [(page, [])]
            case BodyRequest(digests=(digest,)):
                data = self.bodies.get(digest)
                other = (Body(digest="another"), [b"another"])
                if data is None:
                    return [other, (Body(digest=digest, found=False), [])]
                return [other, (Body(digest=digest), [data])]
        raise AssertionError(message)


def result(number: int, digest: str = "") -> JobResult:
    return JobResult(number=number, run="r", id=f"j-{number}", state="accepted", digest=digest)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork()
        self.scheduler = Scheduler()
        answer = lambda name, message: self.scheduler(name, message)  # noqa: E731 - replaceable
        self.control = ScriptedHub(folder, self.network, answer)
        self.log = ScriptedHub(folder, self.network, answer, Plane.TRAJECTORIES)

    def client(self, answer_s: float = WAIT_S, patience_s: float = WAIT_S) -> Client:
        return Client(
            control_port=self.control.port,
            trajectories_port=self.log.port,
            keys=self.control.keys,
            answer_s=answer_s,
            patience_s=patience_s,
            network=self.network,
        )

    def asked(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.control.heard if isinstance(message, kind)]


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    async with asyncio.timeout(WAIT_S):
        yield made
    await made.control.close()
    await made.log.close()
    await made.network.close()


@pytest.mark.asyncio
async def test_jobs_leave_in_as_few_messages_as_fit_and_keep_their_order(world: World) -> None:
    small = [job(f"s-{n}", "x") for n in range(1000)]
    large = [job(f"l-{n}", "y" * 100_000) for n in range(5)]
    async with world.client() as client:
        receipts = await client.submit("r", [*small, *large])
    assert [r.id for r in receipts] == [j.id for j in (*small, *large)]
    sent = [m for m in world.asked(JobSubmit) if isinstance(m, JobSubmit)]
    assert [len(m.jobs) for m in sent] == [512, 488 + 1, 2, 2]
    assert all(len(msgspec.msgpack.encode(m)) <= CONTROL_FRAME_BYTES for m in sent)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (job("Upper", "x"), r"'Upper'.*id"),
        (job("a", "x", group_size=0), r"'a'.*group_size"),
        (job("a", "x", temperature=float("nan")), r"'a'.*temperature"),
        (job("a", "x", deadline_s=float("inf")), r"'a'.*deadline_s"),
        (job("a", "x" * 300_000), r"'a': takes \d+ bytes"),
        (ExternalJob(id="a", items=()), r"'a'.*items"),
    ],
)
async def test_a_job_that_the_scheduler_could_not_read_is_refused_before_anything_is_sent(
    world: World, bad: ExternalJob, said: str
) -> None:
    async with world.client() as client:
        with pytest.raises(TaskError, match=said):
            await client.submit("r", [job("good", "x"), bad])
        with pytest.raises(LocalProtocolError, match="ids"):
            await client.cancel("r", ["x" * 300])
        with pytest.raises(LocalProtocolError, match="after"):
            await client.page(-1)
    assert world.control.heard == []


@pytest.mark.asyncio
async def test_many_cancels_are_split_too(world: World) -> None:
    async with world.client() as client:
        receipts = await client.cancel("r", [f"j-{n}" for n in range(600)])
    assert len(receipts) == 600
    assert len(world.asked(JobCancel)) == 2


@pytest.mark.asyncio
async def test_results_are_confirmed_when_the_program_comes_back_and_not_before(
    world: World,
) -> None:
    world.scheduler = Scheduler(600)
    seen = []
    async with world.client() as client:
        async for each in client.results(until="done"):
            assert world.scheduler.confirmed < each.number
            seen.append(each.number)
    assert seen == list(range(1, 601))
    assert world.scheduler.confirmed == 600


@pytest.mark.asyncio
async def test_a_program_that_dies_sees_again_what_it_had_not_finished(world: World) -> None:
    world.scheduler = Scheduler(10)
    cursor = world.folder / "cursor"

    async def until_number(last: int) -> list[int]:
        seen = []
        async with world.client() as client:
            async for each in client.results(cursor=cursor, until="now"):
                seen.append(each.number)
                if each.number == last:
                    break  # as if it died while it works on this one
        return seen

    assert await until_number(4) == [1, 2, 3, 4]
    assert cursor.read_text() == "3\n"
    assert await until_number(11) == [4, 5, 6, 7, 8, 9, 10]
    assert cursor.read_text() == "10\n"
    assert await until_number(11) == []


@pytest.mark.asyncio
async def test_a_scheduler_that_was_restored_from_a_backup_gives_its_results_again(
    world: World,
) -> None:
    world.scheduler = Scheduler(3)
    cursor = world.folder / "cursor"
    cursor.write_text("50\n")
    async with world.client() as client:
        seen = [each.number async for each in client.results(cursor=cursor, until="now")]
    assert seen == [1, 2, 3]
    assert cursor.read_text() == "3\n"


@pytest.mark.asyncio
async def test_done_waits_for_open_jobs_and_asks_for_nothing_to_be_held_back_without(
    world: World,
) -> None:
    world.scheduler = Scheduler(1)
    world.scheduler.open_jobs = 1
    seen = []
    async with world.client() as client:
        async for each in client.results(until="done"):
            seen.append(each.number)
            if each.number == 1:
                world.scheduler.results.append(result(2))
                world.scheduler.last = 2
                world.scheduler.open_jobs = 0
    assert seen == [1, 2]
    waits = [m.wait_s for m in world.asked(ResultsRequest) if isinstance(m, ResultsRequest)]
    assert waits[0] == waits[-1] == 0.0
    assert max(waits) == 20.0


@pytest.mark.asyncio
async def test_an_absent_scheduler_is_waited_for_within_the_patience(world: World) -> None:
    world.scheduler = Scheduler(2)
    world.scheduler.silent = 2
    async with world.client(answer_s=0.05) as client:
        assert [each.number async for each in client.results(until="now")] == [1, 2]
        world.scheduler.silent = 10**6
        with pytest.raises(PeerUnreachable, match="no answer within"):
            await client.submit("r", [job("a", "x")])
    async with world.client(answer_s=0.05, patience_s=0.1) as client:
        with pytest.raises(PeerUnreachable):
            await anext(client.results(wait_s=0.0))


@pytest.mark.asyncio
async def test_a_refusal_is_raised_with_its_code(world: World) -> None:
    world.scheduler.refuse = "role.not_allowed"
    async with world.client() as client:
        with pytest.raises(RequestRefused, match=r"role\.not_allowed: not you"):
            await client.submit("r", [job("a", "x")])


@pytest.mark.asyncio
async def test_bodies_are_checked_and_one_that_is_gone_says_so(world: World) -> None:
    data = b"packed"
    digest, wrong = body_digest(data), body_digest(b"other")
    world.scheduler.bodies = {digest: data, wrong: data}
    async with world.client() as client:
        assert await client.packed(result(1, digest)) == data
        with pytest.raises(ChecksumMismatch, match="another digest"):
            await client.packed(result(2, wrong))
        with pytest.raises(BodyGone, match="the log has no body"):
            await client.packed(result(3, body_digest(b"gone")))
        with pytest.raises(BodyGone, match="without a body"):
            await client.packed(result(4))
    with pytest.raises(PeerUnreachable, match="closed"):
        await client.packed(result(1, digest))


@pytest.mark.asyncio
async def test_a_request_for_results_that_waits_holds_up_no_submission(world: World) -> None:
    waiting = asyncio.Event()
    answer = world.scheduler

    class Holding(Scheduler):
        def __call__(self, name: str, message: Message) -> Answers:
            if isinstance(message, ResultsRequest):
                waiting.set()
                return []
            return answer(name, message)

    world.scheduler = Holding()
    async with world.client() as client:
        following = asyncio.create_task(anext(client.results()))
        await waiting.wait()
        assert len(await client.submit("r", [job("a", "x")])) == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_what_is_missing_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"submitter\.toml: no such file; name it with key="):
        Client(keys=tmp_path)
    from farflow.client import _read_cursor, _write_cursor

    (tmp_path / "cursor").write_text("seven")
    with pytest.raises(StoreError, match="is no cursor"):
        _read_cursor(tmp_path / "cursor")
    with pytest.raises(StoreError, match="no folder"):
        _write_cursor(tmp_path / "absent" / "cursor", 3)


def test_importing_the_client_imports_no_engine_and_no_scheduler_core() -> None:
    script = (
        "import sys, farflow.client\n"
        "heavy = ('torch', 'transformers', 'vllm', 'numba', 'numpy', 'scheduler.core')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
