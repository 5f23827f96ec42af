"""Keys while everything runs, over real sockets: the server's key is changed, agents are revoked,
two boxes have one key, signers are certified, and an agent tries to be more than that."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from key_cloud import POLICY, WAIT_S, KeyCloud, until

from edge_agent.trust import AgentTrust
from scheduler.tokens import revoke_key
from transport.asking import Asking
from transport.errors import PeerUnreachable
from transport.keys import KeyPair, create_keys
from transport.messages import (
    AgentInventory,
    Heartbeat,
    Hello,
    HelloRequired,
    HostedPolicies,
    NextServerKey,
    Plane,
    Probe,
    ProbeReply,
    Refuse,
    Role,
    StatusReply,
    StatusRequest,
    VersionOffer,
    Welcome,
)
from transport.runtime.clock import SystemClock
from transport.runtime.settings import TransportConfig
from transport.server_keys import PinnedServerKeys
from transport.server_rotation import abandon_rotation, begin_rotation, finish_rotation

pytestmark = pytest.mark.asyncio

SECOND = "second/solver"


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[KeyCloud]:
    made = KeyCloud(tmp_path)
    made.start()
    yield made
    await made.close()


def hello(process: str = "p", incarnation: int = 1) -> Hello:
    inventory = AgentInventory(slots=1, hardware="cpu", engine="fake", workflows={}, rewards=())
    return Hello(
        role=Role.AGENT, incarnation=incarnation, build="b", agent=inventory, process=process
    )


# ---- the server's key ----------------------------------------------------------------------------


async def test_the_servers_key_is_changed_twice_under_a_connected_agent(cloud):
    box = cloud.box()
    pinned = PinnedServerKeys(box)
    trust = AgentTrust(box, box)
    link = cloud.link(server_key=pinned)
    for round_number in range(2):
        await link.send(hello())
        await link.expect(Welcome)
        following = begin_rotation(cloud.keys_folder)
        assert begin_rotation(cloud.keys_folder) == following, "twice begun is once begun"
        assert cloud.plane.book.refresh()
        cloud.plane.keys_changed()
        [told] = await link.expect(NextServerKey)
        assert trust.take(told)
        await asyncio.to_thread(trust.keep)
        assert pinned.candidates()[1] == following
        assert finish_rotation(cloud.keys_folder) == following
        await cloud.stop()
        connection = link.link
        async with asyncio.timeout(WAIT_S):
            await connection.wait_disconnected()
        cloud.start()
        async with asyncio.timeout(WAIT_S):
            await connection.wait_connected()
        await link.send(hello(incarnation=2 + round_number))
        await link.expect(Welcome)
        await until(lambda wanted=following: pinned.candidates() == (wanted,))
        assert f'"{following}"' in (box / "server.public.toml").read_text()
        await until(lambda: not (box / "server.next.public.toml").exists())


async def test_an_agent_that_was_away_meanwhile_stays_out_and_says_why(cloud):
    pinned = PinnedServerKeys(cloud.box())
    begin_rotation(cloud.keys_folder)
    finish_rotation(cloud.keys_folder)
    await cloud.stop()
    cloud.start()
    link = cloud.link(server_key=pinned)
    await until(lambda: link.link.handshake_failures >= 2)
    assert not link.link.connected
    assert "server key" in link.link.last_failure
    (cloud.folder / "box" / "server.public.toml").write_text(
        (cloud.keys_folder / "server.public.toml").read_text()
    )
    async with asyncio.timeout(WAIT_S):
        await link.link.wait_connected()  # what is copied by hand is seen without a restart


async def test_an_abandoned_change_harms_nobody(cloud):
    box = cloud.box()
    following = begin_rotation(cloud.keys_folder)
    cloud.plane.book.refresh()
    trust = AgentTrust(box, box)
    assert trust.take(cloud.plane.book.following)
    trust.keep()
    abandon_rotation(cloud.keys_folder)
    link = cloud.link(server_key=PinnedServerKeys(box))
    await link.send(hello())
    await link.expect(Welcome)
    assert cloud.plane.book.refresh()
    assert cloud.plane.book.following is None
    assert begin_rotation(cloud.keys_folder) != following


async def test_a_next_key_that_the_root_did_not_sign_is_not_announced(cloud):
    begin_rotation(cloud.keys_folder)
    path = cloud.keys_folder / "server.next.public.toml"
    other = KeyPair.generate("server", Role.SCHEDULER).public_key
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f'public_key = "{other}"', *lines[1:]]) + "\n")
    cloud.plane.book.refresh()
    assert cloud.plane.book.following is None


# ---- revocation ----------------------------------------------------------------------------------


async def test_a_revoked_agent_is_cut_off_within_a_second(cloud):
    link = cloud.link()
    await link.send(hello())
    await link.expect(Welcome)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    revoke_key(cloud.keys_folder, "a")
    async with asyncio.timeout(WAIT_S):
        await link.link.wait_disconnected()
    # The scan is every 0.4 s; the rest is slack for a machine that does more than this test.
    assert loop.time() - began_s < 1.0
    await until(lambda: link.link.handshake_failures >= 1)
    assert not link.link.connected
    other = cloud.link("b")
    await other.send(hello())
    await other.expect(Welcome)


# ---- one key, two boxes --------------------------------------------------------------------------


async def test_a_second_box_with_a_key_is_refused_while_the_first_is_alive(cloud):
    first, second = cloud.link(), cloud.link()
    await first.send(hello("one"))
    await first.expect(Welcome)
    await second.send(hello("two", incarnation=7))
    [refused] = await second.expect(Refuse)
    assert refused.code == "agent.duplicate"
    assert 0 < refused.retry_s <= 3 * cloud.heartbeat_s
    assert "farflow agent enrol" in refused.message
    await second.send(Heartbeat(sequence=1, sent_s=0.0))
    await second.expect(HelloRequired)
    await first.send(Heartbeat(sequence=1, sent_s=0.0))
    await until(lambda: cloud.heard(Heartbeat) == 1)
    assert cloud.heard(Hello) == 1
    assert cloud.plane.counters["refused.agent.duplicate"] == 1


async def test_a_restart_gets_in_at_once_because_its_connection_went_with_the_process(cloud):
    cloud.heartbeat_s = 1000.0  # silence would not help within this test
    first = cloud.link()
    await first.send(hello("one"))
    await first.expect(Welcome)
    await first.close()
    again = cloud.link()
    async with asyncio.timeout(WAIT_S):
        while cloud.heard(Hello) != 2:
            await again.send(hello("two", incarnation=2))
            await asyncio.sleep(0.02)
    await again.expect(Welcome)


async def test_the_same_process_gets_in_over_a_new_connection_while_the_old_one_is_up(cloud):
    cloud.heartbeat_s = 1000.0
    first, renewed = cloud.link(), cloud.link()
    await first.send(hello("one"))
    await first.expect(Welcome)
    await renewed.send(hello("one"))
    await renewed.expect(Welcome)


async def test_a_box_that_vanished_without_a_word_is_replaced_once_it_is_silent(cloud):
    cloud.heartbeat_s = 0.1
    first, second = cloud.link(), cloud.link()
    await first.send(hello("one"))
    await first.expect(Welcome)
    loop = asyncio.get_running_loop()
    began_s = loop.time()  # the connection of the first stays open, as behind a dead NAT entry
    async with asyncio.timeout(WAIT_S):
        while cloud.heard(Hello) < 2:
            await second.send(hello("two", incarnation=2))
            await asyncio.sleep(0.05)
    await second.expect(Welcome)
    assert loop.time() - began_s < 2.0


async def test_how_many_agents_know_the_next_server_key_is_counted_while_it_changes(cloud):
    first, second = cloud.link("a"), cloud.link("b")
    for link in (first, second):
        await link.send(hello())
        await link.expect(Welcome)
    assert cloud.plane.next_key_counts() == {}
    begin_rotation(cloud.keys_folder)
    assert cloud.plane.book.refresh()
    assert cloud.plane.next_key_counts() == {
        "server_key.told_next": 0,
        "server_key.not_told_next": 2,
    }
    cloud.plane.send("a", Welcome(term=1, heartbeat_s=1.0, lost_after_s=9.0, policies=(POLICY,)))
    await first.expect(NextServerKey)
    assert cloud.plane.next_key_counts() == {
        "server_key.told_next": 1,
        "server_key.not_told_next": 1,
    }
    cloud.links.remove(second)
    await second.close()
    await until(lambda: cloud.plane.next_key_counts()["server_key.not_told_next"] == 0)
    abandon_rotation(cloud.keys_folder)
    assert cloud.plane.book.refresh()
    assert cloud.plane.next_key_counts() == {}


async def test_between_finish_and_restart_a_command_says_what_to_do(cloud):
    begin_rotation(cloud.keys_folder)
    finish_rotation(cloud.keys_folder)
    transport = TransportConfig(
        host="127.0.0.1", control_port=cloud.port, keys=str(cloud.keys_folder)
    )
    key = cloud.keys_folder / "operator.toml"
    asking = Asking(transport, key, answer_s=1.0, network=cloud.box_network)
    with pytest.raises(PeerUnreachable, match=r"rotate-server --finish`, restart it with the new"):
        await asking.ask(StatusRequest(), StatusReply)
    await asking.close()


async def test_connections_that_end_before_they_are_up_are_not_refusals(cloud):
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", cloud.port)
        writer.close()
    await until(lambda: cloud.hub.counters["received.hung_up"] == 3)
    assert "received.turned_away" not in cloud.hub.counters


# ---- signers, probes, and an agent that wants more -----------------------------------------------


async def test_welcome_and_hosted_policies_carry_certificates_also_of_a_run_that_comes_later(cloud):
    box = cloud.box()
    trust = AgentTrust(box, box)
    link = cloud.link()
    await link.send(hello())
    [welcome] = await link.expect(Welcome)
    trust.take(welcome)
    assert trust.signers.keys() == {cloud.keys.signers[POLICY].key_id}
    cloud.plane.send("a", HostedPolicies(policies=(POLICY, SECOND)))
    [hosted] = await link.expect(HostedPolicies)
    assert {one.policy for one in hosted.signers} == {POLICY}
    more = create_keys(cloud.keys_folder, trainers=[SECOND])  # made while everything runs
    assert cloud.plane.book.refresh()
    cloud.plane.keys_changed()
    [hosted] = await link.expect(HostedPolicies)
    trust.take(hosted)
    assert more.signers[SECOND].key_id in trust.signers
    assert not cloud.plane.book.refresh()


async def test_a_probe_tells_the_time_and_changes_nothing(cloud):
    link = cloud.link()
    await link.send(Probe(sequence=5, sent_s=1.5))
    [reply] = await link.expect(ProbeReply)
    assert (reply.sequence, reply.sent_s, reply.name, reply.known) == (5, 1.5, "a", False)
    assert abs(reply.received_s - SystemClock().wall_s()) < 60.0
    assert cloud.events == []
    await link.send(hello())
    await link.expect(Welcome)
    probing = cloud.link()
    await probing.send(Probe(sequence=6, sent_s=0.0))
    [reply] = await probing.expect(ProbeReply)
    assert reply.known
    await link.send(Heartbeat(sequence=1, sent_s=0.0))
    await until(lambda: cloud.heard(Heartbeat) == 1)
    assert cloud.plane.counters["probes"] == 2


async def test_an_agent_is_who_its_key_says_whatever_it_says_itself(cloud):
    thief = cloud.link("b")
    await thief.send(Hello(role=Role.TRAINER, incarnation=1, build="b"))
    [refused] = await thief.expect(Refuse)
    assert refused.code == "role.mismatch"
    await thief.send(hello())
    await thief.expect(Welcome)
    assert {event.agent for event in cloud.events} == {"b"}


async def test_an_agents_key_cannot_publish_weights(tmp_path):
    cloud = KeyCloud(tmp_path)
    cloud.start(Plane.WEIGHTS)
    link = cloud.link(plane=Plane.WEIGHTS)
    await link.send(VersionOffer(manifest=b"m", signature=b"s", key_id="k"))
    [refused] = await link.expect(Refuse)
    assert refused.code == "role.not_allowed"
    assert "VersionOffer" in refused.message
    assert cloud.hub.counters["received.not_allowed"] == 1
    assert cloud.events == []
    await cloud.close()
