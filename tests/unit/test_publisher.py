"""The publisher, its outbox, and how chunks of it are served."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from cloud_trainer.config import PublicationTable
from cloud_trainer.core.effects import BuildVersion
from cloud_trainer.numpy_trainer import make_numpy_model
from cloud_trainer.outbox import Outbox
from cloud_trainer.publisher import Publisher
from edge_agent.weight_copy import WeightCopies
from scheduler.weight_versions import WeightVersions
from transport.chunk_service import ChunkService
from transport.envelope import LIMITS, decode
from transport.errors import IntegrityError, InvariantViolation, StoreError
from transport.keys import SigningKey
from transport.links import LinkOptions
from transport.memory_links import MemoryNetwork
from transport.messages import BodyRequest, Chunk, ChunkRequest, Plane, VersionOffer
from transport.plane_links import PlaneLinks
from transport.runtime.clock import ManualClock
from transport.runtime.settings import TransportConfig
from transport.weights.digest import full_digest, state_digest
from transport.weights.folder import read_model_folder
from transport.weights.manifest import SignedManifest, decode_manifest, sign, verify
from transport.weights.publication import build_version0
from transport.weights.tensors import TensorBytes
from transport.zmq_links import ZmqNetwork

POLICY = "run/solver"
SIGNER = SigningKey.generate("signer", POLICY)
TRUSTED = {SIGNER.key_id: SIGNER.public}
Tensors = Mapping[str, TensorBytes]


class Setting:
    """A model, a sequence of made-up states of it, and an outbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_numpy_model(folder / "model", seed=1)
        self.states: list[Tensors] = [read_model_folder(self.model)]
        rng = np.random.default_rng(0)
        for _ in range(4):
            changed = dict(self.states[-1])
            cells = np.frombuffer(changed["embed.weight"].data, "<u2").copy()
            cells[rng.integers(0, len(cells), 50)] ^= 1
            changed["embed.weight"] = TensorBytes(
                "BF16", changed["embed.weight"].shape, cells.tobytes()
            )
            self.states.append(changed)
        self.outbox = Outbox(folder / "outbox")

    def publisher(self, at: int = 0, **settings: Any) -> Publisher:
        return Publisher(
            self.outbox,
            SIGNER,
            ManualClock(),
            run="run",
            policy=POLICY,
            model=self.model,
            base_version=at,
            base=self.states[at],
            table=PublicationTable(**settings),
        )

    def publish(self, publisher: Publisher, step: int) -> VersionOffer:
        publisher.capture(step, self.states[step])
        order = BuildVersion(version=step, parent=step - 1, step=step)
        return publisher.build(order)[0]

    def reopen(self) -> Outbox:
        self.outbox = Outbox(self.folder / "outbox")
        return self.outbox

    def files(self, offer: VersionOffer) -> dict[str, bytes]:
        found = {}
        for entry in decode_manifest(offer.manifest).files:
            chunks = [
                self.outbox.read_chunk(entry.digest, index)
                for index in range(len(entry.chunk_digests))
            ]
            found[entry.name] = b"".join(chunk or b"" for chunk in chunks)
        return found


WHOLE_0 = BuildVersion(version=0, parent=None, step=0, whole=True)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def signed(offer: VersionOffer) -> SignedManifest:
    return SignedManifest(manifest=offer.manifest, signature=offer.signature, key_id=offer.key_id)


def test_every_version_is_signed_and_gives_the_weights_that_were_captured(
    setting: Setting, tmp_path: Path
) -> None:
    publisher = setting.publisher()
    store = WeightVersions(tmp_path / "store", trusted=TRUSTED)
    offers = [publisher.build(WHOLE_0)[0]]
    offers += [setting.publish(publisher, step) for step in (1, 2, 3)]
    for offer in offers:
        verify(signed(offer), TRUSTED)
        store.add_version(signed(offer), setting.files(offer))
    for version in range(4):
        weights = store.reconstruct(POLICY, version)
        assert state_digest(weights) == state_digest(setting.states[version])
    assert setting.outbox.highest == 3


def test_what_was_measured_is_told(setting: Setting) -> None:
    publisher = setting.publisher()
    _, facts = publisher.build(WHOLE_0)
    assert facts["full_bytes"] == sum(t.size_bytes for t in setting.states[0].values())
    publisher.capture(1, setting.states[1])
    _, facts = publisher.build(BuildVersion(version=1, parent=0, step=1))
    assert 0 < facts["changed_cells"] <= 50
    assert facts["total_cells"] == facts["full_bytes"] // 2
    assert facts["file_bytes"] < facts["full_bytes"]
    assert 0 < sum(facts["coded_bytes"].values()) < facts["file_bytes"]
    assert facts["encode_s"] >= 0
    assert facts["store_s"] >= 0


