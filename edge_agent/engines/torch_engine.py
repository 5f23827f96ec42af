"""Generation with transformers and torch, on a CPU or one GPU.

What always holds:

1. One thread owns all models and does all decoding; the event loop only puts messages into its
   inbox and gets answers through futures.
2. Weights are swapped between two decode steps, and sequences in flight go on (``HostedPolicy``).
3. On a CPU the model is computed in float32, which holds bf16 values exactly; elsewhere in its
   published type. ``read_weights`` gives the published bits back.
4. A request is answered, failed or cancelled; one that fails takes no other with it, except the
   rows that were computed in the same batch when torch itself failed.

Sequences are generated in waves: up to ``slots`` rows of one policy, in order of arrival, until all
of them have ended. Between two waves the policy of the oldest waiting request gets its turn.
"""

import asyncio
import contextlib
import gc
import importlib.util
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import structlog

from edge_agent.engine import (
    Completion,
    EngineStats,
    GenerationRequest,
    Positions,
)
from edge_agent.engines.hosted_texts import HostedTexts
from edge_agent.engines.torch_bases import Bases
from edge_agent.engines.torch_decoding import Row, Wave
from edge_agent.engines.torch_inbox import Close, OpenRequest, Swap, answer
from edge_agent.engines.torch_policy import HostedPolicy, StagedWrite
from transport.errors import EngineError, GenerationFailed, WeightApplyFailed
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.model_folder import require_torch
from transport.weights.patch import Patch
from transport.weights.tensors import Cells, TensorBytes

_log = structlog.get_logger()

_TORCH_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model's own forward code raises."""


