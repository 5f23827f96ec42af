"""The phases of a trainer."""

from enum import Enum


class Phase(Enum):
    JOINING = "joining"
    LOADING = "loading"
    WAITING = "waiting"
    FETCHING = "fetching"
    STEPPING = "stepping"
    FINISHING = "finishing"
    DONE = "done"
    EXITED = "exited"
