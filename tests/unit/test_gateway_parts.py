"""Parts of the gateway without its process: the shared feed, the record, paths, the address."""

import asyncio
import errno
import json
import os
import resource
from pathlib import Path

import pytest

from farflow.local_argv import CommandLines
from farflow.run_folder import RunFolder
from farflow.up import dashboard_line
from farflow.up_config import up_config
from scheduler.config import HttpTable
from scheduler.gateway import audit as audit_module
from scheduler.gateway import feed as feed_module
from scheduler.gateway import habits
from scheduler.gateway.audit import Asked, Audit
from scheduler.gateway.feed import RING, Feed
from scheduler.gateway.openapi import path_pattern
from scheduler.gateway.service import address_of
from scheduler.gateway.static_files import TYPES
from transport.errors import PeerUnreachable, StoreError
from transport.messages import Events, Transition
from transport.runtime.clock import ManualClock, SystemClock
from transport.status import SchedulerStatus

ASKED = Asked(token="ada", role="operator", address="::1", method="POST", path="/v1/runs")  # noqa: S106


class Scheduler:
    """Answers as an operator's connection does: ``events`` waits until there are more."""

    def __init__(self) -> None:
        self.asked = 0
        self.away = False
        self.runs = 0
        self.made = 0
        self.missed = 0
        self._more = asyncio.Event()

    async def status(self) -> SchedulerStatus:
        self.asked += 1
        await asyncio.sleep(0)
        if self.away:
            raise PeerUnreachable("away")
        return SchedulerStatus(
            term=1, build="b", uptime_s=float(self.asked), runs=(), agents=(),
            counters={"runs": self.runs, "control.frames": self.asked},
        )  # fmt: skip

    async def events(self, after, *, subject="", wait_s=0.0, limit=1000) -> Events:
        if self.away:
            raise PeerUnreachable("away")
        if after is None:
            return Events(transitions=(), last=self.made)
        while after >= self.made:
            self._more.clear()
            await self._more.wait()
        last = min(self.made, after + limit)
        found = [
            Transition(number=n, at_s=0.0, subject="a", what="w")
            for n in range(after + 1, last + 1)
        ]
        missed, self.missed = self.missed, 0
        return Events(transitions=tuple(found), last=last, missed=missed)

    def happen(self, count: int) -> None:
        self.made += count
        self._more.set()


async def until(condition) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_the_status_is_shared_and_numbered_by_what_changed():
    scheduler, clock = Scheduler(), ManualClock()
    feed = Feed(scheduler, scheduler, clock)
    first = await asyncio.gather(*(feed.status() for _ in range(30)))
    assert (scheduler.asked, len({id(one) for one in first})) == (1, 1)
    clock.advance(0.9)
    assert (await feed.status()).status.uptime_s == 1.0
    clock.advance(0.2)
    again = await feed.status()
    assert (again.status.uptime_s, again.number) == (2.0, first[0].number)
    scheduler.runs = 1
    clock.advance(1.1)
    assert (await feed.status()).number == first[0].number + 1
    scheduler.away = True
    clock.advance(1.1)
    with pytest.raises(PeerUnreachable):
        await feed.status()
    assert feed.trouble is not None
    scheduler.away = False
    assert (await feed.status()).number == first[0].number + 1
    await asyncio.sleep(0)
    assert feed.trouble is None


@pytest.mark.asyncio
async def test_who_comes_regularly_finds_a_status_that_is_there(monkeypatch):
    monkeypatch.setattr(feed_module, "LEAD_S", 1.49)  # so that it is asked for at once
    scheduler, clock = Scheduler(), ManualClock()
    feed = Feed(scheduler, scheduler, clock)
    asked = []
    for visit in range(4):
        before = scheduler.asked
        snapshot = await feed.status()
        asked.append(scheduler.asked - before)
        assert clock.monotonic_s() - snapshot.taken_s < feed_module.STATUS_S
        feed.expect("prometheus")
        clock.advance(1.4)
        if visit:
            await until(lambda: feed.snapshot.taken_s == clock.monotonic_s())
        clock.advance(0.1)
    assert asked == [1, 1, 0, 0]  # two visits show the habit
    assert scheduler.asked == 5  # one a visit, as before, and one for a visit to come
    feed.expect("prometheus")
    await feed.close()
    await asyncio.sleep(0.05)
    assert scheduler.asked == 5


