"""The agent's own exact copy of each policy's weights, on disk and in memory.

What always holds: the held version is one, proved by its digest, and moves only in ``commit``, in
one step (a small state file), so a crash leaves the old version or the new one. A new version is
built in the copy's own memory with a way back: whatever fails, and every new plan, first takes the
memory back to the held bits. What turns out damaged at the start is thrown away with a warning: the
copy goes back to its last intact version or is gone, and the agent asks for a fresh plan.

    FOLDER/POLICY/state          which base, which files on top: the only file that is replaced
    FOLDER/POLICY/base-N-K/      Hugging Face folder of version N: weights and artefacts
    FOLDER/POLICY/blobs/SHA256   deltas and composites since the base, and what a plan brings in

Writing a whole model for every version would cost as much disk as the network saves. So a commit
keeps the delta or composite that was downloaded anyway, and every ``fold_every`` of them, or when
somebody needs a folder, they are folded into a new base, read back and verified.

In memory a copy is one times the model, mapped copy-on-write from its base (what no delta touched
is page cache), and while a version is staged what ``weight_staging`` says. Only a snapshot that
replaces another copy takes the model twice, until it is committed.

``commit`` comes after the engine has taken ``staged.changed``; only where the engine is to load
the policy from its folder (a first version), commit, then load ``folder``.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from edge_agent.changed_cells import difference
from edge_agent.copy_folder import STATE_NAME, Copy, CopyFolder
from edge_agent.weight_staging import Edge, Intake, StagedVersion, Staging
from transport.errors import (
    BaseVersionMismatch,
    IntegrityError,
    ModelError,
    RemoteProtocolError,
    StoreError,
)
from transport.messages import VersionRef, WeightsPlan
from transport.runtime.clock import Clock, SystemClock
from transport.weights.blobs import BlobFolder, disk_errors
from transport.weights.folder import check_artefacts
from transport.weights.manifest import FileEntry, SignedManifest, Signer, verify
from transport.weights.manifest_folder import StoredManifest
from transport.weights.patch import Patch
from transport.weights.plan import CheckedStep, check_plan
from transport.weights.state import WeightArena
from transport.weights.tensors import TensorBytes

FOLD_EVERY = 32
DECODE_THREADS = 2


class WeightCopies:
    """The copies of every policy that this agent hosts. Belongs to one thread at a time.

    ``trusted`` (by key id) are the trainers' keys, each for its policy.
    ``max_plan_bytes`` bounds what one plan may bring in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trusted: Mapping[str, Signer],
        fold_every: int = FOLD_EVERY,
        max_plan_bytes: int | None = None,
        decode_threads: int = DECODE_THREADS,
        clock: Clock | None = None,
    ) -> None:
        """Load and verify what is on disk. Raises StoreError when the folder cannot be used."""
        self._folder = folder
        self._trusted = trusted
        self._fold_every = fold_every
        self._max_plan_bytes = max_plan_bytes
        self._threads = decode_threads
        self._clock = SystemClock() if clock is None else clock
        self._copies: dict[str, Copy] = {}
        self._folders: dict[str, CopyFolder] = {}
        self._intakes: dict[str, Intake] = {}
        self._staged: dict[str, StagedVersion] = {}
        self.warnings: list[str] = []
        """What was discarded and why, for the caller to log and clear."""
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if (path / STATE_NAME).is_file():
                    self._load(unquote(path.name))

    # ---- what is held -----------------------------------------------------------------------

    def held(self) -> dict[str, VersionRef]:
        """Version and digest of every copy, as committed."""
        return {policy: copy.ref for policy, copy in self._copies.items()}

    def stored(self) -> tuple[str, ...]:
        """Policies of which anything is on the disk, copies that were never finished included.
        Raises StoreError when the disk refuses."""
        with disk_errors(f"reading {self._folder}"):
            paths = sorted(self._folder.iterdir())
        return tuple(unquote(path.name) for path in paths if path.is_dir())

    def tensors(self, policy: str) -> Mapping[str, TensorBytes]:
        """Weights in the copy's memory: of the held version, or of the staged one while there is
        one. Raises StoreError when there is no copy."""
        return self._copy(policy).arena.tensors

    def blobs(self, policy: str) -> BlobFolder:
        """Where a plan's files are to be written, chunk by chunk."""
        return self._of(policy).blobs

    def folder(self, policy: str) -> Path:
        """Hugging Face folder (config, tokenizer, weights) of exactly the held version. It stays
        until the copy is folded again; whoever loads it reads it now.

        Raises:
            StoreError: no copy, or the disk refused.
        """
        self._copy(policy)
        self._take_back(policy)
        if self._copy(policy).edges:
            self._fold(policy)
        return self._copies[policy].base

    def rescan(self, policy: str) -> None:
        """Read the whole copy and compare it with its digests.

        Raises:
            CopyDrifted: memory has other bits than it was verified with.
            StoreError: no copy.
        """
        self._copy(policy)
        self._take_back(policy)
        self._copy(policy).rescan(policy, threads=self._threads)

    # ---- a new version ----------------------------------------------------------------------

    def begin(self, plan: WeightsPlan) -> Intake:
        """Take a plan in: what is to be fetched, and where to report it. Whatever was staged for
        the policy is taken back; leftovers of earlier plans are removed.

        Raises:
            AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded: as ``check_plan``.
            BaseVersionMismatch: the plan starts from a version that is not the held one.
            StoreError: the disk refused.
        """
        steps = check_plan(plan, self._trusted, max_bytes=self._max_plan_bytes)
        policy = plan.policy
        self._take_back(policy)
        copy, blobs = self._copies.get(policy), self.blobs(policy)
        base = next(
            (StoredManifest(s.manifest, s.signed) for s in steps if s.of_kind("snapshot")), None
        )
        edges = tuple(_edge(step) for step in steps if step.delta is not None)
        if base is None:
            self._check_base(policy, edges)
        files = {entry.digest: entry for step in steps for entry in step.files}
        journal = {edge.file.digest for edge in copy.edges} if copy else set()
        blobs.sweep({*files, *journal})
        artefacts = copy.artefacts if copy else ()
        wanted = tuple(e for d, e in files.items() if e not in artefacts and not blobs.has(d))
        staging = Staging(edges, blobs, threads=self._threads, clock=self._clock)
        for step in steps:
            artefacts = step.of_kind("artefact") or artefacts
        present = {entry.digest: blobs.present(entry) for entry in wanted}
        intake = Intake(policy, wanted, present, staging, base, artefacts)
        self._intakes[policy] = intake
        if base is None and copy is not None:
            complete = [edge.file for edge in edges if edge.file.digest not in present]
            there = {entry.digest: blobs.present(entry) for entry in complete}
            staging.begin(copy.arena, {**present, **there})
        return intake

    def finish(self, intake: Intake) -> StagedVersion:
        """The version that a plan leads to, once all files have come in; verified, not in use.

        Raises:
            IntegrityError: a file or the resulting state is not what the manifests say; a
                damaged file is removed, so that the next plan asks for it again.
            StoreError: a file is not there, or the plan was given up.
        """
        policy, base, staging = intake.policy, intake.base, intake.staging
        if self._intakes.get(policy) is not intake:
            raise StoreError(f"the plan for {policy} was given up for another one")
        blobs, copy = self.blobs(policy), self._copies.get(policy)
        try:
            for entry in intake.wanted:
                blobs.complete(entry)
            if base is not None:
                staging.begin(
                    WeightArena.from_snapshot(blobs, base.manifest, threads=self._threads), {}
                )
            arena, changed = staging.finish()
        except BaseException as error:
            self._take_back(policy)
            if isinstance(error, IntegrityError):
                failed = staging.failed_edge
                suspects = base.manifest.files if base is not None else ()
                blobs.remove_damaged(suspects if failed is None else (failed.file,))
            raise
        journal = () if base is not None or copy is None else copy.edges
        if base is not None:
            changed = difference(arena.tensors, copy.arena.tensors if copy else {})
        edges = (*journal, *staging.edges)
        return self._remember(policy, arena, changed, base, edges, intake.artefacts)

    def wanted(self, plan: WeightsPlan) -> tuple[FileEntry, ...]:
        """The files to fetch for a plan; see ``begin``, which is called again by ``stage``."""
        return self.begin(plan).wanted

    def stage(self, plan: WeightsPlan) -> StagedVersion:
        """``begin`` and ``finish`` of a plan whose files are all there; raises as they do."""
        return self.finish(self.begin(plan))

    def match_local(
        self, policy: str, folder: Path, signed: SignedManifest
    ) -> StagedVersion | None:
        """A model folder that is already on this machine as the version of ``signed``, when its
        artefacts and weights have the very digests: spares the download. None when it differs
        (``warnings`` say how). Nobody may write to the folder until the commit.

        Raises:
            AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded: as ``verify``.
        """
        manifest = verify(signed, self._trusted)
        try:
            if manifest.policy != policy:
                raise IntegrityError(f"the manifest is of {manifest.policy}")
            check_artefacts(folder, manifest.of_kind("artefact"))
            arena = WeightArena.from_folder(folder, manifest, threads=self._threads)
        except (IntegrityError, ModelError) as error:
            self.warnings.append(f"{folder} is not version {manifest.version}: {error}")
            return None
        self._take_back(policy)
        copy = self._copies.get(policy)
        changed = difference(arena.tensors, copy.arena.tensors if copy else {})
        base, artefacts = StoredManifest(manifest, signed), manifest.of_kind("artefact")
        return self._remember(policy, arena, changed, base, (), artefacts, local=folder)

    def commit(self, staged: StagedVersion) -> None:
        """Make a staged version the held one. Committing it again is harmless.

        Raises:
            BaseVersionMismatch: something else was staged or committed since.
            StoreError: the disk refused; the old version stays.
        """
        policy = staged.policy
        if self.held().get(policy) == staged.ref:
            return
        if self._staged.get(policy) is not staged:
            raise BaseVersionMismatch(f"the copy of {policy} moved on since {staged.version} came")
        before, arena, base = self._copies.get(policy), staged.arena, staged.base
        if base is not None:
            path = self._new_base(staged, base)
            if staged.local is not None:
                arena = WeightArena.from_folder(path, base.manifest, threads=self._threads)
            after = Copy(arena, staged.ref, path, base, staged.edges, staged.artefacts)
        else:
            before = self._copy(policy)
            after = Copy(
                arena, staged.ref, before.base, before.base_manifest, staged.edges, staged.artefacts
            )
        self._switch(policy, after)
        del self._staged[policy]
        intake = self._intakes.pop(policy, None)
        if intake is not None:
            intake.staging.close()
        if len(after.edges) >= self._fold_every:
            try:
                self._fold(policy)
            except (IntegrityError, ModelError, StoreError) as error:
                self.warnings.append(f"the copy of {policy} could not be folded yet: {error}")

    def discard(self, policy: str) -> None:
        """Throw a copy away (it or its engine showed other weights, or the policy is hosted no
        more).

        Raises:
            StoreError: the disk refused.
        """
        intake = self._intakes.pop(policy, None)
        if intake is not None:
            intake.staging.close()
        self._staged.pop(policy, None)
        self._copies.pop(policy, None)
        self._of(policy).remove()
        del self._folders[policy]

    def close(self) -> None:
        """End what is under way. What is held stays on the disk."""
        for intake in self._intakes.values():
            intake.staging.close()

    # ---- inside -----------------------------------------------------------------------------

    def _of(self, policy: str) -> CopyFolder:
        if policy not in self._folders:
            path = self._folder / quote(policy, safe="").replace(".", "%2E")
            self._folders[policy] = CopyFolder(path, policy, threads=self._threads)
        return self._folders[policy]

    def _copy(self, policy: str) -> Copy:
        if policy not in self._copies:
            raise StoreError(f"no copy of {policy} is held")
        return self._copies[policy]

    def _check_base(self, policy: str, edges: tuple[Edge, ...]) -> None:
        """Whether a plan without a snapshot begins where the copy is."""
        if not edges:
            raise RemoteProtocolError(f"plan for {policy} brings no weights")
        first, held = edges[0].manifest, self.held().get(policy)
        if held is None or (first.parent, first.base_digest) != (held.version, held.digest):
            here = "none" if held is None else f"version {held.version} ({held.digest[:12]})"
            raise BaseVersionMismatch(f"the plan starts from {first.parent}, held is {here}")

    def _take_back(self, policy: str) -> None:
        """Whatever was begun for a policy and not committed: the copy is the held version again."""
        intake = self._intakes.pop(policy, None)
        self._staged.pop(policy, None)
        if intake is not None and not intake.staging.take_back() and intake.base is None:
            self._copies.pop(policy, None)
            self._load(policy)

    def _remember(
        self,
        policy: str,
        arena: WeightArena,
        changed: Patch,
        base: StoredManifest | None,
        edges: tuple[Edge, ...],
        artefacts: tuple[FileEntry, ...],
        local: Path | None = None,
    ) -> StagedVersion:
        staged = StagedVersion(
            policy=policy,
            version=arena.version,
            digest=arena.digests.hex,
            changed=changed,
            arena=arena,
            replaces=self.held().get(policy),
            base=base,
            edges=edges,
            artefacts=artefacts,
            local=local,
        )
        self._staged[policy] = staged
        return staged

    def _load(self, policy: str) -> None:
        copy = self._of(policy).load(self.warnings)
        if copy is None:
            self.discard(policy)
        else:
            self._switch(policy, copy)

    def _new_base(self, staged: StagedVersion, base: StoredManifest) -> Path:
        folder = self._of(staged.policy)
        if staged.local is not None:
            artefacts = check_artefacts(staged.local, staged.artefacts)
            return folder.written_base(staged.version, staged.arena.tensors, artefacts)
        old = self._copies.get(staged.policy)
        sources: dict[str, Path] = {}
        for entry in staged.artefacts:
            path = folder.blobs.path(entry.digest)
            if not path.exists() and old is not None:
                path = old.base / entry.name  # held already
            sources[entry.name] = path
        return folder.linked_base(base, sources)

    def _fold(self, policy: str) -> None:
        """Base and journal into a new base, read back and compared: so it is proved, and memory is
        the page cache again."""
        copy, folder = self._copy(policy), self._of(policy)
        head = StoredManifest(copy.head, copy.edges[-1].signed)
        artefacts = check_artefacts(copy.base, copy.artefacts)
        path = folder.written_base(copy.ref.version, copy.arena.tensors, artefacts)
        arena = WeightArena.from_folder(path, head.manifest, threads=self._threads)
        self._switch(policy, Copy(arena, copy.ref, path, head, (), copy.artefacts))

    def _switch(self, policy: str, after: Copy) -> None:
        before, folder = self._copies.get(policy), self._of(policy)
        folder.write(after)
        self._copies[policy] = after
        if before is None or before.base != after.base:
            folder.clean(after)


def _edge(step: CheckedStep) -> Edge:
    manifest = msgspec.structs.replace(step.manifest, files=step.files)
    return Edge(manifest=manifest, signed=step.signed)
