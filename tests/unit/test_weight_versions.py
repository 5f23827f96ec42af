"""The weight store's versions on disk: taking, serving, keeping, surviving."""

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from signing import signing_key
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

from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    IntegrityError,
    ParentLost,
    RemoteProtocolError,
    StoreError,
    TruncatedBlob,
)
from transport.weights.delta_file import encode_delta
from transport.weights.folder import read_model_folder
from transport.weights.manifest import DELTA_NAME, describe_file, sign
from transport.weights.plan import check_plan
from transport.weights.publication import build_version0
from transport.weights.tensors import TensorBytes


@pytest.fixture
def publisher(tmp_path):
    return Publisher(tmp_path / "model")


@pytest.fixture
def open_store(tmp_path):
    return partial(opened, tmp_path / "store")


def test_an_agent_with_nothing_gets_the_model_and_the_way_to_the_head(
    open_store, publisher, tmp_path
):
    store = filled(open_store(), publisher, 3)
    plan = store.plan(POLICY)
    assert shape(plan) == [
        (0, ("config.json", "tokenizer.json", "model.safetensors")),
        (1, (DELTA_NAME,)),
        (2, (DELTA_NAME,)),
        (3, (DELTA_NAME,)),
    ]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[3]


def test_an_agent_that_proves_its_version_gets_deltas_only(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 3)
    digest = publisher.publications[1].manifest.digest
    plan = store.plan(POLICY, 1, digest)
    assert shape(plan) == [(2, (DELTA_NAME,)), (3, (DELTA_NAME,))]
    for have in ((1, "0" * 64), (1, ""), (9, digest)):
        assert shape(store.plan(POLICY, *have))[0][0] == 0
    assert store.plan(POLICY, 3, publisher.publications[3].manifest.digest) is None
    assert store.plan("r/unknown") is None
    assert store.policies() == [POLICY]


def test_a_version_may_be_asked_for_by_number(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 3)
    plan = store.plan(POLICY, upto=2)
    assert plan.version == 2
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[2]
    assert store.plan(POLICY, upto=99).version == 3
    digest = publisher.publications[3].manifest.digest
    assert shape(store.plan(POLICY, 3, digest, upto=2))[0][0] == 0
    add(store, publisher.next(7, parent=3))
    with pytest.raises(StoreError, match="version 5"):
        store.plan(POLICY, upto=5)


def test_the_store_keeps_a_copy_and_refuses_what_does_not_lead_there(open_store, publisher):
    store = filled(open_store(), publisher, 1)
    good = publisher.next(2)
    with pytest.raises(ChecksumMismatch):
        add(store, good, digest="d" * 64)
    with pytest.raises(TruncatedBlob):
        store.add_version(sign(good.manifest, KEY))
    with pytest.raises(ChecksumMismatch):
        store.add_version(sign(good.manifest, KEY), {DELTA_NAME: b"other"})
    with pytest.raises(AuthenticationFailed):
        store.add_version(sign(good.manifest, signing_key("22" * 32)), good.files)
    with pytest.raises(RemoteProtocolError, match="another"):
        add(store, good, base_digest="d" * 64)
    with pytest.raises(RemoteProtocolError, match="used"):
        add(store, good, version=1, parent=0)
    assert store.head(POLICY).version == 1
    assert not store.blobs(POLICY).has(good.manifest.delta.digest)
    assert add(store, good) == store.head(POLICY)
    assert store.reconstruct(POLICY, 2) == publisher.states[2]


def test_a_delta_against_other_weights_is_refused(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 1)
    other = Publisher(tmp_path / "other", seed=8)
    other.next(1)
    stray = other.next(2)
    entry = stray.manifest.delta
    honest = publisher.next(2).manifest
    forged = msgspec.structs.replace(honest, files=(entry,))
    with pytest.raises(IntegrityError):
        store.add_version(sign(forged, KEY), stray.files)


def test_weights_that_are_not_finite_are_refused_even_when_signed(open_store, publisher):
    store = filled(open_store(), publisher, 0)
    old = publisher.states[0]
    cells = old["a"].cells().copy()
    cells[3] = 0x7FC0
    new = {**old, "a": TensorBytes("BF16", (4000,), cells.tobytes())}
    delta = encode_delta(old, new, run="r", policy=POLICY, version=1, parent=0)
    manifest = msgspec.structs.replace(
        publisher.next(1).manifest,
        digest=delta.digests.hex,
        files=(describe_file(DELTA_NAME, "delta", delta.data),),
    )
    with pytest.raises(IntegrityError, match="'a' gets infinite"):
        store.add_version(sign(manifest, KEY), {DELTA_NAME: delta.data})


