"""Curators that ship: items that are not worth a group now.

A curator says whether an item is skipped, before it becomes a job, from what came of it and of its
family before. An item that comes up only once (an endless generator) has no history of its own: for
such sources only ``difficulty_band`` with ``by = "family"`` says anything.

What always holds: curators are pure functions of the view and their settings; where they are to be
undecided they use ``ItemView.chance``, which is fixed for a run's seed and an item's index.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from scheduler.data.registry import Algorithm, AlgorithmSettings, curator
from scheduler.data.views import ItemView

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Reward = Annotated[float, Meta(ge=-1e15, le=1e15)]
Remembered = Annotated[int, Meta(ge=1, le=8)]


class SolvedOutSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """The last ``groups`` of the item had a mean reward of at least ``reward``; a share ``explore``
    of such items is tried again all the same."""

    groups: Remembered = 2
    reward: Reward = 1.0
    explore: Share = 0.0


@curator("solved_out", SolvedOutSettings)
def solved_out(item: ItemView, settings: SolvedOutSettings) -> bool:
    """There is nothing left to learn from it."""
    last = item.own.means[-settings.groups :]
    solved = len(last) == settings.groups and min(last) >= settings.reward
    return solved and item.chance >= settings.explore


class GresoSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """Of an item whose last z groups had equal rewards a share ``easy`` ** z is tried again where
    the rewards were at least ``reward``, otherwise a share ``hard`` ** z."""

    easy: Share = 0.5
    hard: Share = 0.5
    reward: Reward = 1.0


@curator("greso", GresoSettings)
def greso(item: ItemView, settings: GresoSettings) -> bool:
    """Groups with equal rewards tend to follow such groups: skip an item the likelier, the more of
    them it had in a row (GRESO, arXiv:2506.02177, with fixed instead of controlled shares)."""
    streak = 0
    for spread in reversed(item.own.spreads):
        if spread > 0.0:
            break
        streak += 1
    if not streak:
        return False
    is_easy = item.own.means[-1] >= settings.reward
    share = settings.easy if is_easy else settings.hard
    return item.chance >= float(share**streak)


class DifficultyBandSettings(AlgorithmSettings, frozen=True, kw_only=True):
    """The moving average of mean rewards, of the item or its family (``by``), is wanted from
    ``low`` to ``high`` once ``groups`` of them came back; a share ``explore`` of the others is
    tried all the same, because the policy changes."""

    low: Reward = 0.05
    high: Reward = 0.95
    by: Literal["item", "family"] = "item"
    groups: Annotated[int, Meta(ge=1, le=10**6)] = 2
    explore: Share = 0.05

    def __post_init__(self) -> None:
        """Raises ValueError for an empty band."""
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}; swap them")


@curator("difficulty_band", DifficultyBandSettings)
def difficulty_band(item: ItemView, settings: DifficultyBandSettings) -> bool:
    """Too easy or too hard for now."""
    history = item.own if settings.by == "item" else item.of_family
    if history.groups < settings.groups:
        return False
    outside = not settings.low <= history.reward <= settings.high
    return outside and item.chance >= settings.explore


CURATORS: Final[dict[str, Algorithm[Any]]] = {
    found.name: found for found in (solved_out, greso, difficulty_band)
}
