"""The agent's own exact copy of each policy's weights, on disk and in memory.

What always holds: the copy is one version, proved by its digest; staging verifies everything and
touches nothing; committing moves the copy in one step (a small state file), so a crash leaves the
old version or the new one. What turns out damaged at the start is thrown away with a warning: the
copy goes back to its last intact version or is gone, and the agent asks for a fresh plan.

    FOLDER/POLICY/state          which base, which deltas on top: the only file that is replaced
    FOLDER/POLICY/base-N-K/      Hugging Face folder of version N: weights and artefacts
    FOLDER/POLICY/blobs/SHA256   deltas since the base, and what a plan brings in

Writing a whole model for every version would cost as much disk as the network saves. So a commit
keeps the delta that was downloaded anyway, and every ``fold_every`` versions, or when somebody
needs a folder, base and deltas are folded into a new base, read back and verified. Unchanged
tensors are views of the base's pages, not copies.

``commit`` comes after the engine has taken ``staged.changed``; only where the engine is to load
the policy from its folder (a first version), commit, then load ``folder``.
"""

import itertools
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from transport.errors import (
    BaseVersionMismatch,
    IntegrityError,
    ModelError,
    RemoteProtocolError,
    StoreError,
)
from transport.messages import VersionRef, WeightsPlan
from transport.weights.blobs import BlobFolder, disk_errors, write_durably
from transport.weights.folder import (
    check_artefacts,
    link_model_folder,
    read_model_folder,
    write_model_folder,
)
from transport.weights.manifest import FileEntry, SignedManifest, Signer, VersionManifest, verify
from transport.weights.manifest_folder import StoredManifest, read_trusted
from transport.weights.plan import check_plan
from transport.weights.state import WeightState, advanced, checked_state, state_of_snapshot
from transport.weights.tensors import TensorBytes

FOLD_EVERY = 32
_STATE = "state"