def test_offering_a_version_again_is_harmless(open_store, publisher):
    store = filled(open_store(), publisher, 2)
    for version in (0, 1, 2):
        assert add(store, publisher.publications[version]).version == version
    assert store.head(POLICY).version == 2


def test_after_a_rollback_the_tree_branches_and_the_abandoned_end_gets_a_snapshot(
    open_store, publisher, tmp_path
):
    store = filled(open_store(), publisher, 3)
    add(store, publisher.next(4, parent=1))
    add(store, publisher.next(5))
    assert [(m.version, m.parent) for m in store.versions(POLICY)] == [
        (0, None), (1, 0), (2, 1), (3, 2), (4, 1), (5, 4),
    ]  # fmt: skip
    abandoned = store.plan(POLICY, 3, publisher.publications[3].manifest.digest)
    assert [version for version, _ in shape(abandoned)] == [0, 1, 4, 5]
    ancestor = store.plan(POLICY, 1, publisher.publications[1].manifest.digest)
    assert [version for version, _ in shape(ancestor)] == [4, 5]
    assert follow(store, abandoned, tmp_path / "agent").tensors == publisher.states[5]
    assert store.reconstruct(POLICY, 3) == publisher.states[3]


def test_files_pulled_chunk_by_chunk_are_taken(open_store, publisher):
    store = open_store()
    for version in (0, 1):
        publication = publisher.first if version == 0 else publisher.next(1)
        signed = sign(publication.manifest, KEY)
        blobs = store.blobs(POLICY)
        for entry in publication.manifest.files:
            for index in range(len(entry.chunk_digests)):
                start = index * entry.chunk_bytes
                data = publication.files[entry.name][start : start + entry.chunk_bytes]
                blobs.write_chunk(entry, index, data)
            blobs.complete(entry)
        store.add_version(signed)
    assert store.head(POLICY).version == 1


def test_everything_survives_a_restart(open_store, publisher, tmp_path):
    store = filled(open_store(cumulative_every=4), publisher, 9)
    assert make_all(store, Asked(6, 9)) == [(0, 8, True), (4, 8, True), (6, 8, True)]
    store.maintain(POLICY)
    before = store.plan(POLICY)
    store = open_store(cumulative_every=4)
    assert store.warnings == []
    assert store.plan(POLICY) == before
    assert make_all(store, Asked(6, 9)) == []
    assert store.head(POLICY) == publisher.publications[9].manifest
    assert follow(store, before, tmp_path / "agent").tensors == publisher.states[9]
    add(store, publisher.next(10))
    assert store.reconstruct(POLICY, 10) == publisher.states[10]
    with pytest.raises(RemoteProtocolError, match="the next one is 11"):
        add(store, publisher.next(10, parent=9))


def test_a_crash_before_the_manifest_leaves_no_version(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 1)
    publication = publisher.next(2)
    entry = publication.manifest.delta
    store.blobs(POLICY).put(entry.digest, (publication.files[DELTA_NAME],))
    (folder,) = (tmp_path / "store").iterdir()
    (folder / "manifests" / "00000002.tmp").write_bytes(b"torn")
    store = open_store()
    assert store.head(POLICY).version == 1
    store.maintain(POLICY, uploading={entry.digest})
    store.add_version(sign(publication.manifest, KEY))
    assert store.head(POLICY).version == 2
    assert not (folder / "manifests" / "00000002.tmp").exists()


def test_retention_keeps_the_disk_bounded_and_every_retained_version_whole(
    open_store, publisher, tmp_path
):
    options = {"cumulative_every": 3, "keep_versions": 4, "keep_versions_max": 6}
    store = filled(open_store(**options), publisher, 0)
    files = []
    for version in range(1, 25):
        add(store, publisher.next(version))
        make_all(store, Asked(version - 3, version))
        store.maintain(POLICY)
        files.append(len(list(store.blobs(POLICY).folder.iterdir())))
    assert max(files) == max(files[:16]) <= 16
    assert [m.version for m in store.versions(POLICY)] == list(range(25))
    store = open_store(**options)
    for version in (0, *range(21, 25)):
        assert store.reconstruct(POLICY, version) == publisher.states[version]
        for have in (None, 0):
            digest = publisher.publications[0].manifest.digest if have == 0 else ""
            plan = store.plan(POLICY, have, digest, upto=version)
            if plan is None:
                continue
            arena = store_arena(store, tmp_path / f"start{version}") if have == 0 else None
            agent = follow(store, plan, tmp_path / f"agent{version}", arena)
            assert agent.tensors == publisher.states[version]
    with pytest.raises(StoreError, match="version 9"):
        store.plan(POLICY, upto=9)
    with pytest.raises(StoreError, match="version 9"):
        store.reconstruct(POLICY, 9)


