"""When nothing that comes back for a policy can be used.

A filter that objects to everything, or a workflow that fails every attempt, stops nobody: the quota
comes back, and other items are sampled for ever. So groups that were filtered or dropped and
attempts that failed are counted from the last group that reached the policy's buffer on; from
``BATCHES`` batches' worth of them in a row, at least ``LEAST``, it is an alert.

What always holds: bounded memory (reasons are names of filters and known codes); nothing is durable
(a new life starts counting anew); one group that can be used ends it. What nobody answers for (lost
agents) is not in it.
"""

from collections import Counter
from typing import Final

BATCHES: Final = 4
LEAST: Final = 16


class UnusableWatch:
    """What came to nothing for one policy since something last did."""

    __slots__ = ("_reasons", "since_s")

    def __init__(self) -> None:
        self._reasons: Counter[tuple[str, str]] = Counter()
        self.since_s = 0.0
        """When the first of them came."""

    def usable(self) -> None:
        """A group is buffered."""
        self._reasons.clear()

    def lost(self, what: str, reason: str, now: float) -> None:
        """A group or attempt came to nothing: ``filtered``, ``dropped`` or ``failed``."""
        if not self._reasons:
            self.since_s = now
        self._reasons[what, reason] += 1

    def standing(self, batch_groups: int) -> str:
        """Why nothing is usable and what to do; empty while that may be chance."""
        total = self._reasons.total()
        if total < max(LEAST, BATCHES * batch_groups):
            return ""
        (what, reason), times = self._reasons.most_common(1)[0]
        return (
            f"none of the last {total} groups and attempts could be used, {times}"
            f" {_SAYS.get(what, what)} {reason}: {_REMEDIES.get(what, _REMEDIES['dropped'])}"
        )


_SAYS: Final = {
    "filtered": "were filtered by",
    "failed": "failed with",
    "dropped": "were dropped as",
}
_REMEDIES: Final = {
    "filtered": "loosen or remove that filter in policies.NAME.data.filters, or choose other items"
    " (`farflow status` counts, `farflow explain JOB` tells of one)",
    "failed": "`farflow dead show` and the agents' logs (`farflow logs AGENT`) say why; correct the"
    " workflow, its settings or the reward, and submit the run again",
    "dropped": "look at `farflow explain JOB` of one of them",
}
