"""Rollouts: what a workflow returns, token by token, and how it is sent.

What always holds: every token of a rollout says which policy and version drew it, or that none did;
a workflow's result is exactly as many well-formed rollouts as it promised, or it is malformed as a
whole: each has a prompt, at least one token that some policy drew, and nothing that was drawn after
other tokens than those before it. Types and bounds of every field are what the scheduler and the
trainer take (``transport.summaries``): there, a fault would count as evidence against the agent.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from edge_agent.engine import Completion
from transport.errors import FarflowError
from transport.messages import MAX_COUNT, MAX_FINITE, Item
from transport.summaries import MAX_FINISH_REASON, MAX_LOGPROB, MAX_TOKEN
from transport.texts import cut, shown
from transport.trajectory import SequenceRecord, run_length

_NO_POLICY: Final = -1
_ODD: Final = "returned a rollout that does not add up"


class MalformedWorkflow(FarflowError):
    """A workflow asked for or returned something impossible."""

    code = "workflow.malformed"


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: what a policy (by id) drew after ``prompt_tokens``."""

    policy: str
    prompt_tokens: tuple[int, ...]
    completion: Completion
    text: str

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.tokens


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that no policy drew (a tool's output, the next turn's question): never trained on."""

    tokens: tuple[int, ...]


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what follows it, in order. ``text`` is what a verifier looks at; ``reward`` None
    leaves the scoring to the run's verifier. What a part was drawn after, its ``prompt_tokens``,
    are the rollout's and all parts before it."""

    prompt_tokens: tuple[int, ...]
    parts: tuple[Generated | Observed, ...]
    text: str
    finish_reason: str
    reward: float | None = None

    @classmethod
    def of(cls, generated: Generated, reward: float | None = None) -> "Rollout":
        """A single turn."""
        return cls(
            prompt_tokens=generated.prompt_tokens,
            parts=(generated,),
            text=generated.text,
            finish_reason=generated.completion.finish_reason,
            reward=reward,
        )

    def only(self, policy: str, reward: float | None = None) -> "Rollout":
        """The same tokens as ``policy`` (its id, ``PolicyHandle.id``) may learn from them: what
        other policies drew is ``Observed``. So a conversation of several policies is returned once
        for each, with a reward of its own; without ``reward`` the rollout's stays."""
        parts = tuple(
            Observed(tokens=part.tokens)
            if isinstance(part, Generated) and part.policy != policy
            else part
            for part in self.parts
        )
        kept = self.reward if reward is None else reward
        return msgspec.structs.replace(self, parts=parts, reward=kept)