def test_habits_are_of_those_who_come_often_enough():
    found = habits.Habits()
    assert [found.came("a", at_s) for at_s in (0.0, 15.0, 30.5)] == [None, 15.0, 15.5]
    assert found.came("b", 31.0) is None
    assert found.came("b", 31.1) is None  # twice at once is no habit
    assert found.came("a", 30.5 + habits.LONGEST_S + 1) is None
    for number in range(habits.MOST):
        found.came(f"c{number}", 1000.0)
    assert found.came("a", 1001.0) is None  # forgotten


@pytest.mark.asyncio
async def test_events_are_followed_once_and_only_so_many_are_kept():
    scheduler = Scheduler()
    scheduler.made = 100
    feed = Feed(scheduler, scheduler, SystemClock())
    async with feed.listening(), feed.listening():
        assert (feed.position, feed.last) == (0, 100)
        mark = feed.mark()
        scheduler.happen(3)
        await feed.changed(mark, 5.0)
        await until(lambda: feed.position == 3)
        told, lost = feed.after(0)
        assert ([one.transition.number for one in told], lost) == ([101, 102, 103], 0)
        assert told[0].encoded.startswith(b"id: 101\nevent: transition\ndata: {")
        assert feed.after(2)[0] == told[2:]
        scheduler.missed = 7
        scheduler.happen(1)
        await until(lambda: feed.position == 5)
        told, _ = feed.after(3)
        assert [one.missed for one in told] == [7, 0]
        scheduler.happen(RING + 10)
        await until(lambda: feed.last == scheduler.made)
        told, lost = feed.after(5)
        assert (len(told), lost) == (RING, 10)
        assert told[-1].transition.number == scheduler.made
    assert feed.after(feed.position) == ([], 0)
    scheduler.away = True
    with pytest.raises(PeerUnreachable):
        async with feed.listening():
            raise AssertionError("nobody can listen")
    scheduler.away = False
    async with feed.listening():
        assert feed.last == scheduler.made


