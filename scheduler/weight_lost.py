"""Versions whose stored manifest is damaged: found when a policy is opened, brought back whole.

What always holds: a manifest with a wrong signature is believed nowhere; one by a key that is not
known here is used as before, for it may be an old run's; a lost version's number is never given to
another state, as far as what is left can tell.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transport.errors import FarflowError, ParentLost, RemoteProtocolError
from transport.weights.manifest import Signer, VersionManifest, verify
from transport.weights.manifest_folder import StoredManifest
from transport.weights.plan import check_successor

if TYPE_CHECKING:
    from scheduler.weight_policy import PolicyVersions


def numbered_files(folder: Path) -> set[int]:
    """Numbers of the manifests in a folder, damaged or not."""
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def believed(
    found: Iterable[StoredManifest],
    policy: str,
    folder: Path,
    numbers: Collection[int],
    trusted: Mapping[str, Signer],
) -> tuple[list[StoredManifest], list[str]]:
    """Those of a policy's manifests in ``folder`` that are not damaged, and what is wrong."""
    good: list[StoredManifest] = []
    problems: list[str] = []
    unknown: dict[str, int] = {}
    for stored in found:
        number, key_id = stored.manifest.version, stored.signed.key_id
        reason = _damage(stored, policy, trusted)
        if number not in numbers:
            reason = "is in another version's file"
        if reason:
            problems.append(
                f"{policy}: the manifest of version {number}, {folder / f'{number:08d}'}: {reason};"
                " the version is not used until the trainer publishes it whole"
            )
            continue
        if key_id not in trusted:
            unknown[key_id] = unknown.get(key_id, 0) + 1
        good.append(stored)
    for key_id, count in unknown.items():
        problems.append(
            f"{policy}: {count} of the manifests in {folder} are signed by key {key_id!r}, which"
            " is not known here: whether they are damaged cannot be told"
        )
    return good, problems


def _damage(stored: StoredManifest, policy: str, trusted: Mapping[str, Signer]) -> str:
    if stored.manifest.policy != policy:
        return f"is one of {stored.manifest.policy}"
    if stored.signed.key_id in trusted:
        try:
            verify(stored.signed, trusted)
        except FarflowError as error:
            return str(error)
        return ""
    for key_id, signer in trusted.items():
        signed = type(stored.signed)(
            manifest=stored.signed.manifest, signature=stored.signed.signature, key_id=key_id
        )
        try:
            verify(signed, {key_id: signer})
        except FarflowError:
            continue
        return f"its key is {key_id!r}, not {stored.signed.key_id!r}"
    return ""


def brings_back(p: "PolicyVersions", manifest: VersionManifest) -> bool:
    """Whether ``manifest`` has the full weights of a version whose own manifest is lost, or of any
    version where that of the first one is: it then takes its place."""
    if manifest.parent is not None or not manifest.of_kind("snapshot"):
        return False
    known = p.versions.get(manifest.version)
    if known is not None:
        return p.lacks_root and known.manifest.digest == manifest.digest
    return manifest.version in p.lost and all(
        (m.run, m.fingerprint) == (manifest.run, manifest.fingerprint)
        and (m.parent != manifest.version or m.base_digest == manifest.digest)
        for m in (stored.manifest for stored in p.versions.values())
    )


def needs_whole(p: "PolicyVersions", manifest: VersionManifest) -> bool:
    """Whether ``manifest`` brings full weights of a version that is lost, or that nothing leads to
    any more."""
    if not manifest.of_kind("snapshot"):
        return False
    number = manifest.version
    return brings_back(p, manifest) or (number in p.versions and not p.reaches(number))


def check_joins(p: "PolicyVersions", manifest: VersionManifest) -> None:
    """Whether a new version may join the tree (``check_successor``) and rests on nothing lost.

    Raises:
        ParentLost: it does, or is lost itself; the trainer is to publish its weights whole.
        RemoteProtocolError: as ``check_successor``; or its number is below that of a lost one.
    """
    where = f"version {manifest.version} of {manifest.policy}"
    if manifest.parent is not None:
        for number in (manifest.version, manifest.parent):
            if number in p.lost:
                raise ParentLost(f"{where}: the stored manifest of version {number} is damaged")
        if p.lacks_root:
            raise ParentLost(f"{where}: the stored manifest of the first version is damaged")
    highest = max(p.lost, default=-1)
    if manifest.version <= highest:
        free = max((highest, *p.versions)) + 1
        raise RemoteProtocolError(f"{where}: the number is used; the next one is {free}")
    adrift = bool(p.versions) and (p.lacks_root or highest > p.newest or not p.reaches(p.newest))
    check_successor(manifest, p.versions, lost=adrift)
