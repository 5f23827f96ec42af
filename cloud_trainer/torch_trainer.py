"""GRPO on any causal language model that transformers loads, with float32 master weights.

What always holds:

1. The masters are float32 whatever the folder's type: updates below half a bf16 ulp accumulate.
   What is published is their rounding to the type that the folder has, under the folder's names.
2. A step whose loss or gradient is not finite changes nothing, and the metric ``skipped`` says so;
   neither does a step without signal (all advantages zero), where ``trained_tokens`` is 0.
3. There is no randomness in here (no dropout): equal state and groups give equal bits on the same
   machine with the same number of threads, and so does continuing from ``state_dict``.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloud_trainer.batching import Batch, make_batch
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_settings import TorchSettings
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
        self._learner: Learner | None = None

    def load(self, folder: Path) -> None:
        """See ``Trainer.load``."""
        self._limit_threads()
        loaded = load_model(folder, device=self._device)
        vocabulary = vocabulary_of(loaded.model)
        load_tokenizer(folder, vocabulary=vocabulary)  # an exported folder must load whole
        self._learner = Learner(
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
        facts = accumulate(learner, batch, self.settings, device=self._device)
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

    def _update(self, learner: Learner, batch: Batch) -> tuple[float, bool, float]:
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

    def _loaded(self) -> Learner:
        if self._learner is None:
            raise LocalProtocolError("the trainer has no model yet: call load first")
        return self._learner

    def _limit_threads(self) -> None:
        """The limit belongs to the calling thread (OpenMP)."""
        import torch

        torch.set_num_threads(self._threads)
