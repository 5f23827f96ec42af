"""``farflow weights`` on a real store's folder, beside the store that has it open."""

import json

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from version_store import PLACE, add, opened
from weight_folder import KEY, POLICY, WeightFolder

from farflow import weights_commands
from farflow.weights_commands import weights_group
from farflow.weights_view import held_by, print_rows, recent_rows, status_rows, store_rows
from scheduler.weight_composites import write_snapshot
from scheduler.weight_reading import StoreReader
from scheduler.weight_upkeep import Asked
from transport.errors import ConfigError, StoreError
from transport.key_files import to_toml
from transport.keys import create_keys
from transport.status import AgentStatus, PolicyStatus, RunStatus, SchedulerStatus
from transport.weights.digest import state_digest
from transport.weights.folder import read_model_folder
from transport.weights.manifest import SignedManifest
from transport.weights.manifest_folder import ManifestFolder
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.tensors import TensorBytes


@pytest.fixture
def made(tmp_path):
    """Versions 0 to 3 and a branch: 4 on 2, as after a rollback."""
    folder = WeightFolder(tmp_path / "scheduler" / "weight-store")
    folder.publish(4, 2)
    signers = tmp_path / "keys" / "signers"
    signers.mkdir(parents=True)
    (signers / "signer.toml").write_text(to_toml(KEY.public))
    return folder


@pytest.fixture
def weights(tmp_path):
    """Runs a command: (exit status, what it said)."""

    def run(*arguments):
        settings = [f"scheduler.folder={tmp_path}/scheduler", f"transport.keys={tmp_path}/keys"]
        options = [part for setting in settings for part in ("--set", setting)]
        result = CliRunner().invoke(weights_group, [arguments[0], *options, *arguments[1:]])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return run


def as_json(outcome):
    status, text = outcome
    assert status == 0
    return json.loads(text)


def tree(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
    }


def test_versions_are_listed_with_their_parents_and_sizes(made, weights):
    rows = as_json(weights("ls", "--json"))
    assert [(row["version"], row["parent"], row["step"]) for row in rows] == [
        (0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 2, 4),
    ]  # fmt: skip
    for row in rows:
        assert (row["policy"], row["kept"], row["held_by"]) == (POLICY, True, [])
        assert row["snapshot"] == (row["version"] == 0)
        delta = made.publications[row["version"]].manifest.of_kind("delta")
        assert row["delta_bytes"] == (delta[0].size_bytes if delta else None)
    assert rows[1]["ratio"] == rows[1]["full_bytes"] / rows[1]["delta_bytes"]
    status, text = weights("ls")
    assert status == 0
    assert POLICY in text
    assert "snapshot" in text


def test_only_recent_versions_are_listed_and_those_that_somebody_has(made, weights):
    rows = [
        {"policy": policy, "version": n, "snapshot": n == 0, "held_by": ["a"] if n == 3 else []}
        for policy in ("r/a", "r/b")
        for n in range(50)
    ]
    shown = [(row["policy"], row["version"]) for row in recent_rows(rows)]
    assert shown == [(p, n) for p in ("r/a", "r/b") for n in (0, 3, *range(30, 50))]
    assert len(as_json(weights("ls", POLICY, "--json"))) == 5
    assert POLICY in weights("ls", POLICY, "--all")[1]
    with pytest.raises(StoreError, match="nobody/here"):
        weights("ls", "nobody/here")


def test_a_version_is_shown_with_its_files_and_coders(made, weights):
    manifest = made.publications[2].manifest
    shown = as_json(weights("show", POLICY, "2", "--json"))
    assert (shown["digest"], shown["parent"], shown["key_id"]) == (manifest.digest, 1, KEY.key_id)
    assert shown["changed_cells"] == made.publications[2].delta.changed_cells
    assert shown["cells"] == sum(t.cells().size for t in made.states[2].values())
    assert shown["coders"] == dict(made.publications[2].delta.coded_bytes)
    assert [(f["digest"], f["kept"]) for f in shown["files"]] == [(manifest.files[0].digest, True)]
    first = as_json(weights("show", POLICY, "0", "--json"))
    assert {f["kind"] for f in first["files"]} == {"snapshot", "artefact"}
    _, text = weights("show", POLICY, "2")
    assert f"digest\t{manifest.digest}" in text