def test_the_settings_decide_the_coder_and_how_often_all_bytes_are_hashed(
    setting: Setting,
) -> None:
    publisher = setting.publisher(coder="absolute", threads=2, full_digest_every=2)
    offers = [publisher.build(WHOLE_0)[0]]
    for step in (1, 2, 3):
        publisher.capture(step, setting.states[step])
        offer, facts = publisher.build(BuildVersion(version=step, parent=step - 1, step=step))
        offers.append(offer)
        assert facts["coded_bytes"].keys() <= {"list.zstd", "split.zstd", "raw"}
    full = [decode_manifest(offer.manifest).full_digest for offer in offers]
    states = [full_digest(state) for state in setting.states]
    assert full == [states[0], None, states[2], None]


def test_a_version_in_the_outbox_is_offered_again_bit_for_bit_after_a_crash(
    setting: Setting,
) -> None:
    publisher = setting.publisher()
    offers = [publisher.build(WHOLE_0)[0]]
    offers += [setting.publish(publisher, step) for step in (1, 2)]
    setting.reopen()
    again = setting.publisher(at=2)
    pending = setting.outbox.ancestry(2)
    assert [(p.version, p.parent, p.step, p.whole) for p in pending] == [
        (0, None, 0, True), (1, 0, 1, False), (2, 1, 2, False),
    ]  # fmt: skip
    for offer, p in zip(offers, pending, strict=True):
        order = BuildVersion(version=p.version, parent=p.parent, step=p.step, whole=p.whole)
        found, facts = again.build(order)
        assert found == offer
        assert facts["again"] is True
    store = WeightVersions(setting.folder / "store", trusted=TRUSTED)
    for offer in [*offers, setting.publish(again, 3)]:
        store.add_version(signed(offer), setting.files(offer))
    assert state_digest(store.reconstruct(POLICY, 3)) == state_digest(setting.states[3])


def test_a_checkpoints_version_can_be_published_whole(setting: Setting, tmp_path: Path) -> None:
    publisher = setting.publisher(at=3)
    offer, _ = publisher.build(BuildVersion(version=3, parent=None, step=3, whole=True))
    store = WeightVersions(tmp_path / "store", trusted=TRUSTED)
    manifest = store.add_version(signed(offer), setting.files(offer))
    assert (manifest.version, manifest.parent, manifest.step) == (3, None, 3)
    assert state_digest(store.reconstruct(POLICY, 3)) == state_digest(setting.states[3])


def again(version: int, parent: int, step: int) -> BuildVersion:
    return BuildVersion(version=version, parent=parent, step=step, again=True)


def follow(store: WeightVersions, copies: WeightCopies) -> Mapping[str, TensorBytes]:
    """An agent's copy goes to the store's head; the tensors that changed on the way."""
    held = copies.held().get(POLICY)
    plan = store.plan(POLICY, *((held.version, held.digest) if held else ()))
    assert plan is not None
    blobs = copies.blobs(POLICY)
    for entry in copies.wanted(plan):
        for index in range(len(entry.chunk_digests)):
            blobs.write_chunk(entry, index, store.read_chunk(entry.digest, index) or b"")
        blobs.complete(entry)
    staged = copies.stage(plan)
    copies.commit(staged)
    return staged.changed


def test_weights_published_again_lead_agents_from_everywhere_to_the_checkpoint(
    setting: Setting, tmp_path: Path
) -> None:
    store = WeightVersions(tmp_path / "store", trusted=TRUSTED)
    copies = [WeightCopies(tmp_path / f"agent-{n}", trusted=TRUSTED) for n in range(2)]
    publisher = setting.publisher()
    for offer in (publisher.build(WHOLE_0)[0], setting.publish(publisher, 1)):
        store.add_version(signed(offer), setting.files(offer))
    follow(store, copies[0])
    for step in (2, 3):
        offer = setting.publish(publisher, step)
        store.add_version(signed(offer), setting.files(offer))
    follow(store, copies[1])
    publisher = setting.publisher(at=1)
    offer, facts = publisher.build(again(4, parent=1, step=1))
    assert facts["changed_cells"] == 0
    assert facts["file_bytes"] < 1024
    manifest = store.add_version(signed(offer), setting.files(offer))
    assert (manifest.digest, manifest.parent, manifest.step) == (manifest.base_digest, 1, 1)
    assert follow(store, copies[0]) == {}
    assert follow(store, copies[1]) != {}
    for copy in copies:
        assert copy.held()[POLICY].version == 4
        assert state_digest(copy.tensors(POLICY)) == state_digest(setting.states[1])
    again_opened = WeightCopies(tmp_path / "agent-0", trusted=TRUSTED)
    assert again_opened.held() == copies[0].held()
    publisher.capture(2, setting.states[2])
    offer, _ = publisher.build(BuildVersion(version=5, parent=4, step=2))
    store.add_version(signed(offer), setting.files(offer))
    assert follow(store, copies[0])
    assert WeightVersions(tmp_path / "store", trusted=TRUSTED).reconstruct(POLICY, 4)