class TorchEngine(HostedTexts):
    """``Engine`` over transformers. ``dtype`` auto: float32 on a CPU, published type elsewhere;
    ``swap`` auto: by reference on a CPU, in place elsewhere (``torch_policy``).

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(
        self,
        slots: int,
        device: str = "cpu",
        threads: int = 1,
        dtype: Literal["auto", "float32"] = "auto",
        *,
        swap: Literal["auto", "reference", "in_place"] = "auto",
        clock: Clock | None = None,
    ) -> None:
        require_torch('engine = "torch"')
        self.slots = slots
        self.takes_adapters = importlib.util.find_spec("peft") is not None
        self.when_freed: Callable[[], None] | None = None
        self.when_lost: Callable[[str], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._device = device
        self._threads = threads
        self._compute: Literal["float32", "published"] = (
            "float32" if dtype == "float32" or device.startswith("cpu") else "published"
        )
        self._in_place = swap == "in_place" or (swap == "auto" and not device.startswith("cpu"))
        self._clock = clock or SystemClock()
        self._changing = asyncio.Lock()  # loading and applying, one after the other
        self._bases = Bases(device=device, compute=self._compute)
        self._policies: dict[str, HostedPolicy] = {}
        # SimpleQueue.put never waits, so the event loop is never held up by the worker.
        self._inbox: queue.SimpleQueue[OpenRequest | Swap | Close] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Below: the worker's own; others only read the numbers.
        self._jobs: dict[int, OpenRequest] = {}  # by identity: all that were not answered yet
        self._waiting: deque[tuple[OpenRequest, Row]] = deque()
        self._closing = False
        self._tokens_generated = 0
        self._busy_s = 0.0
        self._running = 0

    # ---- event loop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker thread; harmless when it runs."""
        if self._thread is None:
            self._closing = False
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._work, name="torch-engine", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """Fail what is in the engine and end the worker after its current step."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(Close())
            await asyncio.to_thread(thread.join)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See ``Engine.generate``."""
        if self._thread is None:
            raise GenerationFailed(f"{request.request_id}: the engine is not running")
        policy = self._find(request.policy)
        policy.check(request)
        loop = asyncio.get_running_loop()
        rows = [policy.row(request, sibling) for sibling in range(request.n)]
        job = OpenRequest(policy, rows, loop, loop.create_future(), len(rows))
        self._inbox.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.abort()
            raise

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        """See ``Engine.load_policy``. Sequences in flight of a policy that is loaded anew end with
        the weights that they began with."""
        async with self._changing:
            self._policies[policy] = await asyncio.to_thread(
                self._load, policy, folder, version, base
            )
        _log.info("engine.policy_loaded", policy=policy, version=version, device=self._device)

    async def unload_policy(self, policy: str) -> None:
        """See ``Engine.unload_policy``. On a GPU the memory is free for other processes, too."""
        async with self._changing:
            if self._policies.pop(policy, None) is None:
                return
            await asyncio.to_thread(self._free)
        _log.info("engine.policy_unloaded", policy=policy)

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        """See ``Engine.apply``."""
        async with self._changing:
            hosted = self._policies.get(policy)
            if hosted is None:
                raise WeightApplyFailed(f"{policy} version {version}: the policy is not loaded")
            staged = await asyncio.to_thread(self._stage, hosted, version, patch)
            if self._thread is None:
                raise WeightApplyFailed(f"{policy} version {version}: the engine is not running")
            loop = asyncio.get_running_loop()
            swap = Swap(hosted, version, staged, [], loop, loop.create_future())
            self._inbox.put(swap)
            pause_s = await swap.future
            await asyncio.to_thread(swap.replaced.clear)
            return pause_s

    def version(self, policy: str) -> int | None:
        """See ``Engine.version``."""
        hosted = self._policies.get(policy)
        return None if hosted is None else hosted.version

    def read_weights(self, policy: str) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``."""
        return self._find(policy).read_weights()

    def read_cells(self, policy: str, tensor: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``."""
        return self._find(policy).read_cells(tensor, positions)

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return EngineStats(
            tokens_generated=self._tokens_generated,
            busy_s=self._busy_s,
            running=self._running,
            waiting=len(self._waiting) + self._inbox.qsize(),
        )

    def _find(self, policy: str) -> HostedPolicy:
        try:
            return self._policies[policy]
        except KeyError:
            raise GenerationFailed(f"policy {policy!r} is not loaded in this engine") from None

    # ---- helper threads --------------------------------------------------------------------

    def _load(self, name: str, folder: Path, version: int, base: Path | None) -> HostedPolicy:
        self._limit_threads()
        return HostedPolicy(
            name,
            folder,
            version,
            device=self._device,
            compute=self._compute,
            in_place=self._in_place,
            base=None if base is None else self._bases.of(folder, base),
        )

    def _free(self) -> None:
        """Some models refer to themselves: what is gone would stay until Python looks for it."""
        import torch

        gc.collect()
        if torch.device(self._device).type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()

    def _stage(self, hosted: HostedPolicy, version: int, patch: Patch) -> list[StagedWrite]:
        self._limit_threads()
        return hosted.stage(version, patch)

    def _limit_threads(self) -> None:
        """The limit belongs to the calling thread (OpenMP)."""
        import torch

        torch.set_num_threads(self._threads)

    # ---- worker ----------------------------------------------------------------------------

    def _work(self) -> None:
        import torch

        self._limit_threads()
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._receive(wait=not self._waiting)
                    # Kept in no variable: while we wait for more, it would keep its policy loaded.
                    self._run_wave(self._admit())
        finally:
            # Also after a crash: somebody who asks gets an answer until the engine is closed.
            self._refuse_until_closed()

    def _receive(self, *, wait: bool) -> None:
        """Take all that is in the inbox. Swaps happen here: between two steps."""
        while not self._closing:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(message, Swap):
                self._swap(message)
            elif isinstance(message, OpenRequest):
                self._jobs[id(message)] = message
                self._waiting.extend((message, row) for row in message.rows)
            else:
                self._closing = True

    def _swap(self, swap: Swap) -> None:
        before_s = self._clock.monotonic_s()
        swap.replaced.extend(swap.policy.swap(swap.version, swap.writes))
        answer(swap.loop, swap.future, self._clock.monotonic_s() - before_s)

    def _admit(self) -> list[tuple[OpenRequest, Row]]:
        """Up to ``slots`` waiting rows of the policy whose row waits longest."""
        admitted: list[tuple[OpenRequest, Row]] = []
        others: deque[tuple[OpenRequest, Row]] = deque()
        for job, row in self._waiting:
            if row.aborted:
                self._jobs.pop(id(job), None)
                continue
            same = not admitted or job.policy is admitted[0][0].policy
            (admitted if same and len(admitted) < self.slots else others).append((job, row))
        self._waiting = others
        return admitted

    def _run_wave(self, admitted: list[tuple[OpenRequest, Row]]) -> None:
        if not admitted:
            return
        policy = admitted[0][0].policy
        jobs = {id(row): job for job, row in admitted}
        began_s = self._clock.monotonic_s()
        try:
            rows = [row for _, row in admitted]
            version = policy.version
            wave = Wave(policy.forward, rows, version=version, device=self._device)
            while wave.rows:
                self._account(wave.rows, jobs)
                now_s = self._clock.monotonic_s()
                self._busy_s, began_s = self._busy_s + now_s - began_s, now_s
                self._receive(wait=False)
                if self._closing:
                    break
                wave.advance(policy.version)
        except _TORCH_ERRORS as error:
            _log.exception("engine.wave_failed", policy=policy.name, rows=len(admitted))
            reason = f"{policy.name}: {type(error).__name__}: {error}"
            for job in {id(job): job for job in jobs.values()}.values():
                self._end(job, GenerationFailed(reason))
        finally:
            self._runs(0)

    def _runs(self, rows: int) -> None:
        """So many rows are being drawn now; tell the agent when they are fewer than before."""
        fewer, self._running = rows < self._running, rows
        if fewer and self.when_freed is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before the engine
                self._loop.call_soon_threadsafe(self.when_freed)

    def _account(self, rows: list[Row], jobs: Mapping[int, OpenRequest]) -> None:
        """Look at the tokens just drawn: count them, answer requests whose last row has ended."""
        self._tokens_generated += len(rows)
        self._runs(sum(row.finish_reason is None for row in rows))
        for row in rows:
            job = jobs[id(row)]
            if row.aborted:
                self._jobs.pop(id(job), None)
            elif math.isnan(row.logprobs[-1]):
                where = f"{job.policy.name} version {row.versions[-1]}"
                self._end(job, GenerationFailed(f"{where}: the logits are not finite"))
            elif row.finish_reason is not None:
                job.open_rows -= 1
                if job.open_rows == 0:
                    self._end(job, [each.completion() for each in job.rows])

    def _end(self, job: OpenRequest, result: list[Completion] | EngineError) -> None:
        if isinstance(result, EngineError):
            job.abort()
        if self._jobs.pop(id(job), None) is not None:
            answer(job.loop, job.future, result)

    def _refuse_until_closed(self) -> None:
        closed = GenerationFailed("the engine is closed")
        for job in list(self._jobs.values()):
            self._end(job, closed)
        self._waiting.clear()
        while not self._closing:
            message = self._inbox.get()
            if isinstance(message, OpenRequest):
                answer(message.loop, message.future, closed)
            elif isinstance(message, Swap):
                answer(message.loop, message.future, WeightApplyFailed("the engine is closed"))
            else:
                self._closing = True
