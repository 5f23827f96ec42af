"""Arenas: verified when made, changed in place, undone exactly, files untouched."""

import hashlib

import msgspec
import numpy as np
import pytest

from transport.errors import (
    ChecksumMismatch,
    IntegrityError,
    InvariantViolation,
    ModelError,
    StoreError,
    TruncatedBlob,
)
from transport.weights.blobs import BlobFolder
from transport.weights.digest import StateDigest, full_digest
from transport.weights.folder import write_model_folder
from transport.weights.manifest import INDEX_NAME, VersionManifest
from transport.weights.patch import CellList, CellRun, whole
from transport.weights.publication import build_version0
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes, read_safetensors, write_safetensors


def model(seed=0):
    rng = np.random.default_rng(seed)

    def data(size):
        return rng.integers(0, 0x60, size, "u1").tobytes()  # finite whatever the type

    return {
        "a": TensorBytes("BF16", (50, 20), data(2000)),
        "b": TensorBytes("F32", (300,), data(1200)),
        "c": TensorBytes("F32", (), data(4)),
        "e": TensorBytes("U8", (0, 3), b""),
        "u": TensorBytes("U8", (7,), data(7)),
    }


def manifest(tensors, version=3, full=True):
    digest = StateDigest.of(tensors).hex
    return VersionManifest(
        run="r",
        policy="r/p",
        version=version,
        parent=None,
        step=3,
        digest=digest,
        base_digest=None,
        files=(),
        full_bytes=0,
        fingerprint="f" * 64,
        created_wall_s=0.0,
        full_digest=full_digest(tensors) if full else None,
    )


def arena_of(tensors, **kwargs):
    return WeightArena.of(tensors, manifest(tensors, **kwargs))


def positions(*values):
    return np.array(values, np.int32)


def patch(seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, 4, dtype=np.uint32)
    return {
        "a": (
            CellRun(10, values.astype("<u2")),
            CellList(positions(3, 12, 999), values[:3].astype("<u2")),
        ),
        "c": (CellRun(0, values[:1]),),
        "e": (CellRun(0, np.zeros(0, "u1")),),
    }  # fmt: skip


def test_an_arena_shows_the_state_it_was_made_of():
    tensors = model()
    arena = arena_of(tensors)
    assert arena.tensors == tensors
    assert list(arena.tensors) == sorted(tensors)
    assert arena.ref.version == arena.version == 3
    assert arena.ref.digest == arena.digests.hex == StateDigest.of(tensors).hex
    with pytest.raises(ValueError, match="read-only"):
        arena.tensors["a"].cells()[0] = 1


def test_another_state_is_refused():
    with pytest.raises(ChecksumMismatch, match="have digest"):
        WeightArena.of(model(1), manifest(model(0)))


def test_the_full_digest_is_compared_too():
    wrong = msgspec.structs.replace(manifest(model()), full_digest="0" * 64)
    with pytest.raises(ChecksumMismatch, match="full digest"):
        WeightArena.of(model(), wrong)
    assert WeightArena.of(model(), manifest(model(), full=False)).version == 3


def test_patches_are_written_in_place_and_taken_back_in_reverse_order():
    arena = arena_of(model())
    view = arena.tensors["a"]
    history = [arena.digests]
    undos = []
    for version in (4, 5, 9):
        digests = arena.digests
        undos.append(arena.apply(patch(version), version, digests))
        after = arena.rescan()
        arena.undo(undos.pop())
        undos.append(arena.apply(patch(version), version, after))
        history.append(after)
        assert arena.version == version
        assert arena.digests == arena.rescan()
    assert len({digests.hex for digests in history}) == 4
    assert view.cells()[10:14].tolist() == arena.tensors["a"].cells()[10:14].tolist()
    for undo, digests, version in zip(undos[::-1], history[-2::-1], (5, 4, 3), strict=True):
        arena.undo(undo)
        assert arena.rescan() == arena.digests == digests
        assert arena.version == version
    assert arena.tensors == model()


def test_only_the_latest_change_can_be_taken_back():
    arena = arena_of(model())
    first = arena.apply(patch(4), 4, arena.digests)
    second = arena.apply(patch(5), 5, arena.digests)
    now = arena.rescan()
    with pytest.raises(InvariantViolation):
        arena.undo(first)
    assert arena.rescan() == now
    arena.undo(second)
    with pytest.raises(InvariantViolation):
        arena.undo(second)
    arena.undo(first)
    assert arena.tensors == model()


