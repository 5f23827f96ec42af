"""The weight store's versions on disk: taking, serving, keeping, surviving."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from signing import signing_key

from scheduler.weight_versions import WeightVersions
from transport.errors import (
    AuthenticationFailed,
    BaseVersionMismatch,
    ChecksumMismatch,
    IntegrityError,
    RemoteProtocolError,
    StoreError,
    TruncatedBlob,
)
from transport.weights.blobs import BlobFolder
from transport.weights.delta_file import encode_delta
from transport.weights.folder import read_model_folder, write_model_folder
from transport.weights.manifest import DELTA_NAME, decode_manifest, describe_file, sign
from transport.weights.plan import check_plan
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.state import advanced, state_of_snapshot
from transport.weights.tensors import TensorBytes

KEY = signing_key()
POLICY = "r/p"
PLACE = {"run": "r", "policy": POLICY, "created_wall_s": 0.0}

TRUSTED = {KEY.key_id: KEY.public}


def tensors(seed):
    rng = np.random.default_rng(seed)
    return {
        name: TensorBytes("BF16", (4000,), rng.integers(0x3B00, 0x3D00, 4000, "<u2").tobytes())
        for name in "abc"
    }


class Publisher:
    """A trainer's side: makes versions, remembers every state."""

    def __init__(self, folder, seed=7):
        write_model_folder(folder, tensors(0), {"config.json": b"{}", "tokenizer.json": b"[]"})
        self.first = build_version0(folder, **PLACE)
        self.states = {0: tensors(0)}
        self.publications = {0: self.first}
        self.rng = np.random.default_rng(seed)

    def next(self, version, parent=None):
        parent = version - 1 if parent is None else parent
        old = self.states[parent]
        name = "abc"[version % 3]
        cells = old[name].cells().copy()
        cells[self.rng.integers(0, 4000, 9)] ^= np.uint16(1)
        new = {**old, name: TensorBytes("BF16", (4000,), cells.tobytes())}
        publication = build_delta_version(
            old, new, version=version, parent=parent, step=version, **PLACE
        )
        self.states[version] = new
        self.publications[version] = publication
        return publication


@pytest.fixture
def publisher(tmp_path):
    return Publisher(tmp_path / "model")


@pytest.fixture
def open_store(tmp_path):
    def opening(**options):
        return WeightVersions(tmp_path / "store", trusted=TRUSTED, **options)

    return opening


def add(store, publication, **changes):
    manifest = msgspec.structs.replace(publication.manifest, **changes)
    return store.add_version(sign(manifest, KEY), publication.files)


def filled(store, publisher, upto):
    add(store, publisher.first)
    for version in range(1, upto + 1):
        add(store, publisher.next(version))
    return store


def follow(store, plan, folder, state=None):
    """What an agent does: check the plan, fetch chunk by chunk, apply."""
    blobs = BlobFolder(folder)
    steps = check_plan(plan, TRUSTED)
    for entry in (entry for step in steps for entry in step.files):
        for index in range(len(entry.chunk_digests)):
            data = store.read_chunk(entry.digest, index)
            assert data is not None
            blobs.write_chunk(entry, index, data)
        blobs.complete(entry)
    for step in steps:
        if step.delta is not None:
            state, _ = advanced(state, blobs, step.manifest)
        elif step.of_kind("snapshot"):
            state = state_of_snapshot(blobs, step.manifest)
    return state


def shape(plan):
    return [(decode_manifest(step.manifest).version, step.files) for step in plan.steps]


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
    with pytest.raises(IntegrityError, match="'a' is not finite"):
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
    store = filled(open_store(snapshot_every=2), publisher, 5)
    store.maintain(POLICY)
    before = store.plan(POLICY)
    store = open_store(snapshot_every=2)
    assert store.warnings == []
    assert store.plan(POLICY) == before
    assert store.head(POLICY) == publisher.publications[5].manifest
    assert follow(store, before, tmp_path / "agent").tensors == publisher.states[5]
    add(store, publisher.next(6))
    assert store.reconstruct(POLICY, 6) == publisher.states[6]
    with pytest.raises(RemoteProtocolError, match="the next one is 7"):
        add(store, publisher.next(6, parent=5))


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


