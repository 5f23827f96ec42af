"""Names of the cloud's hosts, as on the wire."""

from typing import Final

from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE

SCHEDULER: Final = "scheduler"
LOG: Final = TRAJECTORY_LOG
STORE: Final = WEIGHT_STORE
