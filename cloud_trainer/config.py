"""Settings of a trainer: its table ``[trainer]`` and the shared ones.

What is learnt and how (model, steps, learning rate) belongs to the run and comes from the
scheduler; this file only holds what belongs to the host.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.runtime.settings import Bytes, Count, DaemonConfig, Port, PositiveSeconds


class PublicationTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[trainer.publication]``: how versions are coded. ``coder`` auto chooses by cost, segment by
    segment, for agents behind a link of ``link_bits_per_s``; ``threads`` 0 takes all cores; the
    digest that reads every byte is computed for every ``full_digest_every``-th version."""

    coder: Literal["auto", "small", "fast", "portable", "absolute"] = "auto"
    link_bits_per_s: Annotated[float, Meta(ge=1e3, le=1e13)] = 100e6
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    full_digest_every: Count = 16


class TrainerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[trainer]``. ``policy`` is RUN/NAME. ``ranks`` processes share the model (FSDP2), each with
    a ``device`` and ``threads`` of its own; one that is lost or silent for ``rank_timeout_s`` ends
    the others. ``wandb`` names a project of Weights & Biases that metrics go to as well;
    ``metrics_port`` serves them to Prometheus on this machine (0: not at all)."""

    policy: str = ""
    folder: str = "trainer"
    key: str = ""
    signing_key: str = ""
    device: str = "cpu"
    threads: Count = 1
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 1
    rank_timeout_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 600.0
    wandb: Annotated[str, Meta(max_length=128)] = ""
    metrics_port: Port = 0
    keep_checkpoints: Count = 2
    fetch_window_bytes: Bytes = 64 * 2**20
    fetch_timeout_s: PositiveSeconds = 10.0
    publish_timeout_s: PositiveSeconds = 120.0
    publication: PublicationTable = PublicationTable()


class TrainerConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow trainer run`` reads."""

    trainer: TrainerTable = TrainerTable()
