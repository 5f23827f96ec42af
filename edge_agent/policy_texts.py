"""Texts and tokens of a run's policies on one attempt.

What always holds: whatever applies a policy's chat template for a workflow or for a program at the
chat endpoint does it here, with the arguments that the run's file gives the policy.
"""

from collections.abc import Mapping, Sequence

from edge_agent.engine import NO_ARGUMENTS, Chat, Engine, TemplateArguments, Tools


class PolicyTexts:
    """The engine's part that knows texts; ``arguments`` are the chat templates' by policy id.
    Every method raises as the engine's of that name."""

    def __init__(self, engine: Engine, arguments: Mapping[str, TemplateArguments]) -> None:
        self._engine = engine
        self._arguments = arguments

    def encode(self, policy: str, prompt: str) -> tuple[int, ...]:
        """See ``Engine.encode``."""
        return self._engine.encode(policy, prompt, self._of(policy))

    def encode_chat(self, policy: str, messages: Chat, tools: Tools = ()) -> tuple[int, ...]:
        """See ``Engine.encode_chat``."""
        return self._engine.encode_chat(policy, messages, tools, self._of(policy))

    def encode_next(self, policy: str, answer: Sequence[int], messages: Chat) -> tuple[int, ...]:
        """See ``Engine.encode_next``."""
        return self._engine.encode_next(policy, answer, messages, self._of(policy))

    def decode(self, policy: str, tokens: Sequence[int]) -> str:
        """See ``Engine.decode``."""
        return self._engine.decode(policy, tokens)

    def _of(self, policy: str) -> TemplateArguments:
        return self._arguments.get(policy, NO_ARGUMENTS)
