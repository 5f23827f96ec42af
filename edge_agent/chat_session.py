"""One rollout's access to the run's policies over the chat endpoint.

What always holds: a session answers calls from when it is opened until it is closed, at most
``MAX_CALLS`` of them and ``MAX_AT_ONCE`` at a time, with at most ``MAX_TOKENS`` tokens in all, and
one reward; closing it takes effect at once and ends what is under way; every completion is in its
record (``chat_record``) before the program hears of it.
"""

import asyncio
import hmac
import secrets
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import structlog

from edge_agent.chat_record import Conversations, Keep
from edge_agent.chat_requests import (
    Answer,
    CalledFunction,
    ChatMessage,
    ChatRefused,
    ChatRequest,
    Choice,
    ToolCall,
)
from edge_agent.chat_tools import tool_calls
from edge_agent.rollouts import Generated, Rollout
from transport.errors import GenerationFailed
from transport.messages import MAX_FINITE
from transport.runs import MAX_TURNS

if TYPE_CHECKING:
    from edge_agent.workflow import PolicyHandle, WorkflowContext

MAX_CALLS: Final = 256
MAX_AT_ONCE: Final = 32
MAX_TOKENS: Final = 1 << 21
"""Prompts and completions of all calls together: what a rollout's record may hold."""

_log = structlog.get_logger()


class ChatOptions(NamedTuple):
    """``models`` gives policies further names, those that a program has in its code; the
    temperature is the ``run``'s, whatever a program asks for, or the ``program``'s."""

    models: Mapping[str, str] = {}
    temperature: Literal["run", "program"] = "run"


