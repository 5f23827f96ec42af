"""What the fake engine generates: thoughts drawn from real weights, then an answer.

What always holds: weights are kept as the bytes that came in; a swap that does not fit changes
nothing; a thought depends on the weights, the token before, the temperature and one uniform number.

    thoughts   drawn from softmax((embed @ output.T + bias)[token before] / temperature) of a
               ``farflow-numpy`` model, uniform over 64 for any other folder
    answer     what ``fake_text.answer_to`` the prompt says (the value of its last integer sum,
               say), if more than half of the thoughts are in the lower half of the vocabulary, else
               spoiled; spelled with probability 1, so its log-probabilities are 0

So a policy learns to think in the lower half by being rewarded for right answers.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.errors import IntegrityError, ModelError
from transport.weights.folder import read_model_folder
from transport.weights.patch import Patch, patched
from transport.weights.tensors import TensorBytes

MODEL_TYPE = "farflow-numpy"

_VOCABULARY = 64
_MAX_VOCABULARY = 2048  # the table of a model is vocabulary by vocabulary
_MAX_TEMPERATURES = 8
_NAMES = ("bias", "embed.weight", "output.weight")

Floats = NDArray[np.float64]


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str = ""
    vocab_size: int = _VOCABULARY


class FakePolicy:
    """Weights of one policy and the thoughts that follow from them."""

    def __init__(self, folder: Path, version: int) -> None:
        self.version = version
        self.tensors = {name: _owned(t) for name, t in read_model_folder(folder).items()}
        config = _read_config(folder)
        self.vocabulary, self._learns = _VOCABULARY, config.model_type == MODEL_TYPE
        if self._learns:
            self.vocabulary = config.vocab_size
            if not 2 <= self.vocabulary <= _MAX_VOCABULARY:
                raise ModelError(
                    f"{folder / 'config.json'}: vocab_size {self.vocabulary}; the fake engine "
                    f"takes 2 to {_MAX_VOCABULARY}"
                )
        try:
            self._logits = self._table(self.tensors)
        except ValueError as error:
            raise ModelError(f"{folder}: {error}") from error
        self._by_temperature: dict[float, tuple[Floats, Floats]] = {}

    def swap(self, version: int, patch: Patch) -> None:
        """Write new cells; raises ValueError and changes nothing when they do not fit."""
        merged = dict(self.tensors)
        for name, changes in patch.items():
            if name not in merged:
                raise ValueError(f"the model has no tensor {name!r} to change")
            try:
                merged[name] = patched(merged[name], changes)
            except IntegrityError as error:
                raise ValueError(f"tensor {name!r}: {error}") from error
        self._logits = self._table(merged)
        self._by_temperature = {}
        self.tensors, self.version = merged, version

    def think(self, before: int, temperature: float, uniform: float) -> tuple[int, float]:
        """The thought after token ``before`` and its log-probability."""
        row = before % self.vocabulary
        log_probabilities, cumulative = self._distribution(temperature)
        if temperature == 0:
            token = int(np.argmax(log_probabilities[row]))
        else:
            token = int(np.searchsorted(cumulative[row], uniform * cumulative[row, -1], "right"))
            token = min(token, self.vocabulary - 1)
        return token, float(log_probabilities[row, token])

    def _table(self, tensors: Mapping[str, TensorBytes]) -> Floats:
        if not self._learns:
            return np.zeros((self.vocabulary, self.vocabulary))
        missing = [name for name in _NAMES if name not in tensors]
        if missing:
            raise ValueError(f"a {MODEL_TYPE} model has a tensor {missing[0]!r}")
        bias, embed, output = (_values(name, tensors[name]) for name in _NAMES)
        logits = embed @ output.T + bias
        if logits.shape != (self.vocabulary, self.vocabulary) or not np.isfinite(logits).all():
            raise ValueError(f"logits are not finite [{self.vocabulary}, {self.vocabulary}]")
        return logits

    def _distribution(self, temperature: float) -> tuple[Floats, Floats]:
        found = self._by_temperature.get(temperature)
        if found is None:
            # Greedy reports log-probabilities at temperature 1.
            logits = self._logits / (temperature or 1.0)
            logits = logits - logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            found = (logits, np.exp(logits).cumsum(axis=1))
            if len(self._by_temperature) >= _MAX_TEMPERATURES:
                self._by_temperature.clear()
            self._by_temperature[temperature] = found
        return found


def _read_config(folder: Path) -> _Config:
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        return _Config()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _owned(tensor: TensorBytes) -> TensorBytes:
    return TensorBytes(tensor.dtype, tensor.shape, bytes(tensor.data))


def _values(name: str, tensor: TensorBytes) -> Floats:
    if tensor.dtype == "BF16":
        cells = np.frombuffer(tensor.data, "<u2").astype(np.uint32)
        flat = (cells << np.uint32(16)).view(np.float32)
    elif tensor.dtype == "F32":
        flat = np.frombuffer(tensor.data, "<f4")
    else:
        raise ValueError(f"tensor {name!r} is {tensor.dtype}; BF16 or F32 is expected")
    return flat.astype(np.float64).reshape(tensor.shape)
