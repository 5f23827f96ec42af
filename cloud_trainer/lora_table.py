"""The key ``lora`` of ``[policies.NAME.settings]``."""

from typing import Annotated

import msgspec
from msgspec import Meta


class LoraTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora``: train adapters of ``rank`` beside the linear layers named by ``targets`` (the last
    part of a module's name, as in ``q_proj``; ``all-linear`` takes every one but the head) instead
    of the model. ``seed`` is that of their start."""

    rank: Annotated[int, Meta(ge=1, le=4096)] = 16
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 32.0
    targets: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)] = ("all-linear",)
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
