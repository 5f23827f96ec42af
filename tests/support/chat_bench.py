"""A chat endpoint over a fake engine that notes what it was asked and drew, for tests of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
from workflow_bench import JUDGE, SOLVER, offer

from cloud_trainer.numpy_trainer import make_numpy_model
from edge_agent.chat_endpoint import AttemptChats, ChatEndpoint
from edge_agent.chat_session import ChatSession
from edge_agent.config import FakeEngineTable
from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.fake import FakeEngine
from edge_agent.rewards import RewardPool
from edge_agent.workflow import Generated, GenerationTime, Rollout, WorkflowContext
from transport.runtime.clock import SystemClock


class Watched(FakeEngine):
    """Keeps requests and their completions; draws nothing while ``held`` is not set."""

    def __init__(self) -> None:
        super().__init__(64, FakeEngineTable(tokens_per_s=1e5, first_token_s=0.0, mean_tokens=8.0))
        self.drawn: list[tuple[GenerationRequest, list[Completion]]] = []
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.asked.set()
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        completions = await super().generate(request)
        self.drawn.append((request, completions))
        return completions


class ChatWorld:
    """An endpoint, and contexts whose sessions are on it."""

    def __init__(self, engine: Watched, endpoint: ChatEndpoint) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.chats = AttemptChats(endpoint)

    def context(self, **changes: Any) -> WorkflowContext:
        values: dict[str, Any] = {"policies": {"solver": SOLVER}, "max_new_tokens": 40, **changes}
        made = offer(**values)
        time = GenerationTime(SystemClock())
        return WorkflowContext(
            made, made.items[0], self.engine, RewardPool(1.0), time, chats=self.chats
        )


@contextlib.asynccontextmanager
async def chat_world(folder: Path, **limits: Any) -> AsyncIterator[ChatWorld]:
    engine, endpoint = Watched(), ChatEndpoint(SystemClock(), **limits)
    model = await asyncio.to_thread(make_numpy_model, folder / "model")
    await engine.start()
    for policy in (SOLVER, JUDGE):
        await engine.load_policy(policy, model, 3)
    try:
        yield ChatWorld(engine, endpoint)
    finally:
        await endpoint.close()
        await engine.close()


@contextlib.asynccontextmanager
async def client_of(session: ChatSession, **changes: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real package, which repeats nothing, and reads no certificates, as there is no TLS."""
    values: dict[str, Any] = {"base_url": session.base_url, "api_key": session.key, **changes}
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        max_retries=0, timeout=10.0, http_client=http, **values
    ) as client:
        yield client


def check_exact(rollout: Rollout, engine: Watched) -> None:
    """Every part of the rollout is what the engine drew for exactly the tokens before it."""
    drawn = [
        (request.prompt_tokens, request.policy, completion)
        for request, done in engine.drawn
        for completion in done
    ]
    before = rollout.prompt_tokens
    for part in rollout.parts:
        if isinstance(part, Generated):
            assert part.prompt_tokens == before
            assert (before, part.policy, part.completion) in drawn
        before += part.tokens
