"""What the daemon adds to what the core says: stamps, alerts, pages of a status."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from scripted_hub import ScriptedHub

from scheduler.alerts import DISK_FREE_BYTES, MAX_CLOCKS, Alerts
from scheduler.control_plane import ControlPlane, fitting
from scheduler.operator import Operator
from scheduler.segment_damage import DamageBook
from scheduler.segment_records import Gap
from transport.authorized import AllowList
from transport.keys import Peer
from transport.memory_links import MemoryNetwork
from transport.messages import (
    AgentInventory,
    DeadLetter,
    DeadLetters,
    DeadLettersRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Role,
    StatusReply,
    StatusRequest,
)
from transport.plane_hub import Arrival, PlaneHub
from transport.runtime.clock import ManualClock
from transport.runtime.settings import TransportConfig
from transport.status import AgentStatus, Alert, SchedulerStatus

WAIT_S = 10.0


def agent(name: str, **changes: Any) -> AgentStatus:
    values: dict[str, Any] = {
        "name": name,
        "state": "ready",
        "slots": 64,
        "running_sequences": 3,
        "leases": 2,
        "rtt_s": 0.1,
        "rate_tokens_s": 30.0,
        "tokens_generated": 1,
        "bytes_up": 1,
        "bytes_down": 1,
        "versions": {"sums/solver": 4},
        "digests": {"sums/solver": "0" * 64},
        "groups_done": 1,
        "attempts_failed": 0,
    }
    return AgentStatus(**{**values, **changes})


def status(agents: Sequence[AgentStatus], **counters: int) -> SchedulerStatus:
    return SchedulerStatus(
        term=1, build="b", uptime_s=0.0, runs=(), agents=tuple(agents), counters=counters
    )


# ---- stamps ----------------------------------------------------------------------------------


class Sent(PlaneHub):
    """The hub's sending end, kept."""

    def __init__(self) -> None:
        self.counters: Any = {}
        self.sent: list[Message] = []

    def send(self, route: bytes, message: Message, payload: Sequence[bytes] = ()) -> bool:
        self.sent.append(message)
        return True


def beat(plane: ControlPlane, sequence: int) -> None:
    arrival = Arrival(
        b"r",
        Peer(name="box1", role=Role.AGENT),
        Heartbeat(sequence=sequence, sent_s=5.0),
        [],
    )
    assert plane.event(arrival) is not None


@pytest.fixture
def heard() -> tuple[ControlPlane, Sent, ManualClock]:
    hub, clock = Sent(), ManualClock(wall_s=1000.0)
    plane = ControlPlane(hub, clock)
    inventory = AgentInventory(slots=1, hardware="", engine="", workflows={}, rewards=())
    hello = Hello(role=Role.AGENT, incarnation=1, build="b", agent=inventory)
    plane.event(Arrival(b"r", Peer(name="box1", role=Role.AGENT), hello, []))
    return plane, hub, clock


def test_a_reply_says_when_the_heartbeat_came_and_when_it_left(
    heard: tuple[ControlPlane, Sent, ManualClock],
) -> None:
    plane, hub, clock = heard
    beat(plane, 1)
    clock.advance(0.75)  # deciding, committing
    reply = HeartbeatReply(sequence=1, sent_s=5.0, unknown=("x",))
    plane.send("box1", reply)
    assert hub.sent == [msgspec.structs.replace(reply, received_s=1000.0, replied_s=1000.75)]


def test_only_the_latest_heartbeat_is_stamped_and_once(
    heard: tuple[ControlPlane, Sent, ManualClock],
) -> None:
    plane, hub, clock = heard
    beat(plane, 1)
    clock.advance(1.0)
    beat(plane, 2)
    clock.advance(1.0)
    for sequence in (1, 2, 2):
        plane.send("box1", HeartbeatReply(sequence=sequence, sent_s=5.0))
    stamps = [(m.received_s, m.replied_s) for m in hub.sent if isinstance(m, HeartbeatReply)]
    assert stamps == [(0.0, 0.0), (1001.0, 1002.0), (0.0, 0.0)]