def store_arena(store, folder):
    """What an agent has that holds version 0."""
    return follow(store, store.plan(POLICY, upto=0), folder)


def test_what_a_living_agent_holds_can_still_be_continued_within_bounds(open_store, publisher):
    options = {"keep_versions": 3, "keep_versions_max": 16, "cumulative_every": 4}
    store = filled(open_store(**options), publisher, 0)
    for version in range(1, 19):
        add(store, publisher.next(version))
        make_all(store)
        store.maintain(POLICY, acked=[min(version, 3), version])
    digest = publisher.publications[3].manifest.digest
    assert [version for version, _ in shape(store.plan(POLICY, 3, digest))] == list(range(4, 19))
    for version in (19, 20):
        add(store, publisher.next(version))
        store.maintain(POLICY, acked=[3, version])  # then it is too far behind
    assert "model.safetensors" in shape(store.plan(POLICY, 3, digest))[0][1]
    digest = publisher.publications[9].manifest.digest
    assert shape(store.plan(POLICY, 9, digest))[0][0] == 10
    store.maintain(POLICY, acked=[20])
    assert "model.safetensors" in shape(store.plan(POLICY, 9, digest))[0][1]


def damage(store, entry):
    store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)


def test_a_damaged_delta_is_not_served_and_the_head_gets_a_snapshot(
    open_store, publisher, tmp_path
):
    store = filled(open_store(), publisher, 3)
    entry = publisher.publications[2].manifest.delta
    damage(store, entry)
    assert store.read_chunk(entry.digest, 0) is None
    assert store.read_chunk(entry.digest, 99) is None
    assert store.read_chunk("0" * 64, 0) is None
    assert (len(store.warnings), store.suspects) == (1, {POLICY})
    with pytest.raises(StoreError, match="damaged"):
        store.plan(POLICY)
    store.maintain(POLICY)
    plan = store.plan(POLICY)
    assert [version for version, _ in shape(plan)] == [0, 3, 3]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[3]
    digest = publisher.publications[1].manifest.digest
    assert (
        follow(store, store.plan(POLICY, 1, digest), tmp_path / "b").tensors == publisher.states[3]
    )


def test_after_a_restart_damage_is_found_and_what_is_intact_is_used(open_store, publisher):
    store = filled(open_store(cumulative_every=2), publisher, 2)
    assert make_all(store) == [(0, 2, True)]
    add(store, publisher.next(3))
    damage(store, check_plan(store.plan(POLICY, upto=2), TRUSTED)[1].files[0])
    store = open_store()
    assert store.reconstruct(POLICY, 3) == publisher.states[3]
    assert len(store.warnings) == 1
    store = open_store()
    for version in (1, 2, 3):
        damage(store, publisher.publications[version].manifest.delta)
    with pytest.raises(StoreError):
        store.reconstruct(POLICY, 3)
    with pytest.raises(StoreError, match="damaged"):
        add(store, publisher.next(4))


def test_weights_damaged_in_memory_are_built_again(open_store, publisher):
    store = filled(open_store(cumulative_every=2), publisher, 2)
    arena = store._policies[POLICY].head
    arena._cells["a"][7] ^= 1
    store.maintain(POLICY)
    assert "in memory were damaged" in store.warnings[0]
    add(store, publisher.next(3))
    assert store.reconstruct(POLICY, 3) == publisher.states[3]


def test_a_damaged_manifest_is_reported_and_not_trusted(open_store, publisher, tmp_path):
    filled(open_store(), publisher, 2)
    (folder,) = (tmp_path / "store").iterdir()
    (folder / "manifests" / "00000002").write_bytes(b"\xc1")
    store = open_store()
    assert store.head(POLICY).version == 1
    assert "00000002" in store.warnings[0]


