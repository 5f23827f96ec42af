"""Replay selectors that ship: which trained groups are trained on again.

A selector gives a group a number when it arrives; the core chooses by these numbers when a batch is
granted (``scheduler.core.replay_pool``), so a choice needs no word with the shell and a restart
makes it again.

What always holds: selectors are pure functions of the view and their settings.
"""

from typing import Annotated, Any, Final

from msgspec import Meta

from scheduler.data.registry import (
    Algorithm,
    AlgorithmSettings,
    NoSettings,
    replay_selector,
)
from scheduler.data.views import GroupView


@replay_selector("latest")
def latest(group: GroupView, settings: NoSettings) -> float:
    """Those trained on last go first."""
    return 0.0


@replay_selector("uniform", drawn=True)
def uniform(group: GroupView, settings: NoSettings) -> float:
    """All alike, drawn anew for each batch."""
    return 1.0


class PrioritisedSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """The weight is the group's mean |advantage| to the power ``exponent`` (0: all alike), as in
    prioritised experience replay (arXiv:1511.05952) with |advantage| in the place of the error."""

    exponent: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0


@replay_selector("prioritised", PrioritisedSettings, drawn=True)
def prioritised(group: GroupView, settings: PrioritisedSettings) -> float:
    """The further apart a group's rewards are, the more often; never one without a difference."""
    spread = group.reward_spread
    return float(spread**settings.exponent) if spread > 0.0 else 0.0


SELECTORS: Final[dict[str, Algorithm[Any]]] = {
    found.name: found for found in (latest, uniform, prioritised)
}
