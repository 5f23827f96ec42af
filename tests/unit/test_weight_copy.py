"""The agent's own copy: stage, commit, crash, discard."""

import shutil

import msgspec
import pytest
from published_versions import (
    ARTEFACTS,
    PLACE,
    POLICY,
    TRUSTED,
    Versions,
    after,
    tensors,
)
from signing import signing_key

from edge_agent.weight_copy import WeightCopies
from transport.errors import (
    AuthenticationFailed,
    BaseVersionMismatch,
    IntegrityError,
    RemoteProtocolError,
    SizeLimitExceeded,
    StoreError,
)
from transport.weights.digest import state_digest
from transport.weights.folder import (
    UNFINISHED,
    read_artefacts,
    read_model_folder,
    write_model_folder,
)
from transport.weights.manifest import DELTA_NAME, sign
from transport.weights.publication import build_delta_version


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "model")


@pytest.fixture
def open_copies(tmp_path):
    def opening(**options):
        return WeightCopies(tmp_path / "copies", trusted=TRUSTED, **options)

    return opening


def bases(tmp_path):
    return sorted(path.name for path in (tmp_path / "copies").glob("*/base-*"))


def test_a_first_version_becomes_a_model_folder(open_copies, versions):
    copies = open_copies()
    plan = versions.plan(0)
    assert [entry.name for entry in versions.deliver(copies, plan)] == [
        "config.json", "tokenizer.json", "model.safetensors",
    ]  # fmt: skip
    staged = copies.stage(plan)
    assert copies.held() == {}
    assert after(tensors(5), staged.changed) == versions.states[0]
    copies.commit(staged)
    assert copies.held() == {POLICY: versions.ref(0)}
    folder = copies.folder(POLICY)
    assert read_model_folder(folder) == versions.states[0]
    assert read_artefacts(folder) == ARTEFACTS


