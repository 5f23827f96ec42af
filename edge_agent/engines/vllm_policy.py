"""A policy in a vLLM of its own: its process, its weights, the sequences that it draws. With a base
its weights are those of an adapter, and vLLM has one of it on the model in the base's folder.

What always holds:

1. vLLM lives in an event loop and a thread of its own, so the agent's loop waits neither for its
   start nor for its text handling; all methods here may be called from any other thread.
2. Weights change in place and between two steps only: values are laid down in a file and staged
   beside the running model; the pause is for the writes alone. Sequences that have begun go on with
   their cache, the others begin anew.
3. Weights that could be of no version are never drawn with: a write that failed half-way and was
   not put back ends the policy, as a crash does. ``lost`` is called for both, once.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from edge_agent.config import VllmTable
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.chat_tokenizer import ChatTokenizer
from edge_agent.engines.request_check import vllm_fault
from edge_agent.engines.vllm_adapter import AdapterBits, adapter_request
from edge_agent.engines.vllm_arguments import engine_arguments, start_fault, tensor_forms
from edge_agent.engines.vllm_owner import end_children
from edge_agent.engines.vllm_sequence import Sequence as DrawnSequence
from edge_agent.engines.vllm_weights import (
    CALL,
    WorkerFault,
    WorkerWeights,
    answers,
    question,
    staged_fault,
)
from transport.errors import (
    EngineCrashed,
    EngineError,
    FarflowError,
    GenerationFailed,
    WeightApplyFailed,
)
from transport.runtime.clock import Clock
from transport.runtime.model_folder import load_tokenizer
from transport.weights.folder import is_adapter_folder, read_artefacts, read_model_folder
from transport.weights.patch import Patch, whole

T = TypeVar("T")

_log = structlog.get_logger()

CALL_S: Final = 600.0
"""Longer than any call into a live vLLM takes; a start has its own limit."""
STILL_S: Final = 1200.0  # likewise; a prompt may be long
_LOOK_S: Final = 0.25
_NUCLEUS: Final = SamplingParams(max_new_tokens=2, top_p=0.5, stop=("\N{SNOWMAN}",))
END_S: Final = 60.0  # for all of an end
_HUNG_S: Final = 10.0  # the same where a call has not been answered
_ENDING_S: Final = 2.0
"""Its processes have nothing to save, and do not end by themselves; then they are killed."""
_STAGED_S: Final = (0.002, 0.05)  # between two looks at whether they are: at first, at most


class VllmPolicy:
    """A policy that was loaded as ``version``. Blocks while it loads; ``begun`` is told by which
    thread its processes are started.

    Raises:
        ModelError: the folder does not load into vLLM.
        EngineCrashed: vLLM did not start.
        ConfigError: ``[agent.vllm]`` has what vLLM does not take.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        version: int,
        table: VllmTable,
        *,
        device: str,
        clock: Clock,
        lost: Callable[["VllmPolicy", str], None],
        base: Path | None = None,
        begun: Callable[[int], None] = lambda thread: None,
    ) -> None:
        self.name = name
        self.version = version
        self.tokens_generated = 0
        self.dead = ""
        self._clock = clock
        self._lost = lost
        self._adapted = base is not None
        self._artefacts = read_artefacts(folder)
        self._tensors = tensor_forms(folder, adapter=self._adapted)
        model = base or folder
        self.tokenizer = ChatTokenizer(name, load_tokenizer(model))
        self._adapter: Any = None
        bits = AdapterBits(folder) if self._adapted else None
        self.weights = WorkerWeights(name, *self._tensors, self._ask, bits=bits)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sequences: set[DrawnSequence] = set()
        self._ending: EngineError | None = None
        self._llm: Any = None
        self._swaps = 0
        self._hung = False
        self._thread = threading.Thread(target=self._serve, name=f"vllm {name}", daemon=True)
        self._thread.start()
        begun(self._thread.native_id or 0)
        try:
            forms, _ = tensor_forms(model) if self._adapted else self._tensors
            adapter = folder if self._adapted else None
            arguments = engine_arguments(table, name, model, forms, device, adapter=adapter)
            self._call(self._start(arguments, folder), table.start_timeout_s)
        except FarflowError:
            self.stop()
            raise
        except Exception as error:
            self.stop()
            raise start_fault(folder, error) from error

    # ---- from any thread -----------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> None:
        """Raises GenerationFailed for what vLLM would refuse, or do otherwise than asked."""
        if problem := vllm_fault(request, self._vocabulary, self._context_tokens):
            raise GenerationFailed(f"{request.request_id}: {problem}")

    def submit(
        self, request: GenerationRequest, sibling: int
    ) -> "concurrent.futures.Future[Completion]":
        """Begin to draw a sequence; cancelling the future aborts it in vLLM."""
        return self._send(self._run(DrawnSequence(request, sibling, self._drawn)))

    def apply(self, version: int, patch: Patch) -> float:
        """See ``Engine.apply``. Blocks."""
        where = f"{self.name} version {version}"
        if self.dead:
            raise WeightApplyFailed(f"{where}: {self.dead}")
        with self.weights.change(version, patch) as (path, entries):
            return self._call(self._swap(where, version, path, entries))

    def reload(self, folder: Path, version: int) -> bool:
        """Take the folder's weights in place; False if it is another model. Blocks.

        Raises:
            ModelError: the folder does not load.
            WeightApplyFailed: as ``apply``.
        """
        same = is_adapter_folder(folder) == self._adapted and (
            read_artefacts(folder),
            tensor_forms(folder, adapter=self._adapted),
        ) == (self._artefacts, self._tensors)
        if same:
            self.apply(version, whole(read_model_folder(folder, mapped=True)))
        return same

    def checksums(self) -> list[dict[str, str]]:
        """vLLM's own checksums of its parameters, a dictionary per worker."""
        found: list[dict[str, str]] = self._call(self._rpc("compute_weight_checksums"))
        return found

    def _prepare(self, folder: Path) -> None:
        """What is left of a start once vLLM runs; in a thread of its own."""
        self.weights.record()
        if self._adapted:
            self._adapter = adapter_request(self.name)
            self.apply(self.version, whole(read_model_folder(folder, mapped=True)))
        else:
            self._call(self._llm.update_weight_version(str(self.version)))
        self._call(self._warm_up())

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        return self._call(self._asked(name, *arguments))

    def stop(self, reason: EngineError | None = None) -> None:
        """End vLLM, and what it still draws with ``reason``. Blocks; harmless when it has ended."""
        if self._thread.is_alive():
            closed = reason or GenerationFailed("the engine is closed")
            with contextlib.suppress(RuntimeError):  # its loop has just been closed
                ended = self._send(self._end(closed), ends=True)
                ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            self._thread.join(min(END_S, _HUNG_S) if self._hung else END_S)
            if self._thread.is_alive() and (killed := end_children(self._thread.native_id or 0)):
                _log.warning("engine.killed", policy=self.name, processes=killed)
                self._thread.join(END_S)
            if self._thread.is_alive():  # what hangs is in our own process
                _log.error("engine.not_ended", policy=self.name, waited_s=END_S)
        self.weights.close()

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self._kv_tokens

    def _call(self, work: Coroutine[Any, Any, T], within_s: float = CALL_S) -> T:
        try:
            return self._send(work).result(within_s)
        except concurrent.futures.TimeoutError as error:
            why = f"vLLM has not answered for {within_s:g} s"
            self._hung = True
            self._loop.call_soon_threadsafe(self._die, why)
            raise EngineCrashed(f"{self.name}: {why}") from error
        except concurrent.futures.CancelledError as error:
            raise EngineCrashed(f"{self.name}: {self.dead or 'vLLM is being ended'}") from error

    def _send(
        self, work: Coroutine[Any, Any, T], *, ends: bool = False
    ) -> "concurrent.futures.Future[T]":
        """Work for the policy's loop, which ends with it at the latest."""
        if self._ending and not ends:  # its loop may be closed
            work.close()
            raise self._ending

        async def known() -> T:
            task = asyncio.current_task()
            if task is None or (self._ending and not ends):
                work.close()
                raise self._ending or EngineCrashed(self.name)
            self._tasks.add(task)
            try:
                return await work
            except asyncio.CancelledError:
                if self._ending is None:
                    raise
                raise self._ending from None
            finally:
                self._tasks.discard(task)

        return asyncio.run_coroutine_threadsafe(known(), self._loop)

    def _drawn(self, tokens: int) -> None:
        self.tokens_generated += tokens

    # ---- in the policy's own loop --------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self, arguments: dict[str, Any], folder: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # It blocks the loop, which has nothing else to do yet.
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        config, cache = self._llm.vllm_config, self._llm.vllm_config.cache_config
        self._context_tokens = int(config.model_config.max_model_len)
        self._vocabulary = int(config.model_config.get_vocab_size())
        self._kv_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        preparing = self._task(asyncio.to_thread(self._prepare, folder))
        while not preparing.done():  # vLLM leaves calls unanswered when it dies
            if self._llm.errored:
                preparing.cancel()
                raise EngineCrashed(f"{self.name}: vLLM died while it started")
            await asyncio.wait({preparing}, timeout=_LOOK_S)
        preparing.result()
        self._task(self._watch())

    async def _warm_up(self) -> None:
        """A few tokens: what dies at its first step is to be known before an attempt finds out,
        and what is compiled at the first need is to be ready."""
        for sampling in (SamplingParams(max_new_tokens=2), _NUCLEUS):
            request = GenerationRequest(
                request_id="warm-up", policy=self.name, prompt_tokens=(0,), n=1, sampling=sampling
            )
            sequence = DrawnSequence(request, 0, lambda tokens: None)
            await sequence.run(self._llm, lambda: -1, self._adapter)

    async def _rpc(self, method: str, *arguments: Any) -> Any:
        """A call on all workers; EngineCrashed when they are gone, or one raised: what the others
        answered would be taken for the answer to the next call."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm is None:
            raise EngineCrashed(f"{self.name}: vLLM has ended")
        try:
            return await self._llm.collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise EngineCrashed(f"{self.name}: vLLM died") from error
        except Exception as error:
            why = f"a call on vLLM's workers failed: {error}"
            self._die(why)
            raise EngineCrashed(f"{self.name}: {why}") from error

    async def _asked(self, name: str, *arguments: Any) -> list[Any]:
        return answers(await self._rpc(CALL, question(name, *arguments)))

    async def _run(self, sequence: DrawnSequence) -> Completion:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self.dead or self._llm is None:
            raise EngineCrashed(f"{self.name}: {self.dead or 'vLLM has ended'}")
        self._sequences.add(sequence)
        try:
            return await sequence.run(self._llm, lambda: self._swaps, self._adapter)
        except EngineDeadError as error:
            raise EngineCrashed(f"{self.name}: vLLM died") from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise GenerationFailed(f"{sequence.name}: {error.__cause__ or error}") from error
        finally:
            self._sequences.discard(sequence)

    async def _swap(
        self, where: str, version: int, path: str, entries: Sequence[Sequence[dict[str, Any]]]
    ) -> float:
        llm = self._llm
        try:
            await self._asked("stage", path, entries)
            if problem := await self._staged():
                await self._asked("drop")
        except EngineError as error:
            if llm is None or llm.errored:
                # Before whoever gave the weights hears that they were not taken.
                self._die("vLLM died")
            raise WeightApplyFailed(f"{where}: {error}") from error
        if problem:
            raise WeightApplyFailed(f"{where}: {problem}")
        began_s = self._clock.monotonic_s()
        try:
            # ``pause_generation`` of the same does this, and then sleeps for 20 ms.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            try:
                await self._asked("commit")
            except WorkerFault as error:
                # With several workers one may have written what another could not.
                if "undone" not in str(error) or self.weights.workers > 1:
                    raise
                await llm.resume_generation()
                raise WeightApplyFailed(f"{where}: {error}") from error
            await llm.update_weight_version(str(version))
            self.version = version
            self._swaps += 1
            anew = [each.begin_anew() for each in self._sequences if not each.begun]
            if anew:
                await llm.abort(anew)
            await llm.resume_generation()
        except WeightApplyFailed:
            raise
        except Exception as error:
            self._die(f"{where} is half written: {error}")
            raise WeightApplyFailed(f"{where}: {error}") from error
        return self._clock.monotonic_s() - began_s

    async def _staged(self) -> str:
        """Wait until all workers have staged; returns what went wrong."""
        pause_s, longest_s = _STAGED_S
        while True:
            problem = staged_fault(await self._asked("staged"))
            if problem is not None:
                return problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _watch(self) -> None:
        """vLLM says that it died only to those who wait for something, and of a step that hangs
        nothing. Looks are counted, not time: the agent itself may have been stopped."""
        llm, drawn, still = self._llm, 0, 0
        while not llm.errored:
            await asyncio.sleep(_LOOK_S)
            still = still + 1 if self._sequences and self.tokens_generated == drawn else 0
            drawn = self.tokens_generated
            if still * _LOOK_S > STILL_S:
                self._hung = True
                return self._die(f"vLLM has drawn no token for {STILL_S:g} s")
        self._die("vLLM died")

    def _die(self, why: str) -> None:
        if self.dead or self._ending:
            return
        self.dead = why
        _log.error("engine.crashed", policy=self.name, version=self.version, reason=why)
        self._lost(self, why)

    async def _end(self, reason: EngineError) -> None:
        self._ending = reason
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, _ENDING_S)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
