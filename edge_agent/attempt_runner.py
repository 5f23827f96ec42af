"""Running attempts: workflow, rewards, packing, spool.

What always holds: an attempt that was started reports exactly one of ``GroupSpooled`` (after
``GroupGenerated``) or ``AttemptCrashed``, or nothing if it was aborted before its result went to
disk; whatever a workflow or verifier raises, returns or never returns ends only its own attempt,
within the time limit and ``UNWIND_S`` (``containment``); an abort during the write lets the write
finish and reports it, so that the file is dropped like any other. Finished turns are kept elsewhere
as well (``turns``), and a workflow goes on from an earlier attempt's where those can be had.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from edge_agent.attempt_group import group_of
from edge_agent.chat_endpoint import AttemptChats, ChatEndpoint
from edge_agent.containment import Containment, LoopStalled, WorkflowStalled
from edge_agent.core.effects import RunAttempt
from edge_agent.core.events import AttemptCrashed, Event, GroupGenerated, GroupSpooled
from edge_agent.engine import Engine
from edge_agent.recheck import rechecked
from edge_agent.rewards import RewardPool
from edge_agent.rollouts import MalformedWorkflow, Rollout, checked
from edge_agent.spool import Spool
from edge_agent.turns import Keeper, TurnsOfAttempt
from edge_agent.workflow import GenerationTime, Workflow, WorkflowContext
from transport.errors import FarflowError, LocalProtocolError
from transport.ids import Fence
from transport.messages import GroupSummary, Item, LeaseOffer
from transport.runtime.clock import Clock
from transport.summaries import MAX_PACKED_BYTES, summary_fault
from transport.texts import cut, said, told
from transport.trajectory import TrajectoryGroup, pack, summarise

UNWIND_S: Final = 5.0
"""How long a workflow may take to clean up once it is cancelled."""
TELL_AT_STUCK: Final = 3
"""So many runaway workflows are an error of the agent's as a whole; told again at each doubling."""

_log = structlog.get_logger()

Key = tuple[str, Fence]


class WorkflowFailed(FarflowError):
    """A workflow raised; the message has the exception."""

    code = "workflow.error"


class WorkflowStuck(FarflowError):
    """A workflow was not done in time and did not let itself be cancelled."""

    code = "workflow.stuck"


class AttemptTimeout(FarflowError):
    """An attempt was not done in time."""

    code = "attempt.timeout"


class AttemptFailed(FarflowError):
    """What a workflow returned led to an error that nobody foresaw; the log has where."""

    code = "attempt.error"


