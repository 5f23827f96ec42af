"""What a data function sees.

What always holds: views are immutable and hold facts alone; equal facts give equal views, in the
daemon as in the simulator.
"""

import msgspec


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group that came back, as one policy sees it.

    ``policy`` is the name in the run's file. ``rewards`` and ``lengths`` (tokens) are of the
    sequences that hold tokens of this policy; ``sequences`` counts all of the group, and
    ``truncated`` those of them that were cut off at their limit. ``prompt_tokens`` counts each
    prompt once. ``index`` and ``family`` are the item's; ``oldest`` and ``newest`` the versions
    that drew tokens of this policy."""

    run: str
    policy: str
    index: int
    family: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    sequences: int
    truncated: int
    prompt_tokens: int
    oldest: int
    newest: int

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def reward_spread(self) -> float:
        """Mean distance of the rewards from their mean: the mean |advantage| without scaling."""
        mean = self.reward_mean
        return sum(abs(reward - mean) for reward in self.rewards) / len(self.rewards)


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an item, or of all items of a family: how many groups came back, their mean
    reward as a moving average (a fifth of it is the last group's), and of the last eight groups at
    most the mean reward and how far rewards were apart, oldest first."""

    groups: int = 0
    reward: float = 0.0
    means: tuple[float, ...] = ()
    spreads: tuple[float, ...] = ()


class ItemView(msgspec.Struct, frozen=True, kw_only=True):
    """A training item that is about to become a group. ``own`` is the history of this very item
    (told by its prompt), ``of_family`` that of its task family; ``chance`` is a number in [0, 1)
    that is fixed for the run's seed and the index."""

    run: str
    index: int
    family: str
    prompt: str
    chance: float
    own: HistoryView = HistoryView()
    of_family: HistoryView = HistoryView()
