"""GRPO on any causal language model that transformers loads, with float32 master weights.

What always holds:

1. The masters are float32 whatever the folder's type and the ``precision`` of the passes: updates
   below half a bf16 ulp accumulate. What is published is their rounding to the type that the
   folder has, under the folder's names.
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
from cloud_trainer.critic import PREFIX, add_critic
from cloud_trainer.honesty import Comparison
from cloud_trainer.lora import Adapter, adapter_parameters, add_adapters, published_files
from cloud_trainer.model_blocks import checkpoint_activations
from cloud_trainer.optimizer_state import check_saved, restore, saved
from cloud_trainer.precision import check_precision
from cloud_trainer.presets import resolve_settings
from cloud_trainer.ranks import Ranks, SingleRank
from cloud_trainer.spread import spread_over
from cloud_trainer.torch_gradients import accumulate, movement
from cloud_trainer.torch_learner import Learner
from cloud_trainer.torch_reference import load_reference
from cloud_trainer.trainer import Arrays, TrainingSequence
from transport.errors import LocalProtocolError
from transport.messages import GroupDrift
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


class TorchTrainer:
    """``Trainer`` over torch; ``where`` names the settings in errors. With several ``ranks`` the
    model lies over them, and on the devices that they say.

    Raises:
        ConfigError: a setting is unknown or out of range, or nothing that the device can do, or
            torch is not installed.
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
        check_precision(self.settings.precision, self._spread.device, where)
        self._threads = threads
        self._updates = 0
        self._drifts: tuple[GroupDrift, ...] = ()
        self._moved = 0.0
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
        artefacts, lora = read_artefacts(folder), self.settings.lora
        if lora is not None:
            adapters = add_adapters(loaded, lora)
            trained = adapter_parameters(loaded, adapters)
            if lora.publish == "adapter":
                artefacts = published_files(folder, lora, adapters, threads=self._threads)
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
            artefacts=artefacts,
            spread=self._spread,
            adapters=adapters,
            lora=lora,
            reference=load_reference(folder, self.settings, self._spread),
            critic=add_critic(loaded.model, self.settings, self._spread),
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
        comparison = Comparison(batch.sequences)
        facts = accumulate(
            learner, batch, self.settings, device=self._spread.device, comparison=comparison
        )
        self._drifts = comparison.drifts(batch.siblings)
        norm, skipped, lr = self._update(learner, batch)
        self._moved = movement(learner, comparison, self.settings, device=self._spread.device)
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

    def drifts(self) -> tuple[GroupDrift, ...]:
        """See ``Trainer.drifts``."""
        return self._drifts

    def moved(self) -> float | None:
        """See ``Trainer.moved``."""
        return self._moved

    def published_state(self) -> dict[str, TensorBytes]:
        """See ``Trainer.published_state``."""
        return dict(self._loaded().published())

    def artefacts(self) -> dict[str, bytes]:
        """See ``Trainer.artefacts``."""
        return self._loaded().artefacts

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """See ``Trainer.state_dict``."""
        learner = self._loaded()
        arrays = saved(learner.trained, learner.optimizer, self._spread)
        meta = {"step_count": self.step_count, "updates": self._updates}
        critic = learner.critic
        if critic is not None:
            arrays |= saved(critic.parameters, critic.optimizer, self._spread, PREFIX)
            meta["critic_updates"] = critic.updates
        return arrays, meta

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """See ``Trainer.load_state_dict``; raises ModelError for another model's state. Ranks other
        than 0 give no arrays."""
        learner = self._loaded()
        critic = learner.critic
        if self._spread.rank == 0:
            check_saved(arrays, learner.trained)
            if critic is not None:
                check_saved(arrays, critic.parameters, PREFIX)
        self._updates = int(meta["updates"])
        self.step_count = int(meta["step_count"])
        restore(arrays, learner.trained, learner.optimizer, self._spread, self._updates)
        if critic is not None:
            critic.updates = int(meta["critic_updates"])
            restore(
                arrays, critic.parameters, critic.optimizer, self._spread, critic.updates, PREFIX
            )

    def export(self, folder: Path) -> None:
        """See ``Trainer.export``; ``folder`` must not exist (StoreError)."""
        write_model_folder(folder, self.published_state(), self._loaded().artefacts)

    # ---- arithmetic ------------------------------------------------------------------------

    def _update(self, learner: Learner, batch: Batch) -> tuple[float, bool, float]:
        """Gradient norm (0 when not finite), whether the step was skipped, and learning rate."""
        s, critic = self.settings, learner.critic
        stays = critic is not None and critic.warms_up
        lr = 0.0 if stays else s.lr * min(1.0, (self._updates + 1) / max(1, s.warmup_steps))
        if not batch.micro_batches:
            return 0.0, False, lr
        norm = 0.0 if stays else self._clipped(learner.trained)
        finite = bool(np.isfinite(norm))
        if critic is not None:
            finite = bool(np.isfinite(self._clipped(critic.parameters))) and finite
        if finite and not stays:
            for group in learner.optimizer.param_groups:
                group["lr"] = lr
            learner.optimizer.step()
            self._updates += 1
        learner.optimizer.zero_grad(set_to_none=True)
        if critic is not None:
            if finite:
                critic.optimizer.step()
                critic.updates += 1
            critic.optimizer.zero_grad(set_to_none=True)
        return (norm if finite else 0.0), not finite, lr

    def _clipped(self, parameters: "Mapping[str, torch.nn.Parameter]") -> float:
        """The norm of the batch's gradient by these, which is no longer than allowed then."""
        import torch

        trained = list(parameters.values())
        self._spread.sum_gradients(trained)
        found = torch.nn.utils.clip_grad_norm_(trained, self.settings.max_grad_norm)
        return float(self._spread.whole(found))

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
