"""What rots under a weight store: mapped weights in memory, and stored manifests."""

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from version_store import (
    KEY,
    PLACE,
    POLICY,
    TRUSTED,
    Publisher,
    add,
    filled,
    follow,
    make_all,
    opened,
    shape,
)

from scheduler.weight_composites import write_snapshot
from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.errors import ChecksumMismatch, ParentLost, RemoteProtocolError, StoreError
from transport.weights.folder import write_model_folder
from transport.weights.manifest import SignedManifest
from transport.weights.publication import build_version0


@pytest.fixture
def publisher(tmp_path):
    return Publisher(tmp_path / "model")


@pytest.fixture
def open_store(tmp_path):
    return partial(opened, tmp_path / "store")


def manifest_file(tmp_path, number):
    (path,) = (tmp_path / "store").glob(f"*/manifests/{number:08d}")
    return path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def whole(publisher, version, folder):
    """What a trainer that was told ``ParentLost`` publishes."""
    write_model_folder(
        folder, publisher.states[version], {"config.json": b"{}", "tokenizer.json": b"[]"}
    )
    made = build_version0(folder, **PLACE)
    manifest = msgspec.structs.replace(made.manifest, version=version, step=version)
    return SimpleNamespace(manifest=manifest, files=made.files)


def rot_the_mapped_head(store, publisher):
    """A cell that no delta touched, under the head and in the file that it is mapped from."""
    (entry,) = publisher.first.manifest.of_kind("snapshot")
    store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    store._policies[POLICY].head._cells["a"][7] ^= 1
    return entry


def test_rotten_weights_in_memory_never_become_a_snapshot(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 3)
    entry = rot_the_mapped_head(store, publisher)
    assert store.read_chunk(entry.digest, 0) is None
    store.maintain(POLICY)
    assert any("in memory were damaged" in warning for warning in store.warnings)
    assert not store._policies[POLICY].snapshots.keys() - {0}
    with pytest.raises(ParentLost):
        add(store, publisher.next(4))
    add(store, whole(publisher, 3, tmp_path / "whole"))
    add(store, publisher.publications[4])
    assert follow(store, store.plan(POLICY), tmp_path / "agent").tensors == publisher.states[4]


def test_the_head_is_read_again_right_before_it_is_written(open_store, publisher):
    store = filled(open_store(), publisher, 3)
    p = store._policies[POLICY]
    rot_the_mapped_head(store, publisher)
    p.mark_damaged(publisher.first.manifest.files)  # and nothing said that a look is due
    store.maintain(POLICY)
    assert p.head is None
    assert "in memory are damaged" in store.warnings[0]
    with pytest.raises(StoreError):
        store.plan(POLICY)


@pytest.mark.parametrize("field", ["digest", "full_digest"])
def test_a_snapshot_of_another_state_is_not_written(open_store, publisher, field):
    store = filled(open_store(), publisher, 1)
    version = msgspec.structs.replace(publisher.publications[1].manifest, **{field: "d" * 64})
    files = set(store.blobs(POLICY).folder.iterdir())
    with pytest.raises(ChecksumMismatch, match="version 1"):
        write_snapshot(store.blobs(POLICY), publisher.states[1], version)
    assert set(store.blobs(POLICY).folder.iterdir()) == files


def spoil(path, how):
    signed = msgspec.msgpack.decode(path.read_bytes(), type=SignedManifest)
    if how == "signature":
        signed = msgspec.structs.replace(signed, signature=bytes(len(signed.signature)))
    elif how == "contents":
        changed = signed.manifest.replace(b"step", b"stop")
        assert changed != signed.manifest
        signed = msgspec.structs.replace(signed, manifest=changed)
    elif how == "key":
        signed = msgspec.structs.replace(signed, key_id="0" * 16)
    path.write_bytes(b"\xc1" if how == "all" else msgspec.msgpack.encode(signed))


@pytest.mark.parametrize("how", ["signature", "contents", "key", "all"])
def test_a_damaged_manifest_is_reported_and_its_version_comes_back_whole(
    open_store, publisher, tmp_path, how
):
    filled(open_store(), publisher, 3)
    spoil(manifest_file(tmp_path, 2), how)
    store = open_store(cumulative_every=2)
    assert [m.version for m in store.versions(POLICY)] == [0, 1, 3]
    assert len(store.warnings) == 1
    assert "00000002" in store.warnings[0]
    with pytest.raises(StoreError):
        store.plan(POLICY)
    make_all(store, Asked(1, 3), Asked(0, 3))
    store.maintain(POLICY)
    for lost in (publisher.publications[2], publisher.next(4)):
        with pytest.raises(ParentLost):
            add(store, lost)
    other = whole(publisher, 1, tmp_path / "other")
    with pytest.raises(RemoteProtocolError, match="number is used"):
        add(store, other, version=2)  # not what version 3 builds on
    back = whole(publisher, 2, tmp_path / "whole")
    assert store.awaits_whole(back.manifest)
    add(store, back)
    assert not store.awaits_whole(back.manifest)
    for again in (store, open_store()):
        again.maintain(POLICY)
        assert [m.version for m in again.versions(POLICY)] == [0, 1, 2, 3]
        assert again.reconstruct(POLICY, 2) == publisher.states[2]
    assert open_store().warnings == []
    add(store, publisher.next(5, 2))
    assert follow(store, store.plan(POLICY), tmp_path / "agent").tensors == publisher.states[5]


def test_the_number_of_a_lost_newest_version_is_not_given_again(open_store, publisher, tmp_path):
    filled(open_store(), publisher, 3)
    flip(manifest_file(tmp_path, 3), -3)
    store = open_store()
    assert store.head(POLICY).version == 2
    with pytest.raises(ParentLost):
        add(store, publisher.next(3, 2))  # the number is another state's
    with pytest.raises(ParentLost):
        add(store, publisher.next(4))
    add(store, publisher.next(4, 2))
    assert store.reconstruct(POLICY, 4) == publisher.states[4]


def test_where_the_first_manifest_is_lost_any_version_that_comes_whole_is_the_first(
    open_store, publisher, tmp_path
):
    filled(open_store(), publisher, 2)
    flip(manifest_file(tmp_path, 0), -3)
    store = open_store(cumulative_every=2)
    assert make_all(store, Asked(0, 2)) == []
    store.maintain(POLICY)
    with pytest.raises(ParentLost):
        add(store, publisher.next(3))
    add(store, whole(publisher, 2, tmp_path / "whole"))
    add(store, publisher.publications[3])
    for again in (store, open_store()):
        again.maintain(POLICY)
        assert again.plan(POLICY).version == 3
        assert shape(again.plan(POLICY))[0][1][:2] == ("config.json", "tokenizer.json")
        agent = follow(again, again.plan(POLICY), tmp_path / "agent")
        assert agent.tensors == publisher.states[3]


def test_manifests_by_a_key_that_is_not_known_are_used_and_told_of(publisher, tmp_path):
    filled(opened(tmp_path / "store"), publisher, 2)
    store = WeightVersions(tmp_path / "store", trusted={})
    assert store.reconstruct(POLICY, 2) == publisher.states[2]
    assert len(store.warnings) == 1
    assert "3 of the manifests in" in store.warnings[0]
    assert KEY.key_id in store.warnings[0]
    assert WeightVersions(tmp_path / "store", trusted=TRUSTED).warnings == []