# ---- alerts ----------------------------------------------------------------------------------


class Watched:
    def __init__(self, folder: Path, log_limit_bytes: int = 1000) -> None:
        self.now = 10.0
        self.lag_s = 0.0
        self.keys: list[str] = []
        (folder / "bodies").mkdir(exist_ok=True)
        self.alerts = Alerts(
            folder,
            folder / "bodies",
            log_limit_bytes,
            now=lambda: self.now,
            lag_s=lambda: self.lag_s,
            keys=lambda: self.keys,
        )

    def codes(self, *agents: AgentStatus) -> list[tuple[str, str, float]]:
        return [(a.code, a.subject, a.since_s) for a in self.alerts.standing(agents)]


def test_a_loop_that_is_held_up_is_an_alert_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.codes() == []
    watched.lag_s = 0.7
    assert watched.codes() == [("loop.lag", "scheduler", 10.0)]
    assert watched.alerts.counters() == {"loop.lag_ms": 700}
    watched.now = 20.0
    assert watched.codes() == [("loop.lag", "scheduler", 10.0)]
    watched.lag_s = 0.1
    assert watched.codes() == []
    watched.lag_s, watched.now = 0.6, 30.0
    assert watched.codes() == [("loop.lag", "scheduler", 30.0)]


def test_keys_that_are_skipped_or_cannot_be_read_are_an_alert_while_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    folder = tmp_path / "authorized"
    folder.mkdir()
    allowed = AllowList(folder, now=0.0)
    watched.keys = list(allowed.warnings)
    assert watched.codes() == []
    (folder / "a.toml").write_text("nonsense")
    (folder / "b.toml").write_text("nonsense")
    allowed.refresh(now=1e6)
    watched.keys = list(allowed.warnings)
    assert watched.codes() == [("keys.skipped", "scheduler", 10.0)]
    (alert,) = watched.alerts.standing([])
    assert "a.toml" in alert.message
    assert "(1 more)" in alert.message
    (folder / "a.toml").unlink()
    (folder / "b.toml").unlink()
    allowed.refresh(now=2e6)
    watched.keys = list(allowed.warnings)
    assert watched.codes() == []

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        allowed.refresh(now=3e6)
    watched.keys = list(allowed.warnings)
    (alert,) = watched.alerts.standing([])
    assert "Permission denied; who was let in stays" in alert.message


def test_clocks_that_are_off_are_named_up_to_a_bound(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    fine = [agent("a", clock_offset_s=1.0), agent("b"), agent("c", clock_offset_s=-0.9)]
    gone = agent("d", clock_offset_s=50.0, state="gone")
    assert watched.codes(*fine, gone) == []
    slow, fast = agent("e", clock_offset_s=1.5), agent("f", clock_offset_s=-90.0)
    messages = {a.subject: a.message for a in watched.alerts.standing([slow, fast])}
    assert "1.5 s behind the scheduler's" in messages["e"]
    assert "90.0 s ahead of the scheduler's" in messages["f"]
    many = [agent(f"x{n:03d}", clock_offset_s=2.0) for n in range(MAX_CLOCKS + 7)]
    subjects = [a.subject for a in watched.alerts.standing(many)]
    assert len(subjects) == MAX_CLOCKS + 1
    assert subjects[-1] == "7 more agents"
    # Agents on another page keep the moment at which it began.
    watched.now = 99.0
    assert watched.codes(slow) == [("agent.clock", "e", 10.0)]


@pytest.mark.asyncio
async def test_a_disk_and_a_log_that_are_nearly_full_are_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    (tmp_path / "bodies" / "1").write_bytes(b"x" * 960)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=DISK_FREE_BYTES - 1))
    looking = asyncio.create_task(watched.alerts.keep_looking())
    async with asyncio.timeout(WAIT_S):
        while "disk.free_mib" not in watched.alerts.counters():
            await asyncio.sleep(0)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert [code for code, _, _ in watched.codes()] == ["disk.low", "trajectories.full"]
    assert watched.alerts.counters()["disk.free_mib"] == 1023