class Sibling(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sibling stands after ``turns`` finished turns (0: it has not begun): what would be
    returned of it now, and whatever else the workflow needs to go on, as plain JSON values (the
    messages so far, say)."""

    rollout: Rollout
    turns: int
    state: Any = None


def checked(returned: object, item: Item, group_size: int, rollouts: int = 1) -> list[Rollout]:
    """What a workflow returned, as the ``group_size`` times ``rollouts`` that it promised.

    Raises:
        MalformedWorkflow: it returned something else; says what.
    """
    if not isinstance(returned, (list, tuple)):
        raise MalformedWorkflow(f"returned {type(returned).__name__} instead of rollouts")
    count = group_size * rollouts
    if len(returned) != count:
        asked = f"{count} were asked for"
        if rollouts > 1:
            asked = f"{rollouts} for each of {group_size} siblings were asked for"
        raise MalformedWorkflow(f"returned {len(returned)} rollouts for item {item.index}, {asked}")
    for rollout in returned:
        check_rollout(rollout)
    return list(returned)


def check_rollout(rollout: object) -> None:
    """Raises MalformedWorkflow unless a rollout can be packed, sent and learnt from."""
    try:
        _check(rollout)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise MalformedWorkflow(f"{_ODD}: {error}") from error


def _check(rollout: object) -> None:
    if not isinstance(rollout, Rollout):
        raise MalformedWorkflow(f"returned a {type(rollout).__name__} among its rollouts")
    if not isinstance(rollout.parts, (list, tuple)):
        raise MalformedWorkflow(
            f"returned a rollout with the parts {cut(shown(rollout.parts), 80)}"
        )
    if not any(isinstance(part, Generated) and part.tokens for part in rollout.parts):
        raise MalformedWorkflow("returned a rollout in which no policy generated anything")
    if not rollout.prompt_tokens:
        raise MalformedWorkflow("returned a rollout without a prompt: nothing can be learnt there")
    if rollout.reward is not None:
        check_reward(rollout.reward)
    _check_text("text", rollout.text)
    _check_text("finish_reason", rollout.finish_reason, MAX_FINISH_REASON)
    _check_integers("prompt_tokens", rollout.prompt_tokens, MAX_TOKEN)
    before = tuple(rollout.prompt_tokens)
    for number, part in enumerate(rollout.parts, 1):
        _check_part(f"part {number}", part)
        if isinstance(part, Generated) and tuple(part.prompt_tokens) != before:
            raise MalformedWorkflow(
                f"{_ODD}: part {number} was drawn after other"
                " tokens than the prompt and the parts before it, so nothing can be learnt from it"
            )
        before += tuple(part.tokens)


def check_reward(reward: object) -> None:
    """Raises MalformedWorkflow unless it is a number that everybody on the way can compute with."""
    if not isinstance(reward, (int, float)) or not -MAX_FINITE <= reward <= MAX_FINITE:
        raise MalformedWorkflow(
            f"returned the reward {cut(shown(reward), 80)}; a reward is a number between"
            f" {-MAX_FINITE:g} and {MAX_FINITE:g}"
        )


def _check_part(name: str, part: object) -> None:
    if isinstance(part, Observed):
        _check_integers(f"{name}.tokens", part.tokens, MAX_TOKEN)
        return
    if not isinstance(part, Generated):
        raise MalformedWorkflow(f"{_ODD}: {name} is a {type(part).__name__}")
    drawn = part.completion
    if not isinstance(part.policy, str):
        raise MalformedWorkflow(f"{_ODD}: {name}.policy is a {type(part.policy).__name__}")
    _check_integers(f"{name}.prompt_tokens", part.prompt_tokens, MAX_TOKEN)
    _check_integers(f"{name}.tokens", drawn.tokens, MAX_TOKEN)
    _check_integers(f"{name}.versions", drawn.versions, MAX_COUNT)
    types = set(map(type, drawn.logprobs))
    if not all(issubclass(one, (float, int, np.floating)) for one in types):
        raise MalformedWorkflow(f"{_ODD}: {name}.logprobs are not all numbers")
    if not all(-MAX_FINITE <= logprob <= MAX_LOGPROB for logprob in drawn.logprobs):
        raise MalformedWorkflow(
            f"{_ODD}: {name}.logprobs are not all logarithms of probabilities (at most 0)"
        )
    counts = {len(drawn.tokens), len(drawn.logprobs), len(drawn.versions)}
    if len(counts) > 1:
        raise MalformedWorkflow(
            f"{_ODD}: {name} has {len(drawn.tokens)} tokens, {len(drawn.logprobs)}"
            f" log-probabilities and {len(drawn.versions)} versions"
        )


def _check_integers(name: str, values: object, most: int) -> None:
    if not isinstance(values, (list, tuple)):
        raise MalformedWorkflow(f"{_ODD}: {name} is a {type(values).__name__}, not a tuple")
    if not values:
        return
    odd = set(map(type, values)) - {int}
    if odd:
        raise MalformedWorkflow(
            f"{_ODD}: {name} has a {odd.pop().__name__} where plain int is wanted (of numpy's and"
            " torch's arrays: .tolist())"
        )
    if min(values) < 0 or max(values) > most:
        raise MalformedWorkflow(f"{_ODD}: {name} are not all within 0 and {most}")


def _check_text(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, str):
        raise MalformedWorkflow(f"{_ODD}: {name} is a {type(value).__name__}, not a str")
    if most is not None and len(value) > most:
        raise MalformedWorkflow(f"{_ODD}: {name} has {len(value)} characters, at most {most}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedWorkflow(
            f"{_ODD}: {name}: {error}; decode bytes with errors='replace'"
        ) from error


def record_of(
    rollout: Rollout, reward: float, prompt: int, policies: Mapping[str, int]
) -> SequenceRecord:
    """A rollout in the form that is sent; ``policies`` gives each policy id's index.

    Raises:
        MalformedWorkflow: a part was drawn by a policy that the attempt does not use.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    drawn_by: list[int] = []
    versions: list[int] = []
    for part in rollout.parts:
        count = len(part.tokens)
        tokens += part.tokens
        if isinstance(part, Observed):
            logprobs += [0.0] * count
            drawn_by += [_NO_POLICY] * count
            versions += [0] * count
            continue
        if part.policy not in policies:
            raise MalformedWorkflow(f"returned tokens of {part.policy}, which it was not given")
        logprobs += part.completion.logprobs
        drawn_by += [policies[part.policy]] * count
        versions += part.completion.versions
    return SequenceRecord(
        prompt=prompt,
        tokens=tuple(tokens),
        logprobs=np.array(logprobs, dtype=np.float32),
        segments=run_length(tuple(drawn_by), tuple(versions)),
        reward=float(reward),
        finish_reason=rollout.finish_reason,
    )
