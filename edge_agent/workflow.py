"""Rollout workflows: how an item becomes sequences.

A workflow is one async function over named policies:

    @workflow("single_turn")
    async def single_turn(context: WorkflowContext, item: Item) -> list[Rollout]:
        completions = await context.policy().generate(item.prompt, n=context.group_size)
        return [Rollout.of(completion) for completion in completions]

What always holds: every token of a rollout says which policy and version drew it, or that none did;
a rollout without a reward is scored by the run's verifier, afterwards and in one go; a workflow
that returns anything else than what it promised, ``group_size`` well-formed rollouts per item or a
multiple (``workflow_registry``), fails as a whole (a part of a group would bias its lengths).

Workflows run on the agent's event loop and must not block it; what they await may be cancelled, and
one that does not end then is closed, with the tasks that it started (``edge_agent.containment``).
One of several turns says ``context.turn_finished`` after each, and begins with ``context.resumed``
where an earlier attempt had got to, if it got anywhere: see ``edge_agent.workflows.multi_turn``.
"""

import asyncio
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar, cast

import msgspec

from edge_agent.chat_endpoint import AttemptChats
from edge_agent.chat_session import ChatOptions, ChatSession
from edge_agent.containment import ours
from edge_agent.engine import Chat, Engine, GenerationRequest, SamplingParams, Tools
from edge_agent.policy_texts import PolicyTexts
from edge_agent.rewards import RewardPool
from edge_agent.rollouts import Generated, MalformedWorkflow, Observed, Rollout, Sibling
from edge_agent.workflow_registry import (
    SHIPPED,
    Workflow,
    WorkflowFunction,
    load_workflow,
    workflow,
)
from transport.messages import Item, LeaseOffer
from transport.runtime.clock import Clock
from transport.summaries import MAX_SEQUENCES
from transport.texts import cut, encodable, said

__all__ = [
    "SHIPPED",
    "Chat",
    "Generated",
    "GenerationTime",
    "Item",
    "MalformedWorkflow",
    "Observed",
    "PolicyHandle",
    "Rollout",
    "Sibling",
    "Tools",
    "Workflow",
    "WorkflowContext",
    "WorkflowFunction",
    "load_workflow",
    "side_by_side",
    "workflow",
]

TurnsFinished = Callable[[Sequence[Sibling]], None]
Prompt = str | Sequence[int] | Chat
T = TypeVar("T")

MAX_LABEL: Final = 200
"""Characters of a request's label; more are cut off."""


