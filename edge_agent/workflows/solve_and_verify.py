"""A solver answers, a verifier says of each answer whether it is right; both learn.

    solver's reward      what the run's verifier (the scoring function) gives the answer
    verifier's reward    1 if its verdict was correct, 0 if not, or if it gave none

A sibling returns two rollouts, the solver's and the verifier's. Its verdict is on its own answer;
with ``balanced`` on a right and on a wrong one of the group in turn, because a verifier that is
shown one kind mostly is paid best for saying the same to everything. Where no answer was right, the
item's own stands in if it scores as right. Where still only one kind is there, all verdicts have
the reward 1/2: equal rewards teach nothing.

An evaluation returns the solver's alone; with ``best_of`` n the solver answers n times, drawn at
``best_of_temperature``, and one of the n is returned, as ``choose`` says:

    likeliest   the answer of the greatest score          p of a verdict ``yes``, -p of a ``no``,
                                                          0 without a verdict
    weighted    the answer whose n equals (without blanks at either end) have the greatest sum of
                weights                                   max(p, 1/2) of a ``yes``,
                                                          min(1 - p, 1/2) of a ``no``,
                                                          1/2 without a verdict
    majority    the answer that was drawn most often; the verifier is not asked

where p is the probability of the tokens that spell the word; of equals the first. A weight is the
probability of ``yes`` where the verifier knows only the two words. Where it knows more, p says less
than which of the two came first, so a ``yes`` never weighs less than a ``no``. Who says nothing of
every answer leaves the choice to the majority. ``weighted`` is the verifier's vote of Li et al.
(arXiv:2206.02336) and the best-of-N weighted of Snell et al. (arXiv:2408.03314, there with the
score of a reward model); ``majority`` is self-consistency (Wang et al., arXiv:2203.11171).

Different answers are judged once each. To measure a verifier, evaluate it as the ``solver`` on a
file of claims.

``[workflow.settings]``: ``solver`` and ``verifier`` are the names of the policies; ``question`` is
what the verifier reads, with ``{prompt}`` and ``{answer}`` in it; a verdict begins with one of the
words ``yes`` and ``no``, in any case; it has ``verdict_tokens`` at most; ``best_of``,
``best_of_temperature``, ``choose`` and ``balanced`` as above.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

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
    choose: Literal["likeliest", "weighted", "majority"] = "likeliest"
    balanced: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for verdicts of which nobody could tell which one they are."""
        yes, no = self.yes.strip().casefold(), self.no.strip().casefold()
        if not yes or no.startswith(yes):
            raise ValueError(f"no: {self.no!r} begins as yes = {self.yes!r} does; take other words")

    def faults(self, policies: Collection[str], *, training: bool) -> Iterator[str]:
        """What is wrong with them in a run of these policies."""
        for key, name in (("solver", self.solver), ("verifier", self.verifier)):
            if name not in policies:
                yield f"{key}: {name!r} is not in workflow.policies: {', '.join(sorted(policies))}"
        if training and self.solver == self.verifier:
            yield f"verifier: {self.verifier!r} is the solver as well; give it a policy of its own"


@workflow("solve_and_verify", rollouts=2, settings=Settings)
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
    texts = [answer.text.strip() for answer in answers]
    value = await _values(context, item, settings, verifier, texts)
    best = []
    for start in range(0, len(answers), count):
        drawn = texts[start : start + count]
        times = Counter(drawn) if settings.choose != "likeliest" else dict.fromkeys(drawn, 1)
        chosen = max(times, key=lambda text: times[text] * value[text])  # the first of equals
        best.append(answers[start + drawn.index(chosen)])
    return [Rollout.of(answer) for answer in best]


async def _values(
    context: WorkflowContext,
    item: Item,
    settings: Settings,
    verifier: PolicyHandle,
    answers: Sequence[str],
) -> dict[str, float]:
    """What one draw of each different answer is worth in the choice."""
    different = list(dict.fromkeys(answers))
    if settings.choose == "majority":
        return dict.fromkeys(different, 1.0)
    verdicts = await _verdicts(context, item, settings, verifier, different)
    value = _weight if settings.choose == "weighted" else _score
    said = [_says_yes(verdict.text, settings) for verdict in verdicts]
    return {
        answer: value(yes, _probability(verdict, yes, settings, verifier))
        for answer, yes, verdict in zip(different, said, verdicts, strict=True)
    }


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


def _probability(
    verdict: Generated, yes: bool | None, settings: Settings, verifier: PolicyHandle
) -> float:
    """Of the tokens up to the one that completes the word; of all where there is none."""
    total = 0.0
    for count, logprob in enumerate(verdict.completion.logprobs, start=1):
        total += logprob
        read = None if yes is None else verifier.decode(verdict.tokens[:count])
        if read is not None and _says_yes(read, settings) is yes:
            break
    return math.exp(min(0.0, total))


def _score(yes: bool | None, probability: float) -> float:
    """How likely the verifier finds the answer to be right, from -1 to 1."""
    return {True: probability, False: -probability, None: 0.0}[yes]


def _weight(yes: bool | None, probability: float) -> float:
    """The probability with which the verifier finds the answer to be right, from 0 to 1."""
    return {True: max(probability, 0.5), False: min(1.0 - probability, 0.5), None: 0.5}[yes]
