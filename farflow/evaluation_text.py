"""What a person reads of evaluations.

What always holds: without a single answer there is no accuracy, but the reason.
"""

from collections.abc import Iterable

from farflow.words import counted
from transport.ids import policy_name
from transport.runs import HELD_OUT
from transport.status import EvaluationStatus


def accuracy_text(evaluations: Iterable[EvaluationStatus], name: str = HELD_OUT) -> str:
    """``48.2 % → 86.1 % (v120)``: the first and the latest finished evaluation of a name."""
    done = [e for e in evaluations if e.done and e.name == name]
    if not done:
        return "-"
    first, last = done[0], done[-1]
    text = f"{100 * first.accuracy:.1f} %"
    if last is not first:
        text += f" → {100 * last.accuracy:.1f} % (v{last.version})"
    return text


def pass_at_text(evaluation: EvaluationStatus) -> str:
    """``pass@1 20.0 %, pass@4 50.0 %``; ``-`` where every item has one answer."""
    chances = [f"pass@{k} {100 * chance:.1f} %" for k, chance in evaluation.pass_at.items()]
    return ", ".join(chances) or "-"


def evaluation_line(evaluation: EvaluationStatus) -> str:
    """A finished evaluation as a line for a log, also where nothing came of it."""
    other = "" if evaluation.name == HELD_OUT else f"{evaluation.name} "
    answers = f" of {evaluation.samples} answers each" if evaluation.samples > 1 else ""
    chances = f", {pass_at_text(evaluation)}" if evaluation.pass_at else ""
    what = f"evaluation {other}{policy_name(evaluation.policy)} v{evaluation.version}"
    if not evaluation.scored:
        return f"{what} {failure_text(evaluation)}"
    short = f"; {failure_text(evaluation)}" if evaluation.failure else ""
    return (
        f"{what} "
        f"accuracy {100 * evaluation.accuracy:.1f} % over {evaluation.scored} "
        f"{'items' if other else 'held-out items'}{answers}{chances}{short}"
    )


def failure_text(evaluation: EvaluationStatus) -> str:
    """``not done: 16 items failed (workflow.malformed)``; without "not done" where others have
    answers."""
    items = counted(evaluation.failed, "item")
    why = f"{items} failed ({evaluation.failure})" if evaluation.failed else evaluation.failure
    return why if evaluation.scored else f"not done: {why or 'it has no answers'}"