def test_a_snapshot_is_made_when_the_way_has_grown_long(open_store, publisher, tmp_path):
    store = filled(open_store(snapshot_every=4), publisher, 3)
    store.maintain(POLICY)
    assert len(store.plan(POLICY).steps) == 4
    add(store, publisher.next(4))
    store.maintain(POLICY)
    add(store, publisher.next(5))
    plan = store.plan(POLICY)
    assert shape(plan) == [
        (0, ("config.json", "tokenizer.json")),
        (4, ()),
        (4, ("model.safetensors",)),
        (5, (DELTA_NAME,)),
    ]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[5]


def test_retention_keeps_the_disk_bounded_and_every_retained_version_whole(
    open_store, publisher, tmp_path
):
    store = filled(open_store(snapshot_every=3, keep_versions=4), publisher, 0)
    files = []
    for version in range(1, 25):
        add(store, publisher.next(version))
        store.maintain(POLICY)
        files.append(len(list(store.blobs(POLICY).folder.iterdir())))
    assert max(files) == max(files[:16]) <= 16
    assert [m.version for m in store.versions(POLICY)] == list(range(25))
    store = open_store(snapshot_every=3, keep_versions=4)
    for version in (0, *range(21, 25)):
        assert store.reconstruct(POLICY, version) == publisher.states[version]
        plan = store.plan(POLICY, upto=version)
        agent = follow(store, plan, tmp_path / f"agent{version}")
        assert agent.tensors == publisher.states[version]
    with pytest.raises(StoreError, match="version 9"):
        store.plan(POLICY, upto=9)
    with pytest.raises(StoreError, match="version 9"):
        store.reconstruct(POLICY, 9)


def test_what_a_living_agent_holds_can_still_be_continued(open_store, publisher):
    store = filled(open_store(snapshot_every=4, keep_versions=3), publisher, 0)
    for version in range(1, 21):
        add(store, publisher.next(version))
        store.maintain(POLICY, min_acked=min(version, 5))
    plan = store.plan(POLICY, 5, publisher.publications[5].manifest.digest)
    assert [version for version, _ in shape(plan)] == list(range(6, 21))
    store.maintain(POLICY, min_acked=19)
    plan = store.plan(POLICY, 5, publisher.publications[5].manifest.digest)
    assert shape(plan)[0][1] == ("config.json", "tokenizer.json")


def test_a_damaged_delta_is_not_served_and_the_head_gets_a_snapshot(
    open_store, publisher, tmp_path
):
    store = filled(open_store(), publisher, 3)
    entry = publisher.publications[2].manifest.delta
    store.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    assert store.read_chunk(entry.digest, 0) is None
    assert store.read_chunk(entry.digest, 99) is None
    assert store.read_chunk("0" * 64, 0) is None
    assert len(store.warnings) == 1
    plan = store.plan(POLICY)
    assert [version for version, _ in shape(plan)] == [0, 3, 3]
    assert follow(store, plan, tmp_path / "agent").tensors == publisher.states[3]
    digest = publisher.publications[1].manifest.digest
    assert (
        follow(store, store.plan(POLICY, 1, digest), tmp_path / "b").tensors == publisher.states[3]
    )


def test_after_a_restart_damage_is_found_and_what_is_intact_is_used(open_store, publisher):
    store = filled(open_store(snapshot_every=2), publisher, 2)
    store.maintain(POLICY)
    add(store, publisher.next(3))
    snapshot = check_plan(store.plan(POLICY, upto=2), TRUSTED)[1].files[0]
    store.blobs(POLICY).path(snapshot.digest).write_bytes(b"x" * snapshot.size_bytes)
    store = open_store()
    assert store.reconstruct(POLICY, 3) == publisher.states[3]
    assert len(store.warnings) == 1
    store = open_store()
    for version in (1, 2, 3):
        entry = publisher.publications[version].manifest.delta
        store.blobs(POLICY).path(entry.digest).write_bytes(b"")
    with pytest.raises(StoreError):
        store.reconstruct(POLICY, 3)
    with pytest.raises(StoreError, match="damaged"):
        add(store, publisher.next(4))


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
    state = follow(store, store.plan(POLICY, upto=0), tmp_path / "agent")
    with pytest.raises(BaseVersionMismatch):
        follow(store, plan, tmp_path / "agent", state)
