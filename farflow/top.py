"""``farflow top``: a scheduler on the whole screen, until ``q`` or Ctrl-C.

What always holds: the terminal is left as it was found, however it ends; a scheduler that does not
answer is said and asked again, the last picture stays; a key is answered at once, not at the next
status.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.live import Live

from farflow.connect import with_operator
from farflow.inspect_commands import SHOWN_HISTORY, history_lines
from farflow.options import as_operator, duration
from farflow.top_view import Action, TopState, explanation_lines, frame, press, subjects_of
from farflow.watch import Watch
from transport.errors import FarflowError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.operator import Operator
    from transport.status import SchedulerStatus

_READ_BYTES: Final = 256
_KEYS: Final = {"\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down"}


@click.command()
@as_operator
@click.option("--interval", type=duration, default="1s", show_default=True, metavar="TIME")
@click.option("--once", is_flag=True, help="Print one picture and end.")
def top(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    key: Path | None,
    interval: float,
    once: bool,
) -> None:
    """Watch runs and agents on the whole screen.

    Keys: q ends, the arrows (or k and j) select a run or agent, e explains it, d drains the agent
    after a y (which needs an operator's key).
    """
    console = Console()
    if once:
        status = with_operator(files, overrides, key, lambda operator: operator.status())
        size = {"width": console.width, "height": 24 if not console.is_terminal else console.height}
        console.print(frame(status, {}, {}, TopState(), **size))
        return
    if not (console.is_terminal and sys.stdin.isatty()):
        raise click.UsageError("this is no terminal: use --once, or `farflow status`")

    async def run(operator: "Operator") -> None:
        await Top(operator, console, max(0.1, interval)).run()

    with_operator(files, overrides, key, run)


def keys_of(text: str) -> list[str]:
    """What a terminal sent as the keys of ``press``; sequences that mean nothing here are left
    out."""
    found = []
    while text:
        if text[0] != "\x1b":
            found.append(text[0])
            text = text[1:]
            continue
        known = next((name for name in _KEYS if text.startswith(name)), None)
        if known is not None:
            found.append(_KEYS[known])
            text = text[len(known) :]
        elif text[1:2] in ("[", "O"):
            end = next(
                (n for n, each in enumerate(text[2:], 2) if each.isalpha() or each == "~"), 0
            )
            text = text[end + 1 :] if end else ""
        else:
            found.append("escape")
            text = text[1:]
    return found


class Top:
    """One view: asks at each ``interval_s``, draws after every answer and key."""

    def __init__(self, operator: "Operator", console: Console, interval_s: float) -> None:
        self._operator = operator
        self._console = console
        self._interval_s = interval_s
        self._watch = Watch(None)
        self._status: SchedulerStatus | None = None
        self._state = TopState()
        self._trouble = ""
        self._ended = asyncio.Event()
        self._acts: set[asyncio.Task[None]] = set()
        self._live: Live

    async def run(self) -> None:
        """Until ``q``, Ctrl-C or SIGTERM.

        Raises:
            FarflowError: the scheduler did not answer the first question, or refused it.
        """
        loop = asyncio.get_running_loop()
        await self._ask()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        descriptor = sys.stdin.fileno()
        with (
            _single_keys(descriptor),
            Live(console=self._console, screen=True, auto_refresh=False) as self._live,
        ):
            loop.add_reader(descriptor, self._read, descriptor)
            self._draw()
            poll = asyncio.create_task(self._poll())
            poll.add_done_callback(lambda _: self._ended.set())
            try:
                await self._ended.wait()
            finally:
                loop.remove_reader(descriptor)
                loop.remove_signal_handler(signal.SIGWINCH)
                for task in (poll, *self._acts):
                    task.cancel()
                await asyncio.gather(*self._acts, return_exceptions=True)
                with contextlib.suppress(asyncio.CancelledError):
                    await poll

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._ask()
                self._trouble = ""
            except FarflowError as error:
                self._trouble = str(error)
            self._draw()

    async def _ask(self) -> None:
        self._status = await self._operator.status()
        self._watch.update(self._status, asyncio.get_running_loop().time())

    def _draw(self) -> None:
        self._live.update(self._frame(), refresh=True)

    def _frame(self) -> "RenderableType":
        assert self._status is not None  # noqa: S101 - run() asks first
        return frame(
            self._status,
            self._watch.rewards(),
            self._watch.rates,
            self._state._replace(note=self._trouble or self._state.note),
            width=self._console.width,
            height=self._console.height,
        )

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data:  # the terminal is gone
            self._ended.set()
        for key in keys_of(data.decode(errors="replace")):
            subjects = [] if self._status is None else subjects_of(self._status)
            self._state, action = press(self._state, subjects, key)
            if action is not None and action.what == "quit":
                self._ended.set()
            elif action is not None and not self._acts:  # one at a time
                act = asyncio.create_task(self._act(action))
                self._acts.add(act)
                act.add_done_callback(self._acts.discard)
        self._draw()

    async def _act(self, action: Action) -> None:
        try:
            if action.what == "drain":
                said = await self._operator.order(action.name, "drain", reason="farflow top")
                self._state = self._state._replace(note=f"{action.name}: {said or 'drains'}")
            else:
                found = await self._operator.explain(action.name)
                lines = explanation_lines(found, history_lines(found, SHOWN_HISTORY))
                self._state = self._state._replace(explained=lines, scroll=0)
        except FarflowError as error:
            self._state = self._state._replace(note=str(error))
        self._draw()


@contextlib.contextmanager
def _single_keys(descriptor: int) -> Iterator[None]:
    """Keys one by one and unseen; Ctrl-C is still a signal."""
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
