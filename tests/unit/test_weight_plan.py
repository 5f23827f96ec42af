"""Routes through the tree, and what a plan must prove."""

import msgspec
import pytest
from signing import signing_key

from transport.errors import AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded
from transport.messages import PlanStep, WeightsPlan
from transport.weights.manifest import SignedManifest, VersionManifest, describe_file, sign
from transport.weights.manifest_folder import StoredManifest
from transport.weights.plan import (
    MAX_PLAN_STEPS,
    Route,
    cheapest_route,
    check_plan,
    check_successor,
    lineage,
)

KEY = signing_key()
TRUSTED = {KEY.key_id: KEY.public}


def route(deltas, snapshots, target, have=None, parents=None):
    parents = parents or {n: (n - 1 if n else None) for n in range(target + 1)}
    return cheapest_route(parents, deltas.get, snapshots.get, have=have, target=target)


def test_a_chain_from_what_is_held_is_taken_when_it_is_smaller():
    deltas = dict.fromkeys(range(1, 9), 10)
    assert route(deltas, {0: 100}, 8, have=5) == Route(5, False, (6, 7, 8), 30)
    assert route(deltas, {0: 100}, 8) == Route(0, True, tuple(range(1, 9)), 180)
    assert route(deltas, {0: 100, 6: 100}, 8) == Route(6, True, (7, 8), 120)


def test_a_snapshot_is_taken_when_the_chain_is_longer_than_the_model():
    deltas = dict.fromkeys(range(1, 9), 60)
    assert route(deltas, {0: 100, 7: 100}, 8, have=4) == Route(7, True, (8,), 160)
    assert route(deltas, {0: 100, 7: 100}, 8, have=5) == Route(7, True, (8,), 160)
    assert route(deltas, {0: 100, 6: 60}, 8, have=5) == Route(5, False, (6, 7, 8), 180)


def test_a_gap_in_the_chain_leaves_the_snapshot_behind_it_or_nothing():
    deltas = {1: 10, 3: 10, 4: 10}
    assert route(deltas, {0: 100, 2: 100}, 4, have=1) == Route(2, True, (3, 4), 120)
    assert route(deltas, {0: 100}, 4, have=1) is None
    assert route(deltas, {}, 4) is None


def test_an_abandoned_version_is_no_starting_point():
    parents = {0: None, 1: 0, 2: 1, 3: 1}
    deltas = {1: 10, 2: 10, 3: 10}
    assert route(deltas, {0: 100}, 3, have=2, parents=parents) == Route(0, True, (1, 3), 120)
    assert route(deltas, {0: 100}, 3, have=1, parents=parents) == Route(1, False, (3,), 10)
    assert lineage(parents, 3) == [0, 1, 3]
    assert lineage(parents, 9) == []


def manifest(version, parent, files=(), **changes):
    fields = {
        "run": "r",
        "policy": "r/p",
        "version": version,
        "parent": parent,
        "step": version,
        "digest": f"{version:064d}",
        "base_digest": None if parent is None else f"{parent:064d}",
        "files": tuple(files),
        "full_bytes": 8,
        "fingerprint": "f" * 64,
        "created_wall_s": 0.0,
    }
    return VersionManifest(**{**fields, **changes})


def delta(version, parent, **changes):
    entry = describe_file("delta.safetensors", "delta", b"d%d" % version)
    return manifest(version, parent, [entry], **changes)


CONFIG = describe_file("config.json", "artefact", b"{}")
SNAPSHOT = describe_file("model.safetensors", "snapshot", b"weights")
INDEX = describe_file("model.safetensors.index.json", "snapshot", b"{}")
ROOT = manifest(0, None, [CONFIG, SNAPSHOT])
SHARDED = manifest(0, None, [SNAPSHOT, INDEX])


def step(manifest, files=None, key=KEY):
    names = tuple(entry.name for entry in manifest.files) if files is None else tuple(files)
    if key is None:
        data = msgspec.msgpack.encode(manifest)
        return PlanStep(manifest=data, signature=b"", key_id="", files=names)
    return StoredManifest(manifest, sign(manifest, key)).step(
        [entry for entry in manifest.files if entry.name in names]
    )


def plan(*steps, version, policy="r/p"):
    return WeightsPlan(policy=policy, version=version, steps=steps)


def catalogue(version, files=(SNAPSHOT,), **changes):
    return manifest(version, version - 1, files, **changes)


def test_a_plan_for_somebody_with_nothing_is_checked_step_by_step():
    steps = check_plan(
        plan(
            step(ROOT, ["config.json"]),
            step(delta(4, 3), []),
            step(catalogue(4), key=None),
            step(delta(5, 4)),
            version=5,
        ),
        TRUSTED,
    )
    assert [(s.manifest.version, [e.name for e in s.files]) for s in steps] == [
        (0, ["config.json"]),
        (4, ["model.safetensors"]),
        (5, ["delta.safetensors"]),
    ]
    assert steps[1].signed.key_id == KEY.key_id
    assert steps[2].delta is not None
    assert steps[1].delta is None


