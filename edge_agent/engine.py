"""What an agent needs from whatever generates tokens.

An engine hosts one or more policies, generates sequences for them and takes new weights between
decode steps. Weights change only through ``apply``: sequences in flight go on, and each token
carries the version that produced it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from transport.errors import EngineError, ModelError
from transport.weights.patch import Patch
from transport.weights.tensors import Cells, TensorBytes

Positions = npt.NDArray[np.int64]
"""Cells of a tensor, counted in C order from 0."""


MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256

Chat = Sequence[Mapping[str, Any]]
"""Messages of a conversation: ``{"role": "user", "content": "..."}`` and whatever else the chat
template of the model reads (``tool_calls``, ``tool_call_id``)."""

TemplateArguments = Mapping[str, Any]
"""What a policy's chat template is given beside messages and tools, such as ``enable_thinking``
(``policies.NAME.chat_template_kwargs``)."""

NO_ARGUMENTS: Final[TemplateArguments] = MappingProxyType({})

Tools = Sequence[Mapping[str, Any]]
"""Tools that the model may call, as the JSON schemas that chat templates take:
``{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}``."""


class WeightsHidden(EngineError):
    """What generates belongs to somebody else and does not show its weights: they are what its
    owner says they are, and nobody can verify it."""

    code: ClassVar[str] = "engine.hidden"


def inside(positions: Positions, cells: int) -> bool:
    """Whether all ``positions`` are in a tensor of so many cells."""
    return not positions.size or 0 <= int(positions.min()) <= int(positions.max()) < cells


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. ``temperature`` 0 is greedy; ``seed`` makes a request repeatable. A
    sequence ends with the token that completes one of the texts ``stop`` in what it decodes to;
    that token is kept, and so is what it adds behind the text."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0


def stop_fault(sampling: SamplingParams) -> str:
    """What is wrong with the texts that are to end a sequence, or nothing."""
    if len(sampling.stop) > MAX_STOPS:
        return f"{len(sampling.stop)} stop texts, at most {MAX_STOPS} are possible"
    if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in sampling.stop):
        return f"a stop text has 1 to {MAX_STOP_CHARACTERS} characters"
    return ""


def refuse_adapter(policy: str, base: Path | None) -> None:
    """For engines that take none.

    Raises:
        ModelError: ``policy`` is an adapter on a model.
    """
    if base is not None:
        raise ModelError(
            f"{policy} is published as an adapter, which this engine does not take; set"
            ' agent.engine = "torch" or "vllm", or lora.publish = "merged" for the policy'
        )


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``n`` completions of one prompt under one policy."""

    request_id: str
    policy: str
    prompt_tokens: tuple[int, ...]
    n: int
    sampling: SamplingParams


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence: tokens (the end-of-sequence token included when drawn), the log-probability
    of each under the distribution it was drawn from, and the policy version that produced it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start: generated tokens, seconds spent generating, sequences in the
    engine now and waiting for a slot."""

    tokens_generated: int
    busy_s: float
    running: int
    waiting: int


class Engine(Protocol):
    """Generation for several policies with at most ``slots`` concurrent sequences."""

    slots: int
    takes_adapters: bool
    """Whether it can have a policy's adapter on a model that it loads beside it."""
    when_freed: Callable[[], None] | None
    """Called on the event loop whenever sequences have left the engine; the agent sets it before
    ``start``. It must not block."""
    when_lost: Callable[[str], None] | None
    """Called likewise with a policy that is loaded no more although nobody unloaded it: what
    generated for it died. It can be loaded again."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def encode(
        self, policy: str, prompt: str, arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        """Tokens of a prompt, through the chat template when the tokenizer has one.

        Raises:
            GenerationFailed: as ``encode_chat``, or there are arguments and no template.
        """
        ...

    def encode_chat(
        self,
        policy: str,
        messages: Chat,
        tools: Tools = (),
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """Tokens of a conversation through the chat template, up to where the next answer begins.
        One message of a user is what ``encode`` makes of its text.

        Raises:
            GenerationFailed: the tokenizer has no chat template, or its template refuses these
                messages or arguments, or shows no tools.
        """
        ...

    def encode_next(
        self,
        policy: str,
        answer: Sequence[int],
        messages: Chat,
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """Tokens that come behind ``answer``, the tokens that were drawn, when the conversation
        goes on with ``messages`` (a tool's output, the next question): from what ends the answer,
        unless its last token does, up to where the next answer begins. So a conversation stays
        token for token what was drawn and observed, whatever the template would make of its text.

        Raises:
            GenerationFailed: as ``encode_chat``.
        """
        ...

    def decode(self, policy: str, tokens: Sequence[int]) -> str:
        """Text of tokens without special tokens."""
        ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Generate ``request.n`` completions; cancelling the call aborts them.

        Raises:
            GenerationFailed: the request failed; others are not touched.
        """
        ...

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        """Load a Hugging Face folder (config, tokenizer, safetensors) as ``version``; with ``base``
        the adapter in ``folder`` on the model in ``base``, which stays as it is. Then the policy's
        weights are the adapter's.

        Raises:
            ModelError: the folder does not load; names the file and what is wrong.
        """
        ...

    async def unload_policy(self, policy: str) -> None:
        """Free what a policy takes; harmless when it is not loaded.

        For when no request for it is in the engine: one that is nevertheless ends with the
        weights that it began with, later ones fail.
        """
        ...

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        """Write absolute new values of the cells in ``patch``; returns the pause in seconds.

        Everything that can fail comes before the pause. Applying the same version twice is
        harmless. The patch's arrays are not kept, and may change after the call.

        Raises:
            WeightApplyFailed: names, positions, types or values do not fit, or the engine does
                not run; the old weights stay in use.
        """
        ...

    def version(self, policy: str) -> int | None:
        """Version in use, None while the policy is not loaded."""
        ...

    def read_weights(self, policy: str) -> Iterator[tuple[str, TensorBytes]]:
        """Weights in use in canonical order and in the published type, for digests. What is read
        across an ``apply`` may be of both versions: do neither during the other.

        Raises:
            WeightsHidden: nobody can read them.
        """
        ...

    def read_cells(self, policy: str, tensor: str, positions: Positions) -> Cells:
        """Bit patterns in use at ``positions`` of one tensor, in the published type. Blocks.

        Raises:
            GenerationFailed: the policy is not loaded.
            WeightApplyFailed: no such tensor, or a position outside it.
            WeightsHidden: nobody can read them.
        """
        ...

    def stats(self) -> EngineStats: ...