class GenerationTime:
    """Wall time in which at least one generation of an attempt was under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active = 0
        self._since_s = 0.0
        self.total_s = 0.0

    def __enter__(self) -> None:
        if not self._active:
            self._since_s = self._clock.monotonic_s()
        self._active += 1

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        if not self._active:
            self.total_s += self._clock.monotonic_s() - self._since_s


class PolicyHandle:
    """One policy of the run as a workflow sees it."""

    def __init__(self, context: "WorkflowContext", policy: str) -> None:
        self.id = policy
        self._context = context

    def encode(self, prompt: Prompt, tools: Tools = ()) -> tuple[int, ...]:
        """Tokens of a prompt: a text through the chat template when there is one, messages through
        it always, with ``tools`` (JSON schemas) where the template shows them; tokens as they are.

        Raises:
            GenerationFailed: the chat template cannot do it; says why.
            MalformedWorkflow: it is no prompt, or tools go with what is no conversation.
        """
        if _is_chat(prompt):
            return self._context.texts.encode_chat(self.id, cast("Chat", prompt), tools)
        if tools:
            raise MalformedWorkflow("tools are shown in a conversation: give messages with them")
        if isinstance(prompt, str):
            return self._context.texts.encode(self.id, prompt)
        try:
            return tuple(map(operator.index, cast("Sequence[int]", prompt)))
        except TypeError as error:
            raise MalformedWorkflow(f"a prompt is text, messages or tokens: {error}") from error

    def encode_next(self, answer: Sequence[int], messages: Chat) -> Observed:
        """What a policy observes behind its ``answer`` (the tokens that it drew) when the
        conversation goes on with ``messages``; raises as ``encode``. The next answer follows."""
        return Observed(tokens=self._context.texts.encode_next(self.id, answer, messages))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._context.texts.decode(self.id, tokens)

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: tuple[int, ...] = (),
        tools: Tools = (),
        label: str = "",
    ) -> list[Generated]:
        """``n`` completions of a prompt (text, tokens or messages, see ``encode``); defaults are
        the run's. A sequence ends with the token that completes one of the texts ``stop``. Requests
        that are made side by side need a ``label`` of their own, or a repeated attempt may draw
        others.

        Raises:
            GenerationFailed: the engine could not do it.
            MalformedWorkflow: see ``encode``, or more completions than a group can hold.
        """
        if n > MAX_SEQUENCES:
            raise MalformedWorkflow(f"n is {n}, and a group has at most {MAX_SEQUENCES} rollouts")
        context = self._context
        tokens = self.encode(prompt, tools)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(encodable(text) != text for text in stops):
            raise MalformedWorkflow("a stop text has a lone surrogate, which no model writes")
        request = GenerationRequest(
            request_id=context.next_request_id(label),
            policy=self.id,
            prompt_tokens=tokens,
            n=n,
            sampling=SamplingParams(
                max_new_tokens=max_new_tokens or context.max_new_tokens,
                temperature=context.temperature if temperature is None else temperature,
                stop_token_ids=stop_token_ids,
                stop=stops,
                seed=context.seed,
            ),
        )
        with context.generation_time, ours():
            completions = await context.engine.generate(request)
        return [
            Generated(
                policy=self.id,
                prompt_tokens=tokens,
                completion=completion,
                text=self.decode(completion.tokens),
            )
            for completion in completions
        ]


class WorkflowContext:
    """What a workflow has at hand for one item of one attempt.

    ``settings`` are ``[workflow.settings]`` of the run; ``group_size`` is how many siblings there
    are to return; ``kind`` is ``train``, ``external`` (a submitter's job) or ``eval``, where each
    sibling is one rollout that is scored. The same offer gives the same requests, so a repeated
    attempt draws the same tokens from the same weights. ``resumed`` is where the siblings stood
    when an earlier attempt ended, empty for those that begin; a workflow that does not look at it
    begins anew.
    """

    def __init__(
        self,
        offer: LeaseOffer,
        item: Item,
        engine: Engine,
        rewards: RewardPool,
        generation_time: GenerationTime,
        resumed: Sequence[Sibling] = (),
        turns_finished: TurnsFinished | None = None,
        chats: AttemptChats | None = None,
    ) -> None:
        self.resumed = tuple(resumed)
        self.settings: Mapping[str, Any] = offer.settings
        self.group_size = offer.group_size
        self.max_new_tokens = offer.max_new_tokens
        self.temperature = offer.temperature
        self.seed = offer.seed
        self.kind = offer.kind
        self.engine = engine
        self.texts = PolicyTexts(engine, offer.chat_template_kwargs)
        self.generation_time = generation_time
        self._policies = offer.policies
        self._reward = offer.reward
        self._item = item
        self._rewards = rewards
        self._name = f"{offer.job}/{item.index}"
        self._requests = 0
        self._turns_finished = turns_finished
        self._chats = chats
        self._chats_opened = 0

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that the run generates with."""
        return tuple(self._policies)

    def policy(self, name: str | None = None) -> PolicyHandle:
        """The policy of that name; without a name, the only one.

        Raises:
            MalformedWorkflow: the run has no such policy, or several and none was named.
        """
        if name is None:
            if len(self._policies) != 1:
                raise MalformedWorkflow(f"name one of the policies {', '.join(self._policies)}")
            (name,) = self._policies
        if name not in self._policies:
            raise MalformedWorkflow(f"no policy {name!r}; the run has {', '.join(self._policies)}")
        return PolicyHandle(self, self._policies[name])

    def settings_as(self, type_: type[T]) -> T:
        """The settings as a msgspec Struct.

        Raises:
            MalformedWorkflow: they are not; names the key.
        """
        try:
            return msgspec.convert(dict(self.settings), type_)
        except msgspec.ValidationError as error:
            raise MalformedWorkflow(f"[workflow.settings]: {error}") from error

    async def score(self, responses: Sequence[str]) -> list[float]:
        """What the run's verifier gives for responses to this item, for workflows that must know.

        Raises:
            RewardError: a response could not be scored.
        """
        pairs = [(self._item, response) for response in responses]
        with ours():
            return await self._rewards.score(self._reward, pairs)

    def chat(self, options: ChatOptions | None = None) -> AbstractAsyncContextManager[ChatSession]:
        """The run's policies behind an OpenAI-compatible API, for one rollout of an agent that was
        written for it: ``async with context.chat() as chat`` gives ``chat.base_url``, ``chat.key``
        and, inside the block, ``chat.rollout()``.

        Raises:
            MalformedWorkflow: there is none here.
            ChatEndpointFailed: the agent cannot listen (on entering).
        """
        if self._chats is None:
            raise MalformedWorkflow("no chat endpoint belongs to this context")
        self._chats_opened += 1
        return self._chats.session(self, self._chats_opened, options or ChatOptions())

    def turn_finished(self, siblings: Sequence[Sibling]) -> None:
        """All siblings as they stand now that one of them has finished a turn. Costs next to
        nothing: the newest are sent away in the background, as far as there is room for them.

        Raises:
            MalformedWorkflow: not one per rollout that the workflow is to return.
        """
        if len(siblings) != self.group_size:
            raise MalformedWorkflow(
                f"said of {len(siblings)} siblings where they stand, it has {self.group_size}"
            )
        if self._turns_finished is not None:
            self._turns_finished(siblings)

    def next_request_id(self, label: str = "") -> str:
        """A name for a request: the same ones in the same order in every attempt of the job."""
        if label:
            return f"{self._name}/{cut(said(label), MAX_LABEL)}"
        self._requests += 1
        return f"{self._name}/{self._requests}"


async def side_by_side(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that are made at the same time, in their order. The first one that
    raises ends the others, and is raised in an exception group."""
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(call) for call in calls]
    return [task.result() for task in made]


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
