"""The key ``critic`` of ``[policies.NAME.settings]``."""

from typing import Annotated

import msgspec
from msgspec import Meta


class CriticTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``critic``: the value head of ``baseline = "critic"``. ``gamma`` discounts, ``lam`` is that
    of the advantages, ``value_lam`` that of what the head is to predict (1: what came of the
    token). ``trunk_coefficient`` weighs the value loss where it reaches the policy's own weights;
    with 0 only the head learns from it. ``error_clip``: errors beyond it count linearly, 0 for
    none. In the first ``warmup_steps`` steps the head learns and the policy stays as it is. ``lr``
    is the head's: a step moves a value by about ``lr`` times the sum of the hidden state's
    magnitudes at most."""

    gamma: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    lam: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.95
    value_lam: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-4
    trunk_coefficient: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.1
    error_clip: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    warmup_steps: Annotated[int, Meta(ge=0, le=10**9)] = 0
