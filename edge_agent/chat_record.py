"""The calls of one rollout's program, as conversations, and the sequence that is made of them.

What always holds:

1. Everything that was drawn is kept as it was drawn: tokens, log-probabilities, versions. An answer
   that comes back as a message of a later call stands in that call's prompt with the very tokens
   that were drawn, wherever the call goes on from the earlier one.
2. A conversation is one sequence: the prompt of its first call, what was drawn, what was said in
   between, what was drawn next. The prompt of each of its calls is, token for token, the sequence
   up to there; nothing in a sequence was put together afterwards.
3. One policy draws in a conversation; its sequence stays within what a run allows.

A call goes on from an earlier one when its messages begin with those of the earlier call and the
answer to it (of two such calls the longer one counts, of equal ones the later; the white space of
an answer does not matter, as programs like to strip it), both are to the same policy, and the chat
template shows the whole as the same text. Where it does not (a template that drops the thoughts of
earlier turns, other tools, a stop text that the model wrote and the program did not keep out of its
own message), the conversation is cut: the call begins one of its own, and its prompt is what the
template makes of the messages. Cuts are counted, with their reasons.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import structlog

from edge_agent.chat_requests import ChatMessage
from edge_agent.rollouts import Generated, Observed, Rollout
from transport.errors import FarflowError, GenerationFailed
from transport.runs import MAX_TURNS

Keep = Literal["longest", "last"]

_log = structlog.get_logger()


class NothingGenerated(FarflowError):
    """A rollout without a single completion."""

    code = "chat.no_calls"


class Tokenizer(Protocol):
    """The part of an ``Engine`` that knows texts and tokens."""

    def encode_chat(
        self, policy: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> tuple[int, ...]: ...

    def encode_next(
        self, policy: str, answer: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]: ...

    def decode(self, policy: str, tokens: Sequence[int]) -> str: ...


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A completion and where it stands. ``before`` is the turn that it goes on from and
    ``observed`` what came between; ``shown`` is the text that the program was given, ``text`` the
    conversation's up to its end without white space; ``turns`` counts completions, ``length`` all
    tokens behind the first prompt."""

    generated: Generated
    shown: str
    before: "Turn | None"
    observed: tuple[int, ...]
    text: str
    number: int
    turns: int
    length: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of the sequence, its prompt included."""
        return (*self.generated.prompt_tokens, *self.generated.tokens)


class Asked(NamedTuple):
    """A call that is about to be made: its prompt and what ``Conversations.add`` must know."""

    policy: str
    prompt_tokens: tuple[int, ...]
    before: Turn | None
    observed: tuple[int, ...]
    text: str
    key: bytes


class Conversations:
    """What one program has asked and was answered. ``most_tokens`` bounds what follows the first
    prompt of a sequence."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._turns: list[Turn] = []
        self._by_messages: dict[bytes, Turn] = {}
        self._last: Turn | None = None
        self.cuts: Counter[str] = Counter()

    def ask(
        self,
        policy: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        most_new: int,
    ) -> Asked:
        """The prompt of a call that may draw ``most_new`` tokens.

        Raises:
            GenerationFailed: the policy's template does not take these messages.
        """
        plain = [message.plain() for message in messages]
        written = self._tokenizer.encode_chat(policy, plain, tools)
        key, before, rest = self._find(policy, messages)
        if before is not None:
            observed, text = self._observed(policy, before, written, plain[rest:])
            cut = _over(before, len(observed) + most_new, self._most_tokens)
            if observed and not cut:
                return Asked(policy, before.tokens + observed, before, observed, text, key)
            cut = cut or "template"
            self.cuts[cut] += 1
            _log.debug("chat.cut", policy=policy, reason=cut, turns=before.turns)
        text = _squeezed(self._tokenizer.decode(policy, written))
        return Asked(policy, written, None, (), text, key)

    def add(self, asked: Asked, answers: Sequence[tuple[Generated, str, ChatMessage]]) -> None:
        """The answers to a call: what was drawn, the text that the program is given of it, and the
        message that it is when it comes back."""
        number = len(self._turns)
        before = asked.before
        for generated, shown, message in answers:
            count = len(generated.tokens)
            turn = Turn(
                generated=generated,
                shown=shown,
                before=before,
                observed=asked.observed,
                text=asked.text + _squeezed(shown),
                number=number,
                turns=(before.turns if before else 0) + 1,
                length=(before.length if before else 0) + len(asked.observed) + count,
            )
            self._turns.append(turn)
            key = _digest(asked.key, message)
            earlier = self._by_messages.get(key)
            if earlier is None or earlier.number < number:  # the first of equal choices
                self._by_messages[key] = turn
            if self._last is None or self._last.number < number:
                self._last = turn

    def rollout(
        self, *, keep: Keep = "longest", policy: str | None = None, reward: float | None = None
    ) -> Rollout:
        """One conversation as a sequence: the one with the most completions (of equal ones the
        latest), or the one that was answered last; with ``policy`` (an id), among those of that
        policy. Of equal choices of one call the first counts. Its ``text`` is the last text that
        the program was given, in whichever conversation.

        Raises:
            NothingGenerated: there is none.
        """
        turns = [turn for turn in self._turns if policy in (None, turn.generated.policy)]
        if not turns or self._last is None:
            whom = "any policy" if policy is None else policy
            raise NothingGenerated(f"no call to {whom} was answered, so there is no sequence")
        by_turns = keep == "longest"
        chosen = max(turns, key=lambda turn: (turn.turns if by_turns else 0, turn.number))
        parts: list[Generated | Observed] = []
        turn: Turn | None = chosen
        while turn is not None:
            first = turn.generated.prompt_tokens
            parts.append(turn.generated)
            if turn.observed:
                parts.append(Observed(tokens=turn.observed))
            turn = turn.before
        return Rollout(
            prompt_tokens=first,
            parts=tuple(reversed(parts)),
            text=self._last.shown,
            finish_reason=chosen.generated.completion.finish_reason,
            reward=reward,
        )

    def _find(self, policy: str, messages: Sequence[ChatMessage]) -> tuple[bytes, Turn | None, int]:
        """The key of the messages, the turn that they go on from, and where they do."""
        key, found, rest = hashlib.sha256(policy.encode()).digest(), None, 0
        for number, message in enumerate(messages, 1):
            key = _digest(key, message)
            turn = self._by_messages.get(key)
            if turn is not None:
                found, rest = turn, number
        return key, found, rest

    def _observed(
        self,
        policy: str,
        before: Turn,
        written: tuple[int, ...],
        messages: Sequence[Mapping[str, Any]],
    ) -> tuple[tuple[int, ...], str]:
        """What stands between an answer and the next one, and the text up to there; nothing where
        the template does not show the conversation so far as it was."""
        sequence = before.tokens
        text = _squeezed(self._tokenizer.decode(policy, written))
        if written[: len(sequence)] == sequence:
            return written[len(sequence) :], text
        try:
            observed = self._tokenizer.encode_next(policy, before.generated.tokens, messages)
        except GenerationFailed:
            return (), text
        ours = before.text + _squeezed(self._tokenizer.decode(policy, observed))
        return (observed if ours == text else ()), text


def _over(before: Turn, more: int, most: int) -> str:
    if before.turns >= MAX_TURNS:
        return "turns"
    return "tokens" if before.length + more > most else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _digest(before: bytes, message: ChatMessage) -> bytes:
    """A key of messages up to this one."""
    text = _squeezed(message.text) if message.role == "assistant" else message.text
    calls = [
        (call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    said = msgspec.msgpack.encode((message.role, text, calls, message.name, message.tool_call_id))
    return hashlib.sha256(before + said).digest()
