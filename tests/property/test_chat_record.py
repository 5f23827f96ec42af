"""Any sequence of calls: what is kept of them is, token for token, what was asked and drawn."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.chat_record import Conversations, NothingGenerated
from edge_agent.chat_requests import ChatMessage
from edge_agent.engine import Completion
from edge_agent.engines import fake_text
from edge_agent.rollouts import Generated, Observed
from transport.errors import GenerationFailed

MOST = 40
WORDS = st.text(alphabet="ab 1\n", max_size=6)


class Tokenizer:
    """The fake engine's, whose texts have other tokens than those that were drawn where there were
    thoughts; ``forgets`` is a template that shows earlier answers in capitals."""

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets

    def encode_chat(self, policy: str, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        if self.forgets:
            messages = [
                {**m, "content": m["content"].upper()} if m["role"] == "assistant" else m
                for m in messages
            ]
        return fake_text.encode_chat(messages, tools)

    def encode_next(self, policy: str, answer: Any, messages: Any) -> tuple[int, ...]:
        if not messages:
            raise GenerationFailed("no messages")
        return fake_text.encode_next(answer, messages)

    def decode(self, policy: str, tokens: Any) -> str:
        return fake_text.decode_text(tokens)


class Step:
    """What a program does next: it goes on from the answer ``of`` that it has, or begins anew."""

    def __init__(self, of: int, words: str, thoughts: int, said: str, ends: bool, how: str) -> None:
        self.of, self.words, self.thoughts = of, words, thoughts
        self.said, self.ends, self.how = said, ends, how

    def __repr__(self) -> str:
        return f"Step{(self.of, self.words, self.thoughts, self.said, self.ends, self.how)}"


steps = st.lists(
    st.builds(
        Step,
        st.integers(-1, 5),
        WORDS,
        st.integers(0, 3),
        WORDS,
        st.booleans(),
        st.sampled_from(("as it came", "stripped", "changed", "other policy")),
    ),
    max_size=12,
)


def drawn(policy: str, prompt: tuple[int, ...], step: Step, number: int) -> Generated:
    tokens = (*range(step.thoughts), *fake_text.encode_text(step.said))
    if step.ends or not tokens:
        tokens += (fake_text.END,)
    count = len(tokens)
    completion = Completion(
        tokens=tokens,
        logprobs=tuple(-0.5 - n - number for n in range(count)),
        versions=(number,) * count,
        finish_reason="stop" if step.ends else "length",
    )
    return Generated(
        policy=policy,
        prompt_tokens=prompt,
        completion=completion,
        text=fake_text.decode_text(tokens),
    )


@given(steps, st.booleans())
@settings(deadline=None, max_examples=300)
def test_sequences_are_what_was_asked_and_drawn(program: list[Step], forgets: bool) -> None:
    record = Conversations(Tokenizer(forgets=forgets), MOST)
    histories: list[tuple[str, list[ChatMessage]]] = []
    made: list[Generated] = []
    for number, step in enumerate(program):
        policy, before = "p", list[ChatMessage]()
        if 0 <= step.of < len(histories):
            policy, before = histories[step.of]
            *before, answer = before
            if step.how == "stripped":
                answer = ChatMessage(role="assistant", content=answer.text.strip())
            elif step.how == "changed":
                answer = ChatMessage(role="assistant", content=answer.text + "x")
            elif step.how == "other policy":
                policy = "q" if policy == "p" else "p"
            before = [*before, answer]
        messages = [*before, ChatMessage(role="user", content=step.words)]
        asked = record.ask(policy, messages, (), 10)
        goes_on = bool(before) and step.how in ("as it came", "stripped")
        if goes_on and asked.before is None:
            assert record.cuts.total() > 0
        generated = drawn(policy, asked.prompt_tokens, step, number)
        answer = ChatMessage(role="assistant", content=generated.text)
        record.add(asked, [(generated, generated.text, answer)])
        made.append(generated)
        histories.append((policy, [*messages, answer]))
        for keep in ("longest", "last"):
            _check(record, keep, made)  # type: ignore[arg-type]
    if not made:
        with pytest.raises(NothingGenerated):
            record.rollout()
    if not forgets:
        assert record.cuts["template"] == 0


def _check(record: Conversations, keep: Any, made: list[Generated]) -> None:
    rollout = record.rollout(keep=keep)
    assert rollout.text == made[-1].text
    before = rollout.prompt_tokens
    policies = set()
    for part in rollout.parts:
        if isinstance(part, Observed):
            assert part.tokens
        else:
            assert any(part is one for one in made)  # not a copy: nothing was put together
            assert part.prompt_tokens == before
            policies.add(part.policy)
        before += part.tokens
    assert len(policies) == 1
    assert len(before) - len(rollout.prompt_tokens) <= MOST
    if keep == "last":
        assert rollout.parts[-1] is made[-1]


def test_a_template_that_drops_something_cuts_the_conversation() -> None:
    for forgets in (False, True):
        record = Conversations(Tokenizer(forgets=forgets), MOST)
        first = ChatMessage(role="user", content="one")
        asked = record.ask("p", [first], (), 10)
        generated = drawn("p", asked.prompt_tokens, Step(-1, "", 2, "abc", True, ""), 0)
        answer = ChatMessage(role="assistant", content="abc")
        record.add(asked, [(generated, "abc", answer)])
        again = record.ask("p", [first, answer, ChatMessage(role="user", content="two")], (), 10)
        assert (again.before is None) == forgets
        assert dict(record.cuts) == ({"template": 1} if forgets else {})
        kept = again.prompt_tokens[: len(asked.prompt_tokens) + len(generated.tokens)]
        assert (kept == asked.prompt_tokens + generated.tokens) != forgets