def test_the_outbox_knows_the_newest_number_of_a_checkpoints_weights(setting: Setting) -> None:
    publisher = setting.publisher()
    publisher.build(WHOLE_0)
    for step in (1, 2):
        setting.publish(publisher, step)
    publisher = setting.publisher(at=1)
    offer, _ = publisher.build(again(3, parent=1, step=1))
    note = setting.folder / "outbox" / "again"
    assert note.read_bytes() == b'{"of":1,"step":1,"version":3}'
    note.unlink()  # as after a crash just before it
    outbox = setting.reopen()
    assert [outbox.newest_number(*at) for at in ((1, 1), (1, 2), (2, 2), (0, 0))] == [3, 1, 2, 0]
    assert [p.version for p in outbox.ancestry(3)] == [0, 1, 3]
    found, facts = setting.publisher(at=1).build(BuildVersion(version=3, parent=1, step=1))
    assert (found, facts) == (offer, {"version": 3, "again": True})
    for version in (0, 1, 3):
        outbox.remove(version)
    assert setting.reopen().newest_number(1, 1) == 3
    publisher = setting.publisher(at=1)
    publisher._base_version = 3
    publisher.build(again(4, parent=3, step=1))
    setting.outbox.remove(4)
    assert setting.reopen().newest_number(1, 1) == 4
    setting.outbox.clear()
    assert setting.reopen().newest_number(1, 1) == 1
    assert setting.outbox.highest == 4


def test_weights_whose_files_were_lost_are_published_under_one_more_number(
    setting: Setting,
) -> None:
    publisher = setting.publisher(at=1)
    offer, _ = publisher.build(again(3, parent=1, step=1))
    (entry,) = decode_manifest(offer.manifest).files
    (setting.folder / "outbox" / "blobs" / entry.digest).unlink()
    assert setting.reopen().newest_number(1, 1) == 1
    (setting.folder / "outbox" / "again").write_text("{")
    with structlog.testing.capture_logs() as logs:
        assert setting.reopen().newest_number(1, 1) == 1
    assert [log["event"] for log in logs] == ["outbox.damaged"]


def test_another_models_version_of_the_same_number_is_built_anew(setting: Setting) -> None:
    setting.publisher().build(WHOLE_0)
    other = setting.publisher(at=0)
    other._base = setting.states[2]
    with structlog.testing.capture_logs() as logs:
        offer, _ = other.build(WHOLE_0)
    assert decode_manifest(offer.manifest).digest == state_digest(setting.states[2])
    assert [log["event"] for log in logs] == ["publisher.version_differs"]


def test_a_version_without_its_base_or_weights_is_never_built(setting: Setting) -> None:
    publisher = setting.publisher()
    for order in (
        BuildVersion(version=1, parent=0, step=1),
        BuildVersion(version=5, parent=None, step=5, whole=True),
    ):
        with pytest.raises(InvariantViolation):
            publisher.build(order)
    publisher.capture(1, setting.states[1])
    with pytest.raises(InvariantViolation, match="the base is 0"):
        publisher.build(BuildVersion(version=2, parent=1, step=1))


def test_weights_that_are_not_finite_leave_the_base_as_it_was(setting: Setting) -> None:
    publisher = setting.publisher()
    bad = {name: TensorBytes(t.dtype, t.shape, t.data) for name, t in setting.states[1].items()}
    cells = np.full(64, 0x7FC0, "<u2")
    bad["bias"] = TensorBytes("BF16", (64,), cells.tobytes())
    publisher.capture(1, bad)
    with pytest.raises(IntegrityError, match="'bias'"):
        publisher.build(BuildVersion(version=1, parent=0, step=1))
    assert setting.outbox.highest == 0
    assert setting.publish(publisher, 1)


