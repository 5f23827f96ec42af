"""Items of a run, made from its ``TaskSpec``.

What always holds:

1. An item is a pure function of (task, seed, kind, index): asking again, in any order, in another
   process, gives the same item.
2. An item belongs to the held-out part iff ``is_held_out(prompt)``; the kinds ``train`` and
   ``eval`` are therefore disjoint whatever the source does, also for prompts that come twice and
   for those that several parts of a mixture have.
3. Evaluation items have distinct prompts. Their index space ends where the source has no new one
   (``held_out_end``): fewer items than asked for, or none, are given there. The training space
   never ends.
4. What a source gets wrong (data set, setting, file, line, field) is a ``TaskError`` that names it.
"""

from collections.abc import Collection

from scheduler.task_function import FunctionSource
from scheduler.task_gym import ReasoningGymSource
from scheduler.task_items import ItemSource, Named, is_held_out
from scheduler.task_lines import JsonlSource
from scheduler.task_mixture import MixtureSource
from transport.errors import TaskError
from transport.runs import HELD_OUT, EvaluationSpec, PartSpec, TaskSpec

__all__ = [
    "FunctionSource",
    "JsonlSource",
    "MixtureSource",
    "ReasoningGymSource",
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
    return _open(task, seed, task.held_out_one_in, modules)


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
    try:
        return Named(where, _open(task, seed, one_in, modules))
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error


def _open(task: TaskSpec, seed: int, one_in: int, modules: Collection[str]) -> ItemSource:
    if task.source == "mixture":
        parts = [(p.name, p.weight, _open_one(p, seed, one_in, modules)) for p in task.parts]
        return MixtureSource(parts)
    return _open_one(task, seed, one_in, modules)


def _open_one(
    source: TaskSpec | PartSpec, seed: int, one_in: int, modules: Collection[str]
) -> ItemSource:
    match source.source:
        case "jsonl":
            return JsonlSource(source, seed, one_in)
        case "python":
            return FunctionSource(source, seed, one_in, modules)
        case _:
            return ReasoningGymSource(source, seed, one_in)
