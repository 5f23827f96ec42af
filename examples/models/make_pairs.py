"""Make the warm-started small model of ``examples/solve_and_verify.toml``, and its items.

    python examples/models/make_pairs.py examples/models/pairs-250k --seed 17

The task: which two of five digits add up to a total? To solve it, pairs have to be searched; to
check an answer, two digits have to be added. One model is taught both, so that a solver and its
verifier can start from the same folder. Beside that folder,
``pairs.jsonl`` has the run's items and ``claims.jsonl`` what its verifier is measured on: answers
of the model itself to held-out questions, half of them right.

Supervised training in two parts, as in ``make_arithmetic.py``. ``TAUGHT_STEPS`` on right answers
and verdicts; a claim that is right teaches its answer as well, because a model that knows the
answer when it reads one judges it more easily. Then ``HABIT_STEPS`` on those of a hasty pupil, who
with probability ``SLIP`` adds up roughly: as a solver he takes any pair whose sum is at most one
off, as a verifier he agrees to any such pair. ``DECOYS`` wrong pairs of every problem are of that
kind. What both can do better stays within reach, with small probability.

Held out: the fifth of all questions that a run with ``held_out_one_in = 5`` holds out, by the same
function; none of them is ever shown here.
"""

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from make_arithmetic import END, HELD_OUT_ONE_IN, PAD, make_model, make_tokenizer, save

from scheduler.tasks import is_held_out

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

DIGITS = 5
LARGEST = 9  # total: one token
DECOYS = (2, 3, 4)
ITEMS = 6000
CHECKED = 1024
BATCH_SEQUENCES = 128
SLIP = 0.8
TAUGHT_STEPS = 400
HABIT_STEPS = 60
WARM_UP_STEPS = 50
LEARNING_RATE = 2.5e-3
QUESTION = "Which two digits add up to {}? {}:"
CLAIM = "{}{}?"
YES, NO = "yes", "no"
AFTER_CLAIM = 2
"""Tokens of a verifier's question behind the two of the answer: ``?`` and the template's."""
Pair = tuple[int, int]


class Problem(NamedTuple):
    """``pair`` is the only one of ``digits`` that adds up to ``total``, in their order."""

    total: int
    digits: tuple[int, ...]
    pair: Pair

    def question(self) -> str:
        return QUESTION.format(self.total, write(self.digits))

    def pairs(self) -> list[Pair]:
        return list(itertools.combinations(self.digits, 2))

    def near(self) -> list[Pair]:
        """The pairs whose sum is one off at most, the right one among them."""
        return [pair for pair in self.pairs() if abs(sum(pair) - self.total) <= 1]


def draw_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """One problem of the held-out part, or of the other."""
    while True:
        digits = tuple(rng.sample(range(10), DIGITS))
        first, second = sorted(rng.sample(range(DIGITS), 2))
        pair = (digits[first], digits[second])
        problem = Problem(sum(pair), digits, pair)
        right = sum(sum(other) == problem.total for other in problem.pairs())
        if problem.total > LARGEST or right != 1 or len(problem.near()) - 1 not in DECOYS:
            continue
        if is_held_out(problem.question(), HELD_OUT_ONE_IN) == held_out:
            return problem


def write(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))


class Row(NamedTuple):
    """One sequence to learn from. ``told`` says that the question is a claim which is right: its
    answer is learnt from too."""

    question: str
    answer: str
    told: bool


def solved(problem: Problem, rng: random.Random, *, hasty: bool) -> Row:
    """A question, and what the pupil answers."""
    pair = rng.choice(problem.near()) if hasty and rng.random() < SLIP else problem.pair
    return Row(problem.question(), write(pair), told=False)


def judged(problem: Problem, rng: random.Random, *, hasty: bool) -> Row:
    """A claim, right in half of the cases, and what the pupil says of it."""
    wrong = [pair for pair in problem.pairs() if pair != problem.pair]
    near = [pair for pair in problem.near() if pair != problem.pair]
    pair = rng.choice((problem.pair, problem.pair, rng.choice(wrong), rng.choice(near)))
    agrees = right = pair == problem.pair
    if hasty and rng.random() < SLIP:
        agrees = pair in problem.near()
    claim = CLAIM.format(problem.question(), write(pair))
    return Row(claim, YES if agrees else NO, told=right and not hasty)