@pytest.mark.parametrize(
    ("error", "bad"),
    [
        (SizeLimitExceeded, plan(version=1)),
        (SizeLimitExceeded, plan(*[step(delta(1, 0))] * (MAX_PLAN_STEPS + 1), version=1)),
        (RemoteProtocolError, plan(step(delta(1, 0)), version=2)),
        (RemoteProtocolError, plan(step(delta(1, 0)), version=1, policy="r/q")),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(delta(3, 2)), version=3)),
        (
            RemoteProtocolError,
            plan(step(delta(1, 0)), step(delta(2, 1, base_digest="a" * 64)), version=2),
        ),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(ROOT), version=0)),
        (RemoteProtocolError, plan(step(delta(1, 0)), step(ROOT, ["config.json"]), version=1)),
        (RemoteProtocolError, plan(step(ROOT, ["config.json"]), version=0)),
        (RemoteProtocolError, plan(step(ROOT, []), version=0)),
        (
            RemoteProtocolError,
            plan(
                PlanStep(
                    manifest=step(ROOT).manifest,
                    signature=step(ROOT).signature,
                    key_id=KEY.key_id,
                    files=("model.safetensors", "passwd"),
                ),
                version=0,
            ),
        ),
        (
            RemoteProtocolError,
            plan(
                PlanStep(
                    manifest=step(ROOT).manifest,
                    signature=step(ROOT).signature,
                    key_id=KEY.key_id,
                    files=("model.safetensors", "model.safetensors"),
                ),
                version=0,
            ),
        ),
        (AuthenticationFailed, plan(step(delta(1, 0), key=signing_key("22" * 32)), version=1)),
        (AuthenticationFailed, plan(step(delta(1, 0), key=None), version=1)),
        (AuthenticationFailed, plan(step(catalogue(4), key=None), version=4)),
        (
            AuthenticationFailed,
            plan(step(delta(3, 2), []), step(catalogue(4), key=None), version=4),
        ),
        (
            AuthenticationFailed,
            plan(
                step(delta(4, 3), []),
                step(catalogue(4, digest="e" * 64), key=None),
                version=4,
            ),
        ),
        (
            RemoteProtocolError,
            plan(
                step(delta(4, 3), []),
                step(catalogue(4, [CONFIG, SNAPSHOT]), key=None),
                version=4,
            ),
        ),
        (
            SizeLimitExceeded,
            plan(
                step(delta(4, 3), []),
                step(
                    catalogue(4, [msgspec.structs.replace(
                        SNAPSHOT, size_bytes=1 << 30, chunk_bytes=1 << 20,
                        chunk_digests=(bytes(16),) * 1024,
                    )]),
                    key=None,
                ),
                version=4,
            ),
        ),
        (RemoteProtocolError, plan(step(SHARDED, ["model.safetensors"]), version=0)),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_prove_its_way_is_refused(error, bad):
    with pytest.raises(error):
        check_plan(bad, TRUSTED)


def test_a_plan_over_the_byte_limit_is_refused():
    whole = plan(step(ROOT), version=0)
    assert len(check_plan(whole, TRUSTED, max_bytes=9)) == 1
    with pytest.raises(SizeLimitExceeded, match="moves 9 bytes"):
        check_plan(whole, TRUSTED, max_bytes=8)


def test_garbage_in_a_plan_is_refused():
    for data in (b"", b"\xc1", b"\x80"):
        bad = PlanStep(manifest=data, signature=b"", key_id="", files=())
        with pytest.raises(RemoteProtocolError):
            check_plan(plan(bad, version=1), TRUSTED)


def stored(*manifests):
    nothing = SignedManifest(manifest=b"", signature=b"", key_id="")
    return {m.version: StoredManifest(m, nothing) for m in manifests}


def test_the_next_version_has_a_new_number_and_a_known_parent():
    check_successor(ROOT, {})
    check_successor(delta(1, 0), stored(ROOT))
    check_successor(delta(7, 0), stored(ROOT, delta(1, 0)))


@pytest.mark.parametrize(
    "candidate",
    [
        ROOT,
        manifest(5, None, [SNAPSHOT]),
        delta(1, 0, digest="d" * 64),
        delta(5, 4),
        delta(5, 1, base_digest="a" * 64),
        delta(5, 1, fingerprint="a" * 64),
        delta(5, 1, run="other"),
        manifest(5, 1, [SNAPSHOT]),
        manifest(5, 1, []),
    ],
)
def test_other_successors_are_refused(candidate):
    with pytest.raises(RemoteProtocolError):
        check_successor(candidate, stored(ROOT, delta(1, 0)))


def test_a_first_version_needs_its_weights():
    with pytest.raises(RemoteProtocolError, match="snapshot"):
        check_successor(manifest(0, None, [CONFIG]), {})
