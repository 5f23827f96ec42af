"""Submitting jobs to a scheduler from a program, and taking their results.

    async with Client("deployment.toml", key="keys/submitter.toml") as client:
        await client.submit("sums", [job("a-1", "2 + 2 =", "4", group_size=8)])
        async for result in client.results(until="done"):
            group = await client.body(result)

What always holds: submitting the same jobs again is harmless; a result is confirmed, and with it
the right to its body given up, only when the program comes back for one after it, so a program that
dies sees again what it had not finished (at least once, in the order of ``number``); with a cursor
file it is on the disk before the scheduler is told; every wait has a bound. Importing this imports
neither torch nor an engine.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import msgspec
import structlog

from transport.asking import ANSWER_S, PATIENCE_S, Asking, Pace, RequestRefused, patiently
from transport.envelope import CONTROL_FRAME_BYTES
from transport.errors import (
    ChecksumMismatch,
    ConfigError,
    FarflowError,
    StoreError,
    TaskError,
)
from transport.links import Network
from transport.messages import (
    MAX_JOBS_PER_SUBMIT,
    Body,
    BodyRequest,
    ExternalJob,
    Item,
    JobCancel,
    JobReceipt,
    JobReceipts,
    JobResult,
    JobSubmit,
    Plane,
    Results,
    ResultsRequest,
)
from transport.runtime.config import load_config
from transport.runtime.files import atomic_write, read_limited
from transport.runtime.settings import DaemonConfig, TransportConfig

if TYPE_CHECKING:
    from transport.trajectory import TrajectoryGroup

__all__ = [
    "BodyGone",
    "Client",
    "ExternalJob",
    "Item",
    "JobReceipt",
    "JobResult",
    "RequestRefused",
    "Results",
    "job",
]

WAIT_S: Final = 20.0
_BATCH_BYTES: Final = CONTROL_FRAME_BYTES - 4096
_MAX_CURSOR_BYTES: Final = 32

Until = Literal["forever", "done", "now"]

_log = structlog.get_logger()
_encode = msgspec.msgpack.Encoder().encode
_check_job = msgspec.msgpack.Decoder(ExternalJob)


class BodyGone(FarflowError):
    """A result's body is not in the trajectory log (any more)."""

    code = "body.gone"


def job(id: str, prompt: str, answer: str = "", *, meta: str = "", **fields: Any) -> ExternalJob:
    """A job of one item; ``fields`` are those of ``ExternalJob``. ``meta`` is JSON for the run's
    verifier."""
    item = Item(index=0, prompt=prompt, answer=answer, meta=meta)
    return ExternalJob(id=id, items=(item,), **fields)


