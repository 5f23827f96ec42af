"""Parameters with AdamW's moments of them as arrays of a checkpoint.

They are float32 and whole, whatever the number of ranks, under names of a prefix, ``master.``,
``first.`` or ``second.``, and the parameter's own.
"""

from typing import TYPE_CHECKING

import numpy as np

from cloud_trainer.spread import Spread
from cloud_trainer.trainer import Arrays
from transport.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_MASTER, _FIRST, _SECOND = "master", "first", "second"


def saved(
    parameters: "Mapping[str, torch.nn.Parameter]",
    optimizer: "torch.optim.AdamW",
    spread: Spread,
    prefix: str = "",
) -> Arrays:
    """Copies. Every rank calls it, what comes out is rank 0's."""
    import torch

    arrays: Arrays = {}
    for name, parameter in parameters.items():
        zeros = torch.zeros_like(parameter)
        state = optimizer.state.get(parameter, {})
        for kind, values in (
            (_MASTER, parameter),
            (_FIRST, state.get("exp_avg", zeros)),
            (_SECOND, state.get("exp_avg_sq", zeros)),
        ):
            whole = spread.whole(values)
            if spread.rank == 0:
                arrays[f"{prefix}{kind}.{name}"] = whole.cpu().numpy().copy()
    return arrays


def check_saved(
    arrays: Arrays, parameters: "Mapping[str, torch.nn.Parameter]", prefix: str = ""
) -> None:
    """Raises ModelError unless they are the state of such parameters."""
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        for kind in (_MASTER, _FIRST, _SECOND):
            array = arrays.get(f"{prefix}{kind}.{name}")
            if array is None or array.shape != shape or array.dtype != np.float32:
                raise ModelError(f"state has no float32 {prefix}{kind}.{name} of shape {shape}")


def restore(
    arrays: Arrays,
    parameters: "Mapping[str, torch.nn.Parameter]",
    optimizer: "torch.optim.AdamW",
    spread: Spread,
    updates: int,
    prefix: str = "",
) -> None:
    """The inverse of ``saved``, after ``updates`` of the optimizer. Ranks other than 0 give no
    arrays."""
    import torch

    optimizer.state.clear()
    for name, parameter in parameters.items():
        state = {}
        for kind in (_MASTER, _FIRST, _SECOND):
            array = arrays.get(f"{prefix}{kind}.{name}")
            whole = None if array is None else torch.from_numpy(array.copy())
            state[kind] = spread.cut(whole, parameter)
        with torch.no_grad():
            parameter.copy_(state[_MASTER])
        if updates:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(updates), device=parameter.device),
                "exp_avg": state[_FIRST],
                "exp_avg_sq": state[_SECOND],
            }
