"""Model folders and the versions made of them."""

import json

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from transport.errors import IntegrityError, ModelError, StoreError
from transport.weights.delta_encode import encode_delta
from transport.weights.digest import StateDigest, full_digest, state_digest
from transport.weights.folder import (
    check_artefacts,
    link_model_folder,
    read_artefacts,
    read_model_folder,
    shard_names,
    snapshot_files,
    write_model_folder,
)
from transport.weights.manifest import INDEX_NAME, check_manifest, describe_file
from transport.weights.publication import build_delta_version, build_version0, publish_delta
from transport.weights.tensors import TensorBytes, read_safetensors


def tensors(seed=0, names="abcde", cells=50):
    rng = np.random.default_rng(seed)
    return {
        name: TensorBytes("F32", (cells,), rng.normal(size=cells).astype("<f4").tobytes())
        for name in names
    }


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    arrays = {name: np.frombuffer(t.data, "<f4") for name, t in tensors().items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    (folder / "modeling_toy.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("hello")
    return folder


def version0(folder, **options):
    return build_version0(folder, run="r", policy="r/p", created_wall_s=5.0, **options)


def test_version_0_carries_weights_and_what_describes_them_and_nothing_else(model):
    publication = version0(model)
    manifest = publication.manifest
    check_manifest(manifest)
    assert (manifest.version, manifest.parent, manifest.step) == (0, None, 0)
    assert [entry.name for entry in manifest.of_kind("artefact")] == [
        "config.json", "merges.txt", "tokenizer.json",
    ]  # fmt: skip
    assert [entry.name for entry in manifest.of_kind("snapshot")] == ["model.safetensors"]
    assert publication.files.keys() == {entry.name for entry in manifest.files}
    assert read_safetensors(publication.files["model.safetensors"]) == tensors()
    assert manifest.digest == state_digest(tensors())
    assert manifest.full_digest == full_digest(tensors())
    assert manifest.full_bytes == 5 * 200
    for entry in manifest.files:
        assert entry == describe_file(entry.name, entry.kind, publication.files[entry.name])


def test_the_weights_may_be_given_in_the_type_that_is_published(model):
    half = {name: TensorBytes("BF16", (50,), bytes(100)) for name in "abcde"}
    manifest = version0(model, tensors=half, version=7, step=3).manifest
    assert manifest.digest == state_digest(half)
    assert (manifest.version, manifest.step, manifest.full_bytes) == (7, 3, 500)


def test_large_models_are_sharded_and_the_digest_does_not_see_it(model, tmp_path):
    publication = version0(model, shard_bytes=400)
    names = [entry.name for entry in publication.manifest.of_kind("snapshot")]
    assert names == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX_NAME,
    ]
    check_manifest(publication.manifest)
    assert publication.manifest.digest == version0(model).manifest.digest
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name, data in publication.files.items():
        (folder / name).write_bytes(data)
    assert read_model_folder(folder) == tensors()
    assert read_model_folder(folder, mapped=True) == tensors()
    assert version0(folder).manifest.digest == publication.manifest.digest


def test_weights_that_are_not_finite_are_not_published(model):
    bad = tensors()
    bad["c"] = TensorBytes("F32", (50,), np.full(50, np.nan, "<f4").tobytes())
    with pytest.raises(IntegrityError, match="'c'"):
        version0(model, tensors=bad)
    with pytest.raises(IntegrityError, match="'c'"):
        build_delta_version(
            tensors(), bad, run="r", policy="r/p", version=1, parent=0, step=1, created_wall_s=0.0
        )


def test_versions_follow_from_one_another(model):
    first = version0(model)
    new = {**tensors(), **tensors(1, "ad")}
    second = build_delta_version(
        tensors(),
        new,
        run="r",
        policy="r/p",
        version=4,
        parent=0,
        step=9,
        created_wall_s=6.0,
        base=first.digests,
        chunk_bytes=100,
    )
    manifest = second.manifest
    check_manifest(manifest)
    assert (manifest.version, manifest.parent, manifest.step) == (4, 0, 9)
    assert manifest.base_digest == first.manifest.digest
    assert manifest.digest == state_digest(new)
    assert manifest.fingerprint == first.manifest.fingerprint
    assert manifest.full_bytes == first.manifest.full_bytes
    assert manifest.full_digest is None
    assert second.digests == StateDigest.of(new)
    assert len(manifest.delta.chunk_digests) == -(-manifest.delta.size_bytes // 100)


def test_the_full_digest_is_computed_where_it_is_wanted():
    new = {**tensors(), **tensors(1, "ad")}
    options = {"run": "r", "policy": "r/p", "version": 1, "parent": 0, "step": 1}
    plain, full = (
        build_delta_version(
            tensors(), new, created_wall_s=0.0, with_full_digest=wanted, threads=2, **options
        )
        for wanted in (False, True)
    )
    assert full.manifest == msgspec.structs.replace(plain.manifest, full_digest=full_digest(new))
    assert full.files == plain.files


def test_only_changed_weights_are_looked_at_and_the_first_bad_one_is_named():
    bad = {"w": TensorBytes("F32", (2,), np.array([np.inf, 1], "<f4").tobytes()), **tensors()}
    new = {**bad, "w": TensorBytes("F32", (2,), np.array([np.inf, 2], "<f4").tobytes())}
    delta = encode_delta(bad, new, run="r", policy="r/p", version=1, parent=0)
    assert publish_delta(delta, step=1, created_wall_s=0.0).manifest.digest == state_digest(new)
    nan = TensorBytes("F32", (50,), np.full(50, np.nan, "<f4").tobytes())
    delta = encode_delta(
        new, {**new, "d": nan, "b": nan}, run="r", policy="r/p", version=2, parent=1,
        segment_cells=50,
    )  # fmt: skip
    with pytest.raises(IntegrityError, match="'b'"):
        publish_delta(delta, step=1, created_wall_s=0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", INDEX_NAME),
        ('{"weight_map": {"a": "../../etc/passwd.safetensors"}}', "not the name"),
        ('{"weight_map": {"a": "weights.bin"}}', "not the name"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent"),
    ],
)
def test_an_index_that_leads_astray_is_refused(model, text, reason):
    (model / INDEX_NAME).write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_model_folder(model)


def test_damaged_and_missing_weights_are_named(model, tmp_path):
    with pytest.raises(ModelError, match="neither"):
        shard_names(tmp_path)
    with pytest.raises(ModelError, match="absent"):
        read_artefacts(tmp_path / "absent")
    (model / "model.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_model_folder(model)


def test_a_tensor_in_two_shards_is_refused(model):
    (model / "copy.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}
    (model / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="another shard"):
        read_model_folder(model)


def test_artefacts_over_the_limit_are_refused(model):
    with open(model / "vocab.json", "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ModelError, match=r"vocab\.json"):
        read_artefacts(model)


def test_artefacts_must_be_the_published_ones(model):
    entries = version0(model).manifest.of_kind("artefact")
    assert list(check_artefacts(model, entries)) == ["config.json", "merges.txt", "tokenizer.json"]
    (model / "tokenizer.json").write_text("[]")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        check_artefacts(model, entries)


def test_folders_are_written_whole_and_never_replaced(tmp_path):
    folder = tmp_path / "out"
    neighbour = tmp_path / "out.incomplete"
    neighbour.mkdir()
    (neighbour / "mine").write_bytes(b"precious")
    write_model_folder(folder, tensors(), {"config.json": b"{}"})
    assert read_model_folder(folder) == tensors()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (neighbour / "mine").read_bytes() == b"precious"
    with pytest.raises(StoreError, match="exists"):
        write_model_folder(folder, tensors(), {})
    linked = tmp_path / "linked"
    link_model_folder(linked, {path.name: path for path in folder.iterdir()})
    assert read_model_folder(linked) == tensors()
    assert (linked / "model.safetensors").samefile(folder / "model.safetensors")
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert folder.stat().st_mode == ordinary.stat().st_mode


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(StoreError, match="writing"):
        link_model_folder(tmp_path / "out", {"config.json": tmp_path / "missing"})
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="exists"):
        write_model_folder(dangling, tensors(), {})
    assert list(tmp_path.iterdir()) == [dangling]


def test_a_snapshot_says_the_format_that_transformers_asks_for():
    ((name, parts),) = snapshot_files(tensors()).items()
    assert name == "model.safetensors"
    assert b'"__metadata__":{"format":"pt"}' in parts[0]