class ChatSession:
    """What a program needs to speak with the run's policies as with the OpenAI API: ``base_url``
    and ``key``; and what came of it: ``rollout``. ``number`` counts the sessions of an item."""

    def __init__(
        self, context: "WorkflowContext", number: int, options: ChatOptions, id: int, base_url: str
    ) -> None:
        self._context = context
        self._number = number
        self._options = options
        self._record = Conversations(context.texts, MAX_TURNS * context.max_new_tokens)
        self._running: set[asyncio.Task[list[Generated]]] = set()
        self._waiting = 0
        self._calls = 0
        self._tokens = 0
        self._open = True
        self.base_url = base_url
        self.id = id
        self.key = f"farflow-{id}-{secrets.token_urlsafe(32)}"
        self.reward: float | None = None

    @property
    def cuts(self) -> int:
        """How often a conversation was cut: see ``chat_record``."""
        return self._record.cuts.total()

    @property
    def models(self) -> tuple[str, ...]:
        """What a request may name as ``model``."""
        return (*self._context.policies, *self._options.models)

    def rollout(
        self, *, reward: float | None = None, keep: Keep = "longest", policy: str | None = None
    ) -> Rollout:
        """The session's longest conversation as a sequence, or its ``last`` one; with ``policy`` (a
        name), the one of that policy. The reward is ``reward``, or what was posted, or None for the
        run's verifier to say.

        Raises:
            NothingGenerated: no call was answered.
            MalformedWorkflow: the run has no such policy.
        """
        id = None if policy is None else self._context.policy(policy).id
        if reward is None:
            reward = self.reward
        return self._record.rollout(keep=keep, policy=id, reward=reward)

    def opened_by(self, key: str) -> bool:
        """Whether ``key`` is ours; takes as long for one as for any other."""
        same = hmac.compare_digest(self.key.encode(), key.encode("utf-8", "replace"))
        return same and self._open

    def close(self) -> None:
        """The key opens nothing any more, and calls under way end; idempotent."""
        if not self._open:
            return
        self._open = False
        for task in self._running:
            task.cancel()
        if self._record.cuts:
            _log.info("chat.cuts", session=self.id, calls=self._calls, **self._record.cuts)

    def post_reward(self, reward: float) -> None:
        """Raises ChatRefused for a second one, or one that is no number within ``MAX_FINITE``."""
        self._check_open()
        if not -MAX_FINITE <= reward <= MAX_FINITE:
            text = f"reward: {reward} is not between {-MAX_FINITE:g} and {MAX_FINITE:g}"
            raise ChatRefused(400, "invalid_value", text, "reward")
        if self.reward is not None:
            raise ChatRefused(409, "reward_posted", "this rollout has its reward already")
        self.reward = reward

    async def answer(self, request: ChatRequest, created: int) -> Answer:
        """Raises ChatRefused, whatever it is that does not work."""
        self._check_open()
        policy = self._policy(request.model)
        self._admit()
        call = self._calls
        self._calls += 1
        self._waiting += 1
        try:
            return await self._answer(request, policy, call, created)
        except GenerationFailed as error:
            raise ChatRefused(400, error.code, str(error)) from error
        finally:
            self._waiting -= 1

    async def _answer(
        self, request: ChatRequest, policy: "PolicyHandle", call: int, created: int
    ) -> Answer:
        tools = request.offered_tools
        most_new = self._most_new(request)
        # A long conversation takes the tokenizer a while.
        asked = await asyncio.to_thread(
            self._record.ask,
            policy.id,
            request.messages,
            [tool.plain() for tool in tools],
            most_new,
        )
        self._check_open()
        n = request.n or 1
        self._spend(len(asked.prompt_tokens), n * most_new)
        by_program = self._options.temperature == "program" and self._context.kind != "eval"
        drawn = await self._drawn(
            policy.generate(
                asked.prompt_tokens,
                n=n,
                max_new_tokens=most_new,
                temperature=request.temperature if by_program else None,
                stop=request.stops,
                label=f"chat-{self._number}.{call + 1}",
            )
        )
        spent = sum(len(generated.tokens) for generated in drawn)
        self._tokens -= n * most_new - spent
        names = {tool.function.name for tool in tools}
        choices, answers = [], []
        for number, generated in enumerate(drawn):
            shown = _without_stop(generated.text, request.stops)
            said, calls = tool_calls(shown, names) if names else (shown, [])
            choice = Choice(
                content=said if said or not calls else None,
                tool_calls=tuple(
                    ToolCall(
                        id=f"call_{call}_{number}_{place}",
                        function=CalledFunction(name=name, arguments=arguments),
                    )
                    for place, (name, arguments) in enumerate(calls)
                ),
                finish_reason="tool_calls" if calls else generated.completion.finish_reason,
                tokens=(
                    await asyncio.to_thread(_with_logprobs, policy, generated)
                    if request.logprobs
                    else None
                ),
            )
            message = ChatMessage(
                role="assistant", content=choice.content, tool_calls=choice.tool_calls or None
            )
            choices.append(choice)
            answers.append((generated, shown, message))
        self._record.add(asked, answers)
        return Answer(
            id=f"chatcmpl-{self.id}-{call}",
            created=created,
            model=request.model,
            choices=tuple(choices),
            prompt_tokens=len(asked.prompt_tokens),
            completion_tokens=spent,
        )

    async def _drawn(self, generation: Coroutine[Any, Any, list[Generated]]) -> list[Generated]:
        """Ends with the session as well as with the request."""
        task = asyncio.create_task(generation)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._open:
                raise
            raise gone() from None
        finally:
            self._running.discard(task)

    def _check_open(self) -> None:
        """It was when the request came; its body took a while."""
        if not self._open:
            raise gone()

    def _policy(self, model: str) -> "PolicyHandle":
        name = self._options.models.get(model, model)
        if name not in self._context.policies:
            raise ChatRefused(
                404,
                "model_not_found",
                f"model: no policy {model!r}; name one of {', '.join(self.models)}",
                "model",
            )
        return self._context.policy(name)

    def _admit(self) -> None:
        if self._calls >= MAX_CALLS:
            raise ChatRefused(
                429, "calls_exhausted", f"a rollout may make {MAX_CALLS} calls, these were made"
            )
        if self._waiting >= MAX_AT_ONCE:
            raise ChatRefused(
                429,
                "rate_limit_exceeded",
                f"{MAX_AT_ONCE} calls of this rollout are under way; wait for one of them",
                retry=True,
            )

    def _most_new(self, request: ChatRequest) -> int:
        asked = request.max_completion_tokens or request.max_tokens
        most = self._context.max_new_tokens
        return most if asked is None else min(asked, most)

    def _spend(self, prompt_tokens: int, new_tokens: int) -> None:
        if self._tokens + prompt_tokens + new_tokens > MAX_TOKENS:
            raise ChatRefused(
                429,
                "tokens_exhausted",
                f"the calls of a rollout may have {MAX_TOKENS} tokens in all, and this one's "
                f"{prompt_tokens} and up to {new_tokens} new ones would be too many",
            )
        self._tokens += prompt_tokens + new_tokens


def gone() -> ChatRefused:
    """For a key that opens nothing."""
    return ChatRefused(
        401,
        "invalid_api_key",
        "this key opens no rollout: send the one that came with the base URL as bearer; it is good "
        "for as long as its rollout lasts",
    )


def _without_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the first stop text, as the API has it; the tokens keep it."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def _with_logprobs(policy: "PolicyHandle", generated: Generated) -> tuple[tuple[str, float], ...]:
    logprobs = generated.completion.logprobs
    return tuple(
        (policy.decode((token,)), logprob)
        for token, logprob in zip(generated.tokens, logprobs, strict=True)
    )
