"""Digests of bodies that were released lately, in bounded memory."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

MAX_REMEMBERED: Final = 65_536
"""Digests; some 15 MiB."""


class LatelyReleased:
    """The last ``most`` different digests. One thread writes, any may ask."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._digests: dict[str, None] = {}  # the latest last

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._digests.pop(digest, None)
            self._digests[digest] = None
        for digest in list(islice(self._digests, max(0, len(self._digests) - self._most))):
            del self._digests[digest]
