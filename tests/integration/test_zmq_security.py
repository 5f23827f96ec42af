"""Who gets in over real sockets, and what those who should not can do."""

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from transport.authorized import AllowList
from transport.errors import ConfigError, PeerUnreachable
from transport.keys import DeploymentKeys, KeyPair, Peer, create_keys
from transport.links import Inbound, LinkOptions
from transport.messages import Plane, Role
from transport.zmq_limits import inode_of
from transport.zmq_links import ZmqHub, ZmqLink, ZmqNetwork
from transport.zmq_socket import (
    CONNECTION_LOST,
    NOBODY_LISTENS,
    host_of,
    raise_file_limit,
    require_loopback,
)

pytestmark = pytest.mark.asyncio

ANY = "tcp://127.0.0.1:0"
OPTIONS = LinkOptions.for_plane(Plane.CONTROL)._replace(
    linger_s=0.0, reconnect_s=0.01, reconnect_max_s=0.05, max_frames=4
)
HEAD = b"\x01\x10"


@pytest_asyncio.fixture
async def network() -> AsyncIterator[ZmqNetwork]:
    made = ZmqNetwork()
    yield made
    await made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def keys(folder: Path) -> DeploymentKeys:
    return create_keys(folder, agents=["paris", "tokyo"])


@pytest.fixture
def allowed(folder: Path, keys: DeploymentKeys) -> AllowList:
    return AllowList(folder / "authorized", now=0.0)


@pytest_asyncio.fixture
async def hub(network: ZmqNetwork, keys: DeploymentKeys, allowed: AllowList) -> ZmqHub:
    return network.hub(ANY, OPTIONS, key=keys.server, authorise=allowed.lookup)


def connect(network: ZmqNetwork, hub: ZmqHub, key: KeyPair, server: KeyPair) -> ZmqLink:
    return network.link(hub.endpoint, OPTIONS, key=key, server_key=server.public_key)


@contextlib.contextmanager
def raw_dealer(network: ZmqNetwork, key: KeyPair | None = None, server: KeyPair | None = None):
    """A client that keeps none of our rules."""
    dealer = network.context.socket(zmq.DEALER)
    dealer.linger = 0
    if key is not None and server is not None:
        dealer.curve_serverkey = server.public_key.encode()
        dealer.curve_publickey = key.public_key.encode()
        dealer.curve_secretkey = key.secret_key.encode()
    try:
        yield dealer
    finally:
        dealer.close(0)


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not check():
            await asyncio.sleep(0.002)


async def hear(hub: ZmqHub) -> Inbound:
    return (await hub.recv())[0]


async def heard_first(network: ZmqNetwork, hub: ZmqHub, keys: DeploymentKeys) -> None:
    """Nothing of what happened before was let through: an honest peer's message comes first."""
    link = connect(network, hub, keys.agents["tokyo"], keys.server)
    await link.wait_connected()
    link.send([HEAD, b"honest"])
    message = await hear(hub)
    assert message.frames == [HEAD, b"honest"]
    assert message.identity == keys.agents["tokyo"].public_key


async def test_every_message_carries_the_key_that_its_connection_proved(network, keys, hub):
    links = {name: connect(network, hub, key, keys.server) for name, key in keys.agents.items()}
    for _ in range(20):
        for name, link in links.items():
            await link.wait_connected()
            link.send([HEAD, name.encode()])
            message = await hear(hub)
            assert message.frames[1] == name.encode()
            assert message.identity == keys.agents[name].public_key


async def test_an_unknown_key_is_refused_and_named_at_both_ends(network, keys, hub):
    stranger = KeyPair.generate("stranger", Role.AGENT)
    link = connect(network, hub, stranger, keys.server)
    await eventually(lambda: link.handshake_failures >= 2 and hub.handshake_failures >= 2)
    assert not link.connected
    assert "refused our key" in link.last_failure
    assert stranger.public_key in hub.last_failure
    with pytest.raises(PeerUnreachable):
        link.send([HEAD, b""])
    await heard_first(network, hub, keys)


