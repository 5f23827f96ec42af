"""Generation with vLLM: continuous batching, weights swapped in place under load.

What always holds:

1. Each policy has a vLLM of its own, in processes of its own (``vllm_policy``), one that is an
   adapter too; here is only what goes in and comes out.
2. A request is answered, failed or cancelled, and one that is cancelled leaves vLLM at once. One
   that fails takes no other with it, except those of a process that died.
3. When a policy's process dies it counts as not loaded from that moment on: its requests fail,
   ``when_lost`` is called, and it is loaded again no sooner than a back-off allows.
4. As many sequences are in vLLM as its cache has room for (``vllm_room``); the others wait here.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from edge_agent.config import VllmTable
from edge_agent.engine import Completion, EngineStats, GenerationRequest, Positions
from edge_agent.engines.chat_tokenizer import ChatTokenizer
from edge_agent.engines.hosting import HostingEngine
from edge_agent.engines.threads import in_thread
from edge_agent.engines.vllm_arguments import environment
from edge_agent.engines.vllm_owner import LOOK_S, end_children
from edge_agent.engines.vllm_policy import VllmPolicy
from edge_agent.engines.vllm_room import PolicyRoom, remember, remembered
from transport.errors import (
    ConfigError,
    EngineCrashed,
    EngineError,
    FarflowError,
    GenerationFailed,
    ModelError,
    WeightApplyFailed,
)
from transport.runtime.clock import Clock
from transport.weights.patch import Patch
from transport.weights.tensors import Cells, TensorBytes

_log = structlog.get_logger()

BACKOFF_S: Final = 2.0
BACKOFF_MAX_S: Final = 120.0
START_TRIES: Final = 3
STEADY_S: Final = 600.0
"""A process that lived so long has not crashed again and again."""


class _Hosted:
    """A loaded policy, its room, and the sequences that still need it."""

    def __init__(self, policy: VllmPolicy, most: int, loaded_s: float) -> None:
        self.policy = policy
        self.room = PolicyRoom(policy.kv_tokens, most)
        self.loaded_s = loaded_s
        self.requests = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self.policy.tokenizer


class VllmEngine(HostingEngine[_Hosted]):
    """``Engine`` over vLLM. ``slots`` bounds the sequences of all policies together; 0: what the
    caches have room for. What an agent says of itself is fixed when it starts, so ``slots`` is then
    what an earlier life found, written to the file ``memory``; in the first one vLLM's own limit.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(
        self,
        slots: int,
        table: VllmTable,
        *,
        device: str = "cpu",
        threads: int = 1,
        memory: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "engine = \"vllm\": vLLM is not installed: pip install 'farflow[vllm]'"
            )
        environment(threads)
        super().__init__(slots, clock)
        self._memory = memory if not slots else None
        self.slots = slots or remembered(self._memory) or table.max_sequences
        self.takes_adapters = True
        self._table = table
        self._device = device
        self._ending: set[asyncio.Task[None]] = set()
        self._leaving: set[_Hosted] = set()
        self._crashes: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}

    async def start(self) -> None:
        """Take requests from now on; vLLM is started with the first policy."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Fail what is in the engine and end all processes."""
        self._loop = None
        closed = GenerationFailed("the engine is closed")
        self._admission.refuse(closed)
        if self._memory is not None:
            rooms = [hosted.room for hosted in self._hosted.values()]
            await asyncio.to_thread(remember, self._memory, rooms)
        for name in list(self._hosted):
            self._retire(name, closed)
        for hosted in self._leaving:  # nobody waits for its requests any more
            hosted.idle.set()
        while self._ending:
            await asyncio.wait(set(self._ending))

    # ---- sequences -----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See ``Engine.generate``; EngineCrashed when vLLM dies meanwhile."""
        if self._loop is None:
            raise GenerationFailed(f"{request.request_id}: the engine is not running")
        hosted = self._find(request.policy)
        hosted.policy.check(request)
        hosted.requests += 1
        hosted.idle.clear()
        tasks = [
            asyncio.create_task(self._draw(hosted, request, sibling))
            for sibling in range(request.n)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # whoever cancels may do so twice
                hosted.requests -= 1
                if not hosted.requests:
                    hosted.idle.set()

    async def _draw(self, hosted: _Hosted, request: GenerationRequest, sibling: int) -> Completion:
        async with self._admission.place(hosted.room):
            self._busy()
            completion = await asyncio.wrap_future(hosted.policy.submit(request, sibling))
            hosted.room.ended(len(request.prompt_tokens) + len(completion.tokens))
            return completion

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        loaded = sum(hosted.policy.tokens_generated for hosted in self._hosted.values())
        gone = super().stats()
        return msgspec.structs.replace(gone, tokens_generated=gone.tokens_generated + loaded)

    # ---- weights -------------------------------------------------------------------------------

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        """See ``Engine.load_policy``. A policy whose model is loaded takes other weights in place,
        its sequences in flight go on with them; those of another model end with the weights that
        they began with, and are waited for: there may be no room for both. Adapters have each a
        vLLM with the model in ``base``.

        Raises:
            EngineCrashed: vLLM did not start.
        """
        async with self._lock(policy):
            hosted = self._hosted.get(policy)
            if hosted is not None and await self._reloaded(hosted.policy, folder, version):
                return
            await self._retired(policy)
            began_s = self._clock.monotonic_s()
            loaded = await self._started(policy, folder, version, base)
            if self._loop is None:
                await asyncio.to_thread(loaded.stop)
                raise ModelError(f"{policy}: the engine was closed while it loaded")
            now_s = self._clock.monotonic_s()
            self._hosted[policy] = _Hosted(loaded, self._table.max_sequences, now_s)
        _log.info(
            "engine.policy_loaded",
            policy=policy,
            version=version,
            took_s=round(now_s - began_s, 1),
            kv_tokens=loaded.kv_tokens,
        )

    async def _started(
        self, name: str, folder: Path, version: int, base: Path | None
    ) -> VllmPolicy:
        """Try a few times: what else takes memory may be about to end."""
        left = START_TRIES
        while True:
            wait_s = self._not_before_s.get(name, 0.0) - self._clock.monotonic_s()
            if wait_s > 0:
                _log.info("engine.backing_off", policy=name, wait_s=round(wait_s, 1))
                await asyncio.sleep(wait_s)
            threads: list[int] = []
            starting = asyncio.create_task(
                asyncio.to_thread(
                    VllmPolicy,
                    name,
                    folder,
                    version,
                    self._table,
                    device=self._device,
                    clock=self._clock,
                    lost=self._died,
                    base=base,
                    begun=threads.append,
                )
            )
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._end_with(name, self._unwanted(starting, threads))
                raise
            except EngineCrashed as error:
                left -= 1
                self._back_off(name)
                _log.warning("engine.not_started", policy=name, left=left, reason=str(error))
                if not left:
                    raise

    async def _reloaded(self, policy: VllmPolicy, folder: Path, version: int) -> bool:
        try:
            return await in_thread(policy.reload, folder, version)
        except EngineError as error:
            _log.warning("engine.not_reloaded", policy=policy.name, reason=str(error))
            return False

    async def unload_policy(self, policy: str) -> None:
        """See ``Engine.unload_policy``. Its processes end when its last sequence has; without any
        they have ended, and the memory is free, when this returns."""
        hosted = self._hosted.get(policy)
        if hosted is None:
            return
        ending = self._retire(policy)
        if not hosted.requests:
            await asyncio.wait({ending})
        _log.info("engine.policy_unloaded", policy=policy)

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        """See ``Engine.apply``."""
        async with self._lock(policy):
            hosted = self._hosted.get(policy)
            if hosted is None:
                raise WeightApplyFailed(f"{policy} version {version}: the policy is not loaded")
            if self._loop is None:
                raise WeightApplyFailed(f"{policy} version {version}: the engine is not running")
            try:
                return await in_thread(hosted.policy.apply, version, patch)
            except WeightApplyFailed:
                raise
            except EngineError as error:
                raise WeightApplyFailed(f"{policy} version {version}: {error}") from error

    def version(self, policy: str) -> int | None:
        """See ``Engine.version``."""
        hosted = self._hosted.get(policy)
        return None if hosted is None or hosted.policy.dead else hosted.policy.version

    def read_weights(self, policy: str) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``."""
        return self._find(policy).policy.weights.read_weights()

    def read_cells(self, policy: str, tensor: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``."""
        return self._find(policy).policy.weights.read_cells(tensor, positions)

    def checksums(self, policy: str) -> list[dict[str, str]]:
        """vLLM's own checksums of its parameters, a dictionary per worker. Blocks."""
        return self._find(policy).policy.checksums()

    def room(self, policy: str) -> int:
        """Sequences of a policy that its cache has room for now."""
        return self._find(policy).room.sequences

    # ---- the end of a policy's processes -------------------------------------------------------

    def _retire(self, policy: str, reason: EngineError | None = None) -> asyncio.Task[None]:
        """End a policy's processes, without a reason once its last request is answered."""
        hosted = self._hosted.pop(policy)
        self._leaving.add(hosted)
        if reason is not None:
            self._admission.refuse(reason, hosted.room)
        return self._end_with(policy, self._end(hosted, reason))

    def _end_with(self, policy: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that must be over before the policy is started again."""
        task = asyncio.get_running_loop().create_task(work, name=policy)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, hosted: _Hosted, reason: EngineError | None) -> None:
        if reason is None:
            await hosted.idle.wait()
        await asyncio.to_thread(hosted.policy.stop, reason)
        self._tokens_drawn += hosted.policy.tokens_generated
        self._leaving.discard(hosted)

    async def _unwanted(self, starting: asyncio.Task[VllmPolicy], threads: list[int]) -> None:
        """End a start under way, which may take minutes: whatever process it starts is killed."""
        while not starting.done():
            for thread in threads:
                await asyncio.to_thread(end_children, thread)
            await asyncio.wait({starting}, timeout=LOOK_S)
        with contextlib.suppress(FarflowError):
            await asyncio.to_thread(starting.result().stop)

    async def _retired(self, policy: str) -> None:
        """Wait until nothing of the policy's earlier processes is left."""
        if policy in self._hosted:
            self._retire(policy)
        before = {task for task in self._ending if task.get_name() == policy}
        if before:
            await asyncio.wait(before)

    def _died(self, policy: VllmPolicy, why: str) -> None:
        """Called in the policy's own thread."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._bury, policy, why)

    def _bury(self, policy: VllmPolicy, why: str) -> None:
        hosted = self._hosted.get(policy.name)
        if hosted is None or hosted.policy is not policy:
            return
        if self._clock.monotonic_s() - hosted.loaded_s > STEADY_S:
            self._crashes.pop(policy.name, None)
        self._back_off(policy.name)
        self._retire(policy.name, EngineCrashed(f"{policy.name}: {why}"))
        if self.when_lost is not None:
            self.when_lost(policy.name)

    def _back_off(self, policy: str) -> None:
        crashes = self._crashes[policy] = self._crashes.get(policy, 0) + 1
        wait_s = min(BACKOFF_S * 2.0 ** min(crashes - 1, 30), BACKOFF_MAX_S)
        self._not_before_s[policy] = self._clock.monotonic_s() + wait_s
