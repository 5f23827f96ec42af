"""``[policies.NAME.settings]`` of ``trainer = "torch"``."""

from typing import Annotated

import msgspec
from msgspec import Meta

from cloud_trainer.advantages import AdvantageMethod


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW (decoupled weight decay, arXiv:1711.05101) with linear warm-up, and the loss of
    ``cloud_trainer.losses``. ``temperature`` must be the one that sequences are drawn at: recorded
    log-probabilities are taken there."""

    lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-4
    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    epsilon: Annotated[float, Meta(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0.0)] = 1.0
    clip_low: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Meta(gt=0.0)] = 0.2
    ratio_max: Annotated[float, Meta(gt=1.0)] = 3.0
    advantages: AdvantageMethod = "group_std"
    micro_batch_tokens: Annotated[int, Meta(ge=1)] = 16384
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
