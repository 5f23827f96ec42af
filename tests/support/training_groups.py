"""Made-up groups for trainers of the small models of ``torch_models``."""

import random

from cloud_trainer.trainer import TrainingSequence


def groups_of(seed, *, groups=3, siblings=4, logprob=-4.0):
    """Random groups; a sequence is rewarded when its first token is below 160."""
    rng = random.Random(seed)
    made = []
    for number in range(groups):
        prompt = tuple(rng.randrange(5, 317) for _ in range(rng.randint(1, 9)))
        group = []
        for _ in range(siblings):
            tokens = tuple(rng.randrange(5, 317) for _ in range(rng.randint(1, 6)))
            group.append(
                TrainingSequence(
                    group=f"g{number}",
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=tuple(logprob + rng.gauss(0, 0.1) for _ in tokens),
                    versions=(0,) * len(tokens),
                    loss_mask=tuple(rng.random() < 0.9 for _ in tokens),
                    reward=float(tokens[0] < 160),
                )
            )
        made.append(group)
    return made
