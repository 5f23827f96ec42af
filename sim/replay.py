"""A production event log told to the core again: bit-equal, or where it first differs.

What always holds: the core is made as the log says (settings, term, random seed, clock, rows) and
hears every recorded event at its recorded time; each batch's effects are compared by digest.
Another build's log is replayed as well, and its first difference is then no fault. Nothing leaves.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scheduler.core.effects import Effect, Send
from scheduler.core.events import Event, FromAgent, FromOperator, FromService, FromTrainer
from scheduler.core.machine import SchedulerCore
from scheduler.event_log import (
    RecordedTerm,
    effects_digest,
    recorded_terms,
    unpack_event,
)
from transport.errors import ConfigError, FarflowError
from transport.runtime.build import build_id

MAX_SHOWN = 20


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first batch whose effects differ: what came in, and what this build makes of it.
    ``error`` is what the core raised, if it did."""

    batch: int
    at_s: float
    events: tuple[str, ...]
    effects: tuple[str, ...]
    error: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """``equal``: all of ``batches`` gave the recorded effects. ``complete`` false: the log's end is
    missing or torn, so that what came later is unknown."""

    folder: str
    term: int
    recorded_build: str
    build: str
    batches: int
    events: int
    effects: int
    seconds: float
    complete: bool
    equal: bool
    divergence: Divergence | None
    counters: dict[str, int]


def term_folder(folder: Path, term: int | None = None) -> Path:
    """The recorded term below ``folder`` (a term's own, the log's, or the scheduler's); the newest
    unless ``term`` says which.

    Raises:
        ConfigError: there is none.
    """
    if (folder / "start").is_file():
        return folder
    inside = ("", "events", "scheduler/events", "state/scheduler/events")
    for place in (folder / part for part in inside):
        found = recorded_terms(place)
        if term is not None:
            found = [path for path in found if path.name == f"term-{term:08d}"]
        if found:
            return found[-1]
    which = "" if term is None else f" of term {term}"
    raise ConfigError(
        f"{folder}: no event log{which}; give a run's folder, the scheduler's, its `events` or a"
        " `term-*` in there"
    )


def replay(folder: Path) -> Replay:
    """Tell a recorded term to a new core.

    Raises:
        StoreError: there is no log, or rows or events are of a farflow too different to be read.
    """
    term = RecordedTerm(folder)
    start = term.start
    core = SchedulerCore(
        start.settings,
        term=start.term,
        rng=random.Random(start.seed),  # noqa: S311 - what the log was made with
        build=start.build,  # it stands in messages
        rows=list(term.rows()),
        now=start.now,
    )
    batches = events = made = 0
    at_s = start.now
    divergence = None
    for batch in term.batches():
        inputs = [(now, unpack_event(packed)) for now, packed in batch.inputs]
        effects: list[Effect] = []
        error = ""
        for now, event in inputs:
            at_s = now
            try:
                effects += core.handle(event, now)
            except FarflowError as raised:
                error = f"{raised} ({raised.code})"
                break
        core.take_changes()
        if error or effects_digest(effects) != batch.effects_digest:
            divergence = Divergence(
                batch=batch.number,
                at_s=at_s,
                events=_shown([_describe(event) for _, event in inputs]),
                effects=_shown([_describe_effect(effect) for effect in effects]),
                error=error,
            )
            break
        batches, events, made = batches + 1, events + len(inputs), made + len(effects)
    return Replay(
        folder=str(folder),
        term=start.term,
        recorded_build=start.build,
        build=build_id(),
        batches=batches,
        events=events,
        effects=made,
        seconds=at_s - start.now,
        complete=term.complete,
        equal=divergence is None,
        divergence=divergence,
        counters=dict(core.status(at_s).counters),
    )


def _describe(event: Event) -> str:
    match event:
        case (
            FromAgent(name, message)
            | FromTrainer(name, message)
            | FromService(name, message)
            | FromOperator(name, _, message)
        ):
            return f"{type(message).__name__} from {name}"
        case _:
            return type(event).__name__


def _describe_effect(effect: Effect) -> str:
    if isinstance(effect, Send):
        return f"Send {type(effect.message).__name__} to {effect.peer}"
    return type(effect).__name__


def _shown(lines: Sequence[str]) -> tuple[str, ...]:
    more = len(lines) - MAX_SHOWN
    return (*lines[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else []))
