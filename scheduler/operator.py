"""What an operator's command says to a scheduler.

What always holds: see ``transport.asking``; what may be long (a status, dead letters) is asked for
page by page, and the number of pages is bounded.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

import msgspec

from transport.asking import ANSWER_S, Asking, RequestRefused
from transport.links import Network
from transport.messages import (
    AgentLogs,
    AgentLogsRequest,
    AgentOrder,
    CommandReply,
    DeadLetter,
    DeadLetters,
    DeadLettersRequest,
    Events,
    EventsRequest,
    ExplainRequest,
    Explanation,
    JobReplay,
    Message,
    RunCommand,
    RunSubmit,
    StatusReply,
    StatusRequest,
)
from transport.runs import RunSpec
from transport.runtime.settings import TransportConfig
from transport.status import Alert, SchedulerStatus

MAX_PAGES: Final = 1000
LOGS_S: Final = 20.0
"""How long the scheduler may wait for an agent's log before it answers."""

M = TypeVar("M", bound=Message)
Command = Literal["pause", "resume", "stop", "abandon"]
Order = Literal["drain", "cordon", "uncordon", "quarantine", "release"]

__all__ = ["Command", "Operator", "Order", "RequestRefused"]


class Operator:
    """An operator's (or, for what it may ask, a viewer's) connection to a scheduler; an
    asynchronous context manager. Every method raises as ``Asking.ask``."""

    def __init__(
        self,
        transport: TransportConfig,
        key: Path,
        *,
        answer_s: float = ANSWER_S,
        network: Network | None = None,
    ) -> None:
        """``key`` is the secret key file; the scheduler's public key is ``server.public.toml`` in
        ``transport.keys``.

        Raises:
            ConfigError: a key file does not load.
        """
        self._asking = Asking(transport, key, answer_s=answer_s, network=network)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._asking.close()

    # ---- runs --------------------------------------------------------------------------------

    async def submit(self, run: RunSpec, *, by: str = "") -> str:
        """Submit a run; the same one again is harmless. Returns what the scheduler adds to its
        yes, "" for a new run; refused when another run has that name, or it is not possible. Here
        and below, ``by`` is for whom the order is given when it is not the key's holder."""
        return await self._command(RunSubmit(run=run, by=by))

    async def command(self, run: str, command: Command, *, by: str = "") -> str:
        """Pause, resume or stop a run. Returns what the scheduler adds to its yes: "" when it
        changed something, else why there was nothing to do."""
        return await self._command(RunCommand(run=run, command=command, by=by))

    # ---- looking -----------------------------------------------------------------------------

    async def status(self) -> SchedulerStatus:
        """The view model, with every agent however many there are."""
        first = page = await self._status_page("")
        agents, alerts = list(first.agents), _by_subject(first.alerts)
        for _ in range(MAX_PAGES):
            if not page.counters.get("status.agents_left_out") or not page.agents:
                break
            page = await self._status_page(agents[-1].name)
            agents += page.agents
            alerts.update(_by_subject(page.alerts))
        left_out = page.counters.get("status.agents_left_out", 0)
        counters = {k: v for k, v in first.counters.items() if k != "status.agents_left_out"}
        if left_out:
            counters["status.agents_left_out"] = left_out
        return msgspec.structs.replace(
            first, agents=tuple(agents), alerts=tuple(alerts.values()), counters=counters
        )

    async def _status_page(self, after: str) -> SchedulerStatus:
        return (await self._ask(StatusRequest(agents_after=after), StatusReply)).status

    async def explain(self, subject: str) -> Explanation:
        """Why a job, attempt, agent, policy or run is where it is; refused when unknown."""
        return await self._ask(ExplainRequest(subject=subject), Explanation)

    async def events(
        self, after: int | None = None, *, subject: str = "", wait_s: float = 0.0, limit: int = 1000
    ) -> Events:
        """Transitions after number ``after``, or from now on; waits for one up to ``wait_s``."""
        request = EventsRequest(after=after, subject=subject, wait_s=wait_s, limit=limit)
        return await self._ask(request, Events, wait_s=wait_s)

    async def agent_logs(self, agent: str, *, run: str = "", lines: int = 200) -> AgentLogs:
        """The last lines of an agent's log; refused when it does not answer."""
        request = AgentLogsRequest(agent=agent, run=run, lines=lines)
        return await self._ask(request, AgentLogs, wait_s=LOGS_S)

    # ---- agents ------------------------------------------------------------------------------

    async def order(
        self, agent: str, order: Order, *, deadline_s: float = 0.0, reason: str = "", by: str = ""
    ) -> str:
        """Drain, cordon, uncordon, quarantine or release an agent."""
        return await self._command(
            AgentOrder(agent=agent, order=order, deadline_s=deadline_s, reason=reason, by=by)
        )

    # ---- dead letters ------------------------------------------------------------------------

    async def dead_letters(self, run: str = "", *, most: int = 1000) -> list[DeadLetter]:
        """Jobs that were given up, by id; at most ``most`` of them."""
        found: list[DeadLetter] = []
        for _ in range(MAX_PAGES):
            after = found[-1].job if found else ""
            limit = min(100, most - len(found))
            request = DeadLettersRequest(run=run, after=after, limit=limit)
            page = await self._ask(request, DeadLetters)
            found += page.letters
            if not page.more or not page.letters or len(found) >= most:
                break
        return found

    async def dead_letter(self, job: str) -> DeadLetter | None:
        """One job that was given up, or None."""
        if not (job.isascii() and job.isprintable()):
            return None
        # The page after everything that sorts before it begins with it, if it is there.
        request = DeadLettersRequest(after=_just_before(job), limit=1)
        letters = (await self._ask(request, DeadLetters)).letters
        return letters[0] if letters and letters[0].job == job else None

    async def replay(self, jobs: Sequence[str] = (), *, run: str = "", by: str = "") -> str:
        """Queue dead letters again; without ``jobs`` all of ``run``."""
        return await self._command(JobReplay(run=run, jobs=tuple(jobs), by=by))

    async def _command(self, message: Message) -> str:
        reply = await self._ask(message, CommandReply)
        if not reply.ok:
            raise RequestRefused(f"{reply.code}: {reply.message}")
        return reply.message

    async def _ask(self, message: Message, kind: type[M], wait_s: float = 0.0) -> M:
        answer, _ = await self._asking.ask(message, kind, wait_s=wait_s)
        return answer


def _by_subject(alerts: Sequence[Alert]) -> dict[tuple[str, str], Alert]:
    return {(alert.code, alert.subject): alert for alert in alerts}


def _just_before(job: str) -> str:
    """A text that sorts before ``job`` and after every id that sorts before it, as ids end in a
    printable ASCII character: the last one lowered, then the highest character."""
    return job and job[:-1] + chr(ord(job[-1]) - 1) + "\x7f"
