"""GRPO on any causal language model that transformers loads, with float32 master weights.

What always holds:

1. The masters are float32 whatever the folder's type: updates below half a bf16 ulp accumulate.
   What is published is their rounding to the type that the folder has, under the folder's names.
2. A step whose loss or gradient is not finite changes nothing, and the metric ``skipped`` says so;
   neither does a step without signal (all advantages zero), where ``trained_tokens`` is 0.
3. There is no randomness in here (no dropout): equal state and groups give equal bits on the same
   machine with the same number of threads, and so does continuing from ``state_dict``.

The gradient of the batch is the sum over its micro batches, so ``micro_batch_tokens`` bounds the
memory and changes nothing else but rounding.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from cloud_trainer.advantages import AdvantageMethod
from cloud_trainer.batching import Batch, MicroBatch, make_batch
from cloud_trainer.losses import clipped_token_losses, token_log_probabilities
from cloud_trainer.trainer import Arrays, TrainingSequence
from transport.errors import LocalProtocolError, ModelError
from transport.runtime.config import convert
from transport.runtime.model_folder import (
    ModelWeights,
    load_model,
    load_tokenizer,
    require_torch,
    vocabulary_of,
)
from transport.weights.folder import read_artefacts, write_model_folder
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    import torch

_MASTER, _FIRST, _SECOND = "master", "first", "second"
_MEANS = ("loss", "kl_behaviour", "clip_fraction", "ratio_mean", "entropy")


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[policies.NAME.settings]`` of ``trainer = "torch"``: AdamW (decoupled weight decay,
    arXiv:1711.05101) with linear warm-up, and the loss of ``cloud_trainer.losses``. ``temperature``
    must be the one that sequences are drawn at: recorded log-probabilities are taken there."""

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


@dataclass(frozen=True, slots=True)
class _Learner:
    """What belongs to the loaded folder. ``keeps_logits``: the model can leave out logits that
    nobody needs."""

    model: Any
    weights: ModelWeights
    optimizer: "torch.optim.AdamW"
    vocabulary: int
    keeps_logits: bool
    artefacts: dict[str, bytes]


