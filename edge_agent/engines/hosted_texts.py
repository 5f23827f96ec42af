"""Texts of the policies that an engine has loaded.

What always holds: they are made in the agent, with the policy's own tokenizer.
"""

from collections.abc import Sequence
from typing import Protocol

from edge_agent.engine import NO_ARGUMENTS, Chat, TemplateArguments, Tools
from edge_agent.engines.chat_tokenizer import ChatTokenizer


class Hosted(Protocol):
    """A loaded policy."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...


class HostedTexts:
    """The part of ``Engine`` that knows texts. Every method raises GenerationFailed when the policy
    is not loaded."""

    def encode(
        self, policy: str, prompt: str, arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        """See ``Engine.encode``."""
        return self._find(policy).tokenizer.encode(prompt, arguments)

    def encode_chat(
        self,
        policy: str,
        messages: Chat,
        tools: Tools = (),
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """See ``Engine.encode_chat``."""
        return self._find(policy).tokenizer.encode_chat(messages, tools, arguments)

    def encode_next(
        self,
        policy: str,
        answer: Sequence[int],
        messages: Chat,
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """See ``Engine.encode_next``."""
        return self._find(policy).tokenizer.encode_next(answer, messages, arguments)

    def decode(self, policy: str, tokens: Sequence[int]) -> str:
        """See ``Engine.decode``."""
        return self._find(policy).tokenizer.decode(tokens)

    def _find(self, policy: str) -> Hosted:
        """The loaded policy; raises GenerationFailed."""
        raise NotImplementedError
