"""The policy loss of a whole batch in plain Python: loops over tokens, from the formulas of
docs/learning.md, sharing nothing with ``cloud_trainer`` but the settings."""

import math
from dataclasses import dataclass, field

FACTS = ["kl_behaviour", "clip_fraction", "ratio_mean", "importance_weight_mean"]
FACTS += ["truncated_fraction", "second_moment", "masked_fraction", "kl_reference"]


@dataclass
class Sibling:
    """One sequence: log-probabilities of the policy's own tokens only."""

    reward: float
    now: list[float]
    behaviour: list[float]
    reference: list[float]
    values: list[float] | None = None
    """What a critic says, where there is one."""


@dataclass
class Step:
    """``slopes[group][sibling][token]`` is the derivative of ``loss`` by ``now`` there, and
    ``value_slopes`` that of the value loss by the value."""

    loss: float = 0.0
    slopes: list = field(default_factory=list)
    value_slopes: list = field(default_factory=list)
    facts: dict = field(default_factory=dict)


def bounded(value):
    return max(-20.0, min(20.0, value))


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def kl_and_slope(now, reference, estimator):
    """Estimate of KL(now || reference) at a token, and its derivative by ``now``."""
    difference = bounded(now - reference)
    inside = abs(now - reference) < 20
    if estimator == "k1":
        return difference, 1.0 * inside
    if estimator == "k2":
        return difference**2 / 2, difference * inside
    return math.exp(-difference) - 1 + difference, (1 - math.exp(-difference)) * inside


def penalty(count, settings):
    if count >= settings.max_tokens:
        return -1.0
    cache = settings.overlong_share * settings.max_tokens
    start = settings.max_tokens - cache
    return 0.0 if count <= start else (start - count) / cache


def advantages_of(groups, settings):
    shaped = []
    for group in groups:
        rewards = []
        for sibling in group:
            reward = sibling.reward
            if settings.overlong_penalty:
                reward += settings.overlong_penalty * penalty(len(sibling.now), settings)
            if settings.kl_in == "reward":
                for now, reference in zip(sibling.now, sibling.reference, strict=True):
                    kl, _ = kl_and_slope(now, reference, settings.kl_estimator)
                    reward -= settings.kl_coefficient * kl
            rewards.append(reward)
        shaped.append(rewards)
    result = []
    for rewards in shaped:
        centred = []
        for place, reward in enumerate(rewards):
            others = rewards[:place] + rewards[place + 1 :]
            if len(set(rewards)) == 1:
                centred.append(0.0)
            elif settings.baseline == "group_mean":
                centred.append(reward - mean(rewards))
            else:
                centred.append(reward - mean(others))
        if settings.normalisation == "group_std":
            centred = [value / (deviation(rewards) + 1e-6) for value in centred]
        result.append(centred)
    if settings.normalisation == "batch_std":
        everything = [value for group in result for value in group]
        scale = deviation(everything) + 1e-6
        result = [[value / scale for value in group] for group in result]
    return result


def advantage_of_token(values, rewards, t, discount, decay):
    """The sum of all temporal differences to come, each with its weight."""
    ahead = [*values[1:], 0.0]
    differences = [
        reward + discount * later - value
        for reward, later, value in zip(rewards, ahead, values, strict=True)
    ]
    return math.fsum(
        (discount * decay) ** (later - t) * differences[later] for later in range(t, len(values))
    )


def estimates_of(groups, settings):
    """By group, sibling and token: advantages, and what the critic is to predict."""
    table = settings.critic
    advantages, returns = [], []
    for group in groups:
        advantages.append([])
        returns.append([])
        for sibling in group:
            rewards = [0.0] * len(sibling.now)
            rewards[-1] = sibling.reward
            if settings.overlong_penalty:
                rewards[-1] += settings.overlong_penalty * penalty(len(sibling.now), settings)
            if settings.kl_in == "reward":
                for t, (now, reference) in enumerate(
                    zip(sibling.now, sibling.reference, strict=True)
                ):
                    kl, _ = kl_and_slope(now, reference, settings.kl_estimator)
                    rewards[t] -= settings.kl_coefficient * kl
            found = [
                [
                    advantage_of_token(sibling.values, rewards, t, table.gamma, decay)
                    for t in range(len(rewards))
                ]
                for decay in (table.lam, table.value_lam)
            ]
            advantages[-1].append(found[0])
            returns[-1].append([a + v for a, v in zip(found[1], sibling.values, strict=True)])
    if settings.normalisation == "batch_std":
        everything = [a for group in advantages for tokens in group for a in tokens]
        centre, scale = mean(everything), deviation(everything) + 1e-6
        advantages = [
            [[(a - centre) / scale for a in tokens] for tokens in group] for group in advantages
        ]
    return advantages, returns


