"""Small models, what a step makes of them, and their deltas."""

import msgspec
import numpy as np

from transport.weights.delta_file import (
    decode_delta,
)
from transport.weights.digest import state_digest
from transport.weights.manifest import (
    DELTA_NAME,
    VersionManifest,
    describe_file,
)
from transport.weights.patch import patched
from transport.weights.publication import build_delta_version
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes


def bf16(cells):
    array = np.asarray(cells, "<u2")
    return TensorBytes("BF16", array.shape, array.tobytes())


def model(seed=0, size=300):
    rng = np.random.default_rng(seed)
    return {
        "layer.weight": bf16(rng.integers(0x3B00, 0x3D00, (3, size // 3))),
        "layer.bias": TensorBytes("F32", (4,), rng.normal(size=4).astype("<f4").tobytes()),
        "fp8": TensorBytes("F8_E4M3", (size,), bytes(rng.integers(0, 0x70, size, np.uint8))),
        "step": TensorBytes("I64", (), rng.bytes(8)),
        "none": TensorBytes("F16", (0, 2), b""),
    }


def stepped(tensors, seed=1, names=("layer.weight", "step")):
    rng = np.random.default_rng(seed)
    new = dict(tensors)
    for name in names:
        cells = tensors[name].cells().copy()
        where = rng.random(cells.size) < 0.4
        where[0] = True
        cells[where] += cells.dtype.type(1)
        new[name] = TensorBytes(tensors[name].dtype, tensors[name].shape, cells.tobytes())
    return new


def published(old, new, version=1, parent=0, **options):
    return build_delta_version(
        old,
        new,
        run="r",
        policy="r/p",
        version=version,
        parent=parent,
        step=version,
        created_wall_s=0.0,
        **options,
    )


def with_file(manifest, data):
    """A manifest that vouches for other bytes: what a wrong publisher would sign."""
    return msgspec.structs.replace(manifest, files=(describe_file(DELTA_NAME, "delta", data),))


def arena_of(tensors, version=0):
    return WeightArena.of(
        tensors,
        VersionManifest(
            run="r",
            policy="r/p",
            version=version,
            parent=None,
            step=0,
            digest=state_digest(tensors),
            base_digest=None,
            files=(),
            full_bytes=0,
            fingerprint="",
            created_wall_s=0.0,
        ),
    )


def decoded(old, publication, data=None, manifest=None, **options):
    data = publication.files[DELTA_NAME] if data is None else data
    manifest = publication.manifest if manifest is None else manifest
    return decode_delta(arena_of(old), data, manifest, manifest.delta, **options)


def after(old, delta):
    return {name: patched(tensor, delta.patch.get(name, ())) for name, tensor in old.items()}