async def test_a_refused_link_gets_in_by_itself_once_its_key_is_added(
    network, keys, hub, allowed, folder
):
    late = KeyPair.generate("late", Role.AGENT)
    link = connect(network, hub, late, keys.server)
    await eventually(lambda: link.handshake_failures > 0)
    create_keys(folder, agents=["other"])
    (folder / "authorized" / "late.toml").write_text(
        f'name = "late"\nrole = "agent"\npublic_key = "{late.public_key}"\n'
    )
    assert late.public_key in allowed.refresh(now=1.0).added
    await link.wait_connected()
    link.send([HEAD, b"in"])
    assert (await hear(hub)).identity == late.public_key


async def test_a_link_with_another_server_key_never_connects_and_says_so(network, keys, hub):
    impostor = KeyPair.generate("server", Role.SCHEDULER)
    link = connect(network, hub, keys.agents["paris"], impostor)
    await eventually(lambda: link.handshake_failures >= 2 and hub.handshake_failures >= 2)
    assert not link.connected
    assert "server key" in link.last_failure
    assert "server key" in hub.last_failure
    assert "it has stopped, or" in link.last_failure
    await heard_first(network, hub, keys)


async def test_a_hub_that_is_gone_is_not_taken_for_one_with_another_key(network, keys, hub):
    impostor = KeyPair.generate("server", Role.SCHEDULER)
    wrong = connect(network, hub, keys.agents["paris"], impostor)
    link = connect(network, hub, keys.agents["tokyo"], keys.server)
    await link.wait_connected()
    assert link.last_failure == ""
    await eventually(lambda: "server key" in wrong.last_failure)
    await hub.close()
    await link.wait_disconnected()
    assert link.last_failure in (CONNECTION_LOST, NOBODY_LISTENS)
    await eventually(lambda: {link.last_failure, wrong.last_failure} == {NOBODY_LISTENS})


async def test_a_client_without_curve_is_refused(network, keys, hub):
    link = network.link(hub.endpoint, OPTIONS)
    await eventually(lambda: link.handshake_failures >= 2 and hub.handshake_failures >= 1)
    assert not link.connected
    assert "CURVE" in link.last_failure
    await heard_first(network, hub, keys)


async def test_a_revoked_agent_is_cut_off_and_stays_out(network, keys, hub, allowed, folder):
    link = connect(network, hub, keys.agents["paris"], keys.server)
    await link.wait_connected()
    link.send([HEAD, b"hello"])
    route = (await hear(hub)).route
    for _ in range(10):
        link.send([HEAD, b"on its way"])
    (folder / "authorized" / "paris.toml").unlink()
    removed = allowed.refresh(now=1.0).removed
    assert removed == (keys.agents["paris"].public_key,)
    for identity in removed:
        hub.disconnect(identity)
    async with asyncio.timeout(1):
        await link.wait_disconnected()
    await eventually(lambda: link.handshake_failures >= 2)
    await eventually(lambda: unreachable(hub, route))
    await heard_first(network, hub, keys)


def unreachable(hub: ZmqHub, route: bytes) -> bool:
    try:
        hub.send(route, [HEAD, b""])
    except PeerUnreachable:
        return True
    return False


async def test_what_a_revoked_agent_said_last_cuts_nobody_who_has_its_descriptor_now(
    network, keys, hub, allowed, folder
):
    link = connect(network, hub, keys.agents["paris"], keys.server)
    await link.wait_connected()
    link.send([HEAD, b"hello"])
    await hear(hub)
    [(route, ended)] = hub._connections.items()
    for _ in range(10):
        link.send([HEAD, b"on its way"])
    (folder / "authorized" / "paris.toml").unlink()
    for identity in allowed.refresh(now=1.0).removed:
        hub.disconnect(identity)
    await link.wait_disconnected()
    await link.close()
    await eventually(lambda: unreachable(hub, route))
    # Descriptors are the lowest numbers that are free: one of these, at either of its ends, gets
    # the one that ended.
    links = [connect(network, hub, keys.agents["tokyo"], keys.server) for _ in range(8)]
    for link in links:
        await link.wait_connected()
    for _ in range(2):
        for link in links:
            link.send([HEAD, b"honest"])
        heard: list[Inbound] = []
        while len(heard) < len(links):
            heard += await hub.recv()
        assert all(message.frames == [HEAD, b"honest"] for message in heard)
    assert hub.peers == len(links)
    assert inode_of(ended.descriptor) not in (None, ended.inode), "nothing was tried here"


