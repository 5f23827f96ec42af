"""What the weight store should make next and what it should keep: decisions only, no files.

Ways that it makes beside the trainer's deltas:

    cumulative  version 0 -> every k-th version: what a joiner needs that has the released model
    composite   between versions 2, 4, ... 64 apart whose places in the lineage are multiples of
                that gap, so that any stretch is covered by few of them (dyadic intervals)
    bridge      from an abandoned version that agents hold to the head: a rollback then costs them
                a delta instead of the model

Cumulatives are made always and bridges whenever somebody needs one; composites only while agents
ask for such gaps, and within a share of one processor core (which the others count against).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

COMPOSITE_GAPS: Final = (64, 32, 16, 8, 4, 2)
JOINER_LIMIT: Final = 1.25
"""A snapshot is made when somebody with nothing would move more than this many times the model."""
CUMULATIVE_LIMIT: Final = 0.6
"""A cumulative over this part of the model is not kept: a snapshot serves as well."""


class Asked(NamedTuple):
    """An agent that held version ``have`` was given the way to ``target``."""

    have: int
    target: int


class CpuShare:
    """Work that takes ``share`` of one core on the average: after a job of c seconds, rest for
    c / share - c. Times are the caller's."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_s = float("-inf")

    def may_start(self, now_s: float) -> bool:
        return self._share > 0 and now_s >= self._free_s

    def spent(self, cpu_s: float, now_s: float) -> None:
        """A job that took ``cpu_s`` ended now."""
        if self._share > 0:
            self._free_s = max(self._free_s, now_s) + cpu_s * (1 / self._share - 1)


def aligned(path: Sequence[int], every: int) -> int | None:
    """The newest version of a lineage whose place is a multiple of ``every``; None before the
    first such (the root counts as none)."""
    place = (len(path) - 1) // every * every
    return path[place] if place > 0 else None


def next_bridge(
    path: Sequence[int],
    asked: Iterable[Asked],
    made: Collection[tuple[int, int]],
    usable: Collection[int],
) -> tuple[int, int] | None:
    """Base and version of the bridge to make next, None when none is wanted.

    ``path`` is the head's lineage, ``asked`` what agents asked for lately, ``made`` what there is
    or was not worth it, ``usable`` the versions that may be a base. One bridge to any version of
    the lineage is enough, the deltas lead on from there.
    """
    lineage = set(path)
    bridged = {base for base, version in made if version in lineage}
    strays = {ask.have for ask in asked} - lineage - bridged
    bases = [have for have in strays if have in usable and have < path[-1]]
    return (max(bases), path[-1]) if bases else None


def next_composite(
    path: Sequence[int],
    asked: Iterable[Asked],
    made: Collection[tuple[int, int]],
    usable: Collection[int],
) -> tuple[int, int] | None:
    """Base and version of the composite to make next, None when there is none; arguments as for
    ``next_bridge``.

    The newest of each gap, the largest gap first, of those at least half of which somebody lacked.
    A gap of one is the trainer's own delta and says nothing.
    """
    places = {version: place for place, version in enumerate(path)}
    lacked = [
        places[ask.target] - places[ask.have]
        for ask in asked
        if ask.have in places and ask.target in places
    ]
    longest = max((gap for gap in lacked if gap > 1), default=0)
    last = len(path) - 1
    for gap in COMPOSITE_GAPS:
        end = last - last % gap
        if end == 0 or gap > 2 * longest:
            continue
        pair = path[end - gap], path[end]
        if pair not in made and pair[0] in usable:
            return pair
    return None


def kept_versions(
    numbers: Sequence[int], acked: Iterable[int], *, keep: int, keep_max: int
) -> list[int]:
    """Versions whose files are kept: the last ``keep``, and all from the oldest one in ``acked``
    (what living agents hold) on, but no more than ``keep_max``: who lags further behind starts
    from version 0 or a snapshot. ``numbers`` rise."""
    recent = numbers[-keep:]
    known = set(numbers)
    oldest = min([version for version in acked if version in known], default=recent[0])
    kept = [number for number in numbers if number >= min(oldest, recent[0])]
    return kept[-max(keep, keep_max) :]
