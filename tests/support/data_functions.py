"""Data functions of a user, for tests: what a module in ``scheduler.data_modules`` may hold."""

from scheduler.data.registry import (
    AlgorithmSettings,
    NoSettings,
    curator,
    filter_function,
    replay_selector,
)
from scheduler.data.views import GroupView, ItemView


class EvenSettings(AlgorithmSettings):
    """Indices that are multiples of ``of``."""

    of: int = 2


@filter_function("even_items", EvenSettings)
def even_items(group: GroupView, settings: EvenSettings) -> bool:
    return group.index % settings.of == 0


@filter_function("broken")
def broken(group: GroupView, settings: NoSettings) -> bool:
    raise KeyError(group.index)


@replay_selector("lowest_index")
def lowest_index(group: GroupView, settings: NoSettings) -> float:
    return -float(group.index)


@replay_selector("hopeless")
def hopeless(group: GroupView, settings: NoSettings) -> float:
    return float("nan")


def undecorated(group: GroupView, settings: NoSettings) -> bool:
    return False


@curator("odd_items")
def odd_items(item: ItemView, settings: NoSettings) -> bool:
    return item.index % 2 == 1
