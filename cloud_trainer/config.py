"""Settings of a trainer: its table ``[trainer]`` and the shared ones.

What is learnt and how (model, steps, learning rate) belongs to the run and comes from the
scheduler; this file only holds what belongs to the host.
"""

import msgspec

from transport.runtime.settings import Bytes, Count, DaemonConfig, PositiveSeconds


class TrainerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[trainer]``. ``policy`` is RUN/NAME."""

    policy: str = ""
    folder: str = "trainer"
    key: str = ""
    signing_key: str = ""
    device: str = "cpu"
    threads: Count = 1
    keep_checkpoints: Count = 2
    fetch_window_bytes: Bytes = 64 * 2**20
    fetch_timeout_s: PositiveSeconds = 10.0
    publish_timeout_s: PositiveSeconds = 120.0


class TrainerConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow trainer run`` reads."""

    trainer: TrainerTable = TrainerTable()
