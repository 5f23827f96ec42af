"""An engine without a model library: real time behaviour, real learning of a toy kind.

What always holds: at most ``slots`` sequences run; a sequence of ``n`` tokens takes
``first_token_s + n / tokens_per_s`` from getting its slot (one that ``stop`` ends, the time that it
would have taken without); its tokens, lengths and
log-probabilities depend on the engine's seed, the request and the weights only, never on time or
company; weights change between two tokens and each token carries the version that drew it;
``read_weights`` gives back exactly the bytes that came in.

A completion is a chain of thoughts, then an answer spelled out, then the end (``fake_policy`` says
what a policy thinks, ``fake_text`` what it answers). Lengths are log-normal with the mean and
coefficient of variation of ``[agent.fake]``; an answer that does not fit within ``max_new_tokens``
is cut off.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist

from edge_agent.config import FakeEngineTable
from edge_agent.engine import (
    NO_ARGUMENTS,
    Chat,
    Completion,
    EngineStats,
    GenerationRequest,
    Positions,
    TemplateArguments,
    Tools,
    inside,
    refuse_adapter,
    stop_fault,
)
from edge_agent.engines import fake_text
from edge_agent.engines.fake_policy import FakePolicy
from edge_agent.engines.fake_text import CHARACTERS, END, answer_to, decode_text, spoiled
from edge_agent.engines.sampling import uniform_numbers
from transport.errors import GenerationFailed, WeightApplyFailed
from transport.runtime.clock import Clock, SystemClock
from transport.weights.patch import Patch
from transport.weights.tensors import Cells, TensorBytes

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def place_uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that belongs to a place in the group of a job with that seed (splitmix64:
    Steele et al., OOPSLA 2014)."""
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class ServiceTimes:
    """The service-time model alone, for whoever simulates an agent."""

    def __init__(self, table: FakeEngineTable) -> None:
        self._table = table
        variance = math.log1p(table.cv_tokens**2)
        self._sigma = math.sqrt(variance)
        self._mu = math.log(table.mean_tokens) - variance / 2

    def tokens(self, uniform: float, most: int) -> int:
        """Length of a sequence from a uniform number in [0, 1); at least 1, at most ``most``."""
        normal = NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9))
        return max(1, min(most, round(math.exp(self._mu + self._sigma * normal))))

    def duration_s(self, tokens: int) -> float:
        return self._table.first_token_s + tokens / self._table.tokens_per_s

    def tokens_after(self, elapsed_s: float) -> int:
        """How many tokens a sequence has that got its slot ``elapsed_s`` ago."""
        return max(
            0, math.floor((elapsed_s - self._table.first_token_s) * self._table.tokens_per_s)
        )


class _Sequence:
    """One sibling on its way; ``draw`` brings it to a number of tokens."""

    def __init__(
        self,
        policy: FakePolicy,
        request: GenerationRequest,
        sibling: int,
        seed: int,
        times: ServiceTimes,
        by_place: bool,
    ) -> None:
        sampling = request.sampling
        self.policy = policy
        self._request = request
        self._limit = sampling.max_new_tokens
        mixed, name = seed * 1_000_003 + sampling.seed, request.request_id
        self._answer = answer_to(request.prompt_tokens)
        self._room = max(len(self._answer), len(spoiled(self._answer)))
        place = float(uniform_numbers(mixed, name, sibling, 1)[0])
        if by_place:
            place = place_uniform(sampling.seed, sibling)
        length = times.tokens(place, self._limit)
        self._thoughts = max(1, length - self._room - 1)
        self.total = min(self._limit, self._thoughts + self._room + 1)
        self._uniform = uniform_numbers(mixed, name, sibling, self._thoughts + 1)[1:]
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.stopped = False
        self.started_s = 0.0

    def draw(self, count: int) -> int:
        """Have at least ``count`` tokens, if so many come; returns how many are new."""
        before = len(self.tokens)
        while len(self.tokens) < min(count, self.total) and not self.stopped:
            token, logprob = self._next()
            self.tokens.append(token)
            self._logprobs.append(logprob)
            self._versions.append(self.policy.version)
            self.stopped = token == END or self._is_stopped(token)
        return len(self.tokens) - before

    def _next(self) -> tuple[int, float]:
        at = len(self.tokens)
        if at < self._thoughts:
            before = (self.tokens or self._request.prompt_tokens or (0,))[-1]
            return self.policy.think(
                before, self._request.sampling.temperature, float(self._uniform[at])
            )
        if at == self._thoughts and not self._thought_well():
            self._answer = spoiled(self._answer)
        spelled = at - self._thoughts
        if spelled == len(self._answer):
            return END, 0.0
        return CHARACTERS + ord(self._answer[spelled]), 0.0

    def _is_stopped(self, token: int) -> bool:
        sampling = self._request.sampling
        if token in sampling.stop_token_ids:
            return True
        said = self._answer[: max(0, len(self.tokens) - self._thoughts)]
        return any(said.endswith(text) for text in sampling.stop)

    def _thought_well(self) -> bool:
        half = self.policy.vocabulary // 2
        low = sum(token < half for token in self.tokens[: self._thoughts])
        return 2 * low > self._thoughts

    def completion(self) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish_reason="stop" if self.stopped else "length",
        )


