"""The type that a trainer's forward and backward passes compute in.

What always holds: parameters, their gradients, the optimizer and everything that is saved or
published are float32 masters whatever the type. In bfloat16 matrix products and attention are
computed from roundings that torch makes of their operands as they are needed; what sums up over
layers (the residual stream), norms, log-probabilities and losses are float32. One process and
several ranks do the same.
"""

import contextlib
from typing import TYPE_CHECKING

from cloud_trainer.torch_settings import Precision
from transport.errors import ConfigError

if TYPE_CHECKING:
    import torch


def computing(precision: Precision, device: str) -> "contextlib.AbstractContextManager[object]":
    """Around a forward pass on ``device``; its backward pass follows outside."""
    if precision == "float32":
        return contextlib.nullcontext()
    return _autocast(device)


def check_precision(precision: Precision, device: str, where: str) -> None:
    """Whether ``device`` computes in this type; ``where`` names the settings.

    Raises:
        ConfigError: it does not.
    """
    if precision == "float32":
        return
    try:
        _autocast(device)
    except RuntimeError as error:
        raise ConfigError(
            f'{where}.precision: "{precision}" cannot be computed on device {device!r} '
            f'({" ".join(str(error).split())[:200]}); set precision = "float32"'
        ) from error


def _autocast(device: str) -> "torch.autocast":
    import torch

    # Each weight is used once in a pass, so keeping its rounding would save nothing, and with
    # several ranks it would keep the whole model on each of them until the pass ends.
    return torch.autocast(device.partition(":")[0], torch.bfloat16, cache_enabled=False)