class _CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state file: base folder's name and manifest, deltas on top, artefacts in the base."""

    policy: str
    base: str
    base_manifest: SignedManifest
    deltas: tuple[SignedManifest, ...]
    artefacts: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is held: weights in memory, base folder, and the versions from base to head."""

    state: WeightState
    base: Path
    base_manifest: StoredManifest
    deltas: tuple[StoredManifest, ...]
    artefacts: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A verified version that is not in use yet. ``changed`` has absolute values of every tensor
    that differs from the copy (all of them when there was none)."""

    policy: str
    version: int
    digest: str
    changed: Mapping[str, TensorBytes]
    state: WeightState = field(repr=False)
    replaces: VersionRef | None = field(repr=False)
    base: StoredManifest | None = field(repr=False)
    deltas: tuple[StoredManifest, ...] = field(repr=False)
    artefacts: tuple[FileEntry, ...] = field(repr=False)
    local: Path | None = None


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
    ) -> None:
        """Load and verify what is on disk. Raises StoreError when the folder cannot be used."""
        self._folder = folder
        self._trusted = trusted
        self._fold_every = fold_every
        self._max_plan_bytes = max_plan_bytes
        self._copies: dict[str, _Copy] = {}
        self._blobs: dict[str, BlobFolder] = {}
        self._staged: dict[str, set[str]] = {}
        self.warnings: list[str] = []
        """What was discarded and why, for the caller to log and clear."""
        with disk_errors(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if (path / _STATE).is_file():
                    self._load(unquote(path.name))

    # ---- what is held -----------------------------------------------------------------------

    def held(self) -> dict[str, VersionRef]:
        """Version and digest of every copy."""
        return {policy: copy.state.ref for policy, copy in self._copies.items()}

    def tensors(self, policy: str) -> Mapping[str, TensorBytes]:
        """Weights of the copy. Raises StoreError when there is none."""
        return self._copy(policy).state.tensors

    def blobs(self, policy: str) -> BlobFolder:
        """Where a plan's files are to be written, chunk by chunk."""
        if policy not in self._blobs:
            self._blobs[policy] = BlobFolder(self._path(policy) / "blobs")
        return self._blobs[policy]

    def folder(self, policy: str) -> Path:
        """Hugging Face folder (config, tokenizer, weights) of exactly the held version. It stays
        until the copy is folded again; whoever loads it reads it now.

        Raises:
            StoreError: no copy, or the disk refused.
        """
        if self._copy(policy).deltas:
            self._fold(policy)
        return self._copies[policy].base

    # ---- a new version ----------------------------------------------------------------------

    def wanted(self, plan: WeightsPlan) -> list[FileEntry]:
        """Files to fetch for a plan, in order; leftovers of earlier plans are removed.

        Raises:
            AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded: as ``check_plan``.
            StoreError: the disk refused.
        """
        steps = check_plan(plan, self._trusted, max_bytes=self._max_plan_bytes)
        entries = {entry.digest: entry for step in steps for entry in step.files}
        blobs = self.blobs(plan.policy)
        copy = self._copies.get(plan.policy)
        journal = _files_of(copy.deltas) if copy else ()
        blobs.sweep({*entries, *journal, *self._staged.get(plan.policy, ())})
        base = copy.artefacts if copy else ()
        return [e for d, e in entries.items() if e not in base and not blobs.has(d)]

    def stage(self, plan: WeightsPlan) -> StagedVersion:
        """Build and verify the version that a plan leads to; the copy is not touched.

        Raises:
            AuthenticationFailed, RemoteProtocolError, SizeLimitExceeded: as ``check_plan``.
            BaseVersionMismatch: the plan starts from a version that is not the held one.
            IntegrityError: a file or the resulting state is not what the manifests say; a
                damaged file is removed, so that ``wanted`` asks for it again.
            StoreError: a file of the plan is not there.
        """
        steps = check_plan(plan, self._trusted, max_bytes=self._max_plan_bytes)
        copy = self._copies.get(plan.policy)
        blobs = self.blobs(plan.policy)
        state = copy.state if copy else None
        deltas = list(copy.deltas) if copy else []
        artefacts = copy.artefacts if copy else ()
        base: StoredManifest | None = None
        changed: dict[str, TensorBytes] = {}
        for step in steps:
            artefacts = step.of_kind("artefact") or artefacts
            stored = StoredManifest(step.manifest, step.signed)
            try:
                if step.delta is not None:
                    state, part = _next(state, blobs, step.manifest)
                    deltas.append(stored)
                    changed.update(part)
                elif step.of_kind("snapshot"):
                    state = state_of_snapshot(blobs, step.manifest)
                    base, deltas = stored, []
            except IntegrityError:
                blobs.remove_damaged(step.files)
                raise
        if state is None:
            raise RemoteProtocolError(f"plan for {plan.policy} brings no weights")
        if base is not None:
            changed = _difference(state, copy)
        return self._remember(plan.policy, state, changed, base, deltas, artefacts)

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
            state = checked_state(read_model_folder(folder, mapped=True), manifest)
        except (IntegrityError, ModelError) as error:
            self.warnings.append(f"{folder} is not version {manifest.version}: {error}")
            return None
        base, artefacts = StoredManifest(manifest, signed), manifest.of_kind("artefact")
        changed = _difference(state, self._copies.get(policy))
        return self._remember(policy, state, changed, base, [], artefacts, local=folder)

    def commit(self, staged: StagedVersion) -> None:
        """Make a staged version the held one. Committing it again is harmless.

        Raises:
            BaseVersionMismatch: the copy has moved since the version was staged.
            StoreError: the disk refused; the old version stays.
        """
        policy = staged.policy
        held = self.held().get(policy)
        if held == staged.state.ref:
            return
        if held != staged.replaces:
            raise BaseVersionMismatch(f"the copy of {policy} moved on since {staged.version} came")
        if staged.base is not None:
            base, manifest = self._new_base(staged, staged.base), staged.base
        else:
            base, manifest = self._copy(policy).base, self._copy(policy).base_manifest
        after = _Copy(staged.state, base, manifest, staged.deltas, staged.artefacts)
        self._switch(policy, after)
        self._staged.pop(policy, None)
        if len(after.deltas) >= self._fold_every:
            try:
                self._fold(policy)
            except (IntegrityError, ModelError, StoreError) as error:
                self.warnings.append(f"the copy of {policy} could not be folded yet: {error}")

    def discard(self, policy: str) -> None:
        """Throw a copy away (its engine showed other weights, or the policy is hosted no more).

        Raises:
            StoreError: the disk refused.
        """
        self._copies.pop(policy, None)
        self._staged.pop(policy, None)
        self._blobs.pop(policy, None)
        with disk_errors(f"removing {self._path(policy)}"):
            if self._path(policy).is_dir():
                shutil.rmtree(self._path(policy))

    # ---- inside -----------------------------------------------------------------------------

    def _path(self, policy: str) -> Path:
        return self._folder / quote(policy, safe="").replace(".", "%2E")

    def _copy(self, policy: str) -> _Copy:
        if policy not in self._copies:
            raise StoreError(f"no copy of {policy} is held")
        return self._copies[policy]

    def _remember(
        self,
        policy: str,
        state: WeightState,
        changed: Mapping[str, TensorBytes],
        base: StoredManifest | None,
        deltas: list[StoredManifest],
        artefacts: tuple[FileEntry, ...],
        local: Path | None = None,
    ) -> StagedVersion:
        copy = self._copies.get(policy)
        staged = StagedVersion(
            policy=policy,
            version=state.version,
            digest=state.digests.hex,
            changed=changed,
            state=state,
            replaces=copy.state.ref if copy else None,
            base=base,
            deltas=tuple(deltas),
            artefacts=artefacts,
            local=local,
        )
        files = _files_of(staged.deltas + ((base,) if base else ()))
        self._staged[policy] = files | {entry.digest for entry in artefacts}
        return staged

    def _load(self, policy: str) -> None:
        path = self._path(policy)
        try:
            record = msgspec.msgpack.decode((path / _STATE).read_bytes(), type=_CopyRecord)
            manifest = read_trusted(record.base_manifest)
            deltas = [read_trusted(signed) for signed in record.deltas]
            base = path / Path(record.base).name
            check_artefacts(base, record.artefacts)
            state = checked_state(read_model_folder(base, mapped=True), manifest.manifest)
        except (OSError, msgspec.DecodeError, IntegrityError, ModelError) as error:
            self.discard(policy)
            self.warnings.append(f"the copy of {policy} was damaged and is discarded: {error}")
            return
        intact: list[StoredManifest] = []
        try:
            for stored in deltas:
                state, _ = advanced(state, self.blobs(policy), stored.manifest)
                intact.append(stored)
        except (IntegrityError, StoreError) as error:
            self.blobs(policy).remove_damaged(stored.manifest.files)
            self.warnings.append(f"the copy of {policy} goes back to {state.version}: {error}")
        self._switch(policy, _Copy(state, base, manifest, tuple(intact), record.artefacts))

    def _new_base(self, staged: StagedVersion, base: StoredManifest) -> Path:
        """A base folder out of verified files: linked where they were downloaded, else copied."""
        target = self._free_base(staged.policy, base.manifest.version)
        if staged.local is not None:
            artefacts = check_artefacts(staged.local, staged.artefacts)
            write_model_folder(target, staged.state.tensors, artefacts)
            return target
        old = self._copies.get(staged.policy)
        sources: dict[str, Path] = {}
        for entry in (*base.manifest.of_kind("snapshot"), *staged.artefacts):
            path = self.blobs(staged.policy).path(entry.digest)
            if not path.exists() and old is not None:
                path = old.base / entry.name  # an artefact that is held already
            sources[entry.name] = path
        link_model_folder(target, sources)
        return target

    def _free_base(self, policy: str, version: int) -> Path:
        names = (self._path(policy) / f"base-{version:08d}-{n}" for n in itertools.count())
        return next(path for path in names if not path.exists())

    def _fold(self, policy: str) -> None:
        copy = self._copy(policy)
        head = (copy.base_manifest, *copy.deltas)[-1]
        target = self._free_base(policy, copy.state.version)
        write_model_folder(target, copy.state.tensors, check_artefacts(copy.base, copy.artefacts))
        # Read back and compared: the new base is proved, and memory is the page cache again.
        state = checked_state(read_model_folder(target, mapped=True), head.manifest)
        self._switch(policy, _Copy(state, target, head, (), copy.artefacts))

    def _switch(self, policy: str, after: _Copy) -> None:
        record = _CopyRecord(
            policy=policy,
            base=after.base.name,
            base_manifest=after.base_manifest.signed,
            deltas=tuple(stored.signed for stored in after.deltas),
            artefacts=after.artefacts,
        )
        before = self._copies.get(policy)
        write_durably(self._path(policy) / _STATE, (msgspec.msgpack.encode(record),))
        self._copies[policy] = after
        if before is None or before.base != after.base:
            self._clean(policy)

    def _clean(self, policy: str) -> None:
        """Remove bases that the state file does not name. (``wanted`` removes old files.)"""
        with disk_errors(f"cleaning {self._path(policy)}"):
            for path in self._path(policy).glob("base-*"):
                if path != self._copies[policy].base:
                    shutil.rmtree(path)


def _files_of(versions: Iterable[StoredManifest]) -> set[str]:
    return {entry.digest for stored in versions for entry in stored.manifest.files}


def _difference(state: WeightState, copy: _Copy | None) -> dict[str, TensorBytes]:
    """Tensors of ``state`` that the copy does not have already."""
    held = copy.state.digests.tensors if copy else {}
    new = state.digests.tensors
    return {name: t for name, t in state.tensors.items() if held.get(name) != new[name]}


def _next(
    state: WeightState | None, blobs: BlobFolder, manifest: VersionManifest
) -> tuple[WeightState, dict[str, TensorBytes]]:
    if state is None or state.version != manifest.parent:
        held = "none" if state is None else f"version {state.version}"
        raise BaseVersionMismatch(f"the plan starts from {manifest.parent}, held is {held}")
    return advanced(state, blobs, manifest)
