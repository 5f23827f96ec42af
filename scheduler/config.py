"""Settings of the scheduler daemon: its table ``[scheduler]`` and the shared ones."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from scheduler.autoscaler import AutoscalerTable
from transport.runtime.settings import Bytes, Count, DaemonConfig, Port, PositiveSeconds, Seconds


class SchedulerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``. ``durability`` says what an acknowledged row survives. The last
    ``keep_versions`` of each policy are kept, and for agents that lag further behind up to
    ``keep_versions_max``; ``composite_cpu_share`` of one core goes into shortcuts for them.
    ``weights_http_port`` serves weight files over HTTP (0: not at all) at ``weights_http_host``,
    beyond this machine only with ``weights_http_certificate`` (PEM, with its chain) and
    ``weights_http_key`` (PEM, unencrypted). ``tenant_shares`` weighs the tenants of runs (1 where
    not named); ``egress_usd_gb`` is what 10^9 bytes of weights that leave here cost.
    ``data_modules`` are the modules whose filters, replay selectors and curators runs may name;
    they are imported here, at the start, and run beside the deciding loop.
    ``task_modules`` are the modules whose functions runs may name as task sources (``[task]
    function``); they are imported in the process that makes a run's items, never in ours."""

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
    max_queued_jobs: Count = 125_000
    attempt_max_s: PositiveSeconds = 3600.0
    max_dead_letters: Count = 1000
    max_results_per_submitter: Count = 100_000
    remembered_results: Count = 10_000
    cumulative_every_versions: Count = 16
    keep_versions: Count = 64
    keep_versions_max: Count = 256
    composite_cpu_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    trajectory_segment_bytes: Bytes = 64 * 2**20
    trajectory_disk_bytes: Bytes = 64 * 2**30
    weights_http_host: str = "127.0.0.1"
    weights_http_port: Port = 0
    weights_http_certificate: str = ""
    weights_http_key: str = ""
    tenant_shares: dict[str, Annotated[float, Meta(gt=0.0, le=1e6)]] = {}
    egress_usd_gb: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    data_modules: Annotated[tuple[str, ...], Meta(max_length=32)] = ()
    task_modules: Annotated[tuple[str, ...], Meta(max_length=32)] = ()
    autoscaler: AutoscalerTable = AutoscalerTable()

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        if self.keep_versions_max < self.keep_versions:
            raise ValueError(
                f"keep_versions_max = {self.keep_versions_max} is less than keep_versions ="
                f" {self.keep_versions}; raise the first or lower the second"
            )
        least_s = 2 * self.heartbeat_s
        for key, value_s in (("lost_after_s", self.lost_after_s), ("lease_s", self.lease_s)):
            if value_s < least_s:
                raise ValueError(
                    f"{key} = {value_s:g} is shorter than two heartbeats (heartbeat_s ="
                    f" {self.heartbeat_s:g}), so that one late message costs work; raise {key} to"
                    f" {least_s:g} or more, or lower heartbeat_s"
                )
        if bool(self.weights_http_certificate) != bool(self.weights_http_key):
            raise ValueError(
                "weights_http_certificate and weights_http_key belong together; set both or none"
            )
        plain = self.weights_http_port and not self.weights_http_certificate
        if plain and not _is_loopback(self.weights_http_host):
            raise ValueError(
                f"weights_http_host = {self.weights_http_host} is reached from other machines, and"
                " without TLS they would send the token in the clear; set weights_http_certificate"
                " and weights_http_key, or weights_http_host = 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: where it leads is not ours to say


class SchedulerConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow scheduler run`` reads."""

    scheduler: SchedulerTable = SchedulerTable()
