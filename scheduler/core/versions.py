"""The version tree of a policy and what "lag" means.

    path_lag(v) = optimizer steps on the tree path from v to the head
                = step(v) - step(a) + step(head) - step(a),  a = nearest common ancestor

so tokens of a lineage that was left count the steps back to the fork too. While a step runs the
trainer may be ahead of the head that we know of; for a version that descends from the head on no
lineage known to be left, ``lag`` is therefore 0. When a batch is granted the trainer has just named
its head, and ``path_lag`` is exact.

What always holds: version numbers grow along every path. Both are None for a version that has no
place in the tree: its announcement, or that of one before it, is still on its way (a number just
above everything known counts as newest for ``lag``), or it was pruned because no head can come
near it again. Such tokens are not trained on as long as that is so.

Example: 0-1-2-3 with a rollback to 1 and 1-4 (step 2): path_lag(3) at head 4 is 2 + 1 = 3, that of
1 is 1.
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
        """Optimizer steps from ``version`` to the head, 0 for what is ahead of it."""
        if version in self._lags:
            return self._lags[version]
        found = self._find_lag(version)
        if len(self._lags) < 4 * len(self.nodes) + AHEAD:
            self._lags[version] = found
        return found

    def deadline(self, version: int, bound: int) -> int | None:
        """The last head step at which tokens of ``version`` are usable if training goes on from
        the present head; None when they are not even now, or have no place yet."""
        lag, node = self.lag(version), self.nodes.get(version)
        if node is None or lag is None or lag > bound:
            return None
        ahead = max(0, node.step - self.head_step) if lag == 0 else 0
        return self.head_step + bound - lag + ahead

    def prunable(self, below_step: int, keep: frozenset[int]) -> list[int]:
        """Versions made before ``below_step`` that nothing in ``keep`` names."""
        return [
            number
            for number, node in self.nodes.items()
            if node.step < below_step and number not in keep and number != self.head
        ]

    def path_lag(self, version: int) -> int | None:
        """Optimizer steps on the path between ``version`` and the head."""
        node, head = self.nodes.get(version), self.nodes.get(self.head)
        low, high = node, head
        while low is not None and high is not None and low.version != high.version:
            # The larger number cannot be an ancestor of the smaller one.
            if low.version > high.version:
                low = self._parent(low)
            else:
                high = self._parent(high)
        if node is None or head is None or low is None or high is None:
            return None
        return node.step + head.step - 2 * low.step

    def may_be_placed(self, version: int) -> bool:
        """Whether an announcement may still give ``version`` a place."""
        oldest = min(self.nodes, default=0)
        return oldest < version <= self.highest + AHEAD

    def _find_lag(self, version: int) -> int | None:
        if self.highest < version <= self.highest + AHEAD and self.head in self.nodes:
            return 0
        return 0 if self._is_ahead(version) else self.path_lag(version)

    def _is_ahead(self, version: int) -> bool:
        """Whether ``version`` descends from the head on no lineage known to be left."""
        at: int | None = version
        while at is not None and at > max(self.head, self.floor):
            node = self.nodes.get(at)
            at = None if node is None else node.parent
        return at == self.head

    def _parent(self, node: Version) -> Version | None:
        return None if node.parent is None else self.nodes.get(node.parent)
