"""Consecutive versions of models that are really trained, for the delta bench.

* ``toy_versions``: the project's own trainer continues ``examples/models/arithmetic-1m`` with the
  example's learning rate on answers that the model draws itself. Its learning rate is a hundred
  times that of large models, so a third of its weights changes per step: its ratios say nothing
  about large models.
* ``middle_versions``: a transformer of the Llama kind with random weights (standard deviation 0.02,
  on the BF16 grid), under AdamW at the learning rate of large models, with random advantages of
  random tokens: gradients of real back-propagation, without anything to learn.

Both need torch and transformers and give every version in the published form.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloud_trainer.torch_trainer import TorchTrainer
from cloud_trainer.trainer import TrainingSequence
from transport.weights.tensors import TensorBytes

TOY = Path(__file__).parents[1] / "examples" / "models" / "arithmetic-1m"
TOY_LR = 1e-4
MIDDLE_LR = 1e-6
MIDDLE_BETAS = (0.9, 0.999)

_QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="
_GROUPS, _SIBLINGS, _NEW_TOKENS = 16, 8, 4


def toy_versions(steps: int, *, seed: int = 0) -> Iterator[dict[str, TensorBytes]]:
    """The weights before and after every one of ``steps`` steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    model: Any = AutoModelForCausalLM.from_pretrained(TOY)
    model = model.float().eval()
    trainer = TorchTrainer({"lr": TOY_LR, "warmup_steps": 0}, threads=1)
    trainer.load(TOY)
    yield trainer.published_state()
    for _ in range(steps):
        trainer.step(_groups(model, tokenizer, rng))
        yield trainer.published_state()


def _groups(model: Any, tokenizer: Any, rng: random.Random) -> list[list[TrainingSequence]]:
    """Siblings drawn from the model before training, rewarded when the sum is right."""
    import torch

    prompts: list[tuple[int, ...]] = []
    answers = []
    for _ in range(_GROUPS):
        one, other, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-")
        question = "<|user|>" + _QUESTION.format(one, sign, other) + "<|assistant|>"
        prompts.append(tuple(tokenizer.encode(question, add_special_tokens=False)))
        answers.append(str(one + other if sign == "+" else one - other))
    torch.manual_seed(rng.randrange(1 << 30))
    # Digits are tokens of their own, so all questions have the same length.
    tokens = torch.tensor(prompts).repeat_interleave(_SIBLINGS, 0)
    chosen = []
    with torch.no_grad():
        for _ in range(_NEW_TOKENS):
            logs = model(tokens).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(logs.exp(), 1)
            chosen.append(logs.gather(1, drawn)[:, 0])
            tokens = torch.cat([tokens, drawn], 1)
    groups: list[list[TrainingSequence]] = [[] for _ in range(_GROUPS)]
    rows = zip(tokens[:, -_NEW_TOKENS:].tolist(), torch.stack(chosen, 1).tolist(), strict=True)
    for number, (answered, logprobs) in enumerate(rows):
        group = number // _SIBLINGS
        text = tokenizer.decode(answered, skip_special_tokens=True).strip()
        groups[group].append(
            TrainingSequence(
                group=f"g{group}",
                prompt_tokens=prompts[group],
                tokens=tuple(answered),
                logprobs=tuple(logprobs),
                versions=(0,) * _NEW_TOKENS,
                loss_mask=(True,) * _NEW_TOKENS,
                reward=float(text.startswith(answers[group])),
            )
        )
    return groups


def middle_versions(
    steps: int, *, hidden: int, layers: int, seed: int = 0, threads: int = 1
) -> Iterator[dict[str, TensorBytes]]:
    """The weights before and after every one of ``steps`` steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    vocabulary = 4096
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    )
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())
    optimizer = torch.optim.AdamW(parameters, lr=MIDDLE_LR, betas=MIDDLE_BETAS, weight_decay=0.0)
    yield _published(model)
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (4, 64))
        logs = model(tokens).logits[:, :-1].log_softmax(-1)
        chosen = logs.gather(2, tokens[:, 1:, None])[..., 0]
        loss = -(torch.randn(4, 1) * chosen).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield _published(model)


def _published(model: Any) -> dict[str, TensorBytes]:
    import torch

    made = {}
    for name, parameter in sorted(model.named_parameters()):
        bits = parameter.detach().bfloat16().contiguous().view(torch.uint16).numpy()
        made[name] = TensorBytes("BF16", tuple(bits.shape), bits.tobytes())
    return made
