"""The frozen model that a KL term compares with: the run's version 0.

It is the folder that training started from, also after a restart, in float32 and computed like the
learner itself, in its ``precision``: at version 0 the two give the same bits, and the KL is exactly
0. It lies over the ranks as the learner does.
"""

from pathlib import Path
from typing import Any

from cloud_trainer.spread import Spread
from cloud_trainer.torch_settings import TorchSettings
from transport.runtime.model_folder import load_model


def load_reference(folder: Path, settings: TorchSettings, spread: Spread) -> Any:
    """A second model that nothing trains, or None where the settings have no KL.

    Raises:
        ModelError: as ``load_model``.
    """
    if not settings.kl_coefficient:
        return None
    model = load_model(folder, device=spread.load_device).model
    model.requires_grad_(False)
    spread.place(model, {})
    return model
