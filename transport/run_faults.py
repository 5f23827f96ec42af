"""What is wrong with a run, above all its tasks and evaluations, as far as its own text shows.

Asked where a run's file is read and where a run is submitted, so that both say the same.

What always holds: a fault begins with the dotted key to change and says to what; without one, every
item that the tasks can give has a reward, the families of a mixture are told apart by name, and
every evaluation has a name of its own and results that mean something.
"""

from collections.abc import Collection, Iterator

from transport.ids import NAME_RULE, is_name
from transport.runs import (
    HELD_OUT,
    MAX_EVALUATIONS,
    MAX_INSTRUCTION_BYTES,
    EvaluationSpec,
    PartSpec,
    RunSpec,
    SourceFields,
    TaskSpec,
    WorkflowSpec,
    template_fault,
)


def run_faults(run: RunSpec) -> Iterator[str]:
    """Every fault of a run's policies, labels, task and evaluations."""
    names = run.workflow.policies
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"workflow.policies: {name!r} is there twice; name each policy once"
    for label, values in run.require.items():
        if not values:
            yield (
                f"run.require.{label}: allows no value, so no agent may work for the run; list the"
                " values that are allowed, or leave the label out"
            )
    for name, policy in run.policies.items():
        fault = template_fault(policy.chat_template_kwargs)
        if fault:
            yield f"policies.{name}.chat_template_kwargs{fault}"
    yield from task_faults(run.task, "task")
    if len(run.evaluations) > MAX_EVALUATIONS:
        yield f"evaluations: {len(run.evaluations)} of them, at most {MAX_EVALUATIONS}"
    if run.evaluation is not None and HELD_OUT in run.evaluations:
        yield f"evaluations.{HELD_OUT}: is the name of [evaluation]; give it another one"
    if run.evaluation is not None:
        yield from _evaluation_faults(run.evaluation, run.workflow, "evaluation")
    for name, spec in run.evaluations.items():
        where = f"evaluations.{name}"
        if not is_name(name):
            yield f"{where}: the name must be {NAME_RULE}"
        yield from _evaluation_faults(spec, run.workflow, where)


def module_faults(run: RunSpec, modules: Collection[str]) -> Iterator[str]:
    """Every function of a run's tasks that is in none of the ``modules`` that may be used."""
    for at, source in task_functions(run):
        module = source.function.partition(":")[0]
        if module not in modules:
            yield (
                f"{at}.function: module {module!r} is not one that the scheduler may use; add"
                " it to [scheduler] task_modules and restart the scheduler (listed:"
                f" {', '.join(sorted(modules)) or 'none'})"
            )


def task_functions(run: RunSpec) -> Iterator[tuple[str, SourceFields]]:
    """The sources of a run's tasks that are functions, each with the key of its table."""
    return ((where, source) for where, source in task_sources(run) if source.function)


def task_sources(run: RunSpec) -> Iterator[tuple[str, TaskSpec | PartSpec]]:
    """The sources of a run's tasks, each with the key of its table; of a mixture its parts."""
    tasks = {"task": run.task}
    for name, spec in run.all_evaluations().items():
        if spec.task is not None:
            where = "evaluation" if spec is run.evaluation else f"evaluations.{name}"
            tasks[f"{where}.task"] = spec.task
    for where, task in tasks.items():
        if task.source == "mixture":
            yield from part_sources(task, where)
        else:
            yield where, task


def part_sources(task: TaskSpec, where: str) -> Iterator[tuple[str, PartSpec]]:
    """The parts of a mixture, each with the key of its table."""
    return ((f"{where}.parts[{number}]", part) for number, part in enumerate(task.parts))


def task_faults(task: TaskSpec, where: str) -> Iterator[str]:
    """Every fault of a task; ``where`` is the key of its table."""
    if task.source != "mixture":
        if task.parts:
            yield f'{where}.parts: belong to source = "mixture"; remove them, or say so'
        yield from _source_faults(task, where)
        return
    if not task.parts:
        yield f'{where}.parts: missing; source = "mixture" needs at least one'
    for key in ("dataset", "path", "function", "settings", "instruction"):
        if getattr(task, key):
            yield f'{where}.{key}: belongs to one of the parts of source = "mixture"; move it there'
    if task.answer != "whole":
        yield f'{where}.answer: belongs to one of the parts of source = "mixture"; move it there'
    seen: set[str] = set()
    for at, part in part_sources(task, where):
        yield from _source_faults(part, at)
        if part.name in seen:
            yield f"{at}.family: {part.name!r} is taken by an earlier part; give it another one"
        seen.add(part.name)


def _source_faults(source: TaskSpec | PartSpec, where: str) -> Iterator[str]:
    needs = {"reasoning-gym": "dataset", "jsonl": "path", "python": "function"}[source.source]
    if not getattr(source, needs):
        yield f'{where}.{needs}: missing; source = "{source.source}" needs it'
        return
    for key in ("dataset", "path", "function"):
        if key != needs and getattr(source, key):
            yield f'{where}.{key}: source = "{source.source}" takes {needs}; remove it'
    if source.source != "reasoning-gym" and source.reward == "verifier":
        yield (
            f'{where}.reward: source = "{source.source}" brings no verifier; use "exact",'
            ' "math-verify" or "code"'
        )
    if source.source == "reasoning-gym" and source.reward == "code":
        yield f'{where}.reward: source = "reasoning-gym" has no tests for "code"; use "verifier"'
    if source.answer != "whole" and source.reward not in ("verifier", "exact"):
        yield (
            f'{where}.answer: reward = "{source.reward}" finds the answer itself; remove it, or use'
            ' "exact"'
        )
    size_bytes = len(source.instruction.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_INSTRUCTION_BYTES:
        yield (
            f"{where}.instruction: {size_bytes} bytes, at most {MAX_INSTRUCTION_BYTES}; make it"
            " shorter"
        )
    if source.source == "jsonl" and source.settings:
        yield f'{where}.settings: source = "jsonl" has none; remove them'
    if source.source == "python":
        module, _, name = source.function.partition(":")
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            yield f"{where}.function: {source.function!r} is not of the form module:function"


def _evaluation_faults(spec: EvaluationSpec, run: WorkflowSpec, where: str) -> Iterator[str]:
    if spec.task is not None:
        yield from task_faults(spec.task, f"{where}.task")
    elif spec.split != "all":
        yield f"{where}.split: without a task of its own only held-out items are used; remove it"
    if spec.samples > 1 and spec.temperature == 0.0:
        yield (
            f"{where}.temperature: is 0 (greedy), so all {spec.samples} samples of an item are"
            f" alike; set it, for example to {run.temperature or 1.0:g}, or samples = 1"
        )
    for k in spec.pass_at:
        if k > spec.samples:
            yield f"{where}.pass_at: pass@{k} needs samples = {k} or more, it is {spec.samples}"
    if spec.every_versions == 0 and not (spec.at_start or spec.at_end):
        yield f"{where}: is never due; set every_versions, at_start or at_end"
