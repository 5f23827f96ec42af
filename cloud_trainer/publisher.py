"""Turns the weights of a step into a version that can be offered.

What always holds: versions are built one at a time, in the order of steps, each as the difference
from the one before; the base moves on only after the files of its successor are durable; building
never touches the trainer: it compares a captured state with the base, bit pattern by bit pattern,
while the next step runs.

Memory, in sizes of the published weights: one for the base, one for each captured state (at most
as many as versions may be on their way, ``CoreSettings.max_undurable``), and while a version is
built twice its coded bytes and the temporaries of one segment per thread; a version published
whole (the first) takes one more for its files.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from cloud_trainer.config import PublicationTable
from cloud_trainer.core.effects import BuildVersion
from cloud_trainer.outbox import Outbox
from transport.errors import InvariantViolation
from transport.messages import VersionOffer
from transport.runtime.clock import Clock
from transport.weights.digest import StateDigest
from transport.weights.manifest import ManifestKey, sign
from transport.weights.publication import Publication, build_delta_version, build_version0
from transport.weights.segments import CodecSettings
from transport.weights.tensors import TensorBytes

_log = structlog.get_logger()

Tensors = Mapping[str, TensorBytes]


class Publisher:
    """Builds versions of ``policy``; ``base`` are the weights of version ``base_version``, which
    may be published once more ("again") as an empty difference. ``artefacts`` travel with a version
    that is published whole; those of the ``model`` folder unless given.

    ``build`` blocks and is called by one thread at a time; ``capture`` by any.
    """

    def __init__(
        self,
        outbox: Outbox,
        signer: ManifestKey,
        clock: Clock,
        *,
        run: str,
        policy: str,
        model: Path,
        base_version: int,
        base: Tensors,
        table: PublicationTable | None = None,
        artefacts: Mapping[str, bytes] | None = None,
    ) -> None:
        table = PublicationTable() if table is None else table
        self._settings = CodecSettings(coder=table.coder, link_bytes_s=table.link_bits_per_s / 8)
        self._threads = table.threads or len(os.sched_getaffinity(0))
        self._full_digest_every = table.full_digest_every
        self._outbox = outbox
        self._signer = signer
        self._clock = clock
        self._run = run
        self._policy = policy
        self._model = model
        self._artefacts = artefacts
        self._base_version = base_version
        self._base = base
        self._base_digest: StateDigest | None = None
        self._captured: dict[int, Tensors] = {}

    def capture(self, step: int, tensors: Tensors) -> None:
        """Keep the weights after ``step`` until their version is built."""
        self._captured[step] = tensors

    def build(self, order: BuildVersion) -> tuple[VersionOffer, dict[str, Any]]:
        """Make a version durable in the outbox: its offer, and what was measured. A version that
        is there already is offered as it is.

        Raises:
            ModelError: the model folder or its artefacts do not load.
            IntegrityError: a weight is not finite; names the tensor, and nothing was published.
            StoreError: the disk refused.
        """
        started = self._clock.monotonic_s()
        if order.step not in self._captured:
            known = self._known(order)
            if known is not None:
                return known, {"version": order.version, "again": True}
        publication, tensors = self._publication(order)
        built = self._clock.monotonic_s()
        signed = sign(publication.manifest, self._signer)
        offer = self._outbox.add(publication, signed, again=order.again)
        self._base_version, self._base = order.version, tensors
        self._base_digest = publication.digests
        self._captured.pop(order.step, None)
        return offer, _facts(publication, built - started, self._clock.monotonic_s() - built)

    def _known(self, order: BuildVersion) -> VersionOffer | None:
        manifest = self._outbox.manifest(order.version)
        if manifest is None or manifest.parent != order.parent:
            return None
        if order.version == self._base_version and manifest.digest != self._digest().hex:
            # The same number of another life of this folder, say with another model.
            _log.warning("publisher.version_differs", version=order.version)
            return None
        return self._outbox.offer(order.version)

    def _publication(self, order: BuildVersion) -> tuple[Publication, Tensors]:
        wall_s = self._clock.wall_s()
        if order.whole:
            if order.version != self._base_version:
                raise InvariantViolation(f"version {order.version} is not at hand as a whole")
            publication = build_version0(
                self._model,
                tensors=self._base,
                artefacts=self._artefacts,
                run=self._run,
                policy=self._policy,
                version=order.version,
                step=order.step,
                created_wall_s=wall_s,
                threads=self._threads,
            )
            return publication, self._base
        new = self._base if order.again else self._captured.get(order.step)
        if new is None or order.parent != self._base_version:
            raise InvariantViolation(
                f"version {order.version} of step {order.step} on {order.parent} cannot be built: "
                f"the base is {self._base_version}, captured are {sorted(self._captured)}"
            )
        publication = build_delta_version(
            self._base,
            new,
            run=self._run,
            policy=self._policy,
            version=order.version,
            parent=order.parent,
            step=order.step,
            created_wall_s=wall_s,
            base=self._digest(),
            settings=self._settings,
            threads=self._threads,
            with_full_digest=order.version % self._full_digest_every == 0,
        )
        return publication, new

    def _digest(self) -> StateDigest:
        if self._base_digest is None:
            self._base_digest = StateDigest.of(self._base, threads=self._threads)
        return self._base_digest


def _facts(publication: Publication, encode_s: float, store_s: float) -> dict[str, Any]:
    """What was measured: seconds to compare and encode, and to make the version durable."""
    manifest, delta = publication.manifest, publication.delta
    facts: dict[str, Any] = {
        "version": manifest.version,
        "parent": manifest.parent,
        "step": manifest.step,
        "digest": manifest.digest,
        "full_bytes": manifest.full_bytes,
        "file_bytes": sum(entry.size_bytes for entry in manifest.files),
        "encode_s": round(encode_s, 6),
        "store_s": round(store_s, 6),
    }
    if delta is not None:
        facts["changed_cells"] = delta.changed_cells
        facts["total_cells"] = delta.total_cells
        facts["coded_bytes"] = dict(delta.coded_bytes)
    return facts
