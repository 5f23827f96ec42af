"""What is said of an address that cannot be reached: which, why, what to look at, and how often."""

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from scheduler.control_link import ControlLink
from transport.asking import Asking
from transport.envelope import LIMITS, encode
from transport.errors import PeerUnreachable
from transport.keys import KeyPair, create_keys
from transport.links import LinkOptions
from transport.memory_links import MemoryNetwork
from transport.messages import Plane, Role, StatusReply, StatusRequest, Welcome
from transport.plane_links import PlaneLinks
from transport.reaching import (
    FIRST_S,
    MOST_S,
    NAME,
    REFUSED,
    SILENT,
    Rarely,
    what_to_look_at,
    why_no_tcp,
)
from transport.runtime.clock import SystemClock
from transport.runtime.settings import TransportConfig
from transport.zmq_links import ZmqNetwork

CONTROL = Plane.CONTROL
PAIR = KeyPair.generate("a", Role.AGENT)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.reaching.FIRST_S", 0.02)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Quick(random.Random):
    """Pauses are a hundredth of what they would be."""

    def uniform(self, a: float, b: float) -> float:
        return 0.01 * super().uniform(a, b)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not found():
            await asyncio.sleep(0.01)


def test_what_lasts_is_said_soon_and_then_ever_more_rarely() -> None:
    rarely, now, said = Rarely(), 100.0, []
    for _ in range(12):
        now = rarely.due_s(now)
        said.append(now - 100.0)
        rarely.said(now)
    assert said[:4] == [FIRST_S, 3 * FIRST_S, 7 * FIRST_S, 15 * FIRST_S]
    assert said[-1] - said[-2] == MOST_S
    rarely.over()
    assert rarely.due_s(now) == now + FIRST_S


@pytest.mark.asyncio
async def test_a_closed_port_an_unknown_name_and_a_listener_are_told_apart() -> None:
    assert await why_no_tcp(f"tcp://127.0.0.1:{free_port()}") == REFUSED
    assert (await why_no_tcp("tcp://nowhere.invalid:7700")).startswith(f"{NAME}: ")
    assert (await why_no_tcp(f"tcp://{'a' * 70}.example:7700")).startswith(f"{NAME}: ")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    assert await why_no_tcp(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") == ""
    server.close()
    await server.wait_closed()


@pytest.mark.asyncio
async def test_where_nothing_comes_back_that_is_said_within_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    assert await why_no_tcp("tcp://127.0.0.1:7700", 0.02) == f"{SILENT} within 0.02 s"
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", lambda *_, **__: never())
    assert "no name server answers" in await why_no_tcp("tcp://x.example:7700", 0.02)


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (f"{NAME}: Name or service not known", "is transport.host spelt right"),
        (REFUSED, "does it run there, and are transport.host and transport.control_port right?"),
        ("No route to host", "firewall"),
        ("the hub refused our key (status 400): is it in the authorized folder?", "our public key"),
        ("the peer expects another server key", "another key than"),
    ],
)
def test_the_remedy_is_that_of_the_reason(why: str, remedy: str) -> None:
    assert remedy in what_to_look_at(why, "transport.host", "transport.control_port")


