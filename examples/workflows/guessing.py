"""A policy in an environment behind HTTP: start, step after step, close (``guessing_server.py``).

What the environment says is a user's message, observed and never trained on; the reward is the sum
of the environment's rewards. All siblings play the same game, of the item's number. An environment
that does not answer, or answers nonsense, fails the attempt, which is tried again elsewhere; games
are closed in any case, or forgotten by the server.

``[workflow.settings]``: ``url`` is where the environment is as the agents see it, ``turns`` how
often the policy may act, ``answer_s`` how long the environment may take each time.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from msgspec import Meta

from edge_agent.workflow import Item, Rollout, WorkflowContext, side_by_side, workflow
from transport.errors import FarflowError

MAX_ANSWER_BYTES: Final = 64 * 1024
CLOSE_S: Final = 2.0
_NUMBER = re.compile(r"\d+")


class EnvironmentFailed(FarflowError):
    """The environment could not be asked, or did not answer as it should."""

    code = "environment.failed"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    url: Annotated[str, Meta(pattern="^https?://[^/]+$")] = "http://127.0.0.1:8123"
    turns: Annotated[int, Meta(ge=1, le=32)] = 7
    answer_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A game that has begun."""

    game: str
    observation: str


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """What an action led to."""

    observation: str
    reward: float
    done: bool


@workflow("guessing")
async def guessing(context: WorkflowContext, item: Item) -> list[Rollout]:
    """One game per sibling."""
    settings = context.settings_as(Settings)
    limits = aiohttp.ClientTimeout(total=settings.answer_s)
    async with aiohttp.ClientSession(settings.url, timeout=limits) as session:
        return await side_by_side(
            _play(context, item, settings, session, number)
            for number in range(1, context.group_size + 1)
        )


async def _play(
    context: WorkflowContext,
    item: Item,
    settings: Settings,
    session: aiohttp.ClientSession,
    number: int,
) -> Rollout:
    started = await _ask(session, "/start", {"seed": item.index}, Started)
    try:
        policy = context.policy()
        first = f"{item.prompt}\n{started.observation}"
        prompt = policy.encode([{"role": "user", "content": first}])
        tokens, parts, reward = prompt, [], 0.0
        for turn in range(1, settings.turns + 1):
            [said] = await policy.generate(tokens, label=f"turn-{turn}.{number}")
            parts.append(said)
            action = _NUMBER.search(said.text)
            step = {"game": started.game, "action": action[0] if action else ""}
            after = await _ask(session, "/step", step, Stepped)
            reward += after.reward
            if after.done or turn == settings.turns:
                break
            answer = [{"role": "user", "content": after.observation}]
            observed = policy.encode_next(said.tokens, answer)
            parts.append(observed)
            tokens = (*tokens, *said.tokens, *observed.tokens)
    finally:
        # Perhaps we are cancelled, and must not take long; the server forgets what stays open.
        with contextlib.suppress(EnvironmentFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await _ask(session, "/close", {"game": started.game}, dict[str, Any])
    return Rollout(
        prompt_tokens=prompt,
        parts=tuple(parts),
        text=said.text,
        finish_reason=said.completion.finish_reason,
        reward=reward,
    )


async def _ask(
    session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], type_: Any
) -> Any:
    """The environment's answer.

    Raises:
        EnvironmentFailed: there is none, or it is not as expected.
    """
    try:
        async with session.post(path, json=body) as response:
            answer = bytearray()
            async for piece in response.content.iter_chunked(MAX_ANSWER_BYTES):
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise EnvironmentFailed(f"{path}: more than {MAX_ANSWER_BYTES} bytes")
            if response.status != 200:
                said = answer[:200].decode(errors="replace")
                raise EnvironmentFailed(f"{path}: status {response.status}: {said}")
        return msgspec.json.decode(answer, type=type_)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise EnvironmentFailed(f"{path}: {type(error).__name__}: {error}") from error
