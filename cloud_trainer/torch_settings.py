"""``[policies.NAME.settings]`` of ``trainer = "torch"``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cloud_trainer.advantages import Baseline, Normalisation
from cloud_trainer.critic_table import CriticTable
from cloud_trainer.lora_table import LoraTable

Preset = Literal["farflow", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "m2po", "ppo"]
RatioLevel = Literal["token", "sequence"]
ClipForm = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Precision = Literal["float32", "bfloat16"]

Coefficient = Annotated[float, Meta(ge=0.0, le=1e6)]


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW (decoupled weight decay, arXiv:1711.05101) with linear warm-up, and the loss that
    docs/learning.md describes. A ``preset`` sets the keys of the loss to what the paper of its name
    uses; a key that is given wins over it, and the defaults below are those of ``farflow``. 0 turns
    off ``ratio_max``, ``overlong_penalty``, ``kl_coefficient``, ``importance_cap`` and
    ``second_moment_budget``. ``max_tokens`` is the length that ``aggregation = "constant"`` and
    ``overlong_penalty`` refer to. ``temperature`` must be the one that sequences are drawn at:
    recorded log-probabilities are taken there. ``precision`` is that of the forward and backward
    passes; masters, optimizer, log-probabilities and losses are float32 either way. Choose
    ``bfloat16`` on a GPU, whose matrix units are many times faster at it and whose attention needs
    less memory; ``float32`` for small models on CPUs and for comparisons to the last digit.
    ``critic`` is for ``baseline = "critic"`` only, which has the defaults of that table without
    it."""

    lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-4
    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    epsilon: Annotated[float, Meta(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0.0)] = 1.0
    micro_batch_tokens: Annotated[int, Meta(ge=1)] = 8192
    precision: Precision = "float32"
    gradient_checkpointing: bool = False
    lora: LoraTable | None = None
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
    preset: Preset = "farflow"
    ratio: RatioLevel = "token"
    clip: ClipForm = "ppo"
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.2
    clip_high: Annotated[float, Meta(gt=0.0, le=1e6)] = 0.2
    ratio_max: Coefficient = 3.0
    aggregation: Aggregation = "token"
    max_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 0
    baseline: Baseline = "group_mean"
    critic: CriticTable | None = None
    normalisation: Normalisation = "group_std"
    overlong_penalty: Coefficient = 0.0
    overlong_share: Annotated[float, Meta(ge=1e-3, le=1.0)] = 0.2
    kl_coefficient: Coefficient = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    importance_cap: Coefficient = 0.0
    second_moment_budget: Coefficient = 0.0
