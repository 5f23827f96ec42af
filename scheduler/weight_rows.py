"""The versions of a policy as lists show them."""

import msgspec

from scheduler.weight_reading import PolicyShelf


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version; ``parent`` is None for one that came whole, ``created_wall_s`` is of the
    trainer's clock."""

    version: int
    parent: int | None
    step: int
    digest: str
    full_bytes: int
    delta_bytes: int
    created_wall_s: float


def version_rows(shelf: PolicyShelf) -> list[VersionRow]:
    """By number."""
    return [
        VersionRow(
            version=number,
            parent=stored.manifest.parent,
            step=stored.manifest.step,
            digest=stored.manifest.digest,
            full_bytes=stored.manifest.full_bytes,
            delta_bytes=sum(e.size_bytes for e in stored.manifest.of_kind("delta")),
            created_wall_s=stored.manifest.created_wall_s,
        )
        for number, stored in sorted(shelf.versions.items())
    ]
