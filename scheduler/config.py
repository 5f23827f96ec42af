"""Settings of the scheduler daemon: its table ``[scheduler]`` and the shared ones."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from scheduler.autoscaler import AutoscalerTable
from scheduler.http_addresses import networks
from transport.hosts import host_fault, listen_fault
from transport.mqtt_topics import base_fault
from transport.runtime.settings import Bytes, Count, DaemonConfig, Port, PositiveSeconds, Seconds


class SchedulerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``. ``durability`` says what an acknowledged row survives. The last
    ``keep_versions`` of each policy are kept, and for agents that lag further behind up to
    ``keep_versions_max``; ``composite_cpu_share`` of one core goes into shortcuts for them.
    ``weights_http_port`` serves weight files over HTTP (0: not at all) at ``weights_http_host``,
    beyond this machine only with ``weights_http_certificate`` (PEM, with its chain) and
    ``weights_http_key`` (PEM, unencrypted). ``services_metrics_port`` and the one after it serve
    the metrics of trajectory log and weight store on this machine (0: not at all).
    ``tenant_shares`` weighs the tenants of runs (1 where not named); ``egress_usd_gb`` is what 10^9
    bytes of weights that leave here cost.
    ``data_modules`` are the modules whose filters, replay selectors and curators runs may name;
    they are imported here, at the start, and run on the deciding loop: they must be quick.
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
    services_metrics_port: Annotated[int, Meta(ge=0, le=65534)] = 0
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
        fault = listen_fault(self.weights_http_host)
        if fault:
            raise ValueError(f"weights_http_host: {fault}")
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


class HttpTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[http]``: the scheduler's HTTP interface and dashboard (docs/http-api.md), on ``port`` of
    ``host`` unless ``enabled`` is false; port 0 is any free one, which is remembered. Beyond this
    machine it is reached only with ``certificate`` (PEM, with its chain) and ``key`` (PEM,
    unencrypted). Of ``max_connections`` one address has at most ``max_connections_per_address``;
    this machine, and the addresses and networks in ``shared_addresses``, behind which many sit (a
    proxy, an office), are bounded by the first alone. A token may ask ``requests_per_s`` times a
    second (twice as often for a moment); a request's body has at most ``max_body_bytes``.
    ``open_metrics`` gives ``/metrics`` without a token to this machine. ``site`` is where the
    scheduler stands on the dashboard's map, as in agents' label ``site``. ``wheel`` is a file that
    it gives to boxes that install farflow, as ``/v1/wheel/NAME``; it needs no token, as nothing in
    it is secret."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 7780
    certificate: str = ""
    key: str = ""
    max_connections: Annotated[int, Meta(ge=4, le=10_000)] = 256
    max_connections_per_address: Annotated[int, Meta(ge=1, le=10_000)] = 64
    shared_addresses: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    requests_per_s: Annotated[float, Meta(ge=0.1, le=1e5)] = 20.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**26)] = 2**20
    open_metrics: bool = False
    site: Annotated[str, Meta(max_length=64)] = ""
    wheel: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other, or are no addresses."""
        try:
            networks(self.shared_addresses)
        except ValueError as error:
            raise ValueError(
                f"shared_addresses: {error}; write addresses or networks, as 192.0.2.7 or"
                " 192.0.2.0/24"
            ) from error
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key belong together; set both or none")
        fault = listen_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")
        if self.enabled and not self.certificate and not _is_loopback(self.host):
            raise ValueError(
                f"host = {self.host} is reached from other machines, and without TLS they would"
                " send their tokens in the clear; set certificate and key, or host = 127.0.0.1"
            )
        if self.open_metrics and not _is_loopback(self.host):
            raise ValueError(
                f"open_metrics: with host = {self.host} anybody could read them; give the collector"
                " a token of role viewer instead"
            )


class MqttTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[mqtt]``: a bridge to a broker (docs/mqtt.md), part of the HTTP server's process. Topics
    begin with ``base_topic``; numbers are said every ``interval_s``. With ``commands`` orders that
    are signed with an operator's HTTP token are carried out. ``tls`` checks the broker against the
    system's authorities, or those in ``ca_file``; ``password_file`` holds the password of
    ``username``. A broker that is silent for twice ``keepalive_s`` is left, and tried again after
    1 s, 2 s and so on up to ``retry_max_s``. With ``home_assistant`` the agents' sensors are
    described below ``discovery_prefix``."""

    enabled: bool = False
    host: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    base_topic: str = "farflow"
    interval_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 10.0
    commands: bool = False
    tls: bool = False
    ca_file: str = ""
    username: str = ""
    password_file: str = ""
    keepalive_s: Annotated[int, Meta(ge=1, le=3600)] = 30
    retry_max_s: Annotated[float, Meta(ge=0.1, le=3600.0)] = 60.0
    home_assistant: bool = False
    discovery_prefix: str = "homeassistant"

    def __post_init__(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        fault = host_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")
        for key in ("base_topic", "discovery_prefix"):
            fault = base_fault(getattr(self, key))
            if fault:
                raise ValueError(f"{key} {getattr(self, key)!r} {fault}")
        if self.ca_file and not self.tls:
            raise ValueError("ca_file is of no use without TLS; set tls = true")
        if bool(self.username) != bool(self.password_file):
            raise ValueError("username and password_file belong together; set both or none")
        if self.password_file and not self.tls and not _is_loopback(self.host):
            raise ValueError(
                f"password_file: without TLS the password would go to {self.host} in the clear;"
                " set tls = true"
            )


class SchedulerConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow scheduler run`` reads."""

    scheduler: SchedulerTable = SchedulerTable()
    http: HttpTable = HttpTable()
    mqtt: MqttTable = MqttTable()

    def __post_init__(self) -> None:
        """Raises ValueError for tables that contradict each other."""
        if self.mqtt.enabled and not self.http.enabled:
            raise ValueError("mqtt.enabled needs http.enabled: the bridge is in its process")
