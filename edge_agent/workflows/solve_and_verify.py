"""A solver answers, a verifier says of each answer whether it is right; both learn.

    solver's reward      what the run's verifier (the scoring function) gives the answer
    verifier's reward    1 if its verdict was correct, 0 if not, or if it gave none

A sibling returns two rollouts, the solver's and the verifier's. Its verdict is on its own answer;
with ``balanced`` on a right and on a wrong one of the group in turn, because a verifier that is
shown one kind mostly is paid best for saying the same to everything. Where no answer was right, the
item's own stands in if it scores as right. Where still only one kind is there, all verdicts have
the reward 1/2: equal rewards teach nothing.

An evaluation returns the solver's alone; with ``best_of`` n the solver answers n times, drawn at
``best_of_temperature``, and the answer is returned that the verifier finds likeliest to be right:

    score = p of a verdict ``yes``, 0 without a verdict, -p of a verdict ``no``

where p is the probability of the verdict as it was written; of equals the first. Scoring costs n
verdicts per item. To measure a verifier, evaluate it as the ``solver`` on a file of claims.

``[workflow.settings]``: ``solver`` and ``verifier`` are the names of the policies; ``question`` is
what the verifier reads, with ``{prompt}`` and ``{answer}`` in it; a verdict begins with one of the
words ``yes`` and ``no``, in any case; it has ``verdict_tokens`` at most; ``best_of`` and
``best_of_temperature`` and ``balanced`` as above.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge_agent.workflow import (
    Generated,
    PolicyHandle,
    Rollout,
    WorkflowContext,
    side_by_side,
    workflow,
)
from transport.messages import Item

RIGHT: Final = 1.0
"""An answer counts as right from this reward on."""

NOTHING_TOLD: Final = 0.5
"""The reward of verdicts that cannot be balanced."""

Text = Annotated[str, Meta(min_length=1, max_length=8000)]

Claim = tuple[str, bool]
"""An answer, and whether it is right."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    solver: Text = "solver"
    verifier: Text = "verifier"
    question: Text = "{prompt} {answer}? Answer Yes or No."
    yes: Text = "Yes"
    no: Text = "No"
    verdict_tokens: Annotated[int, Meta(ge=1, le=100_000)] = 8
    best_of: Annotated[int, Meta(ge=1, le=256)] = 1
    best_of_temperature: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    balanced: bool = False


@workflow("solve_and_verify", rollouts=2)
async def solve_and_verify(context: WorkflowContext, item: Item) -> list[Rollout]:
    """Answers of the solver, each judged by the verifier."""
    settings = context.settings_as(Settings)
    solver, verifier = context.policy(settings.solver), context.policy(settings.verifier)
    if context.kind == "eval":
        return await _evaluated(context, item, settings, solver, verifier)
    answers = await solver.generate(item.prompt, n=context.group_size, label="solve")
    texts = [answer.text for answer in answers]
    *rewards, own = await context.score([*texts, item.answer])
    claims = [(text, reward >= RIGHT) for text, reward in zip(texts, rewards, strict=True)]
    if settings.balanced:
        claims = _balanced(claims, item.answer if own >= RIGHT else None)
    verdicts = await _verdicts(context, item, settings, verifier, [text for text, _ in claims])
    teaches = not settings.balanced or len({right for _, right in claims}) > 1
    solved = [Rollout.of(answer, reward) for answer, reward in zip(answers, rewards, strict=True)]
    judged = [
        Rollout.of(
            verdict, float(_says_yes(verdict.text, settings) is right) if teaches else NOTHING_TOLD
        )
        for verdict, (_, right) in zip(verdicts, claims, strict=True)
    ]
    return [*solved, *judged]


def _balanced(claims: Sequence[Claim], own: str | None) -> list[Claim]:
    """As many claims, right and wrong ones in turn as far as there are both; ``own`` is the item's
    answer, None if it is not right."""
    right = [claim for claim in claims if claim[1]] or ([] if own is None else [(own, True)])
    wrong = [claim for claim in claims if not claim[1]]
    kinds = [kind for kind in (right, wrong) if kind]
    turns = (divmod(n, len(kinds)) for n in range(len(claims)))
    return [kinds[kind][turn % len(kinds[kind])] for turn, kind in turns]


async def _evaluated(
    context: WorkflowContext,
    item: Item,
    settings: Settings,
    solver: PolicyHandle,
    verifier: PolicyHandle,
) -> list[Rollout]:
    """One answer per sibling: the only one, or the best of several."""
    count = settings.best_of
    if count == 1:
        answers = await solver.generate(item.prompt, n=context.group_size, label="solve")
        return [Rollout.of(answer) for answer in answers]
    answers = await solver.generate(
        item.prompt,
        n=count * context.group_size,
        temperature=settings.best_of_temperature,
        label="solve",
    )
    texts = [answer.text for answer in answers]
    verdicts = await _verdicts(context, item, settings, verifier, texts)
    scores = [_score(verdict, settings) for verdict in verdicts]
    best = (
        max(range(start, start + count), key=lambda n: scores[n])  # the first of equals
        for start in range(0, len(answers), count)
    )
    return [Rollout.of(answers[n]) for n in best]


async def _verdicts(
    context: WorkflowContext,
    item: Item,
    settings: Settings,
    verifier: PolicyHandle,
    answers: Sequence[str],
) -> list[Generated]:
    """One per answer; in an evaluation as greedy as everything else."""

    async def judge(number: int, answer: str) -> Generated:
        texts = {"prompt": item.prompt, "answer": answer.strip()}
        [verdict] = await verifier.generate(
            _filled(settings.question, texts),
            max_new_tokens=settings.verdict_tokens,
            label=f"verify-{number + 1}",
        )
        return verdict

    return await side_by_side(judge(n, answer) for n, answer in enumerate(answers))


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """The texts put in once: what they hold themselves is not looked at."""
    return re.sub(r"\{(prompt|answer)\}", lambda found: texts[found.group(1)], template)


def _says_yes(text: str, settings: Settings) -> bool | None:
    """The verdict; None where it is neither word."""
    said = text.strip().casefold()
    if said.startswith(settings.yes.casefold()):
        return True
    return False if said.startswith(settings.no.casefold()) else None


def _score(verdict: Generated, settings: Settings) -> float:
    """How likely the verifier finds the answer to be right, from -1 to 1."""
    probability = math.exp(min(0.0, sum(verdict.completion.logprobs)))
    return {True: probability, False: -probability, None: 0.0}[_says_yes(verdict.text, settings)]
