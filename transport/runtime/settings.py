"""The tables that every daemon of a deployment shares: where the planes are, keys and logs.

Fields ending in ``_s`` and ``_bytes`` take numbers or texts such as ``"1500ms"`` and ``"64MiB"``.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.hosts import host_fault, listen_fault
from transport.ids import NAME_RULE, is_name

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Count = Annotated[int, Meta(ge=1, le=10**9)]


class RelayAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A relay that an agent asks for chunks before it asks the weight store; ``relays/NAME.toml``
    in the folder of keys is its public key."""

    name: str
    host: str
    port: Port = 7704

    def __post_init__(self) -> None:
        fault = host_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")
        if not is_name(self.name):  # it is a file's name too
            raise ValueError(f"name {self.name!r} is not {NAME_RULE}")


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the three planes listen (scheduler) or are reached (everybody else); port 0 lets the
    scheduler choose and say so. The scheduler listens on ``enrolment_port`` too while a token lets
    new agents in (``farflow token create``). ``keys`` is the folder of key files, as in
    ``transport/keys.py``; a relative path counts from the folder a command is started in.
    ``weights_lanes`` bounds an agent's connections to the weight store, ``relays`` are those that
    it asks first."""

    host: str = "127.0.0.1"
    control_port: Port = 7700
    trajectories_port: Port = 7701
    weights_port: Port = 7702
    enrolment_port: Port = 7703
    keys: str = "keys"
    weights_lanes: Annotated[int, Meta(ge=1, le=16)] = 4
    relays: tuple[RelayAddress, ...] = ()
    socket_heartbeat_s: PositiveSeconds = 10.0
    reconnect_max_s: PositiveSeconds = 30.0

    def __post_init__(self) -> None:
        fault = listen_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")
        names = [relay.name for relay in self.relays]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"relays: {twice[0]!r} is there twice; give each relay its own name")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``format`` auto: console on a terminal, JSON lines elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every daemon reads; each adds its own table, the other tables of a file belong to
    others."""

    transport: TransportConfig = TransportConfig()
    log: LogConfig = LogConfig()
