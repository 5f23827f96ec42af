"""Generation on servers that the user runs (vLLM), through HTTP.

What always holds:

1. Prompts go as tokens and come back as tokens, each with its log-probability under the
   distribution that it was drawn from: a server that does not give these is refused when a policy
   loads, not when an attempt needs them.
2. A request is answered, failed or cancelled. One that is cancelled closes its connections, at
   which the server aborts; at most ``slots`` sequences are at the servers, the others wait here.
3. A server that is away or busy is tried again a few times, with growing pauses; then requests
   fail, and of one that is away its policies count as not loaded (``when_lost``).
4. Weights are written only where the server shows them, too (``openai_weights``). A policy whose
   server shows none is frozen, and its weights are what the user says they are: reading them is
   ``WeightsHidden``.
"""

import asyncio
import contextlib
import itertools
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from edge_agent.config import OpenaiServer, OpenaiTable
from edge_agent.engine import (
    Completion,
    GenerationRequest,
    Positions,
    WeightsHidden,
    refuse_adapter,
)
from edge_agent.engines.chat_tokenizer import ChatTokenizer
from edge_agent.engines.hosting import HostingEngine
from edge_agent.engines.openai_served import (
    FROZEN,
    Served,
    check_frozen,
    check_servers,
    server_of,
    wait_for_served,
)
from edge_agent.engines.openai_stream import Drawing, Stale
from edge_agent.engines.openai_weights import ServerWeights
from edge_agent.engines.openai_wire import ServerAway, ServerBusy
from edge_agent.engines.request_check import vllm_fault
from edge_agent.engines.threads import in_thread
from edge_agent.engines.vllm_room import PolicyRoom
from transport.errors import (
    EngineCrashed,
    EngineError,
    GenerationFailed,
    ModelError,
    WeightApplyFailed,
)
from transport.runtime.clock import Clock
from transport.weights.folder import read_model_folder
from transport.weights.patch import Patch, whole
from transport.weights.tensors import Cells, TensorBytes

_log = structlog.get_logger()

TRIES: Final = 6
BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 15.0
CONNECT_S: Final = 10.0
_READ_BYTES: Final = 2**20


class _Hosted:
    """A loaded policy and what is being drawn for it; ``salt`` keeps prompts that other weights
    cached from new sequences."""

    def __init__(self, served: Served, version: int) -> None:
        self.served = served
        self.version = version
        self.salt = ""
        self.lost: EngineError | None = None
        self.drawing: set[Drawing] = set()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self.served.tokenizer


