"""Filters that ship: groups that would teach a policy nothing, or the wrong thing.

A filter says whether it objects. An objected group is not trained on, its copy counts as
``filtered`` with the filter's name, and its quota comes back, so that another group is sampled in
its place: ``zero_advantage`` therefore is dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).

What always holds: filters are pure functions of the view and their settings.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from scheduler.data.registry import Algorithm, AlgorithmSettings, filter_function
from scheduler.data.views import GroupView


class ZeroAdvantageSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """Rewards that are no further apart than ``tolerance`` count as equal."""

    tolerance: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0


@filter_function("zero_advantage", ZeroAdvantageSettings)
def zero_advantage(group: GroupView, settings: ZeroAdvantageSettings) -> bool:
    """All rewards are equal, so every advantage over the group is zero. A group of one sequence
    has nothing to be compared with, and stays."""
    if len(group.rewards) < 2:
        return False
    return max(group.rewards) - min(group.rewards) <= settings.tolerance


class OverlongSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """``any`` or ``all`` sequences longer than ``tokens``."""

    tokens: Annotated[int, Meta(ge=1, le=10**9)]
    sequences: Literal["any", "all"] = "any"


@filter_function("overlong", OverlongSettings)
def overlong(group: GroupView, settings: OverlongSettings) -> bool:
    """Sequences are longer than is wanted."""
    longest = min(group.lengths) if settings.sequences == "all" else max(group.lengths)
    return longest > settings.tokens


class TruncatedSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """More than ``share`` of the sequences."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


@filter_function("truncated", TruncatedSettings)
def truncated(group: GroupView, settings: TruncatedSettings) -> bool:
    """Too many sequences were cut off at their limit: their rewards say little."""
    return group.truncated > settings.share * group.sequences


class RewardBandSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """Mean rewards from ``low`` to ``high`` are wanted."""

    low: Annotated[float, Meta(ge=-1e15, le=1e15)] = -1e15
    high: Annotated[float, Meta(ge=-1e15, le=1e15)] = 1e15

    def __post_init__(self) -> None:
        """Raises ValueError for an empty band."""
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}; swap them")


@filter_function("reward_band", RewardBandSettings)
def reward_band(group: GroupView, settings: RewardBandSettings) -> bool:
    """The group's mean reward is outside the band: too easy or too hard."""
    return not settings.low <= group.reward_mean <= settings.high


FILTERS: Final[dict[str, Algorithm[Any]]] = {
    found.name: found for found in (zero_advantage, overlong, truncated, reward_band)
}
