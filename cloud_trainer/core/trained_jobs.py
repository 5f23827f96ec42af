"""The jobs that a lineage was trained on, as a set that stays small for millions of them.

Job ids are counters (``RUN/t-000041``), so a prefix and a bit per number are enough: about one
bit a job where numbers are dense. Anything else is kept as text. Exact either way.
"""

from collections.abc import Iterable

_BLOCK_BITS = 1024
_MAX_DIGITS = 18


class TrainedJobs:
    """A set of job ids that only grows."""

    def __init__(self, jobs: Iterable[str] = ()) -> None:
        self._blocks: dict[tuple[str, int], int] = {}
        self._others: set[str] = set()
        self._count = 0
        for job in jobs:
            self.add(job)

    def add(self, job: str) -> None:
        if job in self:
            return
        self._count += 1
        number = _number(job)
        if number is None:
            self._others.add(job)
            return
        block, bit = divmod(number, _BLOCK_BITS)
        key = (_prefix(job), block)
        self._blocks[key] = self._blocks.get(key, 0) | 1 << bit

    def __contains__(self, job: str) -> bool:
        number = _number(job)
        if number is None:
            return job in self._others
        block, bit = divmod(number, _BLOCK_BITS)
        return bool(self._blocks.get((_prefix(job), block), 0) >> bit & 1)

    def __len__(self) -> int:
        return self._count


def _prefix(job: str) -> str:
    # The number of digits belongs to the prefix: t-7 and t-007 are different ids.
    head, _, digits = job.rpartition("-")
    return f"{head}-{len(digits)}"


def _number(job: str) -> int | None:
    digits = job.rpartition("-")[2]
    if digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS and "-" in job:
        return int(digits)
    return None