class Client:
    """A submitter's connection to a scheduler; an asynchronous context manager.

    ``config`` is a deployment file or a ``TransportConfig``; without it the defaults count.
    ``host``, the ports and ``keys`` (the folder with ``server.public.toml``) override it. ``key``
    is the submitter's secret key file; the default is ``submitter.toml`` in ``keys``. All programs
    with one key share one list of results. ``patience_s`` is for how long a scheduler may be away
    before following results ends with ``PeerUnreachable``.

    Raises:
        ConfigError: a file does not load.
    """

    def __init__(
        self,
        config: TransportConfig | Path | str | None = None,
        *,
        host: str | None = None,
        control_port: int | None = None,
        trajectories_port: int | None = None,
        keys: Path | str | None = None,
        key: Path | str | None = None,
        answer_s: float = ANSWER_S,
        patience_s: float = PATIENCE_S,
        network: Network | None = None,
    ) -> None:
        if not isinstance(config, TransportConfig):
            files = [] if config is None else [Path(config)]
            config = load_config(DaemonConfig, files).value.transport
        given = {
            "host": host,
            "control_port": control_port,
            "trajectories_port": trajectories_port,
            "keys": None if keys is None else str(keys),
        }
        changes = {name: value for name, value in given.items() if value is not None}
        transport = msgspec.structs.replace(config, **changes)
        path = Path(key) if key is not None else Path(transport.keys) / "submitter.toml"
        if not path.is_file():
            raise ConfigError(
                f"submitter key {path}: no such file; name it with key=, or the folder with keys="
            )
        self._patience_s = patience_s
        self._network = network
        self._shared = network is not None
        # One each: a request for results that waits must not hold up a submission or a body.
        self._jobs = Asking(transport, path, answer_s=answer_s, network=network)
        self._results = Asking(transport, path, answer_s=answer_s, network=network)
        self._bodies = Asking(
            transport, path, plane=Plane.TRAJECTORIES, answer_s=answer_s, network=network
        )

    async def __aenter__(self) -> Self:
        if not self._shared:
            from transport.zmq_links import ZmqNetwork

            self._network = ZmqNetwork()
            for asking in (self._jobs, self._results, self._bodies):
                asking.use(self._network)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for asking in (self._jobs, self._results, self._bodies):
            await asking.close()
        if self._network is not None and not self._shared:
            await self._network.close()

    async def submit(self, run: str, jobs: Iterable[ExternalJob]) -> list[JobReceipt]:
        """Submit jobs to a live run, in as many messages as they need; what a receipt calls queued
        or known is durable. Receipts are in the order of the jobs; after an error, submit all of
        them again.

        Raises:
            TaskError: a job cannot be submitted; names the job and the field. Nothing was sent.
            RequestRefused: the scheduler takes no jobs of this key.
            PeerUnreachable: no answer.
        """
        receipts: list[JobReceipt] = []
        for batch in _batches(list(jobs)):
            answer, _ = await self._jobs.ask(JobSubmit(run=run, jobs=batch), JobReceipts)
            receipts += answer.receipts
        return receipts

    async def cancel(self, run: str, ids: Iterable[str]) -> list[JobReceipt]:
        """Cancel jobs by the ids that they were submitted under; raises as ``submit``."""
        receipts: list[JobReceipt] = []
        wanted = list(ids)
        for first in range(0, len(wanted), MAX_JOBS_PER_SUBMIT):
            message = JobCancel(run=run, ids=tuple(wanted[first : first + MAX_JOBS_PER_SUBMIT]))
            answer, _ = await self._jobs.ask(message, JobReceipts)
            receipts += answer.receipts
        return receipts

    async def page(self, after: int = 0, *, limit: int = 256, wait_s: float = 0.0) -> Results:
        """The results after number ``after``, at most ``limit`` (1 to 256) of them, waiting up to
        ``wait_s`` (at most 60) for the first. Confirms those up to ``after``, for good.

        Raises:
            RequestRefused, PeerUnreachable: as ``submit``.
        """
        request = ResultsRequest(after=after, limit=limit, wait_s=wait_s)
        answer, _ = await self._results.ask(request, Results, wait_s=wait_s)
        return answer

    async def results(
        self,
        after: int = 0,
        *,
        cursor: Path | None = None,
        until: Until = "forever",
        wait_s: float = WAIT_S,
    ) -> AsyncIterator[JobResult]:
        """Every result after number ``after``, in order. ``until`` ``"done"`` ends when no job of
        this key is open, ``"now"`` when there is nothing more at the moment.

        With a ``cursor`` file the number of every result that the program came back from is kept
        there, and
        the larger of it and ``after`` counts. A scheduler that is away is waited for, up to
        ``patience_s``. One whose store was restored from a backup gives earlier numbers again.

        Raises:
            RequestRefused: the scheduler gives this key no results.
            PeerUnreachable: the scheduler was away too long.
            StoreError: the cursor file cannot be read or written.
        """
        if cursor is not None:
            after = max(after, await asyncio.to_thread(_read_cursor, cursor))
        pace, hold_s = Pace(), wait_s if until == "forever" else 0.0
        while True:
            page = await patiently(
                partial(self.page, after, wait_s=hold_s),
                self._patience_s,
            )
            if page.last < after:
                _log.warning("results.restored", last=page.last, after=after)
                after = 0
                if cursor is not None:
                    await asyncio.to_thread(_write_cursor, cursor, after)
                continue
            for result in page.results:
                yield result
                after = result.number
                if cursor is not None:
                    await asyncio.to_thread(_write_cursor, cursor, after)
            if not page.results and (until == "now" or (until == "done" and not page.open_jobs)):
                return
            if not page.results:
                await pace.keep()
            if until == "done":  # with nothing open no result will come
                hold_s = wait_s if page.open_jobs else 0.0

    async def packed(self, result: JobResult) -> bytes:
        """The packed trajectory of an accepted result, checked against its digest.

        Raises:
            BodyGone: the result has no body, or it was confirmed and released.
            ChecksumMismatch: other bytes came.
            PeerUnreachable: no answer.
        """
        if not result.digest:
            raise BodyGone(f"job {result.id}: {result.state} without a body ({result.code})")
        answer, payload = await self._bodies.ask(
            BodyRequest(digests=(result.digest,)),
            Body,
            accept=lambda body: body.digest == result.digest,
        )
        if not answer.found or not payload:
            raise BodyGone(
                f"job {result.id}: the log has no body {result.digest}; fetch bodies before "
                "confirming their results"
            )
        from transport.trajectory import body_digest

        if await asyncio.to_thread(body_digest, payload[0]) != result.digest:
            raise ChecksumMismatch(f"job {result.id}: its body has another digest")
        return payload[0]

    async def body(self, result: JobResult) -> "TrajectoryGroup":
        """The sequences of an accepted result; raises as ``packed``, and RemoteProtocolError or an
        IntegrityError for a body that is no trajectory."""
        from transport.trajectory import unpack

        return await asyncio.to_thread(unpack, await self.packed(result))


def _batches(jobs: Sequence[ExternalJob]) -> list[tuple[ExternalJob, ...]]:
    """Jobs in messages that fit a frame; every job is checked as the scheduler will check it.

    Raises:
        TaskError: one cannot be submitted.
    """
    batches: list[tuple[ExternalJob, ...]] = []
    batch: list[ExternalJob] = []
    size_bytes = 0
    for each in jobs:
        job_bytes = _job_bytes(each)
        if batch and (len(batch) == MAX_JOBS_PER_SUBMIT or size_bytes + job_bytes > _BATCH_BYTES):
            batches.append(tuple(batch))
            batch, size_bytes = [], 0
        batch.append(each)
        size_bytes += job_bytes
    if batch:
        batches.append(tuple(batch))
    return batches


def _job_bytes(each: ExternalJob) -> int:
    try:
        data = _encode(each)
        _check_job.decode(data)
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise TaskError(f"job {each.id!r}: {error}") from error
    if len(data) > _BATCH_BYTES:
        raise TaskError(
            f"job {each.id!r}: takes {len(data)} bytes, a message holds {_BATCH_BYTES}; shorten "
            "its items or make several jobs of them"
        )
    return len(data)


def _read_cursor(path: Path) -> int:
    try:
        data = read_limited(path, _MAX_CURSOR_BYTES)
    except FileNotFoundError:
        return 0
    text = data.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise StoreError(f"{path}: is no cursor (a number expected); name another file")
    return int(text)


def _write_cursor(path: Path, number: int) -> None:
    try:
        atomic_write(path, f"{number}\n".encode())
    except FileNotFoundError as error:
        raise StoreError(f"no folder {path.parent} for the cursor: create it") from error