def test_two_versions_are_compared_and_the_ways_between_them_told(made, weights):
    found = as_json(weights("diff", POLICY, "1", "3", "--json"))
    changed = {row["tensor"]: row["changed"] for row in found["tensors"]}
    old, new = made.states[1], made.states[3]
    expected = {n: np.count_nonzero(old[n].cells() != new[n].cells()) for n in old}
    assert changed == expected
    assert sum(changed.values()) > 0
    ways = {way["way"]: way for way in found["ways"]}
    sizes = [made.publications[n].manifest.files[0].size_bytes for n in (2, 3)]
    assert ways["deltas"]["bytes"] == sum(sizes)
    assert ways["deltas"]["over"] == "1→2 2→3"
    assert ways["cheapest"]["bytes"] <= ways["deltas"]["bytes"]
    assert ways["from nothing"]["over"].startswith("snapshot 0")
    _, text = weights("diff", POLICY, "3", "4")
    assert "of 4000 (" in text
    assert "deltas" not in text  # 4 is on another branch


def test_a_sound_store_is_found_sound_and_left_as_it_is(made, weights):
    (made.blob("*").parent / ("f" * 64 + ".part")).write_bytes(b"still coming in")
    (made.blob("*").parent / "model.tmp").write_bytes(b"being written")
    before = tree(made.folder)
    [verdict] = as_json(weights("verify", "--json"))
    assert (verdict["versions"], verdict["replayed"], verdict["not_kept"]) == (5, 5, 0)
    assert verdict["damage"] == []
    for command in (["ls"], ["show", POLICY, "1"], ["diff", POLICY, "0", "1"], ["verify", POLICY]):
        assert weights(*command)[0] == 0
    assert tree(made.folder) == before


def test_what_the_store_made_itself_is_listed_offered_and_verified(tmp_path, weights, made):
    """On a longer lineage, where composites and snapshots pay."""
    folder = WeightFolder(tmp_path / "long" / "weight-store", 12, cumulative_every=4)
    kept = [(base, to) for base, to, pays in folder.make_all(Asked(4, 12)) if pays]
    composites = [(base, to) for base, to in kept if base is not None]
    assert composites
    store = ["--store", str(tmp_path / "long")]
    rows = {row["version"]: row for row in as_json(weights("ls", "--json", *store))}
    for base, to in composites:
        assert base in rows[to]["composites_from"]
        ways = as_json(weights("diff", POLICY, str(base), str(to), "--json", *store))["ways"]
        by_name = {way["way"]: way["bytes"] for way in ways}
        assert by_name["cheapest"] <= by_name["composite"] < by_name["deltas"]
    [verdict] = as_json(weights("verify", "--json", *store))
    assert (verdict["replayed"], verdict["damage"]) == (13, [])
    assert verdict["composites"] == len(composites)
    base, to = composites[0]
    catalogue = StoreReader(folder.folder).shelf(POLICY).composites[base, to]
    [entry] = catalogue.manifest.files
    made = as_json(weights("show", POLICY, str(to), "--json", *store))["made"]
    assert (base, entry.name, entry.digest, True) in [
        (file["base"], file["name"], file["digest"], file["kept"]) for file in made
    ]
    _, text = weights("show", POLICY, str(to), *store)
    assert f"made\t{entry.name}, from {base}\t" in text
    path = folder.blob(entry.digest)
    damage(path)
    status, text = weights("verify", *store)
    assert (status, text.count("damaged\t")) == (1, 1)
    assert entry.name in text
    path.unlink()
    status, text = weights("verify", *store)
    assert (status, text.count("damaged\t")) == (1, 1)
    assert f"{path} ({entry.name}) is missing" in text
    assert [line[:3] for line in text.splitlines() if line.startswith("do\t")] == ["do\t"] * 2
    assert "makes them again" in text
    next(folder.folder.glob(f"*/composites/{to:08d}-{base:08d}")).unlink()  # as retention does
    status, text = weights("verify", *store)
    assert (status, text.splitlines()[-1]) == (0, "sound")


