"""GRPO on any causal language model that transformers loads, with float32 master weights.

What always holds:

1. The masters are float32 whatever the folder's type: updates below half a bf16 ulp accumulate.
   What is published is their rounding to the type that the folder has, under the folder's names.
2. A step whose loss or gradient is not finite changes nothing, and the metric ``skipped`` says so;
   neither does a step without signal (all advantages zero, no KL), where ``trained_tokens`` is 0.
3. There is no randomness in here (no dropout): equal state and groups give equal bits on the same
   machine with the same number of threads and ranks, and so does continuing from ``state_dict``.
4. With several ranks every rank makes the same calls; results are rank 0's. State does not depend
   on their number: what one rank saved, four continue, equal but for rounding.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloud_trainer.batching import Batch, make_batch
from cloud_trainer.lora import Adapter, adapter_parameters, add_adapters
from cloud_trainer.model_blocks import checkpoint_activations
from cloud_trainer.presets import resolve_settings
from cloud_trainer.ranks import Ranks, SingleRank
from cloud_trainer.spread import spread_over
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_reference import load_reference
from cloud_trainer.trainer import Arrays, TrainingSequence
from transport.errors import LocalProtocolError, ModelError
from transport.runtime.model_folder import (
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
    """``Trainer`` over torch; ``where`` names the settings in errors. With several ``ranks`` the
    model lies over them, and on the devices that they say.

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
        ranks: Ranks | None = None,
    ) -> None:
        require_torch('trainer = "torch"')
        self.settings = resolve_settings(settings, where)
        self.step_count = 0
        self._spread = spread_over(SingleRank() if ranks is None else ranks, device)
        self._threads = threads
        self._updates = 0
        self._learner: Learner | None = None

    def load(self, folder: Path) -> None:
        """See ``Trainer.load``."""
        self._limit_threads()
        loaded = load_model(folder, device=self._spread.load_device)
        self._spread.check_same(folder)
        vocabulary = vocabulary_of(loaded.model)
        load_tokenizer(folder, vocabulary=vocabulary)  # an exported folder must load whole
        keeps_logits = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        adapters: dict[str, Adapter] = {}
        trained = loaded.weights.parameters
        if self.settings.lora is not None:
            adapters = add_adapters(loaded, self.settings.lora)
            trained = adapter_parameters(loaded, adapters)
        if self.settings.gradient_checkpointing:
            checkpoint_activations(loaded.model)
        placed = self._spread.place(loaded.model, {**loaded.weights.parameters, **trained})
        trained = {name: placed[name] for name in trained}
        of_folder = {name: placed[name] for name in loaded.weights.parameters}
        self._learner = Learner(
            model=loaded.model,
            weights=dataclasses.replace(loaded.weights, parameters=of_folder),
            trained=trained,
            optimizer=self._new_optimizer(list(trained.values())),
            vocabulary=vocabulary,
            keeps_logits=keeps_logits,
            artefacts=read_artefacts(folder),
            spread=self._spread,
            adapters=adapters,
            reference=load_reference(folder, self.settings, self._spread),
        )
        self._updates = self.step_count = 0

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """See ``Trainer.step``.

        Metrics are means over the trained tokens, unless their name says otherwise: ``loss`` (over
        all tokens), ``kl_behaviour``, ``clip_fraction``, ``ratio_mean``, ``entropy`` (nats),
        what settings of the loss add (docs/learning.md), ``grad_norm`` (before clipping),
        ``reward_mean`` (over sequences), ``tokens``, ``trained_tokens``, ``malformed_groups``,
        ``lr``, ``skipped`` (1 or 0).
        """
        self._limit_threads()
        learner = self._loaded()
        batch = make_batch(groups, self.settings, vocabulary=learner.vocabulary)
        facts = accumulate(learner, batch, self.settings, device=self._spread.device)
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
        return dict(self._loaded().published())

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """See ``Trainer.state_dict``."""
        import torch

        learner = self._loaded()
        arrays: Arrays = {}
        for name, parameter in learner.trained.items():
            zeros = torch.zeros_like(parameter)
            state = learner.optimizer.state.get(parameter, {})
            for kind, values in (
                (_MASTER, parameter),
                (_FIRST, state.get("exp_avg", zeros)),
                (_SECOND, state.get("exp_avg_sq", zeros)),
            ):
                whole = self._spread.whole(values)
                if self._spread.rank == 0:
                    arrays[f"{kind}.{name}"] = whole.cpu().numpy().copy()
        return arrays, {"step_count": self.step_count, "updates": self._updates}

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """See ``Trainer.load_state_dict``; raises ModelError for another model's state. Ranks other
        than 0 give no arrays."""
        import torch

        learner = self._loaded()
        if self._spread.rank == 0:
            _check_arrays(arrays, learner)
        self._updates = int(meta["updates"])
        self.step_count = int(meta["step_count"])
        learner.optimizer.state.clear()
        for name, parameter in learner.trained.items():
            state = {}
            for kind in (_MASTER, _FIRST, _SECOND):
                array = arrays.get(f"{kind}.{name}")
                whole = None if array is None else torch.from_numpy(array.copy())
                state[kind] = self._spread.cut(whole, parameter)
            with torch.no_grad():
                parameter.copy_(state[_MASTER])
            if self._updates:
                learner.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self._updates), device=parameter.device),
                    "exp_avg": state[_FIRST],
                    "exp_avg_sq": state[_SECOND],
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
        parameters = list(learner.trained.values())
        self._spread.sum_gradients(parameters)
        found = torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
        norm = float(self._spread.whole(found))
        finite = bool(np.isfinite(norm))
        if finite:
            for group in learner.optimizer.param_groups:
                group["lr"] = lr
            learner.optimizer.step()
            self._updates += 1
        learner.optimizer.zero_grad(set_to_none=True)
        return (norm if finite else 0.0), not finite, lr

    def _new_optimizer(self, parameters: "list[torch.nn.Parameter]") -> "torch.optim.AdamW":
        import torch

        s = self.settings
        return torch.optim.AdamW(
            parameters,
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


def _check_arrays(arrays: Arrays, learner: Learner) -> None:
    """Raises ModelError unless they are the state of such a learner."""
    for name, parameter in learner.trained.items():
        shape = tuple(parameter.shape)
        for kind in (_MASTER, _FIRST, _SECOND):
            array = arrays.get(f"{kind}.{name}")
            if array is None or array.shape != shape or array.dtype != np.float32:
                raise ModelError(f"state has no float32 {kind}.{name} of shape {shape}")
