"""Versions of every policy on the weight store's disk, and the way from any of them to any other.

What always holds: a version is listed only after its files are durable, its signature was checked,
its delta was applied to the store's own copy of the parent and gave the promised digest, and its
weights are finite; its manifest is written last. Numbers are never reused: manifests, a few
kilobytes each, stay for the life of the run even when the files are gone, and are the version
tree. Every retained version can be served to an agent that has nothing. A file that turns out
damaged is no longer offered; what the store made itself it then makes again.

Layout of ``FOLDER/POLICY``: ``scheduler.weight_policy``. What is made beside the trainer's deltas
and when: ``scheduler.weight_upkeep``.

Belongs to one thread; beside it another may call ``read_chunk``, and a third may perform the jobs
of ``next_job`` (``scheduler.weight_composites``), one at a time and never beside ``maintain``.
Costs in memory for each policy: the head's weights, changed in place when a version is added (what
no delta touched stays mapped from a snapshot's files), until ``rest``; while another version is
wanted (export, a branch of the tree) a second copy, and while a job runs what that says. On disk:
the deltas of the retained versions, at most about three snapshots, and composites no larger than
one model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from scheduler.weight_adding import advance, first, restore
from scheduler.weight_composites import CompositeJob, Job
from scheduler.weight_jobs import adopt, next_bridge_job, next_job, step_bytes
from scheduler.weight_lost import brings_back, check_joins, needs_whole
from scheduler.weight_policy import PolicyVersions, WalkFailed, walk, walked_files
from scheduler.weight_retention import drop_damaged, read_again, retain, write_head_down
from scheduler.weight_upkeep import Asked, kept_versions
from transport.errors import (
    ChecksumMismatch,
    IntegrityError,
    ParentLost,
    StoreError,
    TruncatedBlob,
)
from transport.messages import WeightsPlan
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.folder import write_model_folder
from transport.weights.manifest import FileEntry, SignedManifest, Signer, VersionManifest, verify
from transport.weights.plan import UNKNOWN_SPEED, LinkSpeed
from transport.weights.state import WeightArena
from transport.weights.tensors import Buffer, TensorBytes

CUMULATIVE_EVERY = 16
KEEP_VERSIONS = 64
KEEP_VERSIONS_MAX = 256


class WeightVersions:
    """All versions of all policies in ``folder``.

    ``trusted`` (by key id) says whose versions of which policy are taken; the caller may change it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trusted: Mapping[str, Signer],
        cumulative_every: int = CUMULATIVE_EVERY,
        keep_versions: int = KEEP_VERSIONS,
        keep_versions_max: int = KEEP_VERSIONS_MAX,
        threads: int = 1,
    ) -> None:
        """Load what is on disk; ``threads`` help with large models. Raises StoreError when the
        folder cannot be used."""
        self._folder = folder
        self._trusted = trusted
        self._cumulative_every = cumulative_every
        self._keep_versions = keep_versions
        self._keep_versions_max = keep_versions_max
        self._threads = threads
        self._policies: dict[str, PolicyVersions] = {}
        self.warnings: list[str] = []
        """What was found damaged, for the caller to log and clear."""
        self.suspects: set[str] = set()
        """Policies in which something was found damaged, for the caller to look after and clear."""
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(unquote(path.name) for path in folder.iterdir() if path.is_dir())
        for name in names:
            self._open(name)

    # ---- what is there ----------------------------------------------------------------------

    def policies(self) -> list[str]:
        return sorted(name for name, policy in self._policies.items() if policy.versions)

    def versions(self, policy: str) -> list[VersionManifest]:
        """Every version ever stored, by number; the tree is in their ``parent`` fields."""
        known = self._policies.get(policy)
        return [stored.manifest for stored in known.versions.values()] if known else []

    def head(self, policy: str) -> VersionManifest | None:
        """The newest version: the one with the highest number."""
        known = self._policies.get(policy)
        return known.versions[known.newest].manifest if known and known.versions else None

    def blobs(self, policy: str) -> BlobFolder:
        """Where the files of an offered version are to be written, chunk by chunk. Makes the
        policy's folder: ask only for policies that the offering peer may publish."""
        return self._open(policy).blobs

    # ---- taking a version -------------------------------------------------------------------

    def add_version(
        self, signed: SignedManifest, files: Mapping[str, Buffer] | None = None
    ) -> VersionManifest:
        """Take a version durably. Its files are in ``blobs(policy)`` already or in ``files`` (by
        name). Adding the same version again is harmless; one that comes whole, while nothing here
        leads to it any more (``awaits_whole``), is restored.

        Raises:
            AuthenticationFailed: not signed by a trusted key.
            RemoteProtocolError: number used, parent unknown, or files of the wrong kinds.
            IntegrityError: files missing or damaged, digest not as promised, weights not finite;
                the files are forgotten, so that another try fetches them again.
            ParentLost: the parent is no longer kept, or damaged; the trainer is to publish it
                whole. Nothing was added.
            StoreError: the disk refused; nothing was added.
        """
        manifest = verify(signed, self._trusted)
        p = self._open(manifest.policy)
        known = p.versions.get(manifest.version)
        again = known is not None and known.manifest.digest == manifest.digest
        if known is not None and again and not self.awaits_whole(manifest):
            return known.manifest
        back = brings_back(p, manifest)
        if not again and not back:
            check_joins(p, manifest)
            if manifest.parent is not None and not p.holds(manifest.parent):
                try:
                    p.head = self._built(p, manifest.parent)
                except StoreError as error:
                    raise ParentLost(
                        f"no delta of {manifest.parent} can be applied: {error}"
                    ) from error
        try:
            for entry in manifest.files:
                if files and entry.name in files:
                    p.blobs.put(entry.digest, (files[entry.name],))
                elif not p.blobs.has(entry.digest):
                    raise TruncatedBlob(f"{entry.name} of version {manifest.version} is missing")
            if known is not None and again and not back:
                restore(p, known.manifest, manifest, threads=self._threads)
            elif p.head is None or manifest.parent is None:
                p.head = first(p, signed, manifest, threads=self._threads)
            else:
                advance(p, p.head, signed, manifest, threads=self._threads)
        except IntegrityError:
            for entry in manifest.files:
                if entry.digest not in p.files:
                    p.blobs.remove(entry.digest)
            raise
        return manifest

    def awaits_whole(self, manifest: VersionManifest) -> bool:
        """Whether ``manifest`` brings a stored version's full weights, to which nothing here leads
        any more or whose manifest is lost. Then forgets those of its files that are damaged, so
        that they are fetched."""
        p = self._policies.get(manifest.policy)
        if p is None or not needs_whole(p, manifest):
            return False
        p.forget_damaged(manifest.files)
        return True

    # ---- giving versions --------------------------------------------------------------------

    def plan(
        self,
        policy: str,
        have_version: int | None = None,
        have_digest: str = "",
        upto: int | None = None,
        *,
        link: LinkSpeed = UNKNOWN_SPEED,
    ) -> WeightsPlan | None:
        """The cheapest way from what an agent has to the newest version, or to version ``upto``
        where that exists; the quickest one where ``link`` is known. None when there is nothing to
        send.

        Raises:
            StoreError: that version never existed, is no longer kept, or is damaged.
        """
        p = self._policies.get(policy)
        if p is None or not p.versions:
            return None
        target = p.newest if upto is None or upto > p.newest else upto
        held = None if have_version is None else p.versions.get(have_version)
        have = have_version if held and held.manifest.digest == have_digest else None
        if have == target:
            return None
        cells = p.root.manifest.full_bytes // 2  # weights of two bytes, or a guess that will do
        route = p.route(target, have=have, step_bytes=link.step_bytes(cells))
        if route is None:
            raise StoreError(f"version {target} of {policy} is unknown, not kept or damaged")
        return WeightsPlan(policy=policy, version=target, steps=p.steps(route))

    def chunk_bytes(self, digest: str) -> int | None:
        """Size of the chunks of a file of any policy, None for a file that is not here."""
        for p in list(self._policies.values()):
            entry = p.files.get(digest)
            if entry is not None:
                return entry.chunk_bytes
        return None

    def is_damaged(self, digest: str) -> bool:
        """Whether a file is known not to be what its digest says; any thread may ask."""
        return any(digest in p.damaged for p in list(self._policies.values()))

    def read_chunk(self, digest: str, index: int) -> bytes | None:
        """One verified chunk of a file of any policy; None when it cannot be had (never known,
        no longer kept, or damaged: the file is then not offered again)."""
        for p in list(self._policies.values()):
            entry = p.files.get(digest)
            if entry is None or digest in p.damaged:
                continue
            try:
                return p.blobs.read_chunk(entry, index)
            except TruncatedBlob:
                continue
            except (ChecksumMismatch, StoreError) as error:
                self._damaged(p, (entry,), error)
        return None

    def reconstruct(self, policy: str, version: int) -> dict[str, TensorBytes]:
        """Weights of any retained version, verified; a copy of its own.

        Raises:
            StoreError: no such version, no longer kept, or damaged.
        """
        return dict(self._built(self._known(policy), version).tensors)

    def export(self, policy: str, version: int, folder: Path) -> None:
        """Write a version as a new Hugging Face model folder, in one step.

        Raises:
            StoreError: as ``reconstruct``; the folder exists; the disk refused.
        """
        p = self._known(policy)
        arena = p.head
        if arena is None or arena.version != version:
            arena = self._built(p, version)
        entries = p.root.manifest.of_kind("artefact")
        artefacts = {entry.name: p.blobs.data(entry.digest) for entry in entries}
        write_model_folder(folder, arena.tensors, artefacts)

    # ---- making more ways -------------------------------------------------------------------

    def next_job(
        self, policy: str, asked: Iterable[Asked] = (), *, composites: bool = True
    ) -> Job | None:
        """What is to be made next for the newest version's lineage, None when nothing is; not
        twice the same after ``adopt``. ``asked`` is what agents asked for lately; with
        ``composites`` false only what is made in any case. Raises StoreError for an unknown policy.
        """
        p = self._known(policy)
        return next_job(p, list(asked), every=self._cumulative_every, composites=composites)

    def awaits_bridge(
        self, policy: str, have_version: int | None, have_digest: str, upto: int | None = None
    ) -> bool:
        """Whether an agent holds a version that was left behind (rollback), wants the newest one,
        and ``next_job`` will make a bridge for it once it is known to have asked."""
        p = self._policies.get(policy)
        if p is None or have_version is None or (upto is not None and upto < p.newest):
            return False
        held = p.versions.get(have_version)
        if held is None or held.manifest.digest != have_digest:
            return False
        return next_bridge_job(p, [Asked(have_version, p.newest)]) is not None

    def adopt(self, made: VersionManifest) -> bool:
        """Offer what a job made, where it pays. Whether it does.

        Raises:
            StoreError: the disk refused, or the policy is unknown.
        """
        return adopt(self._known(made.policy), made)

    def job_failed(self, policy: str, job: Job, error: Exception) -> None:
        """What a job found damaged is offered no more. A composite that failed otherwise is not
        tried again: nobody is to wait for it. (A cumulative is: nothing replaces those.)"""
        p = self._known(policy)
        if isinstance(error, WalkFailed):
            self.way_failed(policy, error)
        elif isinstance(job, CompositeJob) and job.base.version != p.root.manifest.version:
            p.unpaying.add((job.base.version, job.version.version))

    # ---- upkeep -----------------------------------------------------------------------------

    def maintain(
        self, policy: str, *, acked: Collection[int] = (), uploading: Collection[str] = ()
    ) -> int:
        """Forget what is damaged and can be made again, write the head down when no other way
        leads to it, and remove the files that no retained version needs; how many were removed.

        Retained: the first version, the last ``keep_versions`` and all from the oldest in
        ``acked`` (what living agents hold) on, within ``keep_versions_max``. ``uploading`` are
        digests of files that are coming in.

        Raises:
            StoreError: the disk refused; nothing is lost, call again.
        """
        p = self._known(policy)
        self._rescan(p)
        drop_damaged(p)
        fault = write_head_down(p, threads=self._threads)
        if fault:
            self.warnings.append(f"{p.name}: {fault}; the trainer's next delta will be refused")
        kept = kept_versions(
            list(p.versions), acked, keep=self._keep_versions, keep_max=self._keep_versions_max
        )
        return retain(p, kept, anchors_apart=self._keep_versions, also=uploading)

    def scrub(self, policy: str, budget_bytes: int) -> None:
        """Read the next ``budget_bytes`` of the policy's files, round and round: a file that rots
        is to be noticed before somebody needs it. Raises StoreError for an unknown policy."""
        p = self._known(policy)
        for entry, error in read_again(p, budget_bytes):
            self._damaged(p, (entry,), error)

    def way_to_head(
        self, policy: str, go_on: Callable[[], bool] = lambda: True
    ) -> Callable[[], WeightArena] | None:
        """What builds the newest weights, in any thread, for ``take_head``; None when they are in
        memory, or nothing leads to them. Pages that no delta touched go on being the files'."""
        p = self._known(policy)
        route = None if p.head is not None else p.route(p.newest, step_bytes=step_bytes(p))
        if route is None:
            return None
        hops = p.hops(route)
        return lambda: walk(None, p.blobs, hops, go_on=go_on, threads=self._threads)

    def take_head(self, policy: str, arena: WeightArena) -> None:
        """Keep what ``way_to_head`` built, unless a newer one came meanwhile."""
        p = self._known(policy)
        if p.head is None and arena.version in p.versions:
            p.head = arena

    def rest(self, policy: str) -> None:
        """Give the newest weights in memory up where files lead to them. Raises StoreError for an
        unknown policy."""
        p = self._known(policy)
        if p.head is not None and p.route(p.newest) is not None:
            p.head = None

    def way_failed(self, policy: str, error: WalkFailed) -> None:
        """What was on the way is damaged: it is offered no more."""
        self._damaged(self._known(policy), walked_files(error.manifest), error)

    def _rescan(self, p: PolicyVersions) -> None:
        """Read all of the head's weights now and then: memory fails too. And when a snapshot was
        found damaged: they may be mapped from it."""
        head = p.head
        if head is None or head.version < p.rescanned + self._cumulative_every:
            return
        if head.rescan(threads=self._threads).hex == head.digests.hex:
            p.rescanned = head.version
            return
        self.warnings.append(f"{p.name}: the weights of {head.version} in memory were damaged")
        p.head = None  # the next version builds it again from the files

    # ---- inside -----------------------------------------------------------------------------

    def _known(self, name: str) -> PolicyVersions:
        policy = self._policies.get(name)
        if policy is None or not policy.versions:
            raise StoreError(f"no version of {name} is stored; known: {self.policies()}")
        return policy

    def _open(self, name: str) -> PolicyVersions:
        if name not in self._policies:
            folder = self._folder / quote(name, safe="").replace(".", "%2E")
            policy = PolicyVersions(name, folder, self._trusted)
            self.warnings.extend(policy.problems)
            self._policies[name] = policy
        return self._policies[name]

    def _damaged(self, p: PolicyVersions, entries: Collection[FileEntry], error: Exception) -> None:
        p.mark_damaged(entries)
        if any(entry.kind == "snapshot" for entry in entries):
            p.rescanned = -self._cumulative_every
        self.suspects.add(p.name)
        self.warnings.append(f"{p.name}: a file is no longer served: {error}")

    def _built(self, p: PolicyVersions, version: int) -> WeightArena:
        """A new arena of a version over whatever files are intact; damaged ones are marked."""
        while (route := p.route(version, step_bytes=step_bytes(p))) is not None:
            try:
                return walk(None, p.blobs, p.hops(route), threads=self._threads)
            except WalkFailed as error:
                # Each turn marks files that the next route avoids, so this ends.
                self._damaged(p, walked_files(error.manifest), error)
        raise StoreError(f"version {version} of {p.name} is unknown, not kept or damaged")
