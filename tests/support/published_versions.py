"""Published versions 0 to 8 of a small model and plans between them, without a network."""

import msgspec
import numpy as np
from signing import signing_key

from edge_agent.weight_copy import WeightCopies
from edge_agent.weight_staging import StagedVersion
from transport.messages import PlanStep, VersionRef, WeightsPlan
from transport.weights.delta_file import encode_delta
from transport.weights.folder import write_model_folder
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    VersionManifest,
    composite_name,
    describe_file,
    sign,
)
from transport.weights.manifest_folder import StoredManifest
from transport.weights.patch import Patch, patched
from transport.weights.publication import build_delta_version, build_version0
from transport.weights.tensors import TensorBytes

KEY = signing_key()
POLICY = "r/p"
PLACE = {"run": "r", "policy": POLICY, "created_wall_s": 0.0}
ARTEFACTS = {"config.json": b"{}", "tokenizer.json": b"[]"}
TRUSTED = {KEY.key_id: KEY.public}
CELLS = 400


def tensors(seed: int) -> dict[str, TensorBytes]:
    rng = np.random.default_rng(seed)
    return {
        name: TensorBytes("BF16", (CELLS,), rng.integers(0x3B00, 0x3D00, CELLS, "<u2").tobytes())
        for name in "abc"
    }


def after(weights: dict[str, TensorBytes], changed: Patch) -> dict[str, TensorBytes]:
    """What ``changed`` makes of weights."""
    return {name: patched(tensor, changed.get(name, ())) for name, tensor in weights.items()}


class Versions:
    """Each version replaces one tensor; ``sparse``: a few cells of two."""

    def __init__(self, folder, *, sparse: bool = False, **encoding: int) -> None:
        write_model_folder(folder, tensors(0), ARTEFACTS)
        self.folder = folder
        self.states = {0: tensors(0)}
        self.publications = {0: build_version0(folder, **PLACE)}
        self.made: dict[str, bytes] = {}
        for version in range(1, 9):
            before = self.states[version - 1]
            new = {**before, **(self._sparse if sparse else self._dense)(before, version)}
            self.publications[version] = build_delta_version(
                before, new, version=version, parent=version - 1, step=version, **PLACE, **encoding
            )
            self.states[version] = new

    @staticmethod
    def _dense(before, version):
        name = "abc"[version % 3]
        return {name: tensors(version)[name]}

    @staticmethod
    def _sparse(before, version):
        changed = {}
        for name in "ab":
            cells = before[name].cells().copy()
            cells[version :: 17 + version] ^= np.uint16(1)
            changed[name] = TensorBytes("BF16", (CELLS,), cells.tobytes())
        return changed

    def signed(self, version: int) -> SignedManifest:
        return sign(self.publications[version].manifest, KEY)

    def ref(self, version: int) -> VersionRef:
        digest = self.publications[version].manifest.digest
        return VersionRef(version=version, digest=digest)

    def delta(self, version: int) -> FileEntry:
        entry = self.publications[version].manifest.delta
        assert entry is not None
        return entry

    def file(self, entry: FileEntry) -> bytes:
        """Contents of a published file, or of a composite made here."""
        if entry.digest in self.made:
            return self.made[entry.digest]
        for publication in self.publications.values():
            if entry in publication.manifest.files:
                return bytes(publication.files[entry.name])
        raise KeyError(entry.name)

    def step(self, version: int) -> PlanStep:
        manifest = self.publications[version].manifest
        return StoredManifest(manifest, self.signed(version)).step(manifest.files)

    def plan(self, target: int, have: int | None = None) -> WeightsPlan:
        first = 0 if have is None else have + 1
        steps = tuple(self.step(version) for version in range(first, target + 1))
        return WeightsPlan(policy=POLICY, version=target, steps=steps)

    def composite(self, base: int, target: int, *, lie=None) -> list[PlanStep]:
        """Proof and catalogue of a composite. ``lie`` are the weights that it really leads to."""
        manifest = self.publications[target].manifest
        made = encode_delta(
            self.states[base],
            self.states[target] if lie is None else lie,
            run="r",
            policy=POLICY,
            version=target,
            parent=base,
            segment_cells=100,
        )
        data = made.data
        if lie is not None:  # it says what the manifest says
            data = data.replace(made.digests.hex.encode(), manifest.digest.encode())
        entry = describe_file(
            composite_name(base), "composite", data, chunk_bytes=256, segments=made.segments
        )
        self.made[entry.digest] = data
        catalogue: VersionManifest = msgspec.structs.replace(
            manifest,
            parent=base,
            base_digest=self.publications[base].manifest.digest,
            files=(entry,),
        )
        encoded = msgspec.msgpack.encode(catalogue)
        proof = StoredManifest(manifest, self.signed(target)).step(())
        return [proof, PlanStep(manifest=encoded, signature=b"", key_id="", files=(entry.name,))]

    def deliver(self, copies: WeightCopies, plan: WeightsPlan) -> list[FileEntry]:
        entries = copies.wanted(plan)
        for entry in entries:
            copies.blobs(plan.policy).put(entry.digest, (self.file(entry),))
        return list(entries)

    def follow(self, copies: WeightCopies, plan: WeightsPlan) -> StagedVersion:
        """The whole way to what a plan leads to."""
        self.deliver(copies, plan)
        staged = copies.stage(plan)
        copies.commit(staged)
        return staged

    def bring(self, copies: WeightCopies, target: int, have: int | None = None) -> StagedVersion:
        return self.follow(copies, self.plan(target, have))
