"""A weight store's versions without the service: a publisher, the store, an agent's walk."""

import threading

import msgspec
import numpy as np
from signing import signing_key

from scheduler.weight_composites import perform
from scheduler.weight_policy import change_entry, walk
from scheduler.weight_versions import WeightVersions
from transport.weights.blobs import BlobFolder
from transport.weights.folder import write_model_folder
from transport.weights.manifest import decode_manifest, sign
from transport.weights.plan import check_plan
from transport.weights.publication import build_delta_version, build_version0
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

    def changed(self, old, version):
        name = "abc"[version % 3]
        cells = old[name].cells().copy()
        cells[self.rng.integers(0, 4000, 9)] ^= np.uint16(1)
        return {**old, name: TensorBytes("BF16", (4000,), cells.tobytes())}

    def next(self, version, parent=None):
        parent = version - 1 if parent is None else parent
        old = self.states[parent]
        new = self.changed(old, version)
        publication = build_delta_version(
            old, new, version=version, parent=parent, step=version, **PLACE
        )
        self.states[version] = new
        self.publications[version] = publication
        return publication


def opened(folder, **options):
    return WeightVersions(folder, trusted=TRUSTED, **options)


def add(store, publication, **changes):
    manifest = msgspec.structs.replace(publication.manifest, **changes)
    return store.add_version(sign(manifest, KEY), publication.files)


def filled(store, publisher, upto):
    add(store, publisher.first)
    for version in range(1, upto + 1):
        add(store, publisher.next(version))
    return store


def follow(store, plan, folder, arena=None):
    """What an agent does: check the plan, fetch chunk by chunk, apply."""
    blobs = BlobFolder(folder)
    steps = check_plan(plan, TRUSTED)
    for entry in (entry for step in steps for entry in step.files):
        for index in range(len(entry.chunk_digests)):
            data = store.read_chunk(entry.digest, index)
            assert data is not None
            blobs.write_chunk(entry, index, data)
        blobs.complete(entry)
    return walk(arena, blobs, [s.manifest for s in steps if s.delta or s.of_kind("snapshot")])


def make_all(store, *asked):
    """Make whatever is wanted; what was made, (base, version) each."""
    made = []
    while (job := store.next_job(POLICY, asked)) is not None:
        catalogue = perform(job, threading.Event())
        base = catalogue.parent if change_entry(catalogue) else None
        made.append((base, catalogue.version, store.adopt(catalogue)))
        assert len(made) < 100
    return made


def shape(plan):
    return [(decode_manifest(step.manifest).version, step.files) for step in plan.steps]
