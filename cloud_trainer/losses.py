"""The policy loss: one formula with switches.

For every trained token t of sequence i, with ``A`` the advantage of its sequence, or with a critic
its own,

    d_t = log p_now(t) - log p_behaviour(t)
    r_t = exp(d_t)                          ratio = "token"
    r_t = exp(mean of d over i)             ratio = "sequence", arXiv:2507.18071

    o_t = min(r_t A, clamp(r_t, 1 - clip_low, 1 + clip_high) A)              clip = "ppo"
    o_t = max(o_t, ratio_max A)             where A < 0, arXiv:1912.09729
    o_t = constant(clamp(r_t, 1 - clip_low, 1 + clip_high)) A log p_now(t)   clip = "cispo"
    o_t = r_t A                                                              clip = "none"

    L   = -(sum of o_t over all trained tokens) / divisor

``p_behaviour`` is what the agent recorded when it drew the token, at whatever version that was, so
the ratio corrects for policy lag and for the engine's rounding at once. Sources: the objective and
its group advantages, arXiv:2402.03300; two clip bounds and the mean over all tokens of the batch,
arXiv:2503.14476; clipped constant weights, arXiv:2506.13585.

What always holds:

1. A token's gradient comes through its own log-probability only. The mean in a sequence's ratio is
   a constant; where all of its tokens have one advantage, the gradient of a whole sequence is the
   same as if it were not (the paper's variant by token), and a token that is masked has no part.
2. With ``importance_cap`` the ratio is taken against the weights before the step, and what those
   had drifted from the behaviour is a constant weight ``min(exp(d_t), importance_cap)``. A batch is
   one update, so the weights before the step are those of the forward pass itself: the ratio is 1
   there, no bound of ``clip`` is ever reached, and no further pass is needed.
3. Log ratios are bounded to +-20 before they go into an exponential.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloud_trainer.torch_settings import KlEstimator, TorchSettings

if TYPE_CHECKING:
    import torch

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """``loss`` is the sum over tokens, with gradient; ``facts`` are sums over tokens by the name of
    the metric that is their mean: ``kl_behaviour`` of ``r - 1 - log r`` (unbiased for
    KL(behaviour || now), Schulman 2020), ``clip_fraction`` of tokens whose ratio a bound cut off,
    ``ratio_mean`` of ratios to the behaviour. With the settings that ask for them: ``kl_reference``
    of the estimate, ``importance_weight_mean``, ``truncated_fraction`` of tokens whose weight the
    cap cut off, ``second_moment`` of squared log ratios, ``masked_fraction`` of tokens left out."""

    loss: "torch.Tensor"
    facts: dict[str, float]


def fact_names(settings: TorchSettings) -> tuple[str, ...]:
    """The metrics that ``policy_losses`` brings with these settings."""
    names = ["kl_behaviour", "clip_fraction", "ratio_mean"]
    if settings.importance_cap:
        names += ["importance_weight_mean", "truncated_fraction"]
    if settings.second_moment_budget:
        names += ["second_moment", "masked_fraction"]
    if settings.kl_coefficient:
        names.append("kl_reference")
    return tuple(names)


def kl_terms(
    now: "torch.Tensor", reference: "torch.Tensor", estimator: KlEstimator
) -> "torch.Tensor":
    """Per token, an estimate of KL(now || reference) for tokens that ``now`` would draw.

    With ``d = now - reference``: ``k1 = d``, ``k2 = d d / 2``, ``k3 = exp(-d) - 1 + d`` (Schulman,
    "Approximating KL divergence", 2020).
    """
    difference = (now - reference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference


def policy_losses(
    now: "torch.Tensor",
    behaviour: "torch.Tensor",
    advantage: "torch.Tensor",
    settings: TorchSettings,
    *,
    lengths: "torch.Tensor",
    kept: "torch.Tensor | None" = None,
    reference: "torch.Tensor | None" = None,
) -> TokenLosses:
    """Summed loss of trained tokens, to be divided by what ``settings.aggregation`` asks for.

    ``now``, ``behaviour``, ``advantage``, ``kept`` (whether a token takes part, all by default) and
    ``reference`` (log-probabilities for a KL in the loss) are [trained], sequence after sequence;
    ``lengths`` [sequences] says how many tokens each has.
    """
    import torch

    log_ratio = (now - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    with torch.no_grad():
        to_behaviour = _at_level(log_ratio, now - behaviour, lengths, settings)
    if settings.importance_cap or settings.ratio == "sequence":
        level = torch.zeros_like(to_behaviour) if settings.importance_cap else to_behaviour
        ratio = (level + (now - now.detach())).exp()
    else:
        ratio = log_ratio.exp()
    objective, clipped = _objective(now, ratio, advantage, settings)
    with torch.no_grad():
        drift = log_ratio.exp()
        facts = {
            "kl_behaviour": (drift - 1 - log_ratio).sum(),
            "clip_fraction": clipped.sum(),
            "ratio_mean": to_behaviour.exp().sum(),
        }
        if settings.importance_cap:
            weight = drift.clamp(max=settings.importance_cap)
            facts["importance_weight_mean"] = weight.sum()
            facts["truncated_fraction"] = (drift > settings.importance_cap).sum()
        if kept is not None:
            facts["second_moment"] = log_ratio.square().sum()
            facts["masked_fraction"] = (~kept).sum()
    if settings.importance_cap:
        objective = objective * weight
    if kept is not None:
        objective = torch.where(kept, objective, 0.0)
    if reference is not None:
        kl = kl_terms(now, reference, settings.kl_estimator)
        objective = objective - settings.kl_coefficient * kl
        facts["kl_reference"] = kl.detach().sum()
    if settings.aggregation == "sequence":
        objective = objective / lengths.repeat_interleave(lengths)
    values = torch.stack([fact.to(now.dtype) for fact in facts.values()]).tolist()
    return TokenLosses(-objective.sum(), dict(zip(facts, values, strict=True)))


def _at_level(
    log_ratio: "torch.Tensor",
    difference: "torch.Tensor",
    lengths: "torch.Tensor",
    settings: TorchSettings,
) -> "torch.Tensor":
    """Log ratios to the behaviour as they are, or the mean of each sequence for all its tokens."""
    import torch

    if settings.ratio == "token" or not len(lengths):
        return log_ratio
    means = torch.segment_reduce(difference, "mean", lengths=lengths)
    return means.repeat_interleave(lengths).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _objective(
    now: "torch.Tensor",
    ratio: "torch.Tensor",
    advantage: "torch.Tensor",
    settings: TorchSettings,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """What is to grow, per token, and whether a bound cut the token's ratio off."""
    import torch

    plain = ratio * advantage
    if settings.clip == "none":
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    bounded_ratio = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.clip == "cispo":
        weight = bounded_ratio.detach()
        return weight * advantage * now, (weight != ratio) & (advantage != 0)
    objective = torch.minimum(plain, bounded_ratio * advantage)
    if settings.ratio_max:
        at_most = torch.maximum(objective, settings.ratio_max * advantage)
        objective = torch.where(advantage < 0, at_most, objective)
    return objective, (objective != plain).detach()
