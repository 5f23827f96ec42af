"""The policy loss: group-relative policy optimisation with a clipped ratio.

For every trained token t, with ``A`` the advantage of its sequence,

    r_t = exp(clamp(log p_now(t) - log p_behaviour(t), -20, 20))
    o_t = min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)
    o_t = max(o_t, ratio_max A)                                          where A < 0
    L   = -(sum of o_t over all trained tokens) / (number of tokens in the batch)

``p_behaviour`` is what the agent recorded when it drew the token, at whatever version that was, so
the ratio corrects for policy lag and for the engine's rounding at once. Sources: the objective and
its group advantages, arXiv:2402.03300; two clip bounds and the mean over all tokens of the batch
instead of per sequence, arXiv:2503.14476; the bound for negative advantages, without which one
token that became likely dominates a step, arXiv:1912.09729.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """``loss`` is the sum over tokens, with gradient; the others are sums without: ``kl`` of
    ``r - 1 - log r`` (unbiased for KL(behaviour || now), Schulman 2020), ``clipped`` of tokens
    whose gradient a bound cut off, ``ratio`` of ratios."""

    loss: "torch.Tensor"
    kl: float
    clipped: float
    ratio: float


def token_log_probabilities(
    logits: "torch.Tensor", targets: "torch.Tensor", *, temperature: float = 1.0
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Log-probability of each target at ``temperature``, and entropy in nats (without gradient).

    ``logits`` [rows, columns, vocabulary], ``targets`` [rows, columns]; results [rows, columns],
    float32.
    """
    import torch

    everything = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = everything.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        detached = everything.detach()
        entropy = -(detached.exp() * detached).sum(dim=-1)
    return chosen, entropy


def clipped_token_losses(
    now: "torch.Tensor",
    behaviour: "torch.Tensor",
    advantage: "torch.Tensor",
    *,
    clip_low: float,
    clip_high: float,
    ratio_max: float,
) -> TokenLosses:
    """Summed loss of trained tokens; all tensors [trained]."""
    import torch

    log_ratio = (now - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantage
    bounded = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    objective = torch.where(advantage < 0, torch.maximum(bounded, ratio_max * advantage), bounded)
    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).sum()
        clipped = (objective != plain).sum()
    return TokenLosses(-objective.sum(), float(kl), float(clipped), float(ratio.detach().sum()))
