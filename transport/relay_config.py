"""Settings of a relay: its table ``[relay]`` and the shared ones."""

import msgspec

from transport.hosts import listen_fault
from transport.runtime.settings import Bytes, DaemonConfig, Port


class RelayTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[relay]``. ``host`` and ``port`` are where it listens for agents; ``[transport]`` says
    where the weight store is, and its folder ``keys`` who may connect. ``window_bytes`` bounds what
    is on its way from there."""

    folder: str = "relay"
    key: str = ""
    host: str = "127.0.0.1"
    port: Port = 7704
    cache_bytes: Bytes = 64 * 2**30
    window_bytes: Bytes = 64 * 2**20

    def __post_init__(self) -> None:
        fault = listen_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")


class RelayConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow relay run`` reads."""

    relay: RelayTable = RelayTable()
