"""The key ``lora`` of ``[policies.NAME.settings]``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class LoraTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora``: train adapters of ``rank`` beside the linear layers named by ``targets`` (the last
    part of a module's name, as in ``q_proj``; ``all-linear`` takes every one but the head) instead
    of the model. ``seed`` is that of their start. ``publish``: the ``merged`` model, for which any
    engine will do, or the ``adapter`` alone, for agents whose engine takes adapters and that have
    the model (``agent.local_models``); then its parts have ``dtype``: ``float32``, as they are
    trained, or the type of the ``model``, half the bytes and rounded."""

    rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 32.0
    targets: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)] = ("all-linear",)
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    publish: Literal["merged", "adapter"] = "merged"
    dtype: Literal["float32", "model"] = "float32"
