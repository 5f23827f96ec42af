"""What ``farflow top`` shows and does: pure functions of a status, what was watched, and keys.

What always holds: a frame is exactly as wide and at most as high as it is told; nothing that came
from an agent or a prompt steers the terminal; an order to an agent is given after a ``y`` only.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farflow.view import (
    agent_cells,
    alert_lines,
    demand_lines,
    policy_cells,
    printable,
    token_rate,
)
from farflow.words import counted, human_age
from transport.status import AgentStatus, RunStatus, SchedulerStatus

if TYPE_CHECKING:
    from transport.messages import Explanation

WIDE: Final = 110
"""Columns from which on there is room for everything."""
_MOST_NOTES: Final = 4
_NUMBERS: Final = frozenset(
    {"step", "reward", "lag", "buffer", "USD", "rtt", "tokens/s", "slots", "groups", "clock"}
    | {"up", "down", "USD/h"}
)
"""Columns that are flush right."""
_KEYS: Final = "q quit  ↑↓ select  e explain  d drain"

Subject = tuple[Literal["run", "agent"], str]


class Action(NamedTuple):
    """What a key asks for: ``quit``, ``explain`` or ``drain`` of the subject ``name``."""

    what: Literal["quit", "explain", "drain"]
    name: str = ""


class TopState(NamedTuple):
    """Where the person is. ``asks`` names an agent whose draining wants a ``y``; ``explained`` are
    lines that are shown instead of the tables, from line ``scroll`` on."""

    selected: Subject | None = None
    asks: str = ""
    note: str = ""
    explained: tuple[str, ...] = ()
    scroll: int = 0


def subjects_of(status: SchedulerStatus) -> list[Subject]:
    """Everything that can be selected, in the order in which it is shown."""
    runs: list[Subject] = [("run", run.name) for run in status.runs]
    return runs + [("agent", agent.name) for agent in status.agents]


def press(state: TopState, subjects: Sequence[Subject], key: str) -> tuple[TopState, Action | None]:
    """What a key does: ``up``, ``down``, ``escape`` or one character."""
    if key == "q":
        return state, Action("quit")
    if state.asks:
        agent, state = state.asks, state._replace(asks="", note="")
        return state, Action("drain", agent) if key == "y" else None
    step = {"up": -1, "k": -1, "down": 1, "j": 1}.get(key, 0)
    if state.explained:
        if step:
            last = len(state.explained) - 1
            return state._replace(scroll=min(last, max(0, state.scroll + step))), None
        return state._replace(explained=(), scroll=0), None
    state = state._replace(note="")
    at = _at(state.selected, subjects)
    if step and subjects:
        to = 0 if at is None else min(len(subjects) - 1, max(0, at + step))
        return state._replace(selected=subjects[to]), None
    if at is None:
        hint = "select something first, with the arrow keys" if key in ("e", "d") else ""
        return state._replace(note=hint), None
    kind, name = subjects[at]
    if key == "e":
        return state, Action("explain", name)
    if key == "d" and kind == "agent":
        return state._replace(asks=name), None
    if key == "d":
        return state._replace(note="only agents are drained: select one"), None
    return state, None


def frame(
    status: SchedulerStatus,
    rewards: Mapping[str, Sequence[float]],
    rates: Mapping[str, float],
    state: TopState,
    *,
    width: int,
    height: int,
) -> RenderableType:
    """The whole screen of ``width`` columns and at most ``height`` lines."""
    footer = Text(_footer(state), style="reverse" if state.asks else "dim")
    parts: list[RenderableType] = [Text(_headline(status, rates), style="bold")]
    if state.explained:
        room = max(1, height - 2)
        shown = state.explained[state.scroll : state.scroll + room]
        parts += [Text(printable(line)) for line in shown]
    else:
        notes = [*alert_lines(status.alerts, status.agents), *demand_lines(status.demand)]
        notes = notes[: min(_MOST_NOTES, max(0, height - 8))]
        room = max(2, height - 2 - len(notes) - 2)  # headline, footer, two headings
        run_rows = sum(max(1, len(run.policies)) for run in status.runs)
        run_room = min(run_rows, max(1, room // 2, room - len(status.agents)))
        parts.append(_runs(status.runs, rewards, state.selected, width, run_room))
        agent_room = max(1, room - run_room)
        parts.append(_agents(status.agents, rates, state.selected, width, agent_room))
        parts += [Text(printable(line), style="yellow") for line in notes]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    footer.no_wrap, footer.overflow = True, "ellipsis"
    return Group(*parts, footer)


def explanation_lines(found: "Explanation", history: Sequence[str]) -> tuple[str, ...]:
    """An explanation as the lines of ``TopState.explained``."""
    lines = [f"{found.kind} {found.subject}: {found.state}", *(f"  {r}" for r in found.reasons)]
    for candidate in found.candidates:
        cost = "" if candidate.cost_s is None else f", would finish in {candidate.cost_s:.2f} s"
        lines.append(f"  {candidate.agent}: {candidate.verdict}{cost}")
    return (*lines, *(f"  {line}" for line in history))


def window(rows: int, selected: int | None, room: int) -> range:
    """Which of ``rows`` rows are shown in ``room`` lines so that ``selected`` is among them."""
    first = 0 if selected is None else min(max(0, selected - room // 2), max(0, rows - room))
    return range(first, min(rows, first + room))


def _at(selected: Subject | None, subjects: Sequence[Subject]) -> int | None:
    return subjects.index(selected) if selected in subjects else None


def _headline(status: SchedulerStatus, rates: Mapping[str, float]) -> str:
    live = [agent for agent in status.agents if agent.state not in ("gone", "lost")]
    tokens_s = sum(rates.get(agent.name, token_rate(agent)) for agent in live)
    parts = [
        "farflow",
        f"up {human_age(status.uptime_s)}",
        counted(sum(run.state != "finished" for run in status.runs), "run"),
        f"{len(live)}/{counted(len(status.agents), 'agent')}",
        f"{tokens_s:.0f} tokens/s",
    ]
    parts += [counted(len(status.alerts), "alert")] if status.alerts else []
    return " · ".join(parts)


def _footer(state: TopState) -> str:
    if state.asks:
        return f"drain {state.asks}: it finishes or hands back what it holds, and leaves. y/n"
    if state.explained:
        return "q quit  ↑↓ scroll  any other key: back"
    return f"{printable(state.note)}  {_KEYS}".lstrip()  # what is new must not be cut off


def _table(columns: Sequence[str], width: int) -> Table:
    table = Table(box=None, width=width, padding=(0, 1, 0, 0))
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(
            name, justify=justify, no_wrap=True, overflow="ellipsis", header_style="bold cyan"
        )
    return table


def _runs(
    runs: Sequence[RunStatus],
    rewards: Mapping[str, Sequence[float]],
    selected: Subject | None,
    width: int,
    room: int,
) -> Table:
    columns = ["policy", "step", "reward", "", "lag", "buffer"]
    columns += ["held-out"] if width >= WIDE else []
    ends = ["USD", "reason"] if width >= WIDE else []
    table = _table(["run", "state", *columns, *ends], width)
    rows: list[tuple[str, list[str]]] = []
    for run in runs:
        head = [run.name, run.state]
        tail = [f"{run.cost_usd:.2f}", printable(run.reason)][: len(ends)]
        if not run.policies:
            rows.append((run.name, [*head, *[""] * len(columns), *tail]))
        for policy in run.policies:
            cells = policy_cells(policy, rewards)
            rows.append((run.name, [*head, *(cells[column] for column in columns), *tail]))
            head, tail = ["", ""], [""] * len(ends)
    _fill(table, rows, selected, "run", room)
    return table


def _agents(
    agents: Sequence[AgentStatus],
    rates: Mapping[str, float],
    selected: Subject | None,
    width: int,
    room: int,
) -> Table:
    columns = ["agent", "state", "rtt", "tokens/s", "slots", "groups", "version"]
    columns += ["clock", "up", "down", "USD/h", "hardware"] if width >= WIDE else []
    table = _table(columns, width)
    rows: list[tuple[str, list[str]]] = []
    for agent in agents:
        cells = agent_cells(agent, rates)
        rows.append((agent.name, [cells[column] for column in columns]))
    _fill(table, rows, selected, "agent", room)
    return table


def _fill(
    table: Table,
    rows: Sequence[tuple[str, Sequence[str]]],
    selected: Subject | None,
    kind: Literal["run", "agent"],
    room: int,
) -> None:
    at = next((n for n, (name, _) in enumerate(rows) if selected == (kind, name)), None)
    for number in window(len(rows), at, room):
        name, cells = rows[number]
        chosen = selected == (kind, name)
        table.add_row(*(Text(cell) for cell in cells), style="reverse" if chosen else "")
