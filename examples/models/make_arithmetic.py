"""Make the warm-started small model of ``examples/arithmetic.toml``.

    python examples/models/make_arithmetic.py examples/models/arithmetic-1m --seed 17

The result is a stock Hugging Face folder: ``config.json``, ``generation_config.json``,
``model.safetensors`` (bf16), ``tokenizer.json``, ``tokenizer_config.json``.  Two runs with the
same seed, library versions and processor kind write the same bytes (one thread, one generator).

Supervised training in two parts.  ``TAUGHT_STEPS`` on right answers teach two-digit addition and
subtraction; ``HABIT_STEPS`` on the answers of a careless pupil then spoil it.  The pupil forgets
the carry (or the borrow) of the units column with probability ``SLIP``, and independently the
minus sign of a negative result; where neither is needed he is right.  Greedy decoding copies the
habit, so the model starts below one half on held-out problems although the right answer is
within its reach: reinforcement learning against the verifier has to find it and prefer it.

Held out: the fifth of all questions that a run with ``held_out_one_in = 5`` holds out, by the same
function; none of them is ever shown here.
"""

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.tasks import is_held_out

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SLIP = 0.8
HELD_OUT_ONE_IN = 5
BATCH_SEQUENCES = 256
TAUGHT_STEPS = 700
HABIT_STEPS = 120
WARM_UP_STEPS = 50
LEARNING_RATE = 1e-3
QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, END = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Problem = tuple[int, str, int]


def make_tokenizer(folder: Path, corpus: list[str]) -> "PreTrainedTokenizerFast":
    """Byte-level BPE over the task's texts, digits one by one; a question of ours is 9 tokens.

    The pre-tokenizer splits at digits only, so the fixed wording merges into a single token;
    any other text still encodes, byte by byte.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "eos_token": SPECIAL_TOKENS[END],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def make_model(
    vocabulary: int, seed: int, *, hidden: int = 128, feed_forward: int = 384, layers: int = 3
) -> "Qwen3ForCausalLM":
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=None,
        )
    )


def draw_problem(rng: random.Random) -> Problem:
    return rng.randint(10, 99), rng.choice("+-"), rng.randint(10, 99)


def true_answer(problem: Problem) -> int:
    a, operator, b = problem
    return a + b if operator == "+" else a - b


def pupil_answer(problem: Problem, rng: random.Random) -> str:
    """What the careless pupil writes; right wherever no carry, borrow or sign is needed."""
    a, operator, b = problem
    forgets_column, forgets_sign = rng.random() < SLIP, rng.random() < SLIP
    value = true_answer(problem)
    large, small = max(a, b), min(a, b)
    size = abs(value)
    if forgets_column and operator == "+" and a % 10 + b % 10 >= 10:
        size -= 10
    elif forgets_column and operator == "-" and large % 10 < small % 10:
        size += 10
    return f"-{size}" if value < 0 and not forgets_sign else str(size)


def held_out_problems() -> list[Problem]:
    """Every problem of the task that runs evaluate on, in order."""
    numbers = range(10, 100)
    problems = ((a, operator, b) for a in numbers for operator in "+-" for b in numbers)
    return [problem for problem in problems if is_held_out(question(problem), HELD_OUT_ONE_IN)]


def question(problem: Problem) -> str:
    return QUESTION.format(*problem)


def encode_question(tokenizer: "PreTrainedTokenizerFast", problem: Problem) -> list[int]:
    messages = [{"role": "user", "content": question(problem)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def make_batch(
    tokenizer: "PreTrainedTokenizerFast",
    held_out: frozenset[Problem],
    rng: random.Random,
    *,
    careless: bool,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and labels, both ``[BATCH_SEQUENCES, longest]``; label -100 = not learnt from."""
    import torch

    rows: list[tuple[list[int], list[int]]] = []  # question, answer
    while len(rows) < BATCH_SEQUENCES:
        problem = draw_problem(rng)
        if problem in held_out:
            continue
        text = pupil_answer(problem, rng) if careless else str(true_answer(problem))
        answer = tokenizer.encode(text, add_special_tokens=False)
        rows.append((encode_question(tokenizer, problem), [*answer, END]))
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    tokens = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), -100)
    for row, (asked, answer) in enumerate(rows):
        end = len(asked) + len(answer)
        tokens[row, :end] = torch.tensor(asked + answer)
        labels[row, len(asked) : end] = torch.tensor(answer)
    return tokens, labels


def train(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    held_out: frozenset[Problem],
    rng: random.Random,
) -> None:
    """Supervised imitation: AdamW, linear warm-up, constant rate, linear decay over the habit."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    steps = TAUGHT_STEPS + HABIT_STEPS
    for step in range(steps):
        rate = LEARNING_RATE * min(1, (step + 1) / WARM_UP_STEPS, (steps - step) / HABIT_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, labels = make_batch(tokenizer, held_out, rng, careless=step >= TAUGHT_STEPS)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 in (TAUGHT_STEPS, steps):
            accuracy = held_out_accuracy(model, tokenizer, sorted(held_out))
            print(
                f"step {step + 1:4d}  loss {loss.item():.3f}  held-out greedy accuracy "
                f"{accuracy:.3f}",
                flush=True,
            )


def held_out_accuracy(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", problems: list[Problem]
) -> float:
    """Fraction of problems that greedy decoding answers exactly; all questions are equally long."""
    import torch

    tokens = torch.tensor([encode_question(tokenizer, problem) for problem in problems])
    length = tokens.shape[1]
    with torch.inference_mode():
        for _ in range(5):
            choice = model(input_ids=tokens, logits_to_keep=1).logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, choice[:, None]], dim=1)
    right = 0
    for row, problem in zip(tokens[:, length:].tolist(), problems, strict=True):
        answer = row[: row.index(END)] if END in row else row
        right += tokenizer.decode(answer) == str(true_answer(problem))
    return right / len(problems)


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save(model: "Qwen3ForCausalLM", folder: Path) -> None:
    """Write the weights as bf16; the model keeps their rounded values in float32."""
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    model.float()  # type: ignore[no-untyped-call]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)  # noqa: S311 - data, not secrets
    corpus = [question(draw_problem(rng)) for _ in range(500)]
    tokenizer = make_tokenizer(arguments.folder, corpus)
    problems = held_out_problems()
    model = make_model(len(tokenizer), arguments.seed)
    train(model, tokenizer, frozenset(problems), rng)
    save(model, arguments.folder)
    print(f"parameters {sum(weight.numel() for weight in model.parameters())}")
    print(f"held-out greedy accuracy {held_out_accuracy(model, tokenizer, problems):.3f}")


if __name__ == "__main__":
    main()