async def test_a_revoked_key_that_had_never_spoken_is_cut_off_at_its_first_word(
    network, keys, hub, allowed, folder
):
    link = connect(network, hub, keys.agents["paris"], keys.server)
    await link.wait_connected()
    (folder / "authorized" / "paris.toml").unlink()
    for identity in allowed.refresh(now=1.0).removed:
        hub.disconnect(identity)
    link.send([HEAD, b"first word"])
    receiving = asyncio.create_task(hear(hub))
    await link.wait_disconnected()
    receiving.cancel()
    await heard_first(network, hub, keys)


async def test_a_peer_cannot_choose_its_own_route(network, keys, hub):
    with raw_dealer(network, keys.agents["paris"], keys.server) as dealer:
        dealer.routing_id = b"tokyo"
        dealer.connect(hub.endpoint)
        dealer.send_multipart([HEAD, b"as tokyo"])
        receiving = asyncio.create_task(hear(hub))
        await eventually(lambda: hub.dropped == 1)
        assert not receiving.done()
        receiving.cancel()
        assert hub.peers == 0
        await heard_first(network, hub, keys)


async def test_a_message_of_too_many_frames_is_dropped_whole(network, keys, hub):
    with raw_dealer(network, keys.agents["paris"], keys.server) as dealer:
        dealer.connect(hub.endpoint)
        dealer.send_multipart([HEAD] * 1000)
        dealer.send_multipart([HEAD, b"next"])
        assert (await hear(hub)).frames == [HEAD, b"next"]
        assert hub.dropped == 1


async def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(
    network, keys, hub
):
    honest = connect(network, hub, keys.agents["tokyo"], keys.server)
    await honest.wait_connected()
    with raw_dealer(network, keys.agents["paris"], keys.server) as dealer:
        dealer.connect(hub.endpoint)
        dealer.send_multipart([HEAD, b"hello"])
        await hear(hub)
        dealer.send_multipart([HEAD, b"x" * (OPTIONS.max_frame_bytes + 200)])
        await eventually(lambda: hub.peers == 0)
        honest.send([HEAD, b"still here"])
        assert (await hear(hub)).frames == [HEAD, b"still here"]


async def test_a_frame_of_exactly_the_limit_passes_through_curve(network, keys, hub):
    link = connect(network, hub, keys.agents["paris"], keys.server)
    await link.wait_connected()
    link.send([HEAD, b"x" * OPTIONS.max_frame_bytes])
    assert len((await hear(hub)).frames[1]) == OPTIONS.max_frame_bytes


async def test_hubs_of_one_process_know_different_keys(network, keys, hub):
    def anyone(key: str) -> Peer:
        return Peer(name="newcomer", role=Role.AGENT)

    enrolment = network.hub(ANY, OPTIONS, key=keys.server, authorise=anyone)
    newcomer = KeyPair.generate("newcomer", Role.AGENT)
    outside = connect(network, hub, newcomer, keys.server)
    inside = connect(network, enrolment, newcomer, keys.server)
    await inside.wait_connected()
    inside.send([HEAD, b"enrol me"])
    assert (await hear(enrolment)).identity == newcomer.public_key
    await eventually(lambda: outside.handshake_failures > 0)
    assert not outside.connected
    await enrolment.close()
    await heard_first(network, hub, keys)


