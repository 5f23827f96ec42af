"""Settings of the scheduler daemon: its table ``[scheduler]`` and the shared ones."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.runtime.settings import Bytes, Count, DaemonConfig, PositiveSeconds, Seconds


class SchedulerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``. ``durability`` says what an acknowledged row survives."""

    folder: str = "scheduler"
    placement: Literal[
        "finish-time", "round-robin", "least-outstanding", "nearest", "two-choices"
    ] = "finish-time"
    durability: Literal["power-loss", "process-crash"] = "power-loss"
    heartbeat_s: PositiveSeconds = 2.0
    suspect_after_missed: Count = 3
    lost_after_s: PositiveSeconds = 12.0
    lease_s: PositiveSeconds = 120.0
    offer_timeout_s: PositiveSeconds = 10.0
    reconnect_grace_s: Seconds = 30.0
    work_grace_s: PositiveSeconds = 600.0
    retry_backoff_s: Seconds = 1.0
    retry_backoff_max_s: PositiveSeconds = 60.0
    prefetch_groups: Annotated[int, Meta(ge=0, le=64)] = 1
    max_queued_jobs: Count = 100_000
    cumulative_every_versions: Count = 16
    keep_versions: Count = 64
    trajectory_segment_bytes: Bytes = 64 * 2**20
    trajectory_disk_bytes: Bytes = 64 * 2**30

    def __post_init__(self) -> None:
        """Raises ValueError for times that contradict each other."""
        least_s = 2 * self.heartbeat_s
        for key, value_s in (("lost_after_s", self.lost_after_s), ("lease_s", self.lease_s)):
            if value_s < least_s:
                raise ValueError(
                    f"{key} = {value_s:g} is shorter than two heartbeats (heartbeat_s ="
                    f" {self.heartbeat_s:g}), so that one late message costs work; raise {key} to"
                    f" {least_s:g} or more, or lower heartbeat_s"
                )


class SchedulerConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow scheduler run`` reads."""

    scheduler: SchedulerTable = SchedulerTable()