class OpenaiEngine(HostingEngine[_Hosted]):
    """``Engine`` over servers at the addresses in ``table``.

    Raises:
        ConfigError: one is no address, or its key file holds no key.
    """

    def __init__(self, slots: int, table: OpenaiTable, *, clock: Clock | None = None) -> None:
        check_servers(table)
        super().__init__(slots, clock)
        self.slots = slots
        self.takes_adapters = False
        self._table = table
        self._life = f"farflow-{secrets.token_hex(6)}"
        self._salts = itertools.count(1)
        self._rng = random.Random()  # noqa: S311 - spreads retries
        self._room = PolicyRoom(0, slots)
        self._requests: set[asyncio.Task[Completion]] = set()
        self._session: Any = None

    async def start(self) -> None:
        """Take requests from now on; a server is asked for when a policy loads."""
        import aiohttp

        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S, sock_read=self._table.timeout_s
            ),
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        """Fail what is in the engine; the servers go on without us."""
        self._loop = None
        closed = GenerationFailed("the engine is closed")
        self._admission.refuse(closed)
        for policy in list(self._hosted):
            self._drop(policy, closed)
        if self._requests:
            await asyncio.wait(set(self._requests))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---- sequences -----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See ``Engine.generate``; EngineCrashed when the server goes away meanwhile."""
        if self._loop is None:
            raise GenerationFailed(f"{request.request_id}: the engine is not running")
        hosted = self._find(request.policy)
        served = hosted.served
        problem = vllm_fault(request, served.vocabulary, served.context_tokens)
        if problem:
            raise GenerationFailed(f"{request.request_id}: {problem}")
        tasks = [
            asyncio.create_task(self._draw(hosted, request, sibling))
            for sibling in range(request.n)
        ]
        self._requests.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._requests.difference_update(tasks)

    async def _draw(self, hosted: _Hosted, request: GenerationRequest, sibling: int) -> Completion:
        async with self._admission.place(self._room):
            self._busy()
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - we are in one
            drawing = Drawing(hosted.served, request, sibling, task, self._drawn)
            hosted.drawing.add(drawing)
            try:
                return await self._tried(hosted, drawing)
            except (asyncio.CancelledError, EngineError):
                if hosted.lost is None:
                    raise
                raise hosted.lost from None
            finally:
                hosted.drawing.discard(drawing)

    async def _tried(self, hosted: _Hosted, drawing: Drawing) -> Completion:
        tries = 0
        while hosted.lost is None:
            try:
                return await drawing.run(self._session, hosted.version, hosted.salt)
            except Stale:
                continue
            except (ServerAway, ServerBusy) as error:
                tries += 1
                if tries == TRIES:
                    if isinstance(error, ServerAway):
                        self._lose(hosted, error)
                    raise
                after_s = min(getattr(error, "after_s", 0.0), BACKOFF_MAX_S)
                ceiling_s = min(BACKOFF_S * 2.0 ** (tries - 1), BACKOFF_MAX_S)
                await asyncio.sleep(after_s + self._rng.uniform(0.0, ceiling_s))
            except EngineCrashed as error:  # others' weights: no token of them is worth anything
                self._lose(hosted, error)
                raise
        raise hosted.lost

    def _drawn(self, tokens: int) -> None:
        self._tokens_drawn += tokens

    # ---- weights -------------------------------------------------------------------------------

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        """See ``Engine.load_policy``. Waits ``away_s`` for a server that is not there. One that
        takes weights gets the folder's, and sequences in flight go on with them.

        Raises:
            ModelError: the server is no way to this policy; names the setting.
            ServerAway: it is not there.
        """
        refuse_adapter(policy, base)
        server = server_of(self._table, policy)
        self._check(policy, version, server)
        async with self._lock(policy):
            served = await wait_for_served(
                policy, folder, server, self._table, life=self._life, clock=self._clock
            )
            hosted = _Hosted(served, version)
            try:
                if served.weights is not None:
                    tensors = read_model_folder(folder, mapped=True)
                    await self._write(hosted, served.weights, version, whole(tensors))
                if self._loop is None:
                    raise EngineCrashed(f"{policy}: the engine was closed while it loaded")
            except BaseException as error:
                served.close()
                before = self._hosted.get(policy)
                if before is not None and isinstance(error, EngineCrashed):
                    self._lose(before, error)
                if isinstance(error, WeightApplyFailed):
                    raise ModelError(f"{folder}: {error}") from error
                raise
            self._drop(policy, None)
            self._hosted[policy] = hosted
        _log.info("engine.policy_loaded", policy=policy, version=version, server=served.address.url)

    def _check(self, policy: str, version: int, server: OpenaiServer) -> None:
        """Raises ModelError for what the settings rule out."""
        if server.weight_updates == "vllm":
            url = server.base_url.rstrip("/")
            for other, hosted in self._hosted.items():
                if other != policy and hosted.served.address.url == url:
                    raise ModelError(
                        f"{policy}: {other} has the server at {url}, and weights of one policy only"
                        " fit into it; name another in agent.openai.servers"
                    )
        check_frozen(policy, version, server)

    async def unload_policy(self, policy: str) -> None:
        """See ``Engine.unload_policy``. The server keeps its weights."""
        self._drop(policy, None)

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        """See ``Engine.apply``."""
        where = f"{policy} version {version}"
        async with self._lock(policy):
            hosted = self._hosted.get(policy)
            if hosted is None:
                raise WeightApplyFailed(f"{where}: the policy is not loaded")
            if self._loop is None:
                raise WeightApplyFailed(f"{where}: the engine is not running")
            weights = hosted.served.weights
            if weights is None:
                raise WeightApplyFailed(f"{where} is of a policy that is trained: {FROZEN}")
            try:
                pause_s = await self._write(hosted, weights, version, patch)
            except WeightApplyFailed:
                raise
            except EngineError as error:
                self._lose(hosted, error)
                raise WeightApplyFailed(f"{where}: {error}") from error
            hosted.version = version
            return pause_s

    async def _write(
        self, hosted: _Hosted, weights: ServerWeights, version: int, patch: Patch
    ) -> float:
        loop = asyncio.get_running_loop()

        def paused() -> None:
            # What comes from the server afterwards is read after this was called.
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody draws
                loop.call_soon_threadsafe(self._anew, hosted)

        return await in_thread(weights.apply, version, patch, paused)

    def _anew(self, hosted: _Hosted) -> None:
        """New weights are there: what has no token yet begins with them."""
        for each in (hosted, self._hosted.get(hosted.served.policy)):
            if each is not None:
                each.salt = f"{self._life}-{next(self._salts)}"
                for drawing in each.drawing:
                    drawing.begin_anew()

    def version(self, policy: str) -> int | None:
        """See ``Engine.version``."""
        hosted = self._hosted.get(policy)
        return None if hosted is None else hosted.version

    def read_weights(self, policy: str) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``; raises WeightsHidden where the server shows none."""
        return self._shown(policy).cells.read_weights()

    def read_cells(self, policy: str, tensor: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``; raises WeightsHidden where the server shows none."""
        return self._shown(policy).cells.read_cells(tensor, positions)

    def _shown(self, policy: str) -> ServerWeights:
        served = self._find(policy).served
        if served.weights is None:
            raise WeightsHidden(f"{policy}: the server at {served.address.url} shows no weights")
        return served.weights

    def _drop(self, policy: str, reason: EngineError | None) -> None:
        """The policy is loaded no more; with a reason what is drawn for it fails."""
        hosted = self._hosted.pop(policy, None)
        if hosted is None:
            return
        hosted.served.close()
        hosted.lost = reason
        if reason is not None:
            for drawing in hosted.drawing:
                if drawing.task is not asyncio.current_task():
                    drawing.task.cancel()

    def _lose(self, hosted: _Hosted, error: EngineError) -> None:
        """Its server is gone, or has weights of nobody knows which version."""
        policy = hosted.served.policy
        if self._hosted.get(policy) is not hosted:
            return
        _log.error("engine.crashed", policy=policy, version=hosted.version, reason=str(error))
        self._drop(policy, EngineCrashed(f"{policy}: {error}"))
        if self.when_lost is not None:
            self.when_lost(policy)