def test_a_snapshot_of_the_stores_that_is_missing_is_damage(tmp_path, weights, made):
    shelf = StoreReader(made.folder).shelf(POLICY)
    snapshot = write_snapshot(shelf.blobs, made.states[3], shelf.versions[3].manifest)
    [entry] = snapshot.files
    unsigned = SignedManifest(manifest=msgspec.msgpack.encode(snapshot), signature=b"", key_id="")
    ManifestFolder(shelf.folder / "snapshots").write(3, unsigned)
    assert weights("verify")[0] == 0
    made.blob(entry.digest).unlink()
    status, text = weights("verify")
    assert (status, text.count("damaged\t")) == (1, 1)
    assert f"{entry.digest} ({entry.name}) is missing" in text


def test_a_missing_tokenizer_is_damage(weights, made):
    [entry] = [
        e for e in made.publications[0].manifest.of_kind("artefact") if e.name == "tokenizer.json"
    ]
    made.blob(entry.digest).unlink()
    status, text = weights("verify")
    assert status == 1
    assert "(tokenizer.json) is missing" in text


def status_of_two_agents():
    def agent(name, version, state="ready"):
        fields = dict.fromkeys(AgentStatus.__struct_fields__, 0)
        more = {"name": name, "state": state, "versions": {POLICY: version}}
        return AgentStatus(**{**fields, **more})

    policy = PolicyStatus(
        **{
            **dict.fromkeys(PolicyStatus.__struct_fields__),
            "policy": POLICY,
            "head_version": 3,
            "last_step": None,
        }
    )
    run = RunStatus(name="r", state="running", reason="", policies=(policy,), accounting=())
    agents = (agent("a", 2), agent("b", 3), agent("c", 3, "gone"), agent("d", 1, "lost"))
    return SchedulerStatus(
        term=1, build="", uptime_s=1.0, runs=(run,), agents=agents, counters={}
    )  # fmt: skip


def test_who_holds_what_is_what_the_scheduler_says(made):
    status = status_of_two_agents()
    holders = held_by(status)
    rows = store_rows(StoreReader(made.folder).shelf(POLICY), holders, 60.0)
    assert [row["held_by"] for row in rows] == [[], [], ["a"], ["b"], []]
    assert [row["age_s"] for row in rows] == [60.0] * 5
    far = status_rows(status, holders)  # the store is on another host
    assert [(row["version"], row["held_by"]) for row in far] == [(2, ["a"]), (3, ["b"])]
    print_rows([*rows, *far])
    assert held_by(None) == {}


def test_a_scheduler_that_does_not_answer_leaves_the_list_without_holders(
    made, tmp_path, monkeypatch
):
    create_keys(tmp_path / "deployment")
    monkeypatch.setattr(weights_commands, "_ANSWER_S", 0.2)
    result = CliRunner().invoke(
        weights_group,
        ["ls", "--json", "--store", str(made.folder),
         "--set", f"transport.keys={tmp_path}/deployment", "--set", "transport.control_port=1"],
    )  # fmt: skip
    assert "who holds what is not known" in result.stderr
    assert [row["version"] for row in json.loads(result.stdout)] == [0, 1, 2, 3, 4]