def test_any_retained_version_exports_as_a_model_folder(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 2)
    target = tmp_path / "export"
    store.export(POLICY, 1, target)
    assert read_model_folder(target) == publisher.states[1]
    assert (target / "tokenizer.json").read_bytes() == b"[]"
    with pytest.raises(StoreError, match="exists"):
        store.export(POLICY, 1, target)
    with pytest.raises(StoreError, match="r/q"):
        store.export("r/q", 1, tmp_path / "other")


def test_policies_live_apart_whatever_their_names(open_store, publisher, tmp_path):
    with pytest.raises(AuthenticationFailed):
        add(open_store(), publisher.first, policy="r/..")
    TRUSTED_TWO = {KEY.key_id: SimpleNamespace(verify=KEY.public.verify, policy="r/..")}
    store = WeightVersions(tmp_path / "store", trusted=TRUSTED_TWO)
    add(store, publisher.first, policy="r/..")
    store = WeightVersions(tmp_path / "store", trusted=TRUSTED_TWO)
    assert store.policies() == ["r/.."]
    assert {path.name for path in tmp_path.iterdir()} == {"model", "store"}


def test_a_plan_on_the_wrong_base_is_refused_by_whoever_applies_it(open_store, publisher, tmp_path):
    store = filled(open_store(), publisher, 2)
    plan = store.plan(POLICY, 1, publisher.publications[1].manifest.digest)
    arena = store_arena(store, tmp_path / "agent")
    with pytest.raises(StoreError, match="needs version 1"):
        follow(store, plan, tmp_path / "agent", arena)
    assert arena.tensors == publisher.states[0]


def test_a_version_with_another_full_digest_is_refused_and_leaves_no_trace(open_store, publisher):
    store = filled(open_store(), publisher, 1)
    publication = publisher.next(2)
    with pytest.raises(ChecksumMismatch, match="full digest"):
        add(store, publication, full_digest="d" * 64)
    assert store.head(POLICY).version == 1
    add(store, publication)
    assert store.reconstruct(POLICY, 2) == publisher.states[2]


def test_scrubbing_finds_what_nobody_reads_a_part_at_a_time(tmp_path):
    publisher = Publisher(tmp_path / "model")
    store = filled(opened(tmp_path / "store"), publisher, 3)
    entry = store.versions(POLICY)[1].files[0]
    path = store.blobs(POLICY).path(entry.digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    total = sum(e.size_bytes for m in store.versions(POLICY) for e in m.files)
    for _ in range(3):
        store.scrub(POLICY, total // 2)
    assert store.is_damaged(entry.digest)
    assert store.suspects == {POLICY}
    assert [store.is_damaged(m.files[0].digest) for m in store.versions(POLICY)].count(True) == 1
    assert store.maintain(POLICY) >= 0
    assert store.reconstruct(POLICY, 3) == publisher.states[3]


def test_when_the_newest_version_is_lost_the_trainer_goes_on_from_another_root(tmp_path):
    publisher = Publisher(tmp_path / "model")
    filled(opened(tmp_path / "store"), publisher, 2)
    blobs = opened(tmp_path / "store").blobs(POLICY)
    for manifest in (publisher.publications[v].manifest for v in (0, 1, 2)):
        for entry in manifest.files:
            if entry.kind != "artefact":
                blobs.path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    store = opened(tmp_path / "store")
    with pytest.raises(ParentLost):
        add(store, publisher.next(3))
    whole = build_version0(tmp_path / "model", tensors=publisher.states[3], **PLACE, version=5)
    assert add(store, whole).parent is None
    publisher.states[5] = publisher.states[3]
    assert add(store, publisher.next(6, parent=5)).version == 6
    store = opened(tmp_path / "store")
    held = publisher.publications[2].manifest
    for have in ((None, ""), (2, held.digest)):
        arena = follow(store, store.plan(POLICY, *have), tmp_path / f"agent{have[0]}")
        assert (arena.version, dict(arena.tensors)) == (6, publisher.states[6])
    make_all(store, Asked(2, 6))
    store.maintain(POLICY, acked=[2])
    assert store.reconstruct(POLICY, 6) == publisher.states[6]
    # A second root is for that need only.
    again = build_version0(tmp_path / "model", tensors=publisher.states[6], **PLACE, version=7)
    with pytest.raises(RemoteProtocolError, match="has no parent"):
        add(store, again)