class AttemptRunner:
    """All attempts of one agent; ``feed`` takes their events, on the event loop."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        spool: Spool,
        workflows: Mapping[str, Workflow],
        *,
        clock: Clock,
        timeout_s: float,
        feed: Callable[[Event], None],
        keeper: Keeper | None = None,
        unwind_s: float = UNWIND_S,
    ) -> None:
        self._engine = engine
        self._rewards = rewards
        self._spool = spool
        self._workflows = workflows
        self._clock = clock
        self._timeout_s = timeout_s
        self._feed = feed
        self._keeper = keeper
        self._unwind_s = unwind_s
        self._endpoint = ChatEndpoint(clock)
        self._contained: weakref.WeakSet[Containment] = weakref.WeakSet()
        self.stuck = 0
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._storing: set[Key] = set()

    def start(self, effect: RunAttempt, tasks: asyncio.TaskGroup) -> None:
        """Carry out ``RunAttempt``."""
        key = (effect.offer.attempt, effect.offer.fence)
        task = tasks.create_task(self._run(key, effect), name=key[0])
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the attempts under way."""
        return tuple(name for name, _ in self._tasks)

    def abort(self, attempt: str, fence: Fence) -> None:
        """Stop an attempt; harmless when it is over."""
        key = (attempt, fence)
        task = self._tasks.get(key)
        if task is not None and key not in self._storing:
            task.cancel()

    async def close(self) -> None:
        """Abort everything; writes under way are finished."""
        tasks = list(self._tasks.values())
        for name, fence in list(self._tasks):
            self.abort(name, fence)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(one.end(one.tasks(), self._unwind_s) for one in list(self._contained))
        )
        await self._endpoint.close()

    async def _run(self, key: Key, effect: RunAttempt) -> None:
        name, fence = key
        structlog.contextvars.bind_contextvars(attempt=name)  # the workflow's own lines, too
        generation_time = GenerationTime(self._clock)
        try:
            group = await self._produced(effect.offer, generation_time)
            self._storing.add(key)
            summary = await asyncio.to_thread(
                self._store, group, fence, effect.queued_s, generation_time.total_s
            )
        except FarflowError as error:
            _log.warning("attempt.failed", attempt=name, code=error.code, reason=cut(said(error)))
            self._crashed(key, error)
            return
        except LoopStalled:  # in what a workflow returned, which is looked at out here
            self._crashed(key, WorkflowStalled())
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this attempt only
            _log.exception("attempt.error", attempt=name)
            self._crashed(key, AttemptFailed(told(error)))
            return
        finally:
            self._storing.discard(key)
        _log.debug("attempt.spooled", attempt=name, size_bytes=summary.size_bytes)
        self._feed(GroupSpooled(summary=summary))

    def _crashed(self, key: Key, error: FarflowError) -> None:
        name, fence = key
        detail = cut(said(error))
        self._feed(AttemptCrashed(attempt=name, fence=fence, code=error.code, detail=detail))

    async def _produced(
        self, offer: LeaseOffer, generation_time: GenerationTime
    ) -> TrajectoryGroup:
        contained = Containment()
        self._contained.add(contained)
        try:
            async with asyncio.timeout(self._timeout_s):
                if offer.recheck:
                    return await self._rechecked(offer)
                code = self._workflows[offer.workflow].fingerprint
                async with TurnsOfAttempt(offer, code, self._engine, self._keeper) as turns:
                    rollouts = await self._rolled_out(offer, generation_time, turns, contained)
                self._feed(GroupGenerated(attempt=offer.attempt, fence=offer.fence))
                rewards = await self._scored(offer, rollouts)
        except TimeoutError as error:
            if contained.stuck:
                raise WorkflowStuck(
                    f"not done within {self._timeout_s:g} s, nor {self._unwind_s:g} s after it was "
                    "cancelled, so it was closed: let CancelledError through"
                ) from error
            raise AttemptTimeout(f"not done within {self._timeout_s:g} s") from error
        return group_of(offer, [rollout for _, rollout in rollouts], rewards)

    async def _rechecked(self, offer: LeaseOffer) -> TrajectoryGroup:
        group = await rechecked(offer, self._engine, self._rewards, self._keeper)
        self._feed(GroupGenerated(attempt=offer.attempt, fence=offer.fence))
        return group

    async def _rolled_out(
        self,
        offer: LeaseOffer,
        generation_time: GenerationTime,
        turns: TurnsOfAttempt,
        contained: Containment,
    ) -> list[tuple[Item, Rollout]]:
        """The workflow's rollouts, item by item, role by role."""
        workflow = self._workflows[offer.workflow]
        chats = AttemptChats(self._endpoint)
        tasks = []
        for position, item in enumerate(offer.items):
            context = WorkflowContext(
                offer,
                item,
                self._engine,
                self._rewards,
                generation_time,
                resumed=turns.resumed(position),
                turns_finished=turns.heard(position),
                chats=chats,
            )
            tasks.append(contained.start(_called(workflow, context, item)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    _raise_if_failed(task)
        finally:
            chats.close()
            await contained.end(tasks, self._unwind_s)
            left = len(contained.tasks())
            if left:
                _log.info("workflow.left_tasks", attempt=offer.attempt, tasks=left)
            await contained.finish(self._unwind_s)
            if contained.stuck:
                self._ran_away(offer)
        # What is scored in an evaluation is one rollout per sibling, whatever training gets.
        rollouts = 1 if offer.kind == "eval" else workflow.rollouts
        return [
            (item, rollout)
            for item, task in zip(offer.items, tasks, strict=True)
            for rollout in checked(task.result(), item, offer.group_size, rollouts)
        ]

    def _ran_away(self, offer: LeaseOffer) -> None:
        self.stuck += 1
        _log.warning("workflow.stuck", attempt=offer.attempt, workflow=offer.workflow)
        times, rest = divmod(self.stuck, TELL_AT_STUCK)
        if not rest and times & (times - 1) == 0:
            _log.error(
                "agent.workflows_stuck",
                count=self.stuck,
                workflow=offer.workflow,
                remedy="its workflows catch CancelledError and go on: mend them, restart the agent",
            )

    async def _scored(
        self, offer: LeaseOffer, rollouts: Sequence[tuple[Item, Rollout]]
    ) -> list[float]:
        """Rewards of all rollouts; those without one go to the verifier, all at once."""
        open_pairs = [(item, r.text) for item, r in rollouts if r.reward is None]
        scores = iter(await self._rewards.score(offer.reward, open_pairs) if open_pairs else ())
        return [next(scores) if r.reward is None else float(r.reward) for _, r in rollouts]

    def _store(
        self, group: TrajectoryGroup, fence: Fence, queued_s: float, generating_s: float
    ) -> GroupSummary:
        """Blocks: compresses, hashes, writes and syncs."""
        try:
            body = pack(group)
        except LocalProtocolError as error:
            raise MalformedWorkflow(f"returned what cannot be packed: {error}") from error
        if len(body) > MAX_PACKED_BYTES:
            raise MalformedWorkflow(
                f"the packed group has {len(body)} bytes, at most {MAX_PACKED_BYTES} are taken; "
                "lower group_size or max_new_tokens"
            )
        summary = summarise(group, body, fence=fence, queued_s=queued_s, generating_s=generating_s)
        fault = summary_fault(summary)
        if fault:  # the scheduler's own rules, whose breach would be evidence against the agent
            raise MalformedWorkflow(f"returned what the scheduler would refuse: {fault}")
        self._spool.put(summary, body)
        return summary


async def _called(workflow: Workflow, context: WorkflowContext, item: Item) -> Sequence[Rollout]:
    """So that a call with the wrong parameters is an error of the workflow's as well."""
    return await workflow.function(context, item)


def _raise_if_failed(task: "asyncio.Future[Sequence[Rollout]]") -> None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):  # out of a workflow's own task group
        error = (
            next((e for e in error.exceptions if isinstance(e, FarflowError)), None)
            or (error.exceptions[0])
        )
    if isinstance(error, FarflowError):
        raise error
    if error is not None:
        raise WorkflowFailed(told(error)) from error
