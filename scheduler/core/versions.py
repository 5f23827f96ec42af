"""The version tree of a policy and what "lag" means.

    lag(v) = optimizer steps on the tree path from v to the head
           = step(v) - step(a) + step(head) - step(a),  a = nearest common ancestor of v and head

so tokens of a lineage that was left count the steps back to the fork too. For a token newer than
the head (its version was announced before the step's report) the lag is 0.

What always holds: version numbers grow along every path; ``lag`` is None for versions that can
not be placed (never announced, or pruned because no head can come near them again), and such
tokens are never trained on. A number just above everything known is of a version whose
announcement is still on its way and counts as newest.

Example: 0-1-2-3 with a rollback to 1 and 1-4 (step 2): lag(3) at head 4 is 2 + 1 = 3, lag(1) is 1.
"""

from scheduler.core.state import Version

AHEAD = 64
"""How far above the highest known number an unannounced version may be."""


class VersionTree:
    """Nodes by number, the head, and cached lags for it."""

    def __init__(self) -> None:
        self.nodes: dict[int, Version] = {}
        self.head = 0
        self.highest = -1
        self.newest_stored = -1
        self.floor = -1
        self._lags: dict[int, int | None] = {}

    def put(self, node: Version) -> None:
        """Add or replace a node."""
        self.nodes[node.version] = node
        self.highest = max(self.highest, node.version)
        if node.stored:
            self.newest_stored = max(self.newest_stored, node.version)
        self._lags.clear()

    def drop(self, version: int) -> None:
        self.nodes.pop(version, None)
        self._lags.pop(version, None)

    def move_head(self, version: int, floor: int) -> None:
        """Training goes on from ``version``; numbers up to ``floor`` were given before the last
        rollback, so that a descendant of the head among them is of a lineage that was left."""
        self.head = version
        self.floor = floor
        self._lags.clear()

    @property
    def head_step(self) -> int:
        node = self.nodes.get(self.head)
        return 0 if node is None else node.step

    def lag(self, version: int) -> int | None:
        """Optimizer steps between ``version`` and the head, None when that is unknowable."""
        if version in self._lags:
            return self._lags[version]
        found = self._find_lag(version)
        if len(self._lags) < 4 * len(self.nodes) + AHEAD:
            self._lags[version] = found
        return found

    def deadline(self, version: int, bound: int) -> int | None:
        """The last head step at which tokens of ``version`` are usable if training goes on from
        the present head; None when they are not even now."""
        lag = self.lag(version)
        if lag is None or lag > bound:
            return None
        node = self.nodes.get(version)
        ahead = 0
        if node is not None and lag == 0:
            ahead = max(0, node.step - self.head_step)
        return self.head_step + bound - lag + ahead

    def is_ancestor(self, version: int, of: int) -> bool:
        """Whether ``version`` is ``of`` or on the way from the root to it."""
        at: int | None = of
        while at is not None and at > version:
            node = self.nodes.get(at)
            at = None if node is None else node.parent
        return at == version

    def prunable(self, below_step: int, keep: frozenset[int]) -> list[int]:
        """Versions made before ``below_step`` that nothing in ``keep`` names."""
        return [
            number
            for number, node in self.nodes.items()
            if node.step < below_step and number not in keep and number != self.head
        ]

    def _find_lag(self, version: int) -> int | None:
        head = self.nodes.get(self.head)
        if head is None:
            return None
        node = self.nodes.get(version)
        if node is None:
            return 0 if self.highest < version <= self.highest + AHEAD else None
        low: Version | None = node
        high: Version | None = head
        while low is not None and high is not None and low.version != high.version:
            # The larger number cannot be an ancestor of the smaller one.
            if low.version > high.version:
                low = self._parent(low)
            else:
                high = self._parent(high)
        if low is None or high is None:
            return None
        if low.version == head.version:
            return node.step - head.step if node.version <= self.floor else 0
        return node.step + head.step - 2 * low.step

    def _parent(self, node: Version) -> Version | None:
        return None if node.parent is None else self.nodes.get(node.parent)