@pytest.mark.parametrize(
    "bad",
    [
        {"a": (CellRun(999, np.zeros(2, "<u2")),)},
        {"a": (CellRun(0, np.zeros(2, "<u4")),)},
        {"zz": (CellRun(0, np.zeros(2, "<u4")),)},
    ],
)
def test_a_patch_that_does_not_fit_changes_nothing(bad):
    arena = arena_of(model())
    good = patch(4)
    mixed = {**good, **bad, "a": good["a"] + bad.get("a", ())}
    with pytest.raises(IntegrityError):
        arena.apply(mixed, 4, arena.digests)
    assert arena.tensors == model()
    assert arena.ref.version == 3


def test_writable_memory_is_taken_over_and_other_memory_copied():
    own = bytearray(model()["a"].data)
    tensors = {**model(), "a": TensorBytes("BF16", (50, 20), memoryview(own))}
    frozen = bytes(tensors["b"].data)
    arena = arena_of(tensors)
    zeros = whole({"b": TensorBytes("F32", (300,), bytes(1200))})
    arena.apply({**patch(4), **zeros}, 4, arena.digests)
    assert bytes(own) == bytes(arena.tensors["a"].data) != bytes(model()["a"].data)
    assert tensors["b"].data == frozen == model()["b"].data


def test_tensors_that_share_memory_are_changed_apart():
    memory = memoryview(bytearray(np.random.default_rng(0).bytes(400)))
    tensors = {
        "embed": TensorBytes("BF16", (200,), memory),
        "head": TensorBytes("BF16", (200,), memory),
        "part": TensorBytes("BF16", (10,), memory[100:120]),
    }
    arena = arena_of(tensors)
    arena.apply({"embed": (CellRun(0, np.zeros(200, "<u2")),)}, 4, arena.digests)
    before = np.random.default_rng(0).bytes(400)
    assert not arena.tensors["embed"].cells().any()
    assert bytes(arena.tensors["head"].data) == before
    assert bytes(arena.tensors["part"].data) == before[100:120]


def test_unaligned_memory_works():
    memory = memoryview(bytearray(401))
    tensors = {"a": TensorBytes("F32", (100,), memory[1:])}
    arena = arena_of(tensors)
    arena.apply({"a": (CellRun(3, np.array([7], "<u4")),)}, 4, arena.digests)
    assert arena.tensors["a"].cells()[3] == 7
    assert arena.tensors["a"].cells().flags.aligned


def files_under(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "model"
    write_model_folder(folder, model(), {"config.json": b"{}"})
    made = build_version0(folder, run="r", policy="r/p", created_wall_s=0.0, shard_bytes=1500)
    return made, folder


def test_a_snapshot_is_mapped_and_its_files_stay_as_they_are(tmp_path, made):
    publication, _ = made
    blobs = BlobFolder(tmp_path / "blobs")
    for entry in publication.manifest.files:
        blobs.put(entry.digest, (publication.files[entry.name],))
    assert sum(e.name != INDEX_NAME for e in publication.manifest.of_kind("snapshot")) > 1
    before = files_under(blobs.folder)
    arena = WeightArena.from_snapshot(blobs, publication.manifest)
    other = WeightArena.from_snapshot(blobs, publication.manifest)
    undo = arena.apply(patch(4), 4, arena.digests)
    assert arena.tensors != model()
    assert other.tensors == model()
    assert files_under(blobs.folder) == before
    arena.undo(undo)
    assert arena.tensors == model()


def test_damaged_and_missing_snapshots_are_refused(tmp_path, made):
    publication, _ = made
    blobs = BlobFolder(tmp_path / "blobs")
    with pytest.raises(StoreError):
        WeightArena.from_snapshot(blobs, publication.manifest)
    for entry in publication.manifest.files:
        blobs.put(entry.digest, (publication.files[entry.name],))
    entry = next(e for e in publication.manifest.of_kind("snapshot") if e.name != INDEX_NAME)
    path = blobs.path(entry.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch):
        WeightArena.from_snapshot(blobs, publication.manifest)
    path.unlink()
    path.touch()
    with pytest.raises(TruncatedBlob):
        WeightArena.from_snapshot(blobs, publication.manifest)


def test_a_model_folder_is_mapped_and_stays_as_it_is(made):
    publication, folder = made
    before = files_under(folder)
    arena = WeightArena.from_folder(folder, publication.manifest, threads=2)
    arena.apply(patch(4), 4, arena.digests)
    assert files_under(folder) == before
    assert read_safetensors(folder / "model.safetensors") == model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        WeightArena.from_folder(folder, publication.manifest)
    (folder / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        WeightArena.from_folder(folder, publication.manifest)
    (folder / "model.safetensors").write_bytes(write_safetensors(model(1)))
    with pytest.raises(ChecksumMismatch):
        WeightArena.from_folder(folder, publication.manifest)