@pytest.mark.asyncio
async def test_an_error_in_what_a_service_hears_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.control_link.FIRST_HEARTBEAT_S", 0.01)
    network = MemoryNetwork()
    hub = network.hub("tcp://127.0.0.1:7700", LinkOptions.for_plane(CONTROL))

    def fail() -> None:
        raise KeyError("a bug")

    control = ControlLink(
        "tcp://127.0.0.1:7700",
        lambda endpoint: network.link(endpoint, LinkOptions.for_plane(CONTROL)),
        incarnation=1,
        build="b",
        clock=SystemClock(),
        rng=Quick(1),
        on_welcome=fail,
        on_message=lambda _: None,
    )
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(control.run())
        (inbound, *_) = await hub.recv()
        welcome = Welcome(term=1, heartbeat_s=0.01, lost_after_s=1.0, incarnation=1)
        hub.send(inbound.route, encode(welcome, limits=LIMITS[CONTROL]))
        await until(lambda: control.relinked >= 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await hub.close()
    errors = [line for line in logs if line["event"] == "control.failed"]
    assert [str(line["exc_info"]) for line in errors] == ["'a bug'"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", REFUSED), ("nowhere.invalid", f"{NAME}: ")]
)
async def test_a_link_that_nobody_answers_says_address_reason_and_remedy(
    soon: None, host: str, reason: str
) -> None:
    port = free_port()
    network = ZmqNetwork()
    config = TransportConfig(host=host, control_port=port)
    links = PlaneLinks(network, config, key=PAIR, server_key=PAIR.public_key, planes=[CONTROL])
    with structlog.testing.capture_logs() as logs:
        watching = asyncio.create_task(links.watch(CONTROL))
        await until(lambda: any(line["event"] == "link.not_connected" for line in logs))
        await links.close()
        await watching
        await network.close()
    line = next(line for line in logs if line["event"] == "link.not_connected")
    assert (line["log_level"], line["plane"]) == ("warning", "control")
    assert line["address"] == f"{host}:{port}"
    assert line["reason"].startswith(reason)
    assert "transport.host" in line["remedy"]


@pytest.mark.asyncio
async def test_a_link_that_is_made_anew_again_and_again_is_neither_silent_nor_loud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.reaching.FIRST_S", 0.1)
    links = PlaneLinks(
        MemoryNetwork(), TransportConfig(), key=None, server_key=None, planes=[CONTROL]
    )
    with structlog.testing.capture_logs() as logs:
        watching = asyncio.create_task(links.watch(CONTROL))
        for _ in range(40):  # 0.8 s, more rarely renewed than said, and more often
            await asyncio.sleep(0.02)
            links.renew(CONTROL)
        await links.close()
        await watching
    said = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert said in (["link.not_connected"] * n for n in (1, 2, 3, 4))


@pytest.mark.asyncio
async def test_a_connection_that_came_ends_the_complaint_and_its_loss_begins_one(
    soon: None,
) -> None:
    network = MemoryNetwork()
    options = LinkOptions.for_plane(CONTROL)
    links = PlaneLinks(
        network, TransportConfig(control_port=1), key=None, server_key=None, planes=[CONTROL]
    )
    changes: list[bool] = []
    with structlog.testing.capture_logs() as logs:
        watching = asyncio.create_task(links.watch(CONTROL, lambda _, up: changes.append(up)))
        await until(lambda: any(line["event"] == "link.not_connected" for line in logs))
        hub = network.hub("tcp://127.0.0.1:1", options)
        await until(lambda: changes[-1])
        logs.clear()
        await hub.close()
        await until(lambda: any(line["event"] == "link.not_connected" for line in logs))
        await links.close()
        await watching
    assert logs[0]["event"] == "link.down"
    assert {line["address"] for line in logs} == {"127.0.0.1:1"}


@pytest.mark.asyncio
async def test_a_service_that_reaches_no_scheduler_says_whom_and_why_and_not_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.reaching.FIRST_S", 0.1)
    monkeypatch.setattr("scheduler.control_link.FIRST_LOST_AFTER_S", 0.05)
    monkeypatch.setattr("scheduler.control_link.FIRST_HEARTBEAT_S", 0.01)
    network = MemoryNetwork()
    control = ControlLink(
        "tcp://nowhere:7700",
        lambda endpoint: network.link(endpoint, LinkOptions.for_plane(CONTROL)),
        incarnation=1,
        build="b",
        clock=SystemClock(),
        rng=Quick(1),
        on_welcome=lambda: None,
        on_message=lambda _: None,
    )
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(control.run())
        await until(lambda: control.relinked >= 8)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    said = [line for line in logs if line["log_level"] == "warning"]
    assert {line["event"] for line in said} == {"control.not_connected"}
    assert 1 <= len(said) < control.relinked / 2
    assert said[0]["address"] == "nowhere:7700"
    assert "transport.control_port" in said[0]["remedy"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", REFUSED), ("nowhere.invalid", f"{NAME}: ")]
)
async def test_a_command_that_reaches_nobody_says_whom_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reason: str
) -> None:
    monkeypatch.setattr("transport.asking.ATTEMPT_S", 0.1)
    create_keys(tmp_path)
    config = TransportConfig(host=host, control_port=free_port(), keys=str(tmp_path))
    asking = Asking(config, tmp_path / "operator.toml", answer_s=0.6)
    with pytest.raises(PeerUnreachable) as caught:
        await asking.ask(StatusRequest(), StatusReply)
    await asking.close()
    said = str(caught.value)
    assert said.startswith(f"scheduler at tcp://{host}:{config.control_port}: {reason}")
    assert "transport.host" in said
