"""Rollout workflows: how an item becomes sequences.

A workflow is one async function over named policies:

    @workflow("single_turn")
    async def single_turn(context: WorkflowContext, item: Item) -> list[Rollout]:
        completions = await context.policy().generate(item.prompt, n=context.group_size)
        return [Rollout.of(completion) for completion in completions]

What always holds: every token of a rollout says which policy and version drew it, or that none did;
a rollout without a reward is scored by the run's verifier, afterwards and in one go; a workflow
that returns anything else than ``group_size`` well-formed rollouts per item fails as a whole (a
part of a group would bias its lengths). Its fingerprint is the SHA-256 of the source of the module
that defines it: two agents with the same one run the same code.

Workflows run on the agent's event loop and must not block it; what they await may be cancelled, and
one that does not end then is closed, with the tasks that it started (``edge_agent.containment``).
One of several turns says ``context.turn_finished`` after each, and begins with ``context.resumed``
where an earlier attempt had got to, if it got anywhere: see ``edge_agent.workflows.multi_turn``.
"""

import hashlib
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edge_agent.containment import ours
from edge_agent.engine import Completion, Engine, GenerationRequest, SamplingParams
from edge_agent.rewards import RewardPool
from transport.errors import ConfigError, FarflowError
from transport.messages import Item, LeaseOffer
from transport.runtime.clock import Clock
from transport.trajectory import SequenceRecord, run_length

SHIPPED = ("single_turn", "multi_turn")
_SHIPPED_PACKAGE = "edge_agent.workflows"
_NO_POLICY = -1


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
    """One sibling: a prompt and what follows it, in order. ``text`` is what a verifier looks at;
    ``reward`` None leaves the scoring to the run's verifier."""

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


class Sibling(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sibling stands after ``turns`` finished turns (0: it has not begun): what would be
    returned of it now, and whatever else the workflow needs to go on, as plain JSON values (the
    messages so far, say)."""

    rollout: Rollout
    turns: int
    state: Any = None


TurnsFinished = Callable[[Sequence[Sibling]], None]
WorkflowFunction = Callable[["WorkflowContext", Item], Awaitable[Sequence[Rollout]]]


class Workflow(NamedTuple):
    """A workflow as it is advertised and run."""

    reference: str
    fingerprint: str
    function: WorkflowFunction


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

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt, through the chat template when there is one."""
        return self._context.engine.encode(self.id, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._context.engine.decode(self.id, tokens)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop_token_ids: tuple[int, ...] = (),
        label: str = "",
    ) -> list[Generated]:
        """``n`` completions of a prompt (text or tokens); defaults are the run's. Requests that are
        made side by side need a ``label`` of their own, or a repeated attempt may draw others.

        Raises:
            GenerationFailed: the engine could not do it.
        """
        context = self._context
        tokens = self.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        request = GenerationRequest(
            request_id=context.next_request_id(label),
            policy=self.id,
            prompt_tokens=tokens,
            n=n,
            sampling=SamplingParams(
                max_new_tokens=max_new_tokens or context.max_new_tokens,
                temperature=context.temperature if temperature is None else temperature,
                stop_token_ids=stop_token_ids,
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

    ``settings`` are ``[workflow.settings]`` of the run; ``group_size`` is how many rollouts to
    return. The same offer gives the same requests, so a repeated attempt draws the same tokens
    from the same weights. ``resumed`` is where the siblings stood when an earlier attempt ended,
    empty for those that begin; a workflow that does not look at it begins anew.
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
    ) -> None:
        self.resumed = tuple(resumed)
        self.settings: Mapping[str, Any] = offer.settings
        self.group_size = offer.group_size
        self.max_new_tokens = offer.max_new_tokens
        self.temperature = offer.temperature
        self.seed = offer.seed
        self.kind = offer.kind
        self.engine = engine
        self.generation_time = generation_time
        self._policies = offer.policies
        self._reward = offer.reward
        self._item = item
        self._rewards = rewards
        self._name = f"{offer.job}/{item.index}"
        self._requests = 0
        self._turns_finished = turns_finished

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

    async def score(self, responses: Sequence[str]) -> list[float]:
        """What the run's verifier gives for responses to this item, for workflows that must know.

        Raises:
            RewardError: a response could not be scored.
        """
        pairs = [(self._item, response) for response in responses]
        with ours():
            return await self._rewards.score(self._reward, pairs)

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
            return f"{self._name}/{label}"
        self._requests += 1
        return f"{self._name}/{self._requests}"


_registry: dict[tuple[str, str], WorkflowFunction] = {}


def workflow(name: str) -> Callable[[WorkflowFunction], WorkflowFunction]:
    """Register a function as the workflow ``name`` of its module."""

    def register(function: WorkflowFunction) -> WorkflowFunction:
        _registry[function.__module__, name] = function
        return function

    return register


def load_workflow(reference: str) -> Workflow:
    """A shipped workflow by name, or ``module:function`` (a registered name works as well).

    Raises:
        ConfigError: there is none; names the reference and what there is.
    """
    module_name, separator, name = reference.partition(":")
    if not separator:
        if reference not in SHIPPED:
            raise ConfigError(
                f"workflow {reference!r} is not known; shipped are {', '.join(SHIPPED)}, "
                "others are written as module:function"
            )
        module_name, name = f"{_SHIPPED_PACKAGE}.{reference}", reference
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"workflow {reference!r}: is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, (ImportError, SyntaxError)) else repr(error)
        raise ConfigError(
            f"workflow {reference!r}: {said}; install its package into the agent's environment "
            "(`pip install PACKAGE`), or add the folder it is in to PYTHONPATH"
        ) from error
    function = _registry.get((module.__name__, name)) or getattr(module, name, None)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow {reference!r}: {module_name} has no async function {name!r}")
    return Workflow(reference, _fingerprint(module, reference), function)


def _fingerprint(module: ModuleType, reference: str) -> str:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(f"workflow {reference!r}: its source cannot be read: {error}") from error
    return hashlib.sha256(source.encode()).hexdigest()


def checked(returned: object, item: Item, group_size: int) -> list[Rollout]:
    """What a workflow returned, as the rollouts that it promised.

    Raises:
        MalformedWorkflow: it returned something else; says what.
    """
    if not isinstance(returned, (list, tuple)):
        raise MalformedWorkflow(f"returned {type(returned).__name__} instead of rollouts")
    if len(returned) != group_size:
        raise MalformedWorkflow(
            f"returned {len(returned)} rollouts for item {item.index}, {group_size} were asked for"
        )
    for rollout in returned:
        if not isinstance(rollout, Rollout):
            raise MalformedWorkflow(f"returned a {type(rollout).__name__} among its rollouts")
        if not isinstance(rollout.parts, (list, tuple)):
            raise MalformedWorkflow(f"returned a rollout with the parts {rollout.parts!r:.80}")
        if not any(isinstance(part, Generated) for part in rollout.parts):
            raise MalformedWorkflow("returned a rollout in which no policy generated anything")
        reward = rollout.reward
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise MalformedWorkflow(f"returned the reward {reward!r}")
    return list(returned)


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
