"""An engine that says what a test tells it to, in the fake engine's tokens."""

import math
from collections.abc import Callable, Sequence

from edge_agent.engine import (
    NO_ARGUMENTS,
    Chat,
    Completion,
    GenerationRequest,
    TemplateArguments,
    Tools,
)
from edge_agent.engines.fake import FakeEngine
from edge_agent.engines.fake_text import END, encode_text
from transport.errors import GenerationFailed

Say = Callable[[GenerationRequest, int], str | tuple[str, float]]
"""What a sibling of a request says, and with which probability (1)."""


class ScriptedEngine(FakeEngine):
    """``asked`` are the requests so far, ``arguments`` what chat templates were
    given. The end follows a text unless a stop text ends it."""

    def __init__(self, say: Say, *, shows_tools: bool = True) -> None:
        super().__init__(8)
        self._say = say
        self._shows_tools = shows_tools
        self.asked: list[GenerationRequest] = []
        self.arguments: list[TemplateArguments] = []

    def encode_chat(
        self,
        policy: str,
        messages: Chat,
        tools: Tools = (),
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        if tools and not self._shows_tools:
            raise GenerationFailed("shows no tools")
        self.arguments.append(arguments)
        return super().encode_chat(policy, messages, tools, arguments)

    def encode(
        self, policy: str, prompt: str, arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        self.arguments.append(arguments)
        return super().encode(policy, prompt, arguments)

    def encode_next(
        self,
        policy: str,
        answer: Sequence[int],
        messages: Chat,
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        self.arguments.append(arguments)
        return super().encode_next(policy, answer, messages, arguments)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.asked.append(request)
        return [self._completion(request, sibling) for sibling in range(request.n)]

    def _completion(self, request: GenerationRequest, sibling: int) -> Completion:
        said = self._say(request, sibling)
        text, probability = said if isinstance(said, tuple) else (said, 1.0)
        ended = () if text.endswith(request.sampling.stop) and request.sampling.stop else (END,)
        tokens = (*encode_text(text), *ended)
        return Completion(
            tokens=tokens,
            logprobs=(math.log(probability) / len(tokens),) * len(tokens),
            versions=(3,) * len(tokens),
            finish_reason="stop",
        )


def script(*texts: str) -> Say:
    """One text after the other, whoever is asked."""
    left = iter(texts)
    return lambda _request, _sibling: next(left)
