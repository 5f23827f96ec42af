"""Items of a run, made from its ``TaskSpec``.

What always holds:

1. An item is a pure function of (task, seed, kind, index): asking again, in any order, in another
   process, gives the same item.
2. An item belongs to the held-out part iff ``is_held_out(prompt)``, the prompt without the task's
   instruction; the kinds ``train`` and ``eval`` are therefore disjoint whatever the source does,
   also for prompts that come twice and for those that several parts of a mixture have.
3. Evaluation items have distinct prompts. Their index space ends where the source has no new one
   (``held_out_end``): fewer items than asked for, or none, are given there. The training space
   never ends.
4. What a source gets wrong (data set, setting, file, line, field) is a ``TaskError`` that names it.
"""

from collections.abc import Collection

from scheduler.task_function import FunctionSource
from scheduler.task_gym import GymMissing, ReasoningGymSource
from scheduler.task_items import Instructed, ItemSource, Named, is_held_out
from scheduler.task_lines import JsonlSource
from scheduler.task_mixture import MixtureSource
from transport.errors import TaskError
from transport.run_faults import part_sources, task_sources
from transport.runs import HELD_OUT, EvaluationSpec, PartSpec, RunSpec, TaskSpec

__all__ = [
    "FunctionSource",
    "JsonlSource",
    "MixtureSource",
    "ReasoningGymSource",
    "check_sources",
    "evaluation_source",
    "is_held_out",
    "open_source",
]

EVERYTHING = 1
"""Instead of ``held_out_one_in``: every item is an evaluation item."""


def open_source(task: TaskSpec, seed: int, modules: Collection[str] = ()) -> ItemSource:
    """The source that ``task`` describes, checked as far as possible before the first item;
    ``modules`` may be imported for it.

    Raises:
        TaskError: unknown data set or setting, missing or malformed file, module not allowed.
    """
    return _open(task, seed, task.held_out_one_in, modules, "task")


def check_sources(run: RunSpec) -> list[str]:
    """Opens every source of a run's tasks for once that needs no module of a user's, without
    drawing items. Returns a text for each that cannot be opened here.

    Raises:
        TaskError: as ``open_source``; begins with the key of the run's file.
    """
    unchecked: list[str] = []
    for key, source in task_sources(run):
        if source.source != "python":
            try:
                _open_one(source, run.seed, EVERYTHING, (), key)
            except GymMissing as error:
                unchecked.append(f"{key}: {error}")
            except TaskError as error:
                text = str(error)
                raise TaskError(text if text.startswith(key) else f"{key}: {text}") from error
    return unchecked


def evaluation_source(
    name: str, spec: EvaluationSpec, seed: int, modules: Collection[str] = ()
) -> ItemSource | None:
    """The source of an evaluation that has a task of its own, None for the run's.

    Raises:
        TaskError: as ``open_source``; names the evaluation.
    """
    task = spec.task
    if task is None:
        return None
    one_in = EVERYTHING if spec.split == "all" else task.held_out_one_in
    where = "evaluation" if name == HELD_OUT else f"evaluations.{name}"
    return Named(where, _open(task, seed, one_in, modules, f"{where}.task"))


def _open(task: TaskSpec, seed: int, one_in: int, modules: Collection[str], key: str) -> ItemSource:
    """``key`` is that of the task's table."""
    if task.source != "mixture":
        source = _open_one(task, seed, one_in, modules, key)
        return Instructed(source, task.instruction) if task.instruction else source
    parts = [
        (part.name, part.weight, _open_one(part, seed, one_in, modules, at))
        for at, part in part_sources(task, key)
    ]
    told = {part.name: part.instruction for part in task.parts if part.instruction}
    return Instructed(MixtureSource(parts), "", told) if told else MixtureSource(parts)


def _open_one(
    source: TaskSpec | PartSpec, seed: int, one_in: int, modules: Collection[str], key: str
) -> ItemSource:
    match source.source:
        case "jsonl":
            return JsonlSource(source, seed, one_in, key)
        case "python":
            return FunctionSource(source, seed, one_in, modules, key)
        case _:
            return ReasoningGymSource(source, seed, one_in, key)