class FakeEngine:
    """``Engine`` with the service-time model of ``table``; see the module for what it generates.

    ``sleep`` waits on the same time as ``clock``; both are replaced where time is virtual.
    """

    def __init__(
        self,
        slots: int,
        table: FakeEngineTable | None = None,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.slots = slots
        self.takes_adapters = False
        self.when_freed: Callable[[], None] | None = None
        self.when_lost: Callable[[str], None] | None = None
        self._table = table or FakeEngineTable()
        self._times = ServiceTimes(self._table)
        self._by_place = self._table.lengths_by == "place"
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._free = asyncio.Semaphore(slots)
        self._policies: dict[str, FakePolicy] = {}
        self._running: dict[int, _Sequence] = {}
        self._requests: set[asyncio.Task[list[Completion]]] = set()
        self._waiting = 0
        self._open = False
        self._tokens_generated = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    async def start(self) -> None:
        """See ``Engine.start``."""
        self._open = True

    async def close(self) -> None:
        """Fail what is in the engine."""
        self._open = False
        for task in tuple(self._requests):
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def encode(
        self, policy: str, prompt: str, arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[int, ...]:
        """One token per character; there is no template that ``arguments`` could change."""
        self._hosted(policy)
        return fake_text.encode_text(prompt)

    def encode_chat(
        self,
        policy: str,
        messages: Chat,
        tools: Tools = (),
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """See ``Engine.encode_chat`` and ``fake_text``."""
        self._hosted(policy)
        return fake_text.encode_chat(messages, tools)

    def encode_next(
        self,
        policy: str,
        answer: Sequence[int],
        messages: Chat,
        arguments: TemplateArguments = NO_ARGUMENTS,
    ) -> tuple[int, ...]:
        """See ``Engine.encode_next``."""
        self._hosted(policy)
        return fake_text.encode_next(answer, messages)

    def decode(self, policy: str, tokens: Sequence[int]) -> str:
        """The characters among ``tokens``."""
        self._hosted(policy)
        return decode_text(tokens)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See ``Engine.generate``; ``top_p`` must be 1."""
        if not self._open:
            raise GenerationFailed(f"{request.request_id}: the engine is not running")
        sampling = request.sampling
        if request.n < 1 or sampling.max_new_tokens < 1 or sampling.temperature < 0:
            raise GenerationFailed(f"{request.request_id}: impossible sampling parameters")
        if sampling.top_p != 1.0:
            raise GenerationFailed(f"{request.request_id}: the fake engine knows no top_p")
        if fault := stop_fault(sampling):
            raise GenerationFailed(f"{request.request_id}: {fault}")
        policy = self._hosted(request.policy)
        task = asyncio.create_task(self._generate(policy, request))
        self._requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise GenerationFailed(f"{request.request_id}: the engine is closed") from None
        finally:
            self._requests.discard(task)

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        """See ``Engine.load_policy``; refuses adapters."""
        refuse_adapter(policy, base)
        self._policies[policy] = await asyncio.to_thread(FakePolicy, folder, version)

    async def unload_policy(self, policy: str) -> None:
        """See ``Engine.unload_policy``."""
        self._policies.pop(policy, None)

    async def apply(self, policy: str, version: int, patch: Patch) -> float:
        """See ``Engine.apply``."""
        hosted = self._policies.get(policy)
        if hosted is None:
            raise WeightApplyFailed(f"{policy} version {version}: the policy is not loaded")
        before_s = self._clock.monotonic_s()
        self._catch_up(before_s)
        try:
            hosted.swap(version, patch)
        except ValueError as error:
            raise WeightApplyFailed(f"{policy} version {version}: {error}") from error
        return self._clock.monotonic_s() - before_s

    def version(self, policy: str) -> int | None:
        """See ``Engine.version``."""
        hosted = self._policies.get(policy)
        return None if hosted is None else hosted.version

    def read_weights(self, policy: str) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``."""
        return iter(sorted(self._hosted(policy).tensors.items()))

    def read_cells(self, policy: str, tensor: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``."""
        found = self._hosted(policy).tensors.get(tensor)
        if found is None or not inside(positions, found.cells().size):
            raise WeightApplyFailed(f"{policy} has no such cells of a tensor {tensor!r}")
        return found.cells()[positions]

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        now = self._clock.monotonic_s()
        self._catch_up(now)
        busy_s = self._busy_s + (now - self._busy_since_s if self._running else 0.0)
        return EngineStats(
            tokens_generated=self._tokens_generated,
            busy_s=busy_s,
            running=len(self._running),
            waiting=self._waiting,
        )

    def _hosted(self, policy: str) -> FakePolicy:
        try:
            return self._policies[policy]
        except KeyError:
            raise GenerationFailed(f"policy {policy!r} is not loaded in this engine") from None

    async def _generate(self, policy: FakePolicy, request: GenerationRequest) -> list[Completion]:
        sequences = [
            _Sequence(policy, request, sibling, self._table.seed, self._times, self._by_place)
            for sibling in range(request.n)
        ]
        async with asyncio.TaskGroup() as siblings:
            for sequence in sequences:
                siblings.create_task(self._run(sequence))
        return [sequence.completion() for sequence in sequences]

    async def _run(self, sequence: _Sequence) -> None:
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        sequence.started_s = self._clock.monotonic_s()
        if not self._running:
            self._busy_since_s = sequence.started_s
        self._running[id(sequence)] = sequence
        try:
            await self._sleep(self._times.duration_s(sequence.total))
            self._tokens_generated += sequence.draw(sequence.total)
        finally:
            del self._running[id(sequence)]
            self._free.release()
            if not self._running:
                self._busy_s += self._clock.monotonic_s() - self._busy_since_s
            if self.when_freed is not None:
                self.when_freed()

    def _catch_up(self, now: float) -> None:
        """Draw what the sequences would have drawn by now: later tokens see later weights."""
        for sequence in self._running.values():
            due = self._times.tokens_after(now - sequence.started_s)
            self._tokens_generated += sequence.draw(due)