def test_damaged_bodies_are_an_alert_until_nobody_needs_them(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    book = DamageBook(tmp_path / "bodies")
    book.note(3, Gap(100, 350, "no head of a record"))
    book.write()
    watched.alerts._disk = watched.alerts._look()
    [alert] = watched.alerts.standing(())
    assert (alert.code, alert.subject) == ("trajectories.damaged", "trajectory-log")
    assert "segment-00000003.log bytes 100 to 350 (250 bytes)" in alert.message
    book.removed(3)
    watched.alerts._disk = watched.alerts._look()
    assert watched.codes() == []


def test_a_status_carries_the_daemons_counters_and_alerts(tmp_path: Path) -> None:
    hub = Sent()
    plane = ControlPlane(hub, ManualClock())
    watched = Watched(tmp_path)
    watched.lag_s = 2.0
    plane.gauges, plane.alerts = watched.alerts.counters, watched.alerts.standing
    arrival = Arrival(b"r", Peer(name="op", role=Role.OPERATOR), StatusRequest(), [])
    event: Any = plane.event(arrival)
    own = Alert(code="lengths.bias", subject="sums/solver", message="x", since_s=1.0)
    of_core = msgspec.structs.replace(status([agent("a", clock_offset_s=9.0)]), alerts=(own,))
    plane.reply(event.request, StatusReply(status=of_core))
    [reply] = hub.sent
    assert isinstance(reply, StatusReply)
    codes = [alert.code for alert in reply.status.alerts]
    assert codes == ["lengths.bias", "loop.lag", "agent.clock"]
    assert reply.status.counters["loop.lag_ms"] == 2000


# ---- pages -----------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[ScriptedHub, Operator]]:
    """A scheduler of 3000 agents and 250 dead letters."""
    agents = [agent(f"agent-{n:05d}", clock_offset_s=5.0) for n in range(3000)]
    letters = [
        DeadLetter(
            job=f"r/t-{n:04d}", run="r", kind="train", reason="", died_s=0.0, prompt="", attempts=()
        )
        for n in range(250)
    ]
    clocks = Watched(tmp_path).alerts

    def answer(_: str, message: Message) -> list[tuple[Message, list[bytes]]]:
        match message:
            case StatusRequest(agents_after=after):
                page = fitting(status([a for a in agents if a.name > after], other=1))
                page = msgspec.structs.replace(page, alerts=clocks.standing(page.agents[:3]))
                return [(StatusReply(status=page), [])]
            case DeadLettersRequest(after=after, limit=limit):
                rest = [each for each in letters if each.job > after]
                found = DeadLetters(letters=tuple(rest[:limit]), more=len(rest) > limit)
                return [(found, [])]
        raise AssertionError(message)

    network = MemoryNetwork()
    hub = ScriptedHub(tmp_path, network, answer)
    transport = TransportConfig(control_port=hub.port, keys=str(hub.keys))
    async with Operator(transport, hub.keys / "operator.toml", network=network) as operator:
        yield hub, operator
    await hub.close()
    await network.close()


@pytest.mark.asyncio
async def test_a_status_has_every_agent_of_a_large_fleet(
    fleet: tuple[ScriptedHub, Operator],
) -> None:
    hub, operator = fleet
    found = await operator.status()
    assert [a.name for a in found.agents] == [f"agent-{n:05d}" for n in range(3000)]
    assert found.counters == {"other": 1}
    pages = len(hub.heard)
    assert pages > 2
    assert len(found.alerts) == 3 * pages


@pytest.mark.asyncio
async def test_dead_letters_come_page_by_page_up_to_what_is_wanted(
    fleet: tuple[ScriptedHub, Operator],
) -> None:
    _, operator = fleet
    assert len(await operator.dead_letters()) == 250
    assert len(await operator.dead_letters(most=120)) == 120
    for name in ("r/t-0000", "r/t-0123", "r/t-0249"):
        letter = await operator.dead_letter(name)
        assert letter is not None
        assert letter.job == name
    for name in ("r/t-0250", "r/t", "", "r/\ud7ff", "a"):
        assert await operator.dead_letter(name) is None