@pytest.mark.asyncio
async def test_the_record_is_bounded_and_its_last_lines_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "MAX_BYTES", 2000)
    audit = Audit(tmp_path, 7, ManualClock())
    try:
        for _ in range(40):
            begun = await audit.begin(ASKED)
            await audit.end(begun, 200, "")
        await audit.refused(ASKED, 403, "http.forbidden")
    finally:
        audit.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [audit_module.FILE_NAME + end for end in ("", ".1", ".2", ".3")]
    assert all((tmp_path / name).stat().st_size < 2500 for name in files)
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in files)
    lines = []
    for name in (files[3], files[2], files[1], files[0]):
        lines += [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert (lines[-1]["status"], lines[-1]["what"], lines[-1]["number"]) == (403, "ended", 41)
    assert {line["life"] for line in lines} == {7}
    numbers = [line["number"] for line in lines]
    assert numbers == sorted(numbers)


@pytest.mark.asyncio
async def test_a_record_that_cannot_be_written_says_so(tmp_path):
    audit = Audit(tmp_path / "gone", 1, ManualClock())
    try:
        with pytest.raises(StoreError, match="no folder"):
            await audit.begin(ASKED)
    finally:
        audit.close()


@pytest.mark.asyncio
async def test_a_line_that_a_full_disk_cut_short_does_not_spoil_the_next(tmp_path):
    audit = Audit(tmp_path, 1, ManualClock())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        begun = await audit.begin(ASKED)
        size = (tmp_path / audit_module.FILE_NAME).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
        try:
            with pytest.raises(StoreError, match="disk is full"):
                await audit.begin(ASKED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await audit.end(begun, 200, "")
    finally:
        audit.close()
    lines = (tmp_path / audit_module.FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["begun", "ended"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "torn", [b'{"token":"ada","ro', b"\0" * 500, b'{"token":"a' + b"\0" * 4000, b"{" * 100_000]
)
@pytest.mark.parametrize("before", [0, 3])
async def test_a_line_that_power_loss_tore_does_not_spoil_the_next(tmp_path, torn, before):
    record = tmp_path / audit_module.FILE_NAME
    for life in (1, 2):
        audit = Audit(tmp_path, life, ManualClock())
        try:
            for _ in range(before if life == 1 else 2):
                await audit.refused(ASKED, 403, "http.forbidden")
        finally:
            audit.close()
        if life == 1:
            with record.open("ab") as file:
                file.write(torn)
    lines = record.read_bytes().splitlines()
    assert [json.loads(line)["life"] for line in lines] == [1] * before + [2, 2]


@pytest.mark.asyncio
async def test_a_rotation_that_fails_closes_nobody_elses_descriptor(tmp_path, monkeypatch):
    record = tmp_path / audit_module.FILE_NAME
    record.write_bytes(b"x\n" * (audit_module.MAX_BYTES // 2 + 1))
    really_open, really_close = os.open, os.close
    opened: list[int] = []
    closed: list[int] = []

    def opening(path, *more, **how):
        if opened and Path(path) == record:
            raise OSError(errno.ENOSPC, "No space left on device")
        found = really_open(path, *more, **how)
        if Path(path) == record:
            opened.append(found)
        return found

    def closing(descriptor):
        if descriptor in opened:
            closed.append(descriptor)
        really_close(descriptor)

    audit = Audit(tmp_path, 1, ManualClock())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(audit_module.os, "open", opening)
            patch.setattr(audit_module.os, "close", closing)
            with pytest.raises(StoreError, match="No space left"):
                await audit.begin(ASKED)
            assert closed == opened
        await audit.begin(ASKED)
    finally:
        audit.close()
    assert json.loads(record.read_text())["what"] == "begun"


def test_paths_match_names_and_nothing_else():
    logs = path_pattern("/v1/agents/{agent}/logs")
    assert logs.fullmatch("/v1/agents/box-1.eu/logs").groupdict() == {"agent": "box-1.eu"}
    for path in (
        "/v1/agents//logs",
        "/v1/agents/a/b/logs",
        "/v1/agents/A/logs",
        "/v1/agents/../logs",
    ):
        assert logs.fullmatch(path) is None
    explain = path_pattern("/v1/explain/{subject}")
    assert explain.fullmatch("/v1/explain/sums/t-1#2").group("subject") == "sums/t-1#2"
    assert path_pattern("/v1/runs/{run}/{command}").fullmatch("/v1/runs/a/explode") is None
    assert ".map" not in TYPES


def test_the_address_is_one_that_this_machine_reaches():
    assert address_of(HttpTable(), 7780) == "http://127.0.0.1:7780/"
    everywhere = HttpTable(host="0.0.0.0", certificate="c", key="k")  # noqa: S104
    assert address_of(everywhere, 1) == "https://127.0.0.1:1/"
    assert address_of(HttpTable(host="::1"), 1) == "http://[::1]:1/"


def test_up_has_a_dashboard_on_any_port_unless_the_file_names_one(tmp_path):
    folder = RunFolder(tmp_path)
    ports = {"control": 1, "trajectories": 2, "weights": 3}
    base = {"local": {"agents": {"near": {}}}}
    config, _ = up_config(base)
    argv = CommandLines(folder, (), None, config.http.port).scheduler(ports)
    assert "http.port=0" in argv
    config, _ = up_config({**base, "http": {"port": 8000}})
    assert config.http.port == 8000
    argv = CommandLines(folder, (), None).scheduler(ports)
    assert not [text for text in argv if text.startswith("http.")]


def test_the_secret_is_in_the_dashboards_line_only_for_a_person(tmp_path):
    folder = RunFolder(tmp_path)
    folder.gateway.mkdir(parents=True)
    file = folder.gateway / "local-token"
    address = "http://127.0.0.1:1/"
    assert dashboard_line(folder, address, secret=True) == f"dashboard: {address} (token: {file})"
    file.write_text("s3cret\n")
    assert dashboard_line(folder, address, secret=True) == f"dashboard: {address}#token=s3cret"
    assert dashboard_line(folder, address, secret=False) == f"dashboard: {address} (token: {file})"
