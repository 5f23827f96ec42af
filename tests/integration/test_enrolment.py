"""Enrolment over real sockets: who gets in, and what strangers who should not can do."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog
import zmq

from edge_agent.agent_file import leads_elsewhere, write_config
from edge_agent.config import AgentConfig, AgentTable
from edge_agent.enrol import enrol, enrolled, enrolled_config
from scheduler.enrolment import OPTIONS, Enrolment, RateLimit, Rates
from scheduler.tokens import TokenStore, revoke_key
from transport.authorized import AllowList
from transport.envelope import LIMITS, decode, encode
from transport.errors import ConfigError, PeerUnreachable
from transport.keys import KeyPair, create_keys
from transport.messages import EnrolReply, EnrolRequest, Hello, Message, Plane, Refuse, Role
from transport.plane_hub import PlaneHub
from transport.runtime.clock import ManualClock, SystemClock
from transport.runtime.settings import TransportConfig
from transport.token_files import TokenFile, load_token
from transport.zmq_links import ZmqNetwork

pytestmark = pytest.mark.asyncio

HOUR = 3600.0
PORTS = {"control": 7700, "trajectories": 7701, "weights": 7702}
WAIT_S = 8.0


class World:
    """One enrolment plane with its keys, and agents' networks."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        self.folder = folder
        self.server = create_keys(self.keys, agents=["paris"]).server
        self.store = TokenStore(self.keys)
        self.network = ZmqNetwork()
        self.strangers = ZmqNetwork()
        self.ports: dict[str, int] | None = PORTS
        self.plane: Enrolment | None = None
        self._task: asyncio.Task[None] | None = None
        self.refreshing: asyncio.Task[None] | None = None

    async def open(self, **options: Any) -> None:
        usual = OPTIONS._replace(handshake_s=0.3, connection_s=2.0)
        self.plane = Enrolment(
            self.network,
            TransportConfig(keys=str(self.keys), enrolment_port=0),
            port_file=self.folder / "enrolment-port",
            clock=SystemClock(),
            ports=lambda: self.ports,
            **{"options": usual, **options},
        )
        self._task = asyncio.create_task(self.plane.run())
        await self.until(lambda: self.plane.port != 0)

    async def close(self) -> None:
        for task in (self._task, self.refreshing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.network.close()
        await self.strangers.close()

    def token(self, uses: int = 1, prefix: str = "", lifetime_s: float = HOUR) -> TokenFile:
        token, secret = self.store.create(
            role=Role.AGENT,
            max_uses=uses,
            lifetime_s=lifetime_s,
            wall_s=SystemClock().wall_s(),
            name_prefix=prefix,
        )
        return TokenFile(
            host="127.0.0.1",
            enrolment_port=self.plane.port if self.plane else 1,
            server_key=self.server.public_key,
            id=token.id,
            secret=secret,
        )

    def control(self) -> PlaneHub:
        """A control plane that lets the keys of the folder in; told to who enrols from now on."""
        hub = PlaneHub(
            self.network,
            Plane.CONTROL,
            TransportConfig(keys=str(self.keys)),
            port=0,
            port_file=self.folder / "control-port",
            clock=SystemClock(),
        )
        self.ports = {**PORTS, "control": hub.port}
        self.refreshing = asyncio.create_task(hub.keep_refreshing())
        return hub

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not check():
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def raw(self, pair: KeyPair | None = None):
        """A client that keeps none of our rules."""
        pair = pair or KeyPair.generate("x", Role.AGENT)
        dealer = self.strangers.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        dealer.curve_serverkey = self.server.public_key.encode()
        dealer.curve_publickey = pair.public_key.encode()
        dealer.curve_secretkey = pair.secret_key.encode()
        dealer.connect(f"tcp://127.0.0.1:{self.plane.port}")
        try:
            yield dealer
        finally:
            dealer.close(0)

    async def answer(self, dealer: Any) -> Message:
        async with asyncio.timeout(WAIT_S):
            while not dealer.poll(0):
                await asyncio.sleep(0.005)
        return decode(dealer.recv_multipart(), LIMITS[Plane.ENROLMENT])[0]

    async def say(self, message: Message, pair: KeyPair | None = None) -> Message:
        with self.raw(pair) as dealer:
            dealer.send_multipart(encode(message))
            return await self.answer(dealer)

    def counter(self, name: str) -> int:
        return self.plane.counters.get(f"enrolment.{name}", 0)


def request(of: TokenFile, **changes: Any) -> EnrolRequest:
    return EnrolRequest(**{"token": of.id, "secret": of.secret, "name": "box", **changes})


@pytest_asyncio.fixture
async def closed(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.close()


@pytest_asyncio.fixture
async def world(closed: World) -> World:
    closed.token()
    await closed.open()
    return closed


async def still_good(world: World) -> None:
    """An honest agent gets in, whatever happened before."""
    keys = world.folder / f"agent-{os.urandom(4).hex()}"
    facts = await enrol(world.strangers, world.token(prefix="fine-"), keys, wait_s=WAIT_S)
    assert facts.name.startswith("fine-")


# ---- those who may -------------------------------------------------------------------------------


async def test_an_agent_with_a_token_gets_all_it_needs(world, tmp_path):
    token = world.token()
    folder = tmp_path / "box"
    facts = await enrol(world.strangers, token, folder / "keys", name="box", wait_s=WAIT_S)
    assert (facts.name, facts.host, facts.control_port) == ("box", "127.0.0.1", 7700)
    own = KeyPair.load(folder / "keys" / "agent.toml")
    assert (own.name, own.role) == ("box", Role.AGENT)
    peer = AllowList(world.keys / "authorized", 0.0).lookup(own.public_key)
    assert (peer.name, peer.role) == ("box", Role.AGENT)
    for name in ("server.public.toml", "root.public.toml"):
        assert (folder / "keys" / name).read_text() == (world.keys / name).read_text()
    assert not (folder / "keys" / "enrolling.toml").exists()
    from transport.runtime.config import load_config

    path = write_config(folder, facts)
    config = load_config(AgentConfig, [path], []).value
    assert config.transport.weights_port == 7702
    assert KeyPair.load(Path(config.agent.key)) == own
    assert leads_elsewhere(path, facts) == []
    moved = msgspec.structs.replace(facts, host="10.0.0.7", weights_port=9702)
    assert write_config(folder, moved) == path
    (said,) = leads_elsewhere(path, moved)
    assert "transport.host = 127.0.0.1, transport.weights_port = 7702" in said
    assert "10.0.0.7, 9702" in said


async def test_enrolling_again_changes_nothing_and_asks_whether_the_key_is_let_in(world, tmp_path):
    control = world.control()
    token, keys = world.token(), tmp_path / "keys"
    first = await enrol(world.strangers, token, keys, name="box", wait_s=WAIT_S)
    second = await enrol(world.strangers, token, keys, name="other", wait_s=WAIT_S)
    assert first == second == enrolled(keys)
    await control.close()
    with pytest.raises(PeerUnreachable, match=r"key of 'box', but whether .* is not known"):
        await enrol(world.strangers, token, keys, name="box", wait_s=0.3)


async def test_after_a_revocation_enrol_says_so_and_a_new_key_gets_the_name(world, tmp_path):
    control = world.control()
    keys = tmp_path / "keys"
    await enrol(world.strangers, world.token(), keys, name="box", wait_s=WAIT_S)
    old = KeyPair.load(keys / "agent.toml")
    revoke_key(world.keys, "box")
    control.allowed.refresh(1e12)
    with pytest.raises(ConfigError, match=r"revoked.*farflow token create.*--new-key .*--folder"):
        await enrol(world.strangers, world.token(), keys, name="box", wait_s=WAIT_S)
    dead = world.token()
    world.store.revoke(dead.id)
    with pytest.raises(ConfigError, match=r"token_revoked.*stays in .*enrolling\.toml"):
        await enrol(world.strangers, dead, keys, name="box", wait_s=WAIT_S, new_key=True)
    assert KeyPair.load(keys / "agent.toml") == old, "it is replaced once the new one is let in"
    facts = await enrol(
        world.strangers, world.token(), keys, name="box", wait_s=WAIT_S, new_key=True
    )
    new = KeyPair.load(keys / "agent.toml")
    assert (facts.name, new.name, enrolled(keys)) == ("box", "box", facts)
    assert new.public_key != old.public_key
    assert KeyPair.load(keys / "agent.previous.toml") == old
    assert not (keys / "enrolling.toml").exists()
    control.allowed.refresh(2e12)
    assert await enrol(world.strangers, world.token(), keys, wait_s=WAIT_S) == facts
    await control.close()


async def test_a_key_that_was_revoked_before_its_enrolment_ended_is_not_tried_again(
    world, tmp_path, monkeypatch
):
    token, keys = world.token(uses=2, prefix="spot-"), tmp_path / "keys"

    def crash(*args):
        raise RuntimeError("power cut")

    monkeypatch.setattr("edge_agent.enrol._finish", crash)
    with pytest.raises(RuntimeError):
        await enrol(world.strangers, token, keys, wait_s=WAIT_S)
    monkeypatch.undo()
    revoke_key(world.keys, "spot-1")
    with pytest.raises(ConfigError, match=r"key of the last try was revoked.*farflow token create"):
        await enrol(world.strangers, token, keys, wait_s=WAIT_S)
    assert (await enrol(world.strangers, token, keys, wait_s=WAIT_S)).name == "spot-2"


async def test_an_enrolment_that_was_cut_off_is_gone_on_with(world, tmp_path, monkeypatch):
    token = world.token()

    def crash(*args):
        raise RuntimeError("power cut")

    monkeypatch.setattr("edge_agent.enrol._finish", crash)
    with pytest.raises(RuntimeError):
        await enrol(world.strangers, token, tmp_path / "a", name="box", wait_s=WAIT_S)
    monkeypatch.undo()
    assert enrolled(tmp_path / "a") is None
    facts = await enrol(world.strangers, token, tmp_path / "a", name="box", wait_s=WAIT_S)
    assert facts.name == "box"
    used = next(one for one in world.store.all() if one.id == token.id)
    assert len(used.uses) == 1


async def test_boxes_of_one_image_get_keys_and_names_of_their_own(world, tmp_path):
    token = world.token(uses=3, prefix="spot-")
    (tmp_path / "token").write_text(token.text())
    (tmp_path / "token").chmod(0o600)

    async def boot(number: int) -> AgentConfig:
        config = AgentConfig(
            transport=TransportConfig(host="unset", keys=str(tmp_path / f"box{number}")),
            agent=AgentTable(token_file=str(tmp_path / "token")),
        )
        return await enrolled_config(config, world.strangers)

    configs = await asyncio.gather(*(boot(number) for number in range(3)))
    pairs = [KeyPair.load(Path(config.agent.key)) for config in configs]
    assert sorted(pair.name for pair in pairs) == ["spot-1", "spot-2", "spot-3"]
    assert len({pair.public_key for pair in pairs}) == 3
    assert {config.transport.host for config in configs} == {"127.0.0.1"}
    assert await boot(0) == configs[0], "a second start reads what the first one got"


async def test_the_listener_is_there_only_while_a_token_is_open(closed):
    token = closed.token()
    await closed.open()
    port = closed.plane.port
    closed.store.revoke(token.id)
    await closed.until(lambda: closed.plane.port == 0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    closed.token()
    await closed.until(lambda: closed.plane.port == port)
    await still_good(closed)


async def test_while_the_planes_are_not_up_an_agent_is_put_off(world):
    world.ports = None
    answer = await world.say(request(world.token()))
    assert (answer.code, answer.retry_s) == ("enrol.not_ready", 3.0)


# ---- those who may not ---------------------------------------------------------------------------


async def test_wrong_used_up_expired_and_revoked_tokens_have_their_codes(world):
    good = world.token()
    assert isinstance(await world.say(request(good)), EnrolReply)
    expired = world.token(lifetime_s=0.001)
    revoked = world.token()
    world.store.revoke(revoked.id)
    for asked, code in (
        (request(good, secret="0" * 64), "enrol.token_invalid"),
        (request(good, token="f" * 16), "enrol.token_invalid"),
        (request(good, name="other"), "enrol.token_used_up"),
        (request(expired), "enrol.token_expired"),
        (request(revoked), "enrol.token_revoked"),
        (request(world.token()), "enrol.name_taken"),
        (request(world.token(), protocol=99), "protocol.version"),
    ):
        answer = await world.say(asked)
        assert isinstance(answer, Refuse)
        assert (answer.code, answer.retry_s) == (code, None)
        assert world.counter(f"refused.{code}") >= 1
    await still_good(world)


async def test_a_replayed_request_from_another_key_gets_nothing(world):
    token = world.token()
    asked = request(token)
    pair = KeyPair.generate("x", Role.AGENT)
    assert isinstance(await world.say(asked, pair), EnrolReply)
    answer = await world.say(asked)  # the same bytes, a key of the thief's
    assert isinstance(answer, Refuse)
    assert answer.code == "enrol.token_used_up"
    again = await world.say(asked, pair)
    assert isinstance(again, EnrolReply)
    assert again.name == "box"


async def test_a_revoked_agent_does_not_get_back_in(world):
    token = world.token(uses=2, prefix="spot-")
    pair = KeyPair.generate("x", Role.AGENT)
    assert (await world.say(request(token), pair)).name == "spot-1"
    revoke_key(world.keys, "spot-1")
    answer = await world.say(request(token), pair)
    assert isinstance(answer, Refuse)
    assert answer.code == "enrol.key_revoked"


async def test_the_client_says_why_it_was_refused_and_keeps_its_key(world, tmp_path):
    token = world.token()
    world.store.revoke(token.id)
    with pytest.raises(ConfigError, match=r"enrol\.token_revoked.*farflow token create"):
        await enrol(world.strangers, token, tmp_path / "a", name="box", wait_s=WAIT_S)
    before = (tmp_path / "a" / "enrolling.toml").read_text()
    await enrol(world.strangers, world.token(), tmp_path / "a", name="box", wait_s=WAIT_S)
    assert KeyPair.load(tmp_path / "a" / "agent.toml").public_key in before


@pytest.mark.parametrize(
    ("host", "reason", "remedy"),
    [
        ("127.0.0.1", "nobody listens there", r"farflow token ls.*the port open"),
        ("nowhere.invalid", "the name is not known here", r"resolve names.*--host"),
    ],
)
async def test_an_enrolment_that_reaches_nobody_says_whom_why_and_what_to_look_at(
    closed, tmp_path, monkeypatch, host, reason, remedy
):
    monkeypatch.setattr("edge_agent.enrol.ANSWER_S", 0.1)
    monkeypatch.setattr("edge_agent.enrol.AGAIN_S", 0.05)
    monkeypatch.setattr("transport.reaching.FIRST_S", 0.5)
    where = {"host": host, "enrolment_port": 1}  # a port where nobody can listen but root
    token = msgspec.structs.replace(closed.token(), **where)
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(PeerUnreachable, match=rf"^{host}:1: {reason}.*\. .*{remedy}"),
    ):
        await enrol(closed.strangers, token, tmp_path / "a", name="box", wait_s=2.0)
    said = [line for line in logs if line["event"] == "enrolment.again"]
    assert 1 <= len(said) <= 3  # of some six tries
    assert said[0]["address"] == f"{host}:1"
    assert said[0]["reason"].startswith(reason)
    assert re.search(remedy, said[0]["remedy"])


async def test_nobody_but_the_holder_of_the_tokens_server_key_is_talked_to(world, tmp_path):
    impostor = KeyPair.generate("server", Role.SCHEDULER).public_key
    token = world.token()
    wrong = TokenFile(
        host=token.host,
        enrolment_port=token.enrolment_port,
        server_key=impostor,
        id=token.id,
        secret=token.secret,
    )
    with pytest.raises(PeerUnreachable, match="server key"):
        await enrol(world.strangers, wrong, tmp_path / "a", name="box", wait_s=0.5)
    await enrol(world.strangers, token, tmp_path / "b", name="box", wait_s=WAIT_S)
    (tmp_path / "b" / "agent.toml").unlink()
    with pytest.raises(ConfigError, match="fresh folder"):
        await enrol(world.strangers, wrong, tmp_path / "b", name="box", wait_s=0.5)


# ---- those who break the rules -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "counter"),
    [
        ([b""], "cut.malformed"),
        ([b"\x01"], "cut.malformed"),
        ([b"\x01\x70", b"\xff\xff"], "cut.malformed"),
        ([b"\x01\x70", b"\x80"], "cut.malformed"),
        ([b"\x01\xee", b"\x80"], "cut.malformed"),
        (encode(Hello(role=Role.AGENT, incarnation=1, build="b")), "cut.not_allowed"),
    ],
)
async def test_anything_else_costs_the_connection(world, frames, counter):
    with world.raw() as dealer:
        dealer.send_multipart(frames)
        await world.until(lambda: world.counter(counter) == 1)
        await world.until(lambda: len(world.plane._hub.limits) == 0)
    await still_good(world)


async def test_a_second_message_on_one_connection_is_not_taken(world):
    with world.raw() as dealer:
        for _ in range(2):
            dealer.send_multipart(encode(request(world.token(), secret="0" * 64)))
        await world.until(lambda: world.counter("cut.second_message") == 1)
        await world.until(lambda: len(world.plane._hub.limits) == 0)
    await still_good(world)


async def test_an_oversized_frame_ends_the_connection(world):
    with world.raw() as dealer:
        dealer.send_multipart([b"\x01\x70", b"x" * (OPTIONS.max_frame_bytes + 1000)])
        await world.until(lambda: len(world.plane._hub.limits) == 0)
    await still_good(world)


async def test_who_sends_more_than_a_request_is_cut_before_it_costs_memory(world):
    with world.raw() as dealer:
        dealer.send_multipart([b"\x01\x70", *[b"x" * 8192] * 40])
        await world.until(lambda: world.plane._hub.limits.cut == 1)
        assert world.plane._hub.dropped == 1
    await still_good(world)


async def test_who_never_ends_the_handshake_is_cut_and_who_never_speaks_too(world):
    reader, writer = await asyncio.open_connection("127.0.0.1", world.plane.port)
    writer.write(b"\xff\x00")  # the beginning of a greeting, then nothing
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while await reader.read(1024):
                pass
    writer.close()
    with world.raw():
        await world.until(lambda: len(world.plane._hub.limits) == 1)
        await world.until(lambda: len(world.plane._hub.limits) == 0)
    await still_good(world)


async def test_many_connections_push_out_the_oldest_ones_only(closed):
    closed.token()
    few = OPTIONS._replace(max_connections=8, connection_s=30.0, handshake_s=30.0)
    await closed.open(options=few)
    writers = []
    for _ in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", closed.plane.port)
        writers.append(writer)
    await closed.until(lambda: closed.plane._hub.limits.cut >= 32)
    assert len(closed.plane._hub.limits) <= 8
    await still_good(closed)
    for writer in writers:
        writer.close()


async def test_one_address_cannot_ask_without_end(closed):
    token = closed.token()
    rates = Rates(address_burst=3.0, address_per_s=0.001)
    await closed.open(rates=rates)
    token = closed.token()
    for number in range(3):
        answer = await closed.say(request(token, secret=f"{number:064}"))
        assert answer.code == "enrol.token_invalid"
    with closed.raw() as dealer:
        dealer.send_multipart(encode(request(token)))
        await closed.until(lambda: closed.counter("put_off") >= 1)
        assert dealer.poll(50) == 0
    assert all(not one.uses for one in closed.store.all())


async def test_the_rate_of_one_address_is_not_that_of_another():
    clock = ManualClock()
    limit = RateLimit(
        Rates(all_per_s=1.0, all_burst=4.0, address_per_s=1.0, address_burst=2.0, addresses=2),
        clock,
    )
    assert [limit.admit("a") for _ in range(3)] == [True, True, False]
    assert [limit.admit("b") for _ in range(3)] == [True, True, False]
    assert not limit.admit("c"), "all together are over the rate of all"
    clock.advance(1.0)
    assert limit.admit("c")
    assert not limit.admit("c")
    assert limit.put_off == 4


# ---- token files ---------------------------------------------------------------------------------


async def test_a_token_file_is_private_and_names_what_is_wrong(world, tmp_path, monkeypatch):
    token = world.token()
    path = tmp_path / "token"
    path.write_text(token.text())
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(str(path))
    path.chmod(0o600)
    assert load_token(str(path)) == token
    assert token.secret not in repr(token)
    path.write_text(token.text().replace("server_key", "key"))
    with pytest.raises(ConfigError, match="unknown field `key`"):
        load_token(str(path))
    whole = token.text()
    for length in range(0, len(whole) - 2, 7):
        path.write_text(whole[:length])
        with pytest.raises(ConfigError, match=r"not a whole file as `farflow token create`.*again"):
            load_token(str(path))
    with pytest.raises(ConfigError, match="farflow token create"):
        load_token(str(tmp_path / "none"))
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(token.text()))
    assert load_token("-") == token
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 5000))
    with pytest.raises(ConfigError, match="standard input"):
        load_token("-")
