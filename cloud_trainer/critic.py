"""A critic: a value for every state in which the policy drew a token, from the policy's own model.

    V(state before token t) = w . h_t + b        h_t: what the model's output layer gets there

    L_V = mean over trained tokens of e(V_t - R_t)        e(x) = x x / 2, or with ``error_clip`` c
                                                          c (|x| - c / 2) where |x| > c
    R_t = V_t + A_t with ``value_lam``                    arXiv:1506.02438, arXiv:1707.06347

The linear head shares the model's whole forward pass. It is float32 and starts at zero: so do all
values, and what it gives back to the model. ``e`` with a bound is Huber's loss.

What always holds:

1. A batch is one update, so values before the step are those of the forward pass that gives the
   gradient. The bound that PPO's implementations put on how far a value moves from where it was
   before the step would never be reached, so there is none; ``error_clip`` bounds instead how hard
   a single outcome pulls.
2. The head has its own optimizer and its own norm of gradients: with ``trunk_coefficient`` 0 the
   policy's update does not depend on the value loss at all.
3. During the warm-up the model is computed without gradient, and the policy's parameters and the
   state of their optimizer stay bit for bit what they are.
4. Head and optimizer are in checkpoints under names that begin with ``critic.``; they are no part
   of what is published or exported.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloud_trainer.advantages import Values, generalised_advantages, whitened
from cloud_trainer.batching import Batch, MicroBatch
from cloud_trainer.critic_table import CriticTable
from cloud_trainer.spread import Spread
from cloud_trainer.torch_settings import TorchSettings
from transport.errors import ModelError

if TYPE_CHECKING:
    import torch

PREFIX = "critic."
"""Of the head's names in a checkpoint."""


@dataclass(slots=True)
class Critic:
    """The value head of a model. ``parameters`` are the head's; ``updates`` counts the
    optimizer's."""

    table: CriticTable
    head: Any
    parameters: "dict[str, torch.nn.Parameter]"
    optimizer: "torch.optim.AdamW"
    updates: int = 0
    _hidden: "torch.Tensor | None" = None

    @property
    def warms_up(self) -> bool:
        """Whether the policy is to stay as it is in the next step."""
        return self.updates < self.table.warmup_steps

    def see(self, hidden: "torch.Tensor") -> None:
        """Keep what the model's output layer gets [rows, columns, features]."""
        self._hidden = hidden

    def values(self, row: "torch.Tensor", column: "torch.Tensor", kept: int) -> "torch.Tensor":
        """Values of the trained tokens [trained] after the model's last forward pass; ``row`` and
        ``column`` are their places among the ``kept`` columns before the last one."""
        assert self._hidden is not None  # noqa: S101 - a forward pass came before
        hidden = self._hidden[:, -(kept + 1) : -1].float()
        self._hidden = None  # it belongs to a graph that is to be freed
        scale = self.table.trunk_coefficient
        detached = hidden.detach()
        if scale and hidden.requires_grad:  # the same numbers, another gradient
            hidden = detached + scale * (hidden - detached)
        else:
            hidden = detached
        values: torch.Tensor = self.head(hidden)[..., 0][row, column]
        return values

    def losses(self, values: "torch.Tensor", returns: "torch.Tensor") -> "torch.Tensor":
        """The sum of the errors of ``values``, both [trained]."""
        from torch.nn.functional import huber_loss, mse_loss

        if self.table.error_clip:
            return huber_loss(values, returns, reduction="sum", delta=self.table.error_clip)
        return mse_loss(values, returns, reduction="sum") / 2


def add_critic(model: Any, settings: TorchSettings, spread: Spread) -> Critic | None:
    """The critic that the settings ask for, on a model that is spread already.

    Raises:
        ModelError: the model has no output layer to listen at.
    """
    import torch

    table = settings.critic
    if table is None:
        return None
    output = model.get_output_embeddings()
    if output is None:
        raise ModelError(
            f'baseline = "critic": {type(model).__name__} does not say what its output layer is '
            "(get_output_embeddings); choose another baseline for this model"
        )
    head = torch.nn.Linear(int(output.weight.shape[-1]), 1, device=spread.load_device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = spread.place(head, dict(head.named_parameters()))
    optimizer = torch.optim.AdamW(
        list(parameters.values()),
        lr=table.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=0.0,
        fused=True,
    )
    critic = Critic(table, head, parameters, optimizer)
    output.register_forward_pre_hook(lambda _, inputs: critic.see(inputs[0]))
    return critic


def token_rewards(micro: MicroBatch, rewards: Values) -> Values:
    """Per trained token [trained]: the reward of its sequence (out of ``rewards`` [sequences]) at
    the last one, 0 before."""
    found = np.zeros(len(micro.row))
    found[np.cumsum(micro.lengths) - 1] = rewards[micro.sibling]
    return found


def estimated(
    batch: Batch, settings: TorchSettings, values: Values, advantages: Values, returns: Values
) -> tuple[Batch, float]:
    """The batch with its advantages and returns, and the explained variance; arrays [trained] are
    those of all ranks."""
    if settings.normalisation == "batch_std":
        advantages = whitened(advantages)
    micro_batches = tuple(
        replace(
            micro,
            advantage=advantages[own].astype(np.float32),
            returns=returns[own].astype(np.float32),
        )
        for micro in batch.micro_batches
        for own in [slice(micro.offset, micro.offset + len(micro.row))]
    )
    return replace(batch, micro_batches=micro_batches), explained_variance(values, returns)


def estimates(
    micro: MicroBatch, rewards: Values, values: Values, table: CriticTable
) -> tuple[Values, Values]:
    """Advantages and returns of a micro batch's trained tokens, all [trained]."""
    found = generalised_advantages(rewards, values, micro.lengths, gamma=table.gamma, lam=table.lam)
    to_predict = generalised_advantages(
        rewards, values, micro.lengths, gamma=table.gamma, lam=table.value_lam
    )
    return found, to_predict + values


def explained_variance(values: Values, returns: Values) -> float:
    """``1 - Var(returns - values) / Var(returns)``: 1 for a critic that knows, 0 for one that says
    the same everywhere; 0 also where returns do not differ."""
    if returns.size == 0 or returns.min() == returns.max():
        return 0.0
    return float(1.0 - np.var(returns - values) / np.var(returns))
