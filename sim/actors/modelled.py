"""What stands for content in the simulator: sizes instead of deltas, tokens instead of bodies."""

from typing import NamedTuple

import msgspec

from transport.messages import GroupSummary


class ModelledPlan(msgspec.Struct, frozen=True):
    """What stands in a modelled plan's manifest: how much there is to fetch, what it makes, and
    whether it follows the plan unasked, as deltas do to one who has a copy."""

    size_bytes: int
    digest: str
    follows: bool = False


class Spooled(NamedTuple):
    """A body: what it holds in tokens, and when the agent accepted its attempt."""

    summary: GroupSummary
    tokens: int
    accepted_s: float
