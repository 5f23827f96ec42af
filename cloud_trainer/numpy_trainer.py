"""A small real learner without torch: a low-rank bigram language model and its policy gradient.

Model: with ``e`` the embedding of the token before and ``o_v`` the output row of token ``v``,

    logits[v] = e . o_v + bias[v]

Loss over all trained tokens t (advantages as in GRPO, arXiv:2402.03300; importance weights
truncated from above, as in IMPALA, arXiv:1802.01561, and constant for the gradient):

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)        over the siblings of a group
    w_t = min(ratio_max, exp(logp_t - behaviour_t))
    L   = -sum_t w_t A_t logp_t / number of trained tokens

What always holds: only the pair (token before, token) enters, so a step works on a table of
vocabulary by vocabulary and costs the same for a million tokens; masters are float32 and updates
below half a bf16 ulp accumulate in them; the published state is bfloat16, rounded to nearest even;
equal state and groups give equal bits; a gradient that is not finite changes nothing and is
counted in the metric ``skipped``. Tokens at or above ``vocab_size`` are folded into it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cloud_trainer.trainer import Arrays, TrainingSequence
from transport.errors import ModelError
from transport.messages import GroupDrift
from transport.runtime.config import convert
from transport.weights.folder import read_artefacts, read_model_folder, write_model_folder
from transport.weights.tensors import TensorBytes

MODEL_TYPE = "farflow-numpy"
_NAMES = ("bias", "embed.weight", "output.weight")

Floats = NDArray[np.float32]


class NumpySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[policies.NAME.settings]`` of ``trainer = "numpy"``: Adam with decoupled weight decay."""

    lr: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-3
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    epsilon: Annotated[float, Meta(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    ratio_max: Annotated[float, Meta(gt=0.0)] = 2.0
    max_grad_norm: Annotated[float, Meta(gt=0.0)] = 1.0


_HOW = (
    f'trainer = "numpy" learns its own small {MODEL_TYPE!r} models only: make one with '
    '`farflow trainer numpy-model FOLDER`, or use trainer = "torch"'
)


class _AnyModel(msgspec.Struct, frozen=True):
    """``config.json`` of any model."""

    model_type: str = ""


class NumpyModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json`` of such a model; other keys are ignored."""

    model_type: str
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    hidden: Annotated[int, Meta(ge=1, le=1 << 24)]


def make_numpy_model(
    folder: Path, *, seed: int = 0, parameters: int = 4_160, vocab_size: int = 64
) -> Path:
    """Write a new model folder of about ``parameters`` weights, the same for the same arguments.

    Raises:
        StoreError: the folder exists, or the disk refused.
    """
    hidden = max(1, round((parameters - vocab_size) / (2 * vocab_size)))
    rng = np.random.default_rng(seed)
    scale = np.float32(hidden**-0.25)
    masters: dict[str, Floats] = {
        "bias": np.zeros(vocab_size, np.float32),
        "embed.weight": rng.standard_normal((vocab_size, hidden), np.float32) * scale,
        "output.weight": rng.standard_normal((vocab_size, hidden), np.float32) * scale,
    }
    config = {"model_type": MODEL_TYPE, "vocab_size": vocab_size, "hidden": hidden}
    published = {name: to_bf16(array) for name, array in masters.items()}
    write_model_folder(folder, published, {"config.json": msgspec.json.encode(config)})
    return folder


def to_bf16(values: Floats) -> TensorBytes:
    """Rounded to nearest, ties to even; NaN stays NaN, overflow becomes infinite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    # Rounding could carry a NaN's bits into infinity or zero: make it a quiet one instead.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    cells = np.where(nan, quiet, rounded).astype("<u2")
    return TensorBytes("BF16", values.shape, cells.tobytes())


def from_bytes(name: str, tensor: TensorBytes) -> Floats:
    """Float32 values of a BF16 or F32 tensor; raises ``ModelError`` naming others."""
    if tensor.dtype == "F32":
        flat = np.frombuffer(tensor.data, "<f4").astype(np.float32)
    elif tensor.dtype == "BF16":
        cells = np.frombuffer(tensor.data, "<u2").astype(np.uint32)
        flat = (cells << np.uint32(16)).view(np.float32)
    else:
        raise ModelError(f"tensor {name!r} is {tensor.dtype}; BF16 or F32 is expected")
    return flat.reshape(tensor.shape)


class NumpyTrainer:
    """``Trainer`` over such a model; ``where`` names the settings in errors.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """

    def __init__(self, settings: Mapping[str, Any], *, where: str = "settings") -> None:
        self.settings = convert(settings, NumpySettings, where)
        self.step_count = 0
        self._artefacts: dict[str, bytes] = {}
        self._masters: dict[str, Floats] = {}
        self._first: dict[str, Floats] = {}
        self._second: dict[str, Floats] = {}

    def load(self, folder: Path) -> None:
        """See ``Trainer.load``."""
        path = folder / "config.json"
        try:
            data = path.read_bytes()
            kind = msgspec.json.decode(data, type=_AnyModel).model_type
            if kind != MODEL_TYPE:  # before fields of ours are missed in another kind's file
                raise ModelError(f"{path}: model_type is {kind!r}; {_HOW}")
            config = msgspec.json.decode(data, type=NumpyModelConfig)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}; {_HOW}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: {error}; {_HOW}") from error
        matrix = (config.vocab_size, config.hidden)
        shapes = dict(zip(_NAMES, ((config.vocab_size,), matrix, matrix), strict=True))
        tensors = read_model_folder(folder)
        if tensors.keys() != shapes.keys():
            raise ModelError(f"{folder}: has tensors {', '.join(tensors)}; needs {_NAMES}")
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise ModelError(
                    f"{folder}: tensor {name!r} has shape {tensors[name].shape}, needs {shape}"
                )
        self._artefacts = read_artefacts(folder)
        self._masters = {name: from_bytes(name, tensors[name]) for name in _NAMES}
        self._first = {name: np.zeros_like(self._masters[name]) for name in _NAMES}
        self._second = {name: np.zeros_like(self._masters[name]) for name in _NAMES}
        self.step_count = 0

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """See ``Trainer.step``."""
        log_probabilities = self._log_probabilities()
        weights, facts = self._token_weights(groups, log_probabilities)
        gradients = self._gradients(weights, log_probabilities)
        norm = float(np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in gradients)))
        finite = bool(np.isfinite(norm))
        if finite:
            self._update(gradients, min(1.0, self.settings.max_grad_norm / max(norm, 1e-12)))
        self.step_count += 1
        return {**facts, "grad_norm": norm if finite else 0.0, "skipped": float(not finite)}

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
        return {name: to_bf16(self._masters[name]) for name in _NAMES}

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """See ``Trainer.state_dict``."""
        arrays: Arrays = {}
        for kind, values in self._kinds().items():
            arrays.update({f"{kind}.{name}": values[name].copy() for name in _NAMES})
        return arrays, {"step_count": self.step_count}

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """See ``Trainer.load_state_dict``; raises ``ModelError`` for another model's state."""
        for kind, values in self._kinds().items():
            for name in _NAMES:
                array = arrays.get(f"{kind}.{name}")
                expected = self._masters[name]
                if array is None or array.shape != expected.shape or array.dtype != np.float32:
                    raise ModelError(f"state has no float32 {kind}.{name} of {expected.shape}")
                values[name] = array.astype(np.float32)
        self.step_count = int(meta["step_count"])

    def export(self, folder: Path) -> None:
        """See ``Trainer.export``; ``folder`` must not exist (StoreError). It loads with this class,
        there is no stock one."""
        write_model_folder(folder, self.published_state(), self._artefacts)

    # ---- arithmetic ------------------------------------------------------------------------

    def _kinds(self) -> dict[str, dict[str, Floats]]:
        return {"master": self._masters, "first": self._first, "second": self._second}

    def _log_probabilities(self) -> Floats:
        """[vocabulary before, vocabulary]"""
        embed, output = self._masters["embed.weight"], self._masters["output.weight"]
        with np.errstate(all="ignore"):  # what overflows ends as a gradient that is not finite
            logits: Floats = embed @ output.T + self._masters["bias"]
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def _token_weights(
        self, groups: Sequence[Sequence[TrainingSequence]], log_probabilities: Floats
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Summed ``w_t A_t`` by (token before, token), over the number of trained tokens."""
        vocabulary = len(log_probabilities)
        table = np.zeros(vocabulary * vocabulary, np.float64)
        rewards: list[float] = []
        tokens = 0
        loss = ratio_sum = 0.0
        for group in groups:
            group_rewards = np.array([s.reward for s in group], np.float64)
            rewards += group_rewards.tolist()
            advantages = (group_rewards - group_rewards.mean()) / (group_rewards.std() + 1e-6)
            for sequence, advantage in zip(group, advantages.tolist(), strict=True):
                mask = np.array(sequence.loss_mask, bool)
                drawn = np.array(sequence.tokens, np.int64) % vocabulary
                first = sequence.prompt_tokens[-1:] or (0,)
                before = np.concatenate([np.array(first, np.int64) % vocabulary, drawn[:-1]])
                pairs = (before * vocabulary + drawn)[mask]
                now = log_probabilities.ravel()[pairs].astype(np.float64)
                behaviour = np.array(sequence.logprobs, np.float64)[mask]
                with np.errstate(over="ignore"):
                    ratio = np.minimum(np.exp(now - behaviour), self.settings.ratio_max)
                table += np.bincount(pairs, ratio * advantage, len(table))
                tokens += len(pairs)
                ratio_sum += float(ratio.sum())
                loss -= float((ratio * advantage * now).sum())
        count = max(1, tokens)
        facts = {
            "loss": loss / count,
            "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
            "ratio_mean": ratio_sum / count,
            "tokens": float(tokens),
        }
        return table.reshape(vocabulary, vocabulary) / count, facts

    def _gradients(
        self, weights: NDArray[np.float64], log_probabilities: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Of the loss, in the order of ``_NAMES``."""
        rows = weights.sum(axis=1, keepdims=True)
        slopes: Floats = (rows * np.exp(log_probabilities) - weights).astype(np.float32)
        return (
            slopes.sum(axis=0),
            slopes @ self._masters["output.weight"],
            slopes.T @ self._masters["embed.weight"],
        )

    def _update(self, gradients: Sequence[Floats], scale: float) -> None:
        s, t = self.settings, self.step_count + 1
        for name, raw in zip(_NAMES, gradients, strict=True):
            gradient = raw * np.float32(scale)
            first, second = self._first[name], self._second[name]
            first *= np.float32(s.beta1)
            first += np.float32(1 - s.beta1) * gradient
            second *= np.float32(s.beta2)
            second += np.float32(1 - s.beta2) * gradient * gradient
            step = first / np.float32(1 - s.beta1**t)
            step /= np.sqrt(second / np.float32(1 - s.beta2**t)) + np.float32(s.epsilon)
            step += np.float32(s.weight_decay) * self._masters[name]
            self._masters[name] -= np.float32(s.lr) * step
