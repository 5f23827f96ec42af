"""A trainer that takes the time and makes the change it is told to, and learns nothing.

It stands for a real one in measurements of everything around it (``farflow sim emulate``): a step
lasts ``step_s`` whatever the batch, and changes a random share ``changed_share`` of every tensor's
cells by one unit in the last place, so that the delta of a version has a known size.

What always holds: any model folder with BF16 tensors will do; cells stay finite (only the lowest
mantissa bit is turned over); the cells of step k are a function of the folder, the settings and k.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cloud_trainer.trainer import Arrays, TrainingSequence
from transport.errors import ModelError
from transport.messages import GroupDrift
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.config import convert
from transport.weights.folder import read_artefacts, read_model_folder, write_model_folder
from transport.weights.tensors import TensorBytes

Cells = NDArray[np.uint16]


class EmulatedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[policies.NAME.settings]`` of ``trainer = "emulated"``: seconds of a step, and the share of
    all cells that it changes."""

    step_s: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    changed_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.01
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0


class EmulatedTrainer:
    """``Trainer`` by the settings above; ``where`` names them in errors, ``sleep`` waits (blocking,
    as a step does that computes).

    Raises:
        ConfigError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        where: str = "settings",
        sleep: Callable[[float], None] = time.sleep,
        clock: Clock | None = None,
    ) -> None:
        self.settings = convert(settings, EmulatedSettings, where)
        self.step_count = 0
        self._sleep = sleep
        self._clock = clock or SystemClock()
        self._artefacts: dict[str, bytes] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._cells: dict[str, Cells] = {}

    def load(self, folder: Path) -> None:
        """See ``Trainer.load``; other types than BF16 are refused."""
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder / 'config.json'}: is missing; give a model folder")
        tensors = read_model_folder(folder)
        for name, tensor in tensors.items():
            if tensor.dtype != "BF16":
                raise ModelError(
                    f'{folder}: tensor {name!r} is {tensor.dtype}; trainer = "emulated" takes BF16'
                )
        self._artefacts = read_artefacts(folder)
        self._shapes = {name: tensor.shape for name, tensor in sorted(tensors.items())}
        self._cells = {
            name: np.frombuffer(tensors[name].data, "<u2").astype(np.uint16)
            for name in self._shapes
        }
        self.step_count = 0

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """See ``Trainer.step``: the change is made first, the rest of ``step_s`` is slept."""
        began_s = self._clock.monotonic_s()
        rng = np.random.Generator(np.random.Philox(key=[self.settings.seed, self.step_count]))
        share = np.float32(self.settings.changed_share)
        for cells in self._cells.values():
            np.bitwise_xor(cells, 1, out=cells, where=rng.random(cells.size, np.float32) < share)
        self.step_count += 1
        rewards = [sequence.reward for group in groups for sequence in group]
        tokens = sum(sum(sequence.loss_mask) for group in groups for sequence in group)
        self._sleep(max(0.0, self.settings.step_s - (self._clock.monotonic_s() - began_s)))
        return {
            "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
            "tokens": float(tokens),
            **dict.fromkeys(("loss", "grad_norm", "skipped"), 0.0),
        }

    def drifts(self) -> tuple[GroupDrift, ...]:
        """Nothing: no engine draws from these weights alone."""
        return ()

    def moved(self) -> float | None:
        """See ``Trainer.moved``."""
        return None

    def artefacts(self) -> dict[str, bytes]:
        """See ``Trainer.artefacts``."""
        return self._artefacts

    def published_state(self) -> dict[str, TensorBytes]:
        """See ``Trainer.published_state``."""
        return {
            name: TensorBytes("BF16", self._shapes[name], cells.astype("<u2").tobytes())
            for name, cells in self._cells.items()
        }

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """See ``Trainer.state_dict``."""
        arrays: Arrays = {name: cells.copy() for name, cells in self._cells.items()}
        return arrays, {"step_count": self.step_count}

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """See ``Trainer.load_state_dict``; raises ``ModelError`` for another model's state."""
        for name, cells in self._cells.items():
            array = arrays.get(name)
            if array is None or array.shape != cells.shape or array.dtype != np.uint16:
                raise ModelError(f"state has no uint16 {name} of {cells.shape}")
        self._cells = {name: arrays[name].astype(np.uint16) for name in self._cells}
        self.step_count = int(meta["step_count"])

    def export(self, folder: Path) -> None:
        """See ``Trainer.export``; ``folder`` must not exist (StoreError)."""
        write_model_folder(folder, self.published_state(), self._artefacts)
