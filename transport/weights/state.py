"""Weights of one version with their digest, and how one version becomes the next.

What always holds: a ``WeightState`` was verified against a manifest when it was made; advancing
gives a new state and leaves the old one as it was (unchanged tensors are shared).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transport.errors import ChecksumMismatch, IntegrityError
from transport.messages import VersionRef
from transport.weights.blobs import BlobFolder
from transport.weights.delta_file import apply_delta
from transport.weights.digest import StateDigest
from transport.weights.manifest import INDEX_NAME, VersionManifest
from transport.weights.tensors import TensorBytes, read_safetensors


@dataclass(frozen=True, slots=True)
class WeightState:
    """A version's tensors in canonical order; they may be views of mapped files."""

    version: int
    tensors: Mapping[str, TensorBytes]
    digests: StateDigest

    @property
    def ref(self) -> VersionRef:
        """Number and digest, as peers name a version to each other."""
        return VersionRef(version=self.version, digest=self.digests.hex)


def checked_state(tensors: Mapping[str, TensorBytes], manifest: VersionManifest) -> WeightState:
    """Tensors from anywhere as the state that ``manifest`` describes.

    Raises:
        ChecksumMismatch: they are another state.
    """
    digests = StateDigest.of(tensors)
    if digests.hex != manifest.digest:
        raise ChecksumMismatch(
            f"weights for version {manifest.version} of {manifest.policy} have digest "
            f"{digests.hex[:12]}, the manifest says {manifest.digest[:12]}"
        )
    return WeightState(manifest.version, dict(sorted(tensors.items())), digests)


def state_of_snapshot(blobs: BlobFolder, manifest: VersionManifest) -> WeightState:
    """The state in a manifest's snapshot files, mapped.

    Raises:
        IntegrityError: a file is malformed, or another state than the manifest says.
        StoreError: a file is not there.
    """
    tensors: dict[str, TensorBytes] = {}
    for entry in manifest.of_kind("snapshot"):
        if entry.name != INDEX_NAME:
            tensors.update(read_safetensors(blobs.data(entry.digest)))
    return checked_state(tensors, manifest)


def advanced(
    state: WeightState, blobs: BlobFolder, manifest: VersionManifest
) -> tuple[WeightState, dict[str, TensorBytes]]:
    """The next version by its delta, and the tensors that changed.

    Raises:
        IntegrityError: as ``apply_delta``.
        StoreError: the delta is not there.
    """
    delta = manifest.delta
    if delta is None:
        raise IntegrityError(f"version {manifest.version} of {manifest.policy} has no delta")
    data = blobs.data(delta.digest)
    changed, digests = apply_delta(state.tensors, data, manifest, digests=state.digests)
    return WeightState(manifest.version, {**state.tensors, **changed}, digests), changed
