"""Settings of the pure core: the durations and limits that its decisions depend on.

The daemon builds this from ``[scheduler]``; the simulator and the tests build it directly. Fields
that the table has too mean the same there.
"""

from typing import Literal

import msgspec

PlacementName = Literal["finish-time", "round-robin", "least-outstanding", "nearest", "two-choices"]

TRAJECTORY_LOG = "trajectory-log"
WEIGHT_STORE = "weight-store"


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds.

    ``shortlist`` bounds how many agents one placement looks at; fleets with no more free agents
    than that are searched in full, of larger ones a quarter of it is drawn.
    ``heartbeat_scale_agents`` is the fleet size above which the assigned heartbeat interval grows
    in proportion. ``remembered_results`` is how many confirmed results of a submitter are known
    again when their jobs are submitted once more. An attempt that its agent has held for
    ``attempt_max_s`` counts as lost, however often it is renewed. With ``prompts_on_disk`` the
    items of submitters' jobs are rows of their own, and the shell puts them into the offers.
    ``task_modules`` are those that a run's own task source may be in.
    """

    placement: PlacementName = "finish-time"
    heartbeat_s: float = 2.0
    suspect_after_missed: int = 3
    lost_after_s: float = 12.0
    lease_s: float = 120.0
    offer_timeout_s: float = 10.0
    reconnect_grace_s: float = 30.0
    work_grace_s: float = 600.0
    retry_backoff_s: float = 1.0
    retry_backoff_max_s: float = 60.0
    prefetch_groups: int = 1
    max_queued_jobs: int = 125_000
    shortlist: int = 64
    heartbeat_scale_agents: int = 1000
    story_length: int = 20_000
    release_repeat_s: float = 15.0
    produce_repeat_s: float = 30.0
    forget_agent_s: float = 86_400.0
    tenant_shares: dict[str, float] = {}
    egress_usd_gb: float = 0.0
    max_dead_letters: int = 1000
    max_results_per_submitter: int = 100_000
    remembered_results: int = 10_000
    attempt_max_s: float = 3600.0
    prompts_on_disk: bool = False
    task_modules: tuple[str, ...] = ()
