"""Any program that speaks the OpenAI API, as a workflow: one process per sibling.

``[agent.programs.NAME]`` of an agent's configuration says which programs there are; a run names one
as ``program:NAME`` and cannot give a command line of its own, so whoever may submit runs may not
run whatever they like on the agents. The fingerprint covers this module, the arguments of the
command and the content of those that are files: two agents with the same one run the same code,
and jobs go to no other. The first word is left out, as interpreters lie where they lie.

``[workflow.settings]``: ``timeout_s`` for one program (at most the owner's), ``keep``, which
conversation becomes the sequence (``longest`` or ``last``), ``policy``, whose (any), ``models``,
further names for policies, ``temperature``, whose (``run`` or ``program``).

What always holds: no shell is involved; a program sees ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
``FARFLOW_ITEM``, ``FARFLOW_PROGRAM``, ``PATH`` and what the owner lists, nothing else of the
agent's environment; when it is over, so is everything in its process group and all that carries its
mark (``edge_agent.program_marks``), and its key opens nothing any more. One that fails, or is not
done in time, fails the attempt. One that ends well gets the reward that it posted, or the run's
verifier scores the last text that it was given.
"""

import asyncio
import contextlib
import hashlib
import inspect
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from edge_agent.chat_session import ChatOptions, ChatSession
from edge_agent.config import ProgramTable
from edge_agent.program_marks import MARK, ProgramMarks
from edge_agent.rollouts import MalformedWorkflow, Rollout
from edge_agent.workflow import WorkflowContext, side_by_side
from edge_agent.workflow_registry import Workflow
from transport.errors import ConfigError, FarflowError
from transport.messages import Item
from transport.runtime.commands import Talk, start_talk
from transport.runtime.processes import describe_status

MAX_ITEM_BYTES: Final = 96 * 1024
"""Of one environment variable; Linux allows 128 KiB."""
MAX_FILE_BYTES: Final = 64 * 2**20
"""Of a file that a command names."""
KEPT_BYTES: Final = 4096
KEPT_LINES: Final = 12
"""What is kept of the end of a program's standard error, and quoted when it fails."""
LAST_WORDS_S: Final = 2.0
_OURS: Final = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "FARFLOW_ITEM", MARK, "PATH")


class ProgramFailed(FarflowError):
    """A program ended with another status than 0; quotes the end of its standard error."""

    code = "program.failed"


class ProgramTimeout(FarflowError):
    """A program was not done in time; quotes the end of its standard error."""

    code = "program.timeout"


class ProgramNotStarted(FarflowError):
    """A program cannot be run on this agent."""

    code = "program.not_started"


class ProgramSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[workflow.settings]`` of a run whose workflow is a program."""

    timeout_s: Annotated[float, Meta(gt=0.0, le=1e6)] = 600.0
    keep: Literal["longest", "last"] = "longest"
    policy: str | None = None
    models: dict[str, str] = {}
    temperature: Literal["run", "program"] = "run"

    def faults(self, policies: Collection[str], *, training: bool) -> Iterator[str]:
        """What is wrong with them in a run of these policies."""
        named = {f"models.{key}": name for key, name in self.models.items()}
        if self.policy is not None:
            named["policy"] = self.policy
        for key, name in named.items():
            if name not in policies:
                yield f"{key}: {name!r} is not in workflow.policies: {', '.join(sorted(policies))}"


class Program:
    """One of ``[agent.programs]``."""

    def __init__(self, name: str, table: ProgramTable, marks: ProgramMarks) -> None:
        self._name = name
        self._table = table
        self._marks = marks
        self._permits = asyncio.Semaphore(table.at_once)

    async def __call__(self, context: WorkflowContext, item: Item) -> list[Rollout]:
        """The workflow: each sibling is what one process of the program asked and was answered."""
        settings = context.settings_as(ProgramSettings)
        return await side_by_side(
            self._sibling(context, item, settings) for _ in range(context.group_size)
        )

    async def _sibling(
        self, context: WorkflowContext, item: Item, settings: ProgramSettings
    ) -> Rollout:
        options = ChatOptions(models=settings.models, temperature=settings.temperature)
        chat = context.chat(options)  # numbered in the order of the siblings
        async with self._permits, chat as session:
            await self._run(session, item, min(settings.timeout_s, self._table.timeout_s))
            return session.rollout(keep=settings.keep, policy=settings.policy)

    async def _run(self, session: ChatSession, item: Item, timeout_s: float) -> None:
        """Raises the errors of this module."""
        try:
            async with self._started(session, item) as (talk, words), asyncio.timeout(timeout_s):
                status = await talk.wait()
        except TimeoutError as error:
            text = f"program {self._name!r} was not done within {timeout_s:g} s"
            raise ProgramTimeout(f"{text}{_quoted(words)}") from error
        if status:
            text = f"program {self._name!r} ended with {describe_status(status)}"
            raise ProgramFailed(f"{text}{_quoted(words)}")

    @contextlib.asynccontextmanager
    async def _started(
        self, session: ChatSession, item: Item
    ) -> AsyncIterator[tuple[Talk, bytearray]]:
        """The running program and the end of what it says; left, both are over."""
        command, mark = self._table.command, self._marks.new()
        environment = {**self._environment(session, item), MARK: mark}
        found = shutil.which(command[0], path=environment["PATH"])
        try:
            talk = await start_talk(
                (found or command[0], *command[1:]),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                environment=environment,
                folder=self._table.folder or None,
            )
        except OSError as error:
            raise ProgramNotStarted(
                f"program {self._name!r}: {command[0]}: {error.strerror or error}; look at "
                f"[agent.programs.{self._name}] of this agent"
            ) from error
        words = bytearray()
        listening = asyncio.create_task(_listen(talk.stderr, words))
        try:
            yield talk, words
        finally:
            try:
                try:
                    await talk.end()
                finally:
                    await self._marks.end(mark)
                await asyncio.wait({listening}, timeout=LAST_WORDS_S)
            finally:
                listening.cancel()

    def _environment(self, session: ChatSession, item: Item) -> dict[str, str]:
        question = msgspec.json.encode(item)
        if len(question) > MAX_ITEM_BYTES:
            raise MalformedWorkflow(
                f"item {item.index} has {len(question)} bytes, a program is given at most "
                f"{MAX_ITEM_BYTES}: make prompt, answer and meta shorter"
            )
        ours = os.path.dirname(sys.executable)
        return {
            **{name: os.environ[name] for name in self._table.inherit if name in os.environ},
            **self._table.environment,
            "PATH": os.pathsep.join((ours, os.environ.get("PATH", os.defpath))),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "FARFLOW_ITEM": question.decode(),
        }


def offered_programs(
    tables: Mapping[str, ProgramTable], marks: ProgramMarks | None = None
) -> dict[str, Workflow]:
    """The programs of an agent by the reference that runs name; ``marks`` are the agent's. Blocks:
    reads their files.

    Raises:
        ConfigError: a name or a table is not usable; names it.
    """
    offered, marks = {}, marks or ProgramMarks()
    for name, table in tables.items():
        where = f"agent.programs.{name}"
        if not name.isidentifier() or len(name) > 64:
            raise ConfigError(f"{where}: a program's name is a word of letters, digits and _")
        taken = [key for key in _OURS if key in table.environment or key in table.inherit]
        if taken:
            raise ConfigError(f"{where}: {taken[0]} is set by the agent; leave it out")
        if table.folder and not Path(table.folder).is_dir():
            raise ConfigError(f"{where}.folder: there is no folder {table.folder}")
        reference = f"program:{name}"
        run = Program(name, table, marks)
        offered[reference] = Workflow(reference, _fingerprint(where, table), run)
    return offered


def _fingerprint(where: str, table: ProgramTable) -> str:
    digest = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode())
    for word in table.command[1:]:
        digest.update(hashlib.sha256(word.encode()).digest())
        path = Path(table.folder, word)
        try:
            if path.is_file():
                if path.stat().st_size > MAX_FILE_BYTES:
                    raise ConfigError(f"{where}.command: {path} has over {MAX_FILE_BYTES} bytes")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}.command: {path}: {error}") from error
    return digest.hexdigest()


async def _listen(stream: asyncio.StreamReader | None, words: bytearray) -> None:
    """Keeps the end of a stream, so that its pipe never fills."""
    while stream is not None and (read := await stream.read(1 << 16)):
        words += read
        del words[:-KEPT_BYTES]


def _quoted(words: bytearray) -> str:
    lines = [line for line in words.decode("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join(("; it said last:", *lines[-KEPT_LINES:])) if lines else ""