def add_value_loss(step, groups, returns, settings):
    """The critic's part of a step."""
    values = [v for group in groups for sibling in group for v in sibling.values]
    targets = [r for group in returns for tokens in group for r in tokens]
    bound = settings.critic.error_clip or math.inf
    loss = 0.0
    for group, of_group in zip(groups, returns, strict=True):
        step.value_slopes.append([])
        for sibling, of_sibling in zip(group, of_group, strict=True):
            errors = [v - r for v, r in zip(sibling.values, of_sibling, strict=True)]
            for error in errors:
                inside = abs(error) <= bound
                loss += error**2 / 2 if inside else bound * (abs(error) - bound / 2)
            slopes = [max(-bound, min(bound, error)) / len(values) for error in errors]
            step.value_slopes[-1].append(slopes)
    step.facts["value_loss"] = loss / len(values)
    left = deviation([r - v for r, v in zip(targets, values, strict=True)]) ** 2
    spread = deviation(targets) ** 2
    step.facts["explained_variance"] = 1 - left / spread if spread else 0.0


def masked_by_second_moment(groups, advantages, settings):
    """(group, sibling, token) that are left out: the largest first, until the mean fits."""
    tokens = [
        ((g, s, t), bounded(now - behaviour) ** 2)
        for g, group in enumerate(groups)
        for s, sibling in enumerate(group)
        if advantages[g][s] or settings.kl_coefficient
        for t, (now, behaviour) in enumerate(zip(sibling.now, sibling.behaviour, strict=True))
    ]
    tokens.sort(key=lambda item: item[1])
    while tokens and mean([square for _, square in tokens]) > settings.second_moment_budget:
        tokens.pop()
    return {place for place, _ in tokens}


def value_and_slope(ratio, now, advantage, settings):
    """What is to grow at a token, its derivative by ``now`` (``ratio`` grows as fast as itself),
    and whether a bound cut it."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.clip == "none":
        return ratio * advantage, ratio * advantage, False
    if settings.clip == "cispo":
        weight = max(low, min(high, ratio))
        return weight * advantage * now, weight * advantage, weight != ratio and advantage != 0
    if advantage >= 0:
        cut = ratio > high and advantage > 0
        return min(ratio, high) * advantage, 0.0 if cut else ratio * advantage, cut
    top = settings.ratio_max or math.inf
    cut = ratio < low or ratio > top
    return max(low, min(ratio, top)) * advantage, 0.0 if cut else ratio * advantage, cut


def reference_step(groups, settings, advantages=None):
    """Loss, slopes and mean facts of a step on ``groups`` of ``Sibling``. An advantage is one per
    sibling, or a list of one per token."""
    returns = None
    if advantages is None and settings.critic is not None:
        advantages, returns = estimates_of(groups, settings)
    elif advantages is None:
        advantages = advantages_of(groups, settings)
    kept = masked_by_second_moment(groups, advantages, settings)
    every = [sibling for group in groups for sibling in group]
    divisors = {
        "token": sum(len(sibling.now) for sibling in every),
        "sequence": len(every),
        "constant": len(every) * settings.max_tokens,
    }
    step = Step()
    sums = dict.fromkeys(FACTS, 0.0)
    trained = 0
    for g, group in enumerate(groups):
        step.slopes.append([])
        for s, sibling in enumerate(group):
            given, slopes = advantages[g][s], []
            step.slopes[-1].append(slopes)
            if given == 0 and not settings.kl_coefficient:
                slopes += [0.0] * len(sibling.now)
                continue
            share = len(sibling.now) if settings.aggregation == "sequence" else 1
            scale = share * divisors[settings.aggregation]
            drifts = [n - b for n, b in zip(sibling.now, sibling.behaviour, strict=True)]
            for t, now in enumerate(sibling.now):
                advantage = given[t] if isinstance(given, list) else given
                drift = math.exp(bounded(drifts[t]))
                level = drifts[t] if settings.ratio == "token" else mean(drifts)
                to_behaviour = math.exp(bounded(level))
                ratio = 1.0 if settings.importance_cap else to_behaviour
                value, slope, cut = value_and_slope(ratio, now, advantage, settings)
                if settings.clip != "cispo" and settings.ratio == "token":
                    # A token at the end of the scale has a constant ratio.
                    slope *= bool(settings.importance_cap) or abs(drifts[t]) < 20
                if settings.importance_cap:
                    weight = min(drift, settings.importance_cap)
                    value, slope = value * weight, slope * weight
                    sums["importance_weight_mean"] += weight
                    sums["truncated_fraction"] += drift > settings.importance_cap
                if settings.second_moment_budget:
                    if (g, s, t) not in kept:
                        value = slope = 0.0
                        sums["masked_fraction"] += 1
                    sums["second_moment"] += bounded(drifts[t]) ** 2
                if settings.kl_coefficient:
                    kl, kl_slope = kl_and_slope(now, sibling.reference[t], settings.kl_estimator)
                    sums["kl_reference"] += kl
                    if settings.kl_in == "loss":
                        value -= settings.kl_coefficient * kl
                        slope -= settings.kl_coefficient * kl_slope
                step.loss -= value / scale
                slopes.append(-slope / scale)
                sums["kl_behaviour"] += drift - 1 - bounded(drifts[t])
                sums["clip_fraction"] += cut
                sums["ratio_mean"] += to_behaviour
                trained += 1
    step.facts = {name: value / max(1, trained) for name, value in sums.items()}
    if returns is not None:
        add_value_loss(step, groups, returns, settings)
    return step
