"""``farflow top``: what a frame holds, what keys do, and a session in a real pseudo-terminal."""

import asyncio
import os
import pty
import signal
import sys
import termios
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from status_views import agent, run, status, step

from farflow.top import keys_of
from farflow.top_view import (
    Action,
    TopState,
    explanation_lines,
    frame,
    press,
    subjects_of,
    window,
)
from farflow.watch import Watch
from transport.messages import Explanation
from transport.status import (
    Alert,
    SchedulerStatus,
)

UP, DOWN = "up", "down"
START = TopState()


def drawn(of: SchedulerStatus, state: TopState = START, width: int = 80, height: int = 24):
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(frame(of, {}, {}, state, width=width, height=height))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("agents", [0, 3, 200])
@pytest.mark.parametrize("runs", [0, 1, 40])
def test_a_frame_fits_its_screen(width: int, height: int, agents: int, runs: int) -> None:
    alert = Alert(code="disk.low", subject="scheduler", message="x" * 300, since_s=1.0)
    lines = drawn(status(agents, runs, alerts=(alert,) * 9), width=width, height=height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


def test_eighty_columns_hold_what_counts() -> None:
    text = "\n".join(drawn(status()))
    for part in ("first", "41/120", "0.500", "box0", "ready", "81 ms", "12/64", "solver v41"):
        assert part in text
    assert "1800 tokens/s" in text  # three agents with twelve slots of 50
    assert "…" not in text
    wide = "\n".join(drawn(status(), width=140))
    assert "NVIDIA H200" in wide
    assert "NVIDIA H200" not in text


def test_what_an_agent_says_does_not_steer_the_terminal() -> None:
    bad = agent("box", quarantined="\x1b[2J")
    lines = drawn(msgspec.structs.replace(status(), agents=(bad,)), width=140)
    assert not any("\x1b[2J" in line for line in lines)


def test_the_selection_moves_and_stays_in_sight() -> None:
    now = status(200)
    subjects = subjects_of(now)
    state, action = press(TopState(), subjects, DOWN)
    assert (state.selected, action) == (("run", "first"), None)
    for _ in range(150):
        state, _ = press(state, subjects, DOWN)
    assert state.selected == ("agent", "box149")
    assert any("box149" in line for line in drawn(now, state))
    state, _ = press(state, subjects, UP)
    assert state.selected == ("agent", "box148")
    gone, _ = press(state, subjects[:2], DOWN)  # what was selected has left
    assert gone.selected == ("run", "first")
    assert press(TopState(), [], DOWN)[0].selected is None


def test_a_drain_wants_a_yes() -> None:
    subjects = subjects_of(status())
    on_agent = TopState(selected=("agent", "box1"))
    asked, action = press(on_agent, subjects, "d")
    assert (asked.asks, action) == ("box1", None)
    assert "drain box1" in drawn(status(), asked)[-1]
    assert press(asked, subjects, "y") == (on_agent, Action("drain", "box1"))
    for other in ("n", "d", "escape", DOWN):
        assert press(asked, subjects, other) == (on_agent, None)
    on_run, action = press(TopState(selected=("run", "first")), subjects, "d")
    assert (on_run.asks, action, on_run.note) == (
        "",
        None,
        "only agents are drained: select one",
    )
    assert press(TopState(), subjects, "d")[1] is None
    assert press(asked, subjects, "q")[1] == Action("quit")


def test_an_explanation_is_shown_scrolled_and_left() -> None:
    subjects = subjects_of(status())
    assert press(TopState(selected=("run", "first")), subjects, "e")[1] == Action(
        "explain", "first"
    )
    found = Explanation(
        subject="box1", kind="agent", state="ready", reasons=("x",), candidates=(), history=()
    )
    lines = explanation_lines(found, [f"line {n}" for n in range(50)])
    state = TopState(selected=("agent", "box1"), explained=lines)
    assert "agent box1: ready" in drawn(status(), state)[1]
    for _ in range(5):
        state, _ = press(state, subjects, DOWN)
    assert "line 3" in drawn(status(), state)[1]
    for _ in range(100):
        state, _ = press(state, subjects, DOWN)
    assert state.scroll == len(lines) - 1
    assert press(state, subjects, "escape")[0] == TopState(selected=("agent", "box1"))


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1bOB", [UP, DOWN]),
        ("\x1b[5~e", ["e"]),
        ("\x1b", ["escape"]),
        ("\x1b[", []),
        ("j\x1b[1;5Ck", ["j", "k"]),
    ],
)
def test_what_a_terminal_sends_becomes_keys(sent: str, keys: list[str]) -> None:
    assert keys_of(sent) == keys


def test_a_window_holds_the_selected_row() -> None:
    for rows in range(12):
        for selected in (None, *range(rows)):
            shown = window(rows, selected, 5)
            assert len(shown) == min(rows, 5)
            assert selected is None or selected in shown


def test_rewards_are_remembered_from_one_status_to_the_next() -> None:
    watch = Watch(None)
    for number, reward in ((1, 0.1), (1, 0.1), (2, 0.2)):
        now = msgspec.structs.replace(status(), runs=(run("first", step(number, reward)),))
        assert watch.update(now, 1.0) == []
    assert watch.rewards() == {"first/solver": [0.1, 0.2]}


SESSION = """
import asyncio, signal, sys
sys.path.insert(0, {here!r})
from rich.console import Console
from status_views import status
from farflow.top import Top
from transport.asking import RequestRefused
from transport.messages import Explanation

class Scheduler:
    async def status(self):
        return status()
    async def explain(self, subject):
        return Explanation(subject=subject, kind="run", state="running",
                           reasons=("because of the moon",), candidates=(), history=())
    async def order(self, agent, order, *, reason):
        raise RequestRefused(f"refused.role: no {{order}} of {{agent}} for a viewer")

asyncio.run(Top(Scheduler(), Console(), 0.1).run())
print("ended in order")
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["q", "\x03"], ids=["q", "ctrl-c"])
async def test_a_session_in_a_terminal(end: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SESSION.format(here=str(Path(__file__).parents[1] / "support"))),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        preexec_fn=lambda: (os.setsid(), __import__("fcntl").ioctl(0, termios.TIOCSCTTY, 0)),
    )
    seen = bytearray()
    arrived = asyncio.Event()

    def read() -> None:
        try:
            seen.extend(os.read(ours, 65536))
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(ours)
        arrived.set()

    async def until(text: str) -> None:
        async with asyncio.timeout(20):
            while text.encode() not in seen:
                arrived.clear()
                await arrived.wait()

    asyncio.get_running_loop().add_reader(ours, read)
    try:
        await until("box2")
        os.write(ours, b"\x1b[B")
        os.write(ours, b"e")
        await until("because of the moon")
        os.write(ours, b"x\x1b[B\x1b[Bd")
        await until("drain box1")
        os.write(ours, b"y")
        await until("no drain of box1 for a viewer")
        os.write(ours, end.encode())
        await until("ended in order")
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        assert termios.tcgetattr(theirs) == before
        assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
        assert (
            b"\x1b[2J" not in seen.split(b"\x1b[?1049h")[1]
        )  # no flicker: drawn over, not cleared
        assert b"\x1b[?25h" in seen  # the cursor is back
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        os.close(ours)
        os.close(theirs)
