"""A Hugging Face tokenizer as engines use it: texts and conversations to tokens, and back.

What always holds: one thread at a time is inside the tokenizer, so the event loop may encode while
an engine's own thread decodes; whatever a chat template makes of messages that it does not like is
a ``GenerationFailed``; what follows an answer is taken from the template, never the answer itself.
"""

import threading
from collections.abc import Sequence
from typing import Any, Final

from edge_agent.engine import NO_ARGUMENTS, Chat, TemplateArguments, Tools
from transport.errors import GenerationFailed
from transport.ids import policy_name

_QUESTION: Final = "question"
_ANSWER: Final = "farflowanswer"
"""Stands for what was drawn while a template shows what comes behind it."""
_MARGIN: Final = 8
"""More than the bytes of one character, which may be spread over as many tokens."""


class ChatTokenizer:
    """``tokenizer`` of the policy ``name``."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._inside = threading.Lock()

    def encode(self, prompt: str, arguments: TemplateArguments = NO_ARGUMENTS) -> tuple[int, ...]:
        """Through the chat template as one user message, or as it is where there is none."""
        if self._tokenizer.chat_template is None:
            if arguments:
                raise GenerationFailed(
                    f"{self._name}: its tokenizer has no chat template for"
                    f" {self._setting}; remove it"
                )
            with self._inside:
                return tuple(self._tokenizer.encode(prompt))
        return self.encode_chat([{"role": "user", "content": prompt}], arguments=arguments)

    def encode_chat(
        self, messages: Chat, tools: Tools = (), arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        """See ``Engine.encode_chat``."""
        text = self._render(messages, tools, arguments)
        if tools and text == self._render(messages, (), arguments):
            raise GenerationFailed(
                f"{self._name}: its chat template shows no tools; describe them in a message"
            )
        return self._tokens(text)

    def encode_next(
        self,
        answer: Sequence[int],
        messages: Chat,
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """See ``Engine.encode_next``."""
        before = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER})
        rendered = self._render((*before, *messages), (), arguments)
        if messages and rendered == self._render(before, (), arguments):
            roles = ", ".join(sorted({str(message.get("role")) for message in messages}))
            raise GenerationFailed(f"{self._name}: its chat template shows no messages of {roles}")
        _, found, text = rendered.partition(_ANSWER)
        if not found:
            raise GenerationFailed(f"{self._name}: its chat template does not show earlier answers")
        tokens = self._tokens(text)
        return tokens[1:] if tokens[:1] == tuple(answer[-1:]) else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        with self._inside:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def ends_in(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether one of the texts ``stop`` (at least one) is in what ``tokens`` decode to, if it
        was not before the last of them; looks at as few of the last ones as will do."""
        count = max(map(len, stop)) + _MARGIN
        characters = count + len(self.decode(tokens[-1:]))
        text = self.decode(tokens[-count:])
        while len(text) < characters and count < len(tokens):  # many say nothing, or half of one
            count *= 2
            text = self.decode(tokens[-count:])
        return any(end in text for end in stop)

    @property
    def _setting(self) -> str:
        """The key of a run's file that gives our template arguments."""
        return f"policies.{policy_name(self._name)}.chat_template_kwargs"

    def _render(self, messages: Chat, tools: Tools, arguments: TemplateArguments) -> str:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise GenerationFailed(
                f"{self._name}: its tokenizer has no chat template for messages; give it text or"
                " tokens"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:  # a template is a program, and each refuses in its own way
            given = f" with {self._setting} = {dict(arguments)}" if arguments else ""
            raise GenerationFailed(
                f"{self._name}: its chat template refuses these messages{given}: {error}"
            ) from error
        return text

    def _tokens(self, text: str) -> tuple[int, ...]:
        with self._inside:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
