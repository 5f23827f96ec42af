"""Deltas from shards: which cells a rank has, and that the sharding leaves no trace."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_trainer.shard_gathering import assemble, check_coverage, pack_delta, unpack_delta
from cloud_trainer.sharding import (
    Box,
    Part,
    ShardDelta,
    Shards,
    box_runs,
    cut_box,
    encode_shards,
    kinds_bytes,
    shard_sums,
)
from transport.errors import IntegrityError, ModelError
from transport.weights.cell_sums import add_sums
from transport.weights.delta_encode import encode_delta
from transport.weights.delta_file import decode_delta
from transport.weights.digest import StateDigest, fingerprint, state_digest, zero_sums
from transport.weights.manifest import DELTA_NAME, VersionManifest, describe_file
from transport.weights.publication import publish_delta
from transport.weights.segments import CodecSettings
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes, read_safetensors

SHAPES = {"a": (7, 5), "b": (1,), "c": (), "d": (0, 3), "e": (2, 3, 4), "f": (3, 2)}
KINDS = {name: ("F16" if name == "f" else "BF16", shape) for name, shape in SHAPES.items()}
SETTINGS = CodecSettings()
PLACE = {"run": "run", "policy": "run/solver", "version": 1, "parent": 0}


def state(seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (dtype, shape) in KINDS.items():
        cells = rng.integers(0x3B00, 0x3D00, int(np.prod(shape)), "<u2")
        tensors[name] = TensorBytes(dtype, shape, cells.tobytes())
    return tensors


def stepped(tensors, seed=1):
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in tensors.items():
        cells = tensor.cells().copy()
        cells[rng.random(cells.size) < 0.3] ^= np.uint16(1)
        new[name] = TensorBytes(tensor.dtype, tensor.shape, cells.tobytes())
    return new


def sharded(tensors, ranks, dimension=0):
    """What each rank has when tensors with that dimension are cut along it; others are dealt."""
    parts = [[] for _ in range(ranks)]
    for number, name in enumerate(sorted(tensors)):
        tensor, cells = tensors[name], tensors[name].cells()
        for rank in range(ranks):
            if dimension < len(tensor.shape):
                box = cut_box(tensor.shape, [(dimension, ranks, rank)])
                starts, run = box_runs(tensor.shape, box)
                parts[rank] += [Part(name, at, cells[at : at + run]) for at in starts]
            elif number % ranks == rank:
                parts[rank].append(Part(name, 0, cells))
    return [Shards(KINDS, tuple(some)) for some in parts]


def decoded(old, delta):
    """The old state after the delta file was decoded and applied."""
    entry = describe_file(DELTA_NAME, "delta", delta.data)
    header = delta.header
    arena = WeightArena.of(old, manifest(0, None, state_digest(old), None, ()))
    expected = manifest(1, 0, header.digest, header.base_digest, (entry,))
    found = decode_delta(arena, delta.data, expected, entry)
    arena.apply(found.patch, 1, found.digests)
    return arena.tensors


def manifest(version, parent, digest, base_digest, files):
    return VersionManifest(
        run="run", policy="run/solver", version=version, parent=parent, step=version,
        digest=digest, base_digest=base_digest, files=files,
        full_bytes=sum(t.size_bytes for t in state().values()), fingerprint=fingerprint(state()),
        created_wall_s=0.0,
    )  # fmt: skip


def test_a_cut_is_that_of_chunk_and_its_runs_are_its_cells():
    for shape in ((7, 5), (3,), (2, 3, 4), (4, 1, 6)):
        everything = np.arange(np.prod(shape)).reshape(shape)
        for dimension, pieces in itertools.product(range(len(shape)), (1, 2, 3, 5)):
            # torch.chunk makes pieces of equal size and fewer than asked for when they run out.
            size = -(-shape[dimension] // pieces)
            cuts = [slice(at, at + size) for at in range(0, shape[dimension], size)]
            for index in range(pieces):
                box = cut_box(shape, [(dimension, pieces, index)])
                starts, run = box_runs(shape, box)
                cells = np.concatenate([np.arange(at, at + run) for at in (starts or [0])])
                if index < len(cuts):
                    expected = everything[(slice(None),) * dimension + (cuts[index],)]
                    assert cells.tolist() == expected.ravel().tolist()
                else:
                    assert (starts, run) == ([], 0)
    assert cut_box((8, 6), [(0, 2, 1), (1, 3, 2)]) == Box((4, 4), (4, 2))
    assert cut_box((8, 6), [(0, 2, 1), (0, 2, 1)]) == Box((6, 0), (2, 6))
    assert box_runs((), Box((), ())) == ([0], 1)
    assert box_runs((8, 6), Box((4, 0), (4, 6))) == ([24], 24)


@pytest.mark.parametrize(("ranks", "dimension"), [(1, 0), (2, 0), (3, 0), (8, 0), (2, 1), (3, 1)])
def test_sums_and_coverage_do_not_depend_on_the_sharding(ranks, dimension):
    old = state()
    new = stepped(old)
    before, now = sharded(old, ranks, dimension), sharded(new, ranks, dimension)
    deltas = [
        encode_shards(a, b, SETTINGS, segment_cells=11, threads=2)
        for a, b in zip(before, now, strict=True)
    ]
    check_coverage(deltas)
    sums = zero_sums(KINDS)
    for shards in before:
        for name, part in shard_sums(shards).items():
            sums[name] = add_sums(sums[name], part)
    base = StateDigest.from_sums(sums, kinds_bytes(KINDS))
    assert base.hex == state_digest(old)
    sent = [unpack_delta(memoryview(pack_delta(delta))) for delta in deltas]
    assert sent == deltas
    delta = assemble(sent, base, **PLACE)
    assert delta.digests.hex == state_digest(new) == encode_delta(old, new, **PLACE).digests.hex
    assert state_digest(decoded(old, delta)) == state_digest(new)


def test_what_is_not_finite_is_named_and_other_shards_are_refused():
    old = state()
    cells = old["e"].cells().copy()
    cells[20] = 0x7FC0
    new = {**old, "e": TensorBytes("BF16", SHAPES["e"], cells.tobytes())}
    deltas = [
        encode_shards(a, b, SETTINGS) for a, b in zip(sharded(old, 2), sharded(new, 2), strict=True)
    ]
    delta = assemble(deltas, StateDigest.of(old), **PLACE)
    with pytest.raises(IntegrityError, match="'e' has infinite"):
        publish_delta(delta, step=1, created_wall_s=0.0)
    with pytest.raises(ModelError, match="shards are others"):
        encode_shards(sharded(old, 2)[0], sharded(old, 2)[1], SETTINGS)


def test_cells_that_are_nobodys_or_twice_somebodys_are_found():
    parts = sharded(state(), 2)
    first, second = (encode_shards(shards, shards, SETTINGS) for shards in parts)
    check_coverage([first, second])
    for wrong, reason in (
        ([first], "nobody's"),
        ([first, second, second], "of several ranks"),
        ([second], "nobody's"),
        ([first, ShardDelta({}, second.spans, ())], "different tensors"),
    ):
        with pytest.raises(ModelError, match=reason):
            check_coverage(wrong)
    for data in (pack_delta(first)[:-1], pack_delta(first) + b"x", b"\xff" * 9, b""):
        with pytest.raises(IntegrityError):
            unpack_delta(memoryview(data))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_of_fsdp_publish_what_one_process_would(tmp_path, count):
    """Rows that are not shared evenly, one cell for all, a tied head, columns, replicas."""
    script = Path(__file__).parents[1] / "support" / "shard_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(count), tmp_path],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=220)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, said
    old, new = (read_safetensors(tmp_path / f"{n}.safetensors") for n in ("before", "after"))
    assert "embed.weight" in old
    assert "head.weight" not in old
    data = (tmp_path / "delta.bin").read_bytes()
    assert (tmp_path / "digest.txt").read_text() == state_digest(new) != state_digest(old)
    whole = encode_delta(old, new, **PLACE)
    entry = describe_file(DELTA_NAME, "delta", data)
    expected = manifest(1, 0, state_digest(new), state_digest(old), (entry,))
    expected = msgspec.structs.replace(expected, fingerprint=fingerprint(old))
    root = msgspec.structs.replace(
        expected, version=0, parent=None, digest=state_digest(old), base_digest=None, files=()
    )
    arena = WeightArena.of(old, root)
    found = decode_delta(arena, data, expected, entry)
    arena.apply(found.patch, 1, found.digests)
    assert {n: bytes(t.data) for n, t in arena.tensors.items()} == {
        n: bytes(t.data) for n, t in new.items()
    }
    assert found.digests.hex == whole.digests.hex