def test_staging_gives_absolute_values_and_the_held_version_stays(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    plan = versions.plan(4, have=0)
    versions.deliver(copies, plan)
    for _ in range(2):
        staged = copies.stage(plan)
        assert (staged.version, staged.digest) == (4, versions.ref(4).digest)
        assert after(versions.states[0], staged.changed) == versions.states[4]
        assert after(versions.states[4], staged.changed) == versions.states[4]
        assert copies.held() == {POLICY: versions.ref(0)}
        assert open_copies().held() == {POLICY: versions.ref(0)}
    copies.commit(staged)
    copies.commit(staged)
    assert copies.held() == {POLICY: versions.ref(4)}
    assert copies.tensors(POLICY) == versions.states[4]


def test_a_commit_writes_no_model(open_copies, versions, tmp_path):
    copies = open_copies()
    versions.bring(copies, 0)
    (before,) = bases(tmp_path)
    versions.bring(copies, 3, have=0)
    assert bases(tmp_path) == [before]


def test_the_copy_survives_a_restart_and_goes_on(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 2)
    versions.bring(copies, 4, have=2)
    copies = open_copies()
    assert copies.warnings == []
    assert copies.held() == {POLICY: versions.ref(4)}
    assert copies.tensors(POLICY) == versions.states[4]
    versions.bring(copies, 6, have=4)
    assert open_copies().tensors(POLICY) == versions.states[6]


def test_a_folder_is_of_exactly_the_held_version(open_copies, versions, tmp_path):
    copies = open_copies()
    versions.bring(copies, 0)
    first = copies.folder(POLICY)
    versions.bring(copies, 2, have=0)
    folder = copies.folder(POLICY)
    assert folder != first
    assert copies.folder(POLICY) == folder
    assert read_model_folder(folder) == versions.states[2]
    assert read_artefacts(folder) == ARTEFACTS
    assert bases(tmp_path) == [folder.name]
    assert open_copies().held() == {POLICY: versions.ref(2)}
    versions.bring(copies, 3, have=2)
    assert copies.tensors(POLICY) == versions.states[3]


def test_deltas_are_folded_into_a_new_base_after_a_while(open_copies, versions, tmp_path):
    copies = open_copies(fold_every=3)
    versions.bring(copies, 0)
    for version in range(1, 9):
        versions.bring(copies, version, have=version - 1)
        assert copies.tensors(POLICY) == versions.states[version]
    assert bases(tmp_path) == ["base-00000006-0"]
    kept = list(copies.blobs(POLICY).folder.iterdir())
    assert len(kept) <= 4
    assert open_copies().tensors(POLICY) == versions.states[8]


def test_a_plan_from_another_version_is_refused(open_copies, versions):
    copies = open_copies()
    for held in (None, 0):
        if held is not None:
            versions.bring(copies, held)
        with pytest.raises(BaseVersionMismatch):
            copies.begin(versions.plan(3, have=1))


def test_a_staged_version_does_not_replace_what_came_after_it(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    plan = versions.plan(1, have=0)
    versions.deliver(copies, plan)
    late = copies.stage(plan)
    versions.bring(copies, 2, have=0)
    with pytest.raises(BaseVersionMismatch):
        copies.commit(late)
    assert copies.held() == {POLICY: versions.ref(2)}


def test_the_next_plan_takes_a_staged_version_back(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    plan = versions.plan(1, have=0)
    versions.deliver(copies, plan)
    staged = copies.stage(plan)
    with pytest.raises(BaseVersionMismatch):
        copies.begin(versions.plan(2, have=1))
    assert copies.tensors(POLICY) == versions.states[0]
    with pytest.raises(BaseVersionMismatch):
        copies.commit(staged)
    assert open_copies().held() == {POLICY: versions.ref(0)}


def test_leftovers_of_an_earlier_plan_are_removed_and_chunks_of_this_one_stay(
    open_copies, versions
):
    copies = open_copies()
    versions.bring(copies, 1)
    blobs = copies.blobs(POLICY)
    old = versions.publications[3].manifest.delta
    blobs.write_chunk(old, 0, versions.publications[3].files[DELTA_NAME])
    new = versions.publications[2].manifest.delta
    blobs.write_chunk(new, 0, versions.publications[2].files[DELTA_NAME])
    copies = open_copies()
    assert copies.wanted(versions.plan(2, have=1)) == (new,)
    assert copies.blobs(POLICY).present(old) == frozenset()
    assert copies.blobs(POLICY).present(new) == {0}


def test_damaged_files_are_refused_and_the_copy_stays(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 0)
    plan = versions.plan(1, have=0)
    (entry,) = versions.deliver(copies, plan)
    copies.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    with pytest.raises(IntegrityError):
        copies.stage(plan)
    assert copies.tensors(POLICY) == versions.states[0]
    with pytest.raises(StoreError):
        copies.stage(plan)
    assert copies.wanted(plan) == (entry,)
    assert copies.tensors(POLICY) == versions.states[0]
    assert open_copies().held() == {POLICY: versions.ref(0)}


def test_unsigned_and_oversized_plans_are_refused_before_anything_is_fetched(open_copies, versions):
    plan = versions.plan(0)
    stranger = sign(versions.publications[0].manifest, signing_key("22" * 32))
    step = msgspec.structs.replace(
        plan.steps[0], signature=stranger.signature, key_id=stranger.key_id
    )
    with pytest.raises(AuthenticationFailed):
        open_copies().wanted(msgspec.structs.replace(plan, steps=(step,)))
    with pytest.raises(SizeLimitExceeded):
        open_copies(max_plan_bytes=1000).wanted(plan)
    nothing = msgspec.structs.replace(plan.steps[0], files=())
    with pytest.raises(RemoteProtocolError):
        open_copies().stage(msgspec.structs.replace(plan, steps=(nothing,)))


def damage_weights(folder):
    (path,) = folder.glob("base-*/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def damage_artefact(folder):
    (path,) = folder.glob("base-*/config.json")
    path.unlink()
    path.write_bytes(b"[]")


def damage_record(folder):
    (folder / "state").write_bytes(b"\xc1")


def damage_base(folder):
    (path,) = folder.glob("base-*")
    shutil.rmtree(path)


@pytest.mark.parametrize("damage", [damage_weights, damage_artefact, damage_record, damage_base])
def test_a_damaged_copy_is_discarded_and_fetched_anew(open_copies, versions, tmp_path, damage):
    versions.bring(open_copies(), 2)
    (folder,) = (tmp_path / "copies").iterdir()
    damage(folder)
    copies = open_copies()
    assert copies.held() == {}
    assert POLICY in copies.warnings[0]
    versions.bring(copies, 3)
    assert open_copies().tensors(POLICY) == versions.states[3]


def test_a_damaged_delta_takes_the_copy_back_to_the_version_before_it(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 3)
    entry = versions.publications[2].manifest.delta
    copies.blobs(POLICY).path(entry.digest).write_bytes(b"x" * entry.size_bytes)
    copies = open_copies()
    assert copies.held() == {POLICY: versions.ref(1)}
    assert "goes back to 1" in copies.warnings[0]
    assert copies.wanted(versions.plan(3, have=1))[0].name == DELTA_NAME
    versions.bring(copies, 3, have=1)
    assert open_copies().tensors(POLICY) == versions.states[3]


def test_a_crash_between_base_and_record_keeps_the_old_version(open_copies, versions, tmp_path):
    versions.bring(open_copies(), 1)
    (folder,) = (tmp_path / "copies").iterdir()
    (base,) = folder.glob("base-*")
    shutil.copytree(base, folder / "base-00000009-0")
    leftover = folder / f"{UNFINISHED}x" / "model"
    leftover.mkdir(parents=True)
    (folder / "state.tmp").write_bytes(b"torn")
    copies = open_copies()
    assert copies.held() == {POLICY: versions.ref(1)}
    assert bases(tmp_path) == [base.name]
    assert not leftover.parent.exists()


def test_a_snapshot_replaces_a_copy_and_changes_only_what_differs(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 1)
    plan = versions.plan(2)
    wanted = versions.deliver(copies, plan)
    assert "config.json" not in {entry.name for entry in wanted}
    staged = copies.stage(plan)
    assert staged.changed.keys() == {"c"}
    assert after(versions.states[1], staged.changed) == versions.states[2]
    copies.commit(staged)
    assert copies.tensors(POLICY) == versions.states[2]
    assert read_artefacts(copies.folder(POLICY)) == ARTEFACTS
    assert open_copies().held() == {POLICY: versions.ref(2)}


def test_a_local_folder_with_the_same_digests_spares_the_download(open_copies, versions):
    copies = open_copies()
    staged = copies.match_local(POLICY, versions.folder, versions.signed(0))
    assert after(tensors(5), staged.changed) == versions.states[0]
    copies.commit(staged)
    (versions.folder / "model.safetensors").unlink()
    assert copies.tensors(POLICY) == versions.states[0]
    assert read_artefacts(copies.folder(POLICY)) == ARTEFACTS
    versions.bring(copies, 2, have=0)
    assert open_copies().tensors(POLICY) == versions.states[2]


def test_another_local_folder_is_left_alone(open_copies, versions, tmp_path):
    copies = open_copies()
    (versions.folder / "tokenizer.json").write_bytes(b"{}")
    assert copies.match_local(POLICY, versions.folder, versions.signed(0)) is None
    other = tmp_path / "other"
    write_model_folder(other, tensors(5), ARTEFACTS)
    assert copies.match_local(POLICY, other, versions.signed(0)) is None
    assert copies.match_local(POLICY, tmp_path / "absent", versions.signed(0)) is None
    assert copies.match_local("r/q", versions.folder, versions.signed(0)) is None
    assert len(copies.warnings) == 4
    assert copies.held() == {}


def test_a_copy_can_be_discarded(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 1)
    copies.discard(POLICY)
    copies.discard(POLICY)
    assert copies.held() == {}
    with pytest.raises(StoreError, match="no copy"):
        copies.folder(POLICY)
    assert open_copies().held() == {}
    versions.bring(copies, 1)
    assert state_digest(copies.tensors(POLICY)) == versions.ref(1).digest


def test_a_version_with_the_same_weights_still_advances_the_number(open_copies, versions):
    copies = open_copies()
    versions.bring(copies, 1)
    same = build_delta_version(
        versions.states[1], versions.states[1], version=2, parent=1, step=2, **PLACE
    )
    versions.publications[2] = same
    staged = versions.bring(copies, 2, have=1)
    assert staged.changed == {}
    assert copies.held()[POLICY].version == 2
    assert open_copies().held()[POLICY].version == 2