def make_batch(
    tokenizer: "PreTrainedTokenizerFast", rng: random.Random, *, hasty: bool
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and labels, both ``[BATCH_SEQUENCES, longest]``; label -100 = not learnt from."""
    import torch

    pupils = (solved, judged, judged)  # a verdict has less to learn from than an answer
    rows = [
        pupils[n % 3](draw_problem(rng, held_out=False), rng, hasty=hasty)
        for n in range(BATCH_SEQUENCES)
    ]
    asked = encode_all(tokenizer, [row.question for row in rows])
    said = tokenizer([row.answer for row in rows], add_special_tokens=False)["input_ids"]
    longest = max(len(a) + len(b) + 1 for a, b in zip(asked, said, strict=True))
    tokens = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), -100)
    for number, (row, question, answer) in enumerate(zip(rows, asked, said, strict=True)):
        start, end = len(question), len(question) + len(answer) + 1
        tokens[number, :end] = torch.tensor([*question, *answer, END])
        labels[number, start:end] = tokens[number, start:end]
        if row.told:
            claimed = slice(start - AFTER_CLAIM - 2, start - AFTER_CLAIM)
            labels[number, claimed] = tokens[number, claimed]
    return tokens, labels


def encode_all(tokenizer: "PreTrainedTokenizerFast", questions: list[str]) -> list[list[int]]:
    """The tokens of each question as a user's message, ready for an answer."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tokens


def train(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", rng: random.Random
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
        tokens, labels = make_batch(tokenizer, rng, hasty=step >= TAUGHT_STEPS)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  {report(model, tokenizer)}")


def report(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast") -> str:
    """Greedy accuracies on ``CHECKED`` held-out problems: as a solver, and as a verifier of right
    pairs and of near ones, half and half."""
    rng = random.Random(0)  # noqa: S311 - data, not secrets
    problems = [draw_problem(rng, held_out=True) for _ in range(CHECKED)]
    answers = answered(model, tokenizer, [problem.question() for problem in problems])
    right = sum(a == write(p.pair) for a, p in zip(answers, problems, strict=True))
    agreed = []
    for wanted in (True, False):
        claims = []
        for problem in problems:
            pairs = [pair for pair in problem.near() if (pair == problem.pair) is wanted]
            claims.append(CLAIM.format(problem.question(), write(rng.choice(pairs))))
        verdicts = answered(model, tokenizer, claims)
        agreed.append(sum(verdict == YES for verdict in verdicts) / CHECKED)
    return (
        f"solver {right / CHECKED:.3f}  yes to right {agreed[0]:.3f}, to near ones {agreed[1]:.3f}"
    )


def answered(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", questions: list[str]
) -> list[str]:
    """Greedy answers, in the order of the questions."""
    import torch

    answers = [""] * len(questions)
    by_length: dict[int, list[int]] = {}
    encoded = encode_all(tokenizer, questions)
    for row, question in enumerate(encoded):
        by_length.setdefault(len(question), []).append(row)
    for length, places in by_length.items():
        tokens = torch.tensor([encoded[row] for row in places])
        with torch.inference_mode():
            for _ in range(3):
                choice = model(input_ids=tokens, logits_to_keep=1).logits[:, -1].argmax(-1)
                tokens = torch.cat([tokens, choice[:, None]], dim=1)
        for place, said in zip(places, tokens[:, length:].tolist(), strict=True):
            answers[place] = tokenizer.decode(said[: said.index(END)] if END in said else said)
    return answers


def drawn_answers(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", questions: list[str]
) -> list[str]:
    """Answers of two tokens, drawn at temperature 1."""
    import torch

    tokens = torch.tensor(encode_all(tokenizer, questions))
    with torch.inference_mode():
        for _ in range(2):
            chances = model(input_ids=tokens, logits_to_keep=1).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return tokenizer.batch_decode(tokens[:, -2:])


def write_claims(
    path: Path, model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", rng: random.Random
) -> None:
    """``CHECKED`` claims, as items whose answer is the verdict."""
    problems = [draw_problem(rng, held_out=True) for _ in range(8 * CHECKED)]
    questions = [problem.question() for problem in problems]
    kinds: dict[str, list[dict[str, str]]] = {YES: [], NO: []}
    given = drawn_answers(model, tokenizer, questions)
    for question, problem, answer in zip(questions, problems, given, strict=True):
        verdict = YES if answer == write(problem.pair) else NO
        kinds[verdict].append({"prompt": CLAIM.format(question, answer), "answer": verdict})
    pairs = zip(kinds[YES][: CHECKED // 2], kinds[NO][: CHECKED // 2], strict=True)
    write_lines(path, [claim for pair in pairs for claim in pair])


def write_items(path: Path, rng: random.Random) -> None:
    """The items of the run; no question twice."""
    problems: dict[str, Problem] = {}
    while len(problems) < ITEMS:
        held_out = len(problems) % HELD_OUT_ONE_IN == 0
        problem = draw_problem(rng, held_out=held_out)
        problems[problem.question()] = problem
    write_lines(path, [{"prompt": q, "answer": write(p.pair)} for q, p in problems.items()])


def write_lines(path: Path, items: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)  # noqa: S311 - data, not secrets
    write_items(arguments.folder.with_name("pairs.jsonl"), rng)
    drawn = [judged(draw_problem(rng, held_out=False), rng, hasty=False) for _ in range(500)]
    corpus = [text for row in drawn for text in (row.question, row.answer)]
    tokenizer = make_tokenizer(arguments.folder, corpus)
    model = make_model(len(tokenizer), arguments.seed, hidden=96, feed_forward=256, layers=2)
    train(model, tokenizer, rng)
    save(model, arguments.folder)
    write_claims(arguments.folder.with_name("claims.jsonl"), model, tokenizer, rng)
    print(report(model, tokenizer))


if __name__ == "__main__":
    main()