async def test_garbage_and_silence_on_the_port_do_no_harm(network, keys, allowed):
    hub = network.hub(
        ANY, OPTIONS._replace(handshake_s=0.1), key=keys.server, authorise=allowed.lookup
    )
    noisy_reader, noisy = await asyncio.open_connection("127.0.0.1", hub.port)
    noisy.write(os.urandom(4096))
    silent_reader, silent = await asyncio.open_connection("127.0.0.1", hub.port)
    with contextlib.suppress(ConnectionError):
        await noisy_reader.read()
    with contextlib.suppress(ConnectionError):
        while await silent_reader.read(1024):
            pass
    for writer in (noisy, silent):
        writer.close()
    await heard_first(network, hub, keys)


async def test_a_link_keeps_trying_a_port_that_speaks_something_else(network, keys):
    visits = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = network.link(
        f"tcp://127.0.0.1:{port}",
        OPTIONS,
        key=keys.agents["paris"],
        server_key=keys.server.public_key,
    )
    await eventually(lambda: visits >= 3)
    assert not link.connected
    await link.close()
    server.close()
    await server.wait_closed()


async def test_a_path_that_went_dead_is_noticed_within_the_heartbeat_timeout(
    network, keys, allowed
):
    options = OPTIONS._replace(heartbeat_s=0.05, heartbeat_timeout_s=0.1)
    hub = network.hub(ANY, options, key=keys.server, authorise=allowed.lookup)
    forwarding = asyncio.Event()
    forwarding.set()
    pumps: set[asyncio.Task] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await forwarding.wait()
                writer.write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", hub.port)
        pumps.add(asyncio.create_task(pump(reader, far_writer)))
        pumps.add(asyncio.create_task(pump(far_reader, writer)))

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    link = network.link(
        f"tcp://127.0.0.1:{port}",
        options,
        key=keys.agents["paris"],
        server_key=keys.server.public_key,
    )
    await link.wait_connected()
    link.send([HEAD, b"hello"])
    await hear(hub)
    forwarding.clear()
    async with asyncio.timeout(1):
        await link.wait_disconnected()
        await eventually(lambda: hub.peers == 0)
    await link.close()
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    proxy.close()


async def test_an_open_hub_or_link_is_only_allowed_on_loopback(network):
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:7700", "tcp://[::]:0"):
        with pytest.raises(ConfigError, match="loopback"):
            network.hub(endpoint, OPTIONS)
        with pytest.raises(ConfigError, match="loopback"):
            network.link(endpoint, OPTIONS)
    for endpoint in (
        "tcp://127.0.0.1:0",
        "tcp://127.8.8.8:0",
        "tcp://localhost:0",
        "tcp://[::1]:0",
    ):
        require_loopback(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:7700", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://:1", "tcp://a:99999"],
)
async def test_a_malformed_endpoint_is_a_config_error(network, endpoint):
    with pytest.raises(ConfigError, match="endpoint"):
        host_of(endpoint)
    with pytest.raises(ConfigError, match="endpoint"):
        network.link(endpoint, OPTIONS, key=KeyPair.generate("a", Role.AGENT), server_key="x" * 40)


async def test_a_malformed_server_key_is_a_config_error(network, keys):
    for server_key in ("short", "ä" * 40):
        with pytest.raises(ConfigError, match="server key"):
            network.link(
                "tcp://127.0.0.1:1", OPTIONS, key=keys.agents["paris"], server_key=server_key
            )


async def test_closing_a_network_leaves_no_descriptor_behind(keys, allowed):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        network = ZmqNetwork()
        hub = network.hub(ANY, OPTIONS, key=keys.server, authorise=allowed.lookup)
        link = connect(network, hub, keys.agents["paris"], keys.server)
        connect(network, hub, KeyPair.generate("stranger", Role.AGENT), keys.server)
        await link.wait_connected()
        await network.close()
    assert descriptors() <= before + 2  # the loop's own, for the thread that ends the context


async def test_raising_the_file_limit_gives_the_hard_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