def damage(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_damaged_delta_is_named_with_what_hangs_on_it(made, weights):
    damage(made.blob(made.publications[2].manifest.files[0].digest))
    status, text = weights("verify")
    assert status == 1
    lines = [line for line in text.splitlines() if line.startswith("damaged\t")]
    assert any("delta.safetensors" in line and "SHA-256" in line for line in lines)
    for number in (2, 3, 4):
        assert any(f"version {number} cannot be rebuilt" in line for line in lines)
    assert not any("version 1 " in line for line in lines)
    assert "do\tfor files of the trainer: keep the store running" in text
    assert "from a backup of" in text
    with pytest.raises(StoreError, match="version 3"):
        weights("export", POLICY, "3", str(made.folder.parent / "out"))


def test_forged_manifests_and_missing_files_are_damage(made, weights):
    path = made.folder / next(made.folder.iterdir()).name / "manifests" / "00000001"
    manifest = path.read_bytes()
    for forged, reason in (
        (manifest.replace(b"run\xa1r", b"run\xa1s"), "version 1: manifest: the signature is wrong"),
        (manifest[:-1], "00000001: "),
    ):
        path.write_bytes(forged)
        status, text = weights("verify")
        assert status == 1
        assert reason in text
    path.write_bytes(manifest)
    made.blob(made.publications[4].manifest.files[0].digest).unlink()
    status, text = weights("verify")
    assert (status, text.count("damaged\t")) == (1, 1)
    assert "version 4: delta.safetensors is missing" in text


def test_versions_whose_files_retention_removed_are_no_damage(made, weights):
    """An old branch went: 3 has no file, nobody follows it, the head is on 2."""
    made.blob(made.publications[3].manifest.files[0].digest).unlink()
    [verdict] = as_json(weights("verify", "--json"))
    assert (verdict["replayed"], verdict["not_kept"], verdict["damage"]) == (4, 1, [])
    rows = as_json(weights("ls", "--json"))
    assert [row["version"] for row in rows if not row["kept"]] == [3]
    with pytest.raises(StoreError, match=r"no longer kept; those of 0-2, 4 are"):
        weights("export", POLICY, "3", str(made.folder.parent / "out"))


def test_an_exported_folder_has_the_very_weights(made, weights, tmp_path):
    for number in (0, 3, 4):
        folder = tmp_path / str(number)
        said = as_json(weights("export", POLICY, str(number), str(folder), "--json"))
        state = read_model_folder(folder)
        assert said["digest"] == state_digest(state) == state_digest(made.states[number])
        assert (folder / "tokenizer.json").read_bytes() == b"[]"
    with pytest.raises(StoreError, match="exists"):
        weights("export", POLICY, "3", str(tmp_path / "3"))


def test_what_is_not_there_is_an_error_with_a_remedy(made, weights, tmp_path):
    with pytest.raises(StoreError, match="known: \\['r/p'\\]"):
        weights("show", "r/other", "1")
    with pytest.raises(StoreError, match="no version 9; known: 0 to 4"):
        weights("show", POLICY, "9")
    with pytest.raises(StoreError, match="--store FOLDER"):
        weights("ls", "--store", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"--set transport\.keys=FOLDER"):
        weights("verify", "--set", f"transport.keys={tmp_path}/other")
    assert as_json(weights("ls", "--json", "--store", str(made.folder)))


@pytest.mark.slow
def test_an_exported_folder_loads_with_transformers(tmp_path, weights):
    from torch_models import random_qwen3
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = random_qwen3(tmp_path / "model")
    store = opened(tmp_path / "scheduler" / "weight-store" / "versions")
    first = build_version0(model, **PLACE)
    add(store, first)
    old = read_model_folder(model)
    name = "model.norm.weight"
    cells = old[name].cells().copy()
    cells[0] ^= np.uint16(1)
    new = {**old, name: TensorBytes(old[name].dtype, old[name].shape, cells.tobytes())}
    add(store, build_delta_version(old, new, version=1, parent=0, step=1, **PLACE))
    folder = tmp_path / "out"
    assert weights("export", POLICY, "1", str(folder))[0] == 0
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert loaded.model.norm.weight.view(-1)[0] != 1.0
    assert state_digest(read_model_folder(folder)) == state_digest(new)
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True)("1+1=")


@pytest.mark.parametrize("gone", [True, False])
def test_files_without_any_manifest_are_damage(made, weights, gone):
    (folder,) = made.folder.glob("*/manifests")
    for path in folder.iterdir():
        path.unlink() if gone else path.write_bytes(b"\xc1")
    status, text = weights("verify")
    assert status == 1
    assert "no manifest that can be read names them" in text
    assert text.count("damaged\t") == (1 if gone else 6)
    assert "sound" not in text
