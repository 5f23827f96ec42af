"""Losses of published methods as settings, and how a file's settings become complete.

What always holds: a key that the file gives wins over the preset, whatever its value; a preset
names nothing but keys of the loss; keys that need each other are there before anything starts.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from cloud_trainer.critic_table import CriticTable
from cloud_trainer.torch_settings import Preset, TorchSettings
from transport.errors import ConfigError
from transport.runtime.config import convert

PRESETS: dict[Preset, dict[str, Any]] = {
    "farflow": {},
    # arXiv:2402.03300: the mean of each sequence's mean, one bound each way, KL 0.04 in the loss.
    "grpo": {
        "ratio_max": 0.0,
        "aggregation": "sequence",
        "kl_coefficient": 0.04,
    },
    # arXiv:2503.20783: neither length nor deviation of rewards changes a token's weight.
    "dr_grpo": {
        "ratio_max": 0.0,
        "aggregation": "constant",
        "normalisation": "none",
    },
    # arXiv:2503.14476: a wider upper bound, all tokens alike, long answers cost reward. Its dynamic
    # sampling is the scheduler's: groups of equal rewards are sorted out before they get here.
    "dapo": {
        "clip_high": 0.28,
        "ratio_max": 0.0,
        "overlong_penalty": 1.0,
    },
    # arXiv:2507.18071
    "gspo": {
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "ratio_max": 0.0,
        "aggregation": "sequence",
    },
    # arXiv:2506.13585: no lower bound. Its upper one is not published; 5 is that of
    # arXiv:2510.13786, which studies the same loss.
    "cispo": {
        "clip": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    # arXiv:2402.14740: REINFORCE with the other siblings as baseline. Its KL belongs to the reward,
    # with a coefficient that depends on the data: that one is left to the file.
    "rloo": {
        "clip": "none",
        "baseline": "leave_one_out",
        "normalisation": "none",
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv:2510.01161
    "m2po": {
        "clip": "none",
        "second_moment_budget": 0.04,
    },
    # arXiv:1707.06347, with advantages by a critic (arXiv:1506.02438) that are whitened over the
    # batch, and the KL of arXiv:2203.02155 in the reward, whose coefficient is left to the file.
    "ppo": {
        "ratio_max": 0.0,
        "baseline": "critic",
        "normalisation": "batch_std",
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
}


def resolve_settings(settings: Mapping[str, Any], where: str = "settings") -> TorchSettings:
    """Complete settings: defaults, then the preset's keys, then ``settings``.

    Raises:
        ConfigError: a key is unknown, out of range, or lacks another that it needs; names it below
            ``where`` and the remedy.
    """
    preset = settings.get("preset", "farflow")
    under = PRESETS.get(preset, {}) if isinstance(preset, str) else {}  # type: ignore[call-overload]
    resolved = convert({**under, **settings}, TorchSettings, where)
    if 0.0 < resolved.ratio_max <= 1.0:
        raise ConfigError(
            f"{where}.ratio_max: is {resolved.ratio_max}; it must be above 1, or 0 for no bound"
        )
    if resolved.max_tokens == 0:
        if resolved.aggregation == "constant":
            raise ConfigError(
                f'{where}.max_tokens: is 0, but aggregation = "constant" divides by it; set it to '
                "the longest sequence that the workflow generates (workflow.max_new_tokens)"
            )
        if resolved.overlong_penalty > 0.0:
            raise ConfigError(
                f"{where}.max_tokens: is 0, but overlong_penalty counts from it; set it to the "
                "longest sequence that the workflow generates (workflow.max_new_tokens), or set "
                "overlong_penalty = 0"
            )
    return _with_critic(resolved, where)


def _with_critic(settings: TorchSettings, where: str) -> TorchSettings:
    """With the critic's table where the baseline is one, and with none elsewhere."""
    if settings.baseline != "critic":
        if settings.critic is not None:
            raise ConfigError(
                f'{where}.critic: is given, but baseline is "{settings.baseline}"; set baseline = '
                '"critic" (or preset = "ppo"), or leave the table out'
            )
        return settings
    if settings.normalisation == "group_std":
        raise ConfigError(
            f'{where}.normalisation: is "group_std", but baseline = "critic" compares no siblings; '
            'set it to "batch_std" or "none"'
        )
    return msgspec.structs.replace(settings, critic=settings.critic or CriticTable())