class TorchTrainer:
    """``Trainer`` over torch; ``where`` names the settings in errors.

    Raises:
        ConfigError: a setting is unknown or out of range, or torch is not installed.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        where: str = "settings",
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        require_torch('trainer = "torch"')
        self.settings = convert(settings, TorchSettings, where)
        self.step_count = 0
        self._device = device
        self._threads = threads
        self._updates = 0
        self._learner: _Learner | None = None

    def load(self, folder: Path) -> None:
        """See ``Trainer.load``."""
        self._limit_threads()
        loaded = load_model(folder, device=self._device)
        vocabulary = vocabulary_of(loaded.model)
        load_tokenizer(folder, vocabulary=vocabulary)  # an exported folder must load whole
        self._learner = _Learner(
            model=loaded.model,
            weights=loaded.weights,
            optimizer=self._new_optimizer(loaded.weights),
            vocabulary=vocabulary,
            keeps_logits="logits_to_keep" in inspect.signature(loaded.model.forward).parameters,
            artefacts=read_artefacts(folder),
        )
        self._updates = self.step_count = 0

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """See ``Trainer.step``.

        Metrics are means over the trained tokens, unless their name says otherwise: ``loss`` (over
        all tokens), ``kl_behaviour``, ``clip_fraction``, ``ratio_mean``, ``entropy`` (nats),
        ``grad_norm`` (before clipping), ``reward_mean`` (over sequences), ``tokens``,
        ``trained_tokens``, ``malformed_groups``, ``lr``, ``skipped`` (1 or 0).
        """
        self._limit_threads()
        learner = self._loaded()
        batch = make_batch(
            groups,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            advantages=self.settings.advantages,
            vocabulary=learner.vocabulary,
        )
        facts = self._gradients(learner, batch)
        norm, skipped, lr = self._update(learner, batch)
        self.step_count += 1
        return {
            **({} if skipped else facts),
            "grad_norm": norm,
            "skipped": float(skipped),
            "lr": lr,
            "reward_mean": batch.reward_mean,
            "tokens": float(batch.tokens),
            "trained_tokens": float(batch.trained),
            "malformed_groups": float(batch.malformed_groups),
        }

    def published_state(self) -> dict[str, TensorBytes]:
        """See ``Trainer.published_state``."""
        return dict(self._loaded().weights.published())

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """See ``Trainer.state_dict``."""
        import torch

        learner = self._loaded()
        arrays: Arrays = {}
        for name, parameter in learner.weights.parameters.items():
            zeros = torch.zeros_like(parameter)
            state = learner.optimizer.state.get(parameter, {})
            for kind, values in (
                (_MASTER, parameter.detach()),
                (_FIRST, state.get("exp_avg", zeros)),
                (_SECOND, state.get("exp_avg_sq", zeros)),
            ):
                arrays[f"{kind}.{name}"] = values.cpu().numpy().copy()
        return arrays, {"step_count": self.step_count, "updates": self._updates}

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """See ``Trainer.load_state_dict``; raises ModelError for another model's state."""
        import torch

        learner = self._loaded()
        restored: dict[str, torch.Tensor] = {}
        for name, parameter in learner.weights.parameters.items():
            for kind in (_MASTER, _FIRST, _SECOND):
                array = arrays.get(f"{kind}.{name}")
                shape = tuple(parameter.shape)
                if array is None or array.shape != shape or array.dtype != np.float32:
                    raise ModelError(f"state has no float32 {kind}.{name} of shape {shape}")
                restored[f"{kind}.{name}"] = torch.from_numpy(array.copy()).to(self._device)
        self._updates = int(meta["updates"])
        self.step_count = int(meta["step_count"])
        learner.optimizer.state.clear()
        for name, parameter in learner.weights.parameters.items():
            parameter.data.copy_(restored[f"{_MASTER}.{name}"])
            if self._updates:
                learner.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self._updates), device=self._device),
                    "exp_avg": restored[f"{_FIRST}.{name}"],
                    "exp_avg_sq": restored[f"{_SECOND}.{name}"],
                }

    def export(self, folder: Path) -> None:
        """See ``Trainer.export``; ``folder`` must not exist (StoreError)."""
        write_model_folder(folder, self.published_state(), self._loaded().artefacts)

    # ---- arithmetic ------------------------------------------------------------------------

    def _gradients(self, learner: _Learner, batch: Batch) -> dict[str, float]:
        """Leave the gradient of the batch in the parameters; returns means."""
        totals = dict.fromkeys(_MEANS, 0.0)
        for micro in batch.micro_batches:
            now, entropy = self._forward(learner, micro)
            losses = clipped_token_losses(
                now,
                self._tensor(micro.behaviour),
                self._tensor(micro.advantage),
                clip_low=self.settings.clip_low,
                clip_high=self.settings.clip_high,
                ratio_max=self.settings.ratio_max,
            )
            loss = losses.loss / batch.tokens
            loss.backward()  # type: ignore[no-untyped-call]
            totals["loss"] += loss.item()
            totals["kl_behaviour"] += losses.kl / batch.trained
            totals["clip_fraction"] += losses.clipped / batch.trained
            totals["ratio_mean"] += losses.ratio / batch.trained
            totals["entropy"] += entropy / batch.trained
        return totals

    def _forward(self, learner: _Learner, micro: MicroBatch) -> tuple["torch.Tensor", float]:
        """Log-probabilities of the trained tokens [trained] and the sum of entropies there."""
        arguments = {"input_ids": self._tensor(micro.tokens), "use_cache": False}
        # One more than is used: the last column predicts what comes behind the sequences.
        wanted = micro.kept + 1
        if learner.keeps_logits:
            arguments["logits_to_keep"] = wanted
        logits = learner.model(**arguments).logits[:, -wanted:-1]
        chosen, entropy = token_log_probabilities(
            logits, self._tensor(micro.targets), temperature=self.settings.temperature
        )
        row, column = self._tensor(micro.row), self._tensor(micro.column)
        return chosen[row, column], float(entropy[row, column].sum())

    def _update(self, learner: _Learner, batch: Batch) -> tuple[float, bool, float]:
        """Gradient norm (0 when not finite), whether the step was skipped, and learning rate."""
        import torch

        s = self.settings
        lr = s.lr * min(1.0, (self._updates + 1) / max(1, s.warmup_steps))
        if not batch.micro_batches:
            return 0.0, False, lr
        parameters = list(learner.weights.parameters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm))
        finite = bool(np.isfinite(norm))
        if finite:
            for group in learner.optimizer.param_groups:
                group["lr"] = lr
            learner.optimizer.step()
            self._updates += 1
        learner.optimizer.zero_grad(set_to_none=True)
        return (norm if finite else 0.0), not finite, lr

    def _new_optimizer(self, weights: ModelWeights) -> "torch.optim.AdamW":
        import torch

        s = self.settings
        return torch.optim.AdamW(
            list(weights.parameters.values()),
            lr=s.lr,
            betas=(s.beta1, s.beta2),
            eps=s.epsilon,
            weight_decay=s.weight_decay,
            fused=True,
        )

    def _loaded(self) -> _Learner:
        if self._learner is None:
            raise LocalProtocolError("the trainer has no model yet: call load first")
        return self._learner

    def _tensor(self, array: "np.ndarray[Any, Any]") -> "torch.Tensor":
        import torch

        return torch.from_numpy(array).to(self._device)

    def _limit_threads(self) -> None:
        """The limit belongs to the calling thread (OpenMP)."""
        import torch

        torch.set_num_threads(self._threads)