def test_a_number_stays_given_when_its_version_is_forgotten(setting: Setting) -> None:
    publisher = setting.publisher()
    publisher.build(WHOLE_0)
    offer = setting.publish(publisher, 1)
    (entry,) = decode_manifest(offer.manifest).files
    setting.outbox.remove(1)
    setting.outbox.remove(1)
    assert setting.outbox.read_chunk(entry.digest, 0) is None
    assert setting.outbox.offer(1) is None
    outbox = setting.reopen()
    assert outbox.highest == 1
    assert [p.version for p in outbox.ancestry(1)] == []
    assert [p.version for p in outbox.ancestry(0)] == [0]


def test_versions_of_a_lost_lineage_are_removed_with_their_files(setting: Setting) -> None:
    publisher = setting.publisher()
    publisher.build(WHOLE_0)
    for step in (1, 2):
        setting.publish(publisher, step)
    setting.outbox.keep_only([0, 1])
    assert setting.outbox.offer(2) is None
    assert setting.outbox.offer(1) is not None
    assert len(list((setting.folder / "outbox" / "blobs").iterdir())) == 3
    setting.outbox.keep_only([])
    assert list((setting.folder / "outbox" / "blobs").iterdir()) == []
    assert setting.reopen().highest == 2


def test_a_version_with_a_missing_file_is_not_offered(setting: Setting) -> None:
    publisher = setting.publisher()
    publisher.build(WHOLE_0)
    offer = setting.publish(publisher, 1)
    (entry,) = decode_manifest(offer.manifest).files
    (setting.folder / "outbox" / "blobs" / entry.digest).unlink()
    assert setting.reopen().offer(1) is None


def test_an_unreadable_highest_number_is_an_error_with_a_remedy(setting: Setting) -> None:
    (setting.folder / "outbox" / "highest").write_text("many\n")
    with pytest.raises(StoreError, match="highest version number ever published"):
        setting.reopen()


@pytest.mark.asyncio
async def test_more_chunks_than_a_link_holds_arrive_one_by_one(setting: Setting) -> None:
    publication = build_version0(
        setting.model, run="run", policy=POLICY, created_wall_s=0.0, chunk_bytes=128
    )
    setting.outbox.add(publication, sign(publication.manifest, SIGNER))
    entry = next(e for e in publication.manifest.files if e.kind == "snapshot")
    count = len(entry.chunk_digests)
    assert count > 3 * LinkOptions.for_plane(Plane.WEIGHTS).window_messages
    network = MemoryNetwork()
    hub = network.hub("tcp://127.0.0.1:0", LinkOptions.for_plane(Plane.WEIGHTS))
    transport = TransportConfig(
        control_port=hub.port, trajectories_port=hub.port, weights_port=hub.port
    )
    links = PlaneLinks(network, transport, key=None, server_key=None)
    with ThreadPoolExecutor(1) as reader:
        service = ChunkService(setting.outbox, links, reader)
        serving = asyncio.create_task(service.run())
        for first in range(0, count, 50):
            indices = tuple(range(first, min(first + 50, count)))
            service.ask(ChunkRequest(digest=entry.digest, indices=indices))
        service.ask(ChunkRequest(digest=entry.digest, indices=(0, count + 7)))
        service.ask(ChunkRequest(digest="0" * 64, indices=(0,)))
        got: dict[int, bytes] = {}
        lost: set[tuple[str, int]] = set()
        while len(got) < count or len(lost) < 2:
            for inbound in await hub.recv():
                message, payload = decode(inbound.frames, LIMITS[Plane.WEIGHTS])
                assert isinstance(message, Chunk)
                if message.found:
                    got[message.index] = payload[0]
                else:
                    lost.add((message.digest, message.index))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert lost == {(entry.digest, count + 7), ("0" * 64, 0)}
    assert b"".join(got[index] for index in range(count)) == publication.files[entry.name]
    await links.close()
    await network.close()


@pytest.mark.asyncio
async def test_bodies_asked_for_one_by_one_in_a_burst_are_all_asked_for() -> None:
    network = ZmqNetwork()
    hub = network.hub("tcp://127.0.0.1:0", LinkOptions.for_plane(Plane.TRAJECTORIES))
    ports = dict.fromkeys(("control_port", "trajectories_port", "weights_port"), hub.port)
    links = PlaneLinks(network, TransportConfig(**ports), key=None, server_key=None)
    await links._links[Plane.TRAJECTORIES].wait_connected()
    digests = [f"{number:064d}" for number in range(40)]
    assert all(links.send(Plane.TRAJECTORIES, BodyRequest(digests=(d,))) for d in digests)
    asked: list[str] = []
    while len(asked) < len(digests):
        for inbound in await hub.recv():
            message, _ = decode(inbound.frames, LIMITS[Plane.TRAJECTORIES])
            assert isinstance(message, BodyRequest)
            asked.extend(message.digests)
    assert asked == digests
    await links.close()
    await network.close()
