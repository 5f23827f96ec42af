"""What recorded runs came to, out of their ``metrics.jsonl``: no scheduler is asked.

What always holds: of a step that was trained twice (after a rollback) the last record counts; a
line that is damaged, or of another version of farflow, is left out.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farflow.evaluation_text import failure_text
from transport.errors import ConfigError, StoreError
from transport.ids import policy_name
from transport.runs import HELD_OUT
from transport.runtime.files import folder_holder, open_regular
from transport.status import EvaluationStatus, StepStatus

FILE_NAME: Final = "metrics.jsonl"
_UP_RECORDS: Final = "state/scheduler/runs"
LAST_STEPS: Final = 10
"""Over how many of the last steps the final reward is the mean."""
_MAX_LINE_BYTES: Final = 1 << 20


class PolicyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of a recorded run. ``state`` is why the run ended, "open" where that is not
    recorded, or "interrupted" where `farflow up` was left before it; ``hours`` from the run's first
    record to its last; ``accuracy_*`` of the first and last ``held-out`` evaluation; ``reward`` the
    mean of the last ``LAST_STEPS`` steps; ``busy_share`` the part of its time that the trainer
    trained; ``trained_tokens`` of the policy; ``tokens`` that agents generated and ``cost_usd`` are
    the whole run's (None where its end is not recorded); ``rewards`` by step; ``not_evaluated``
    says which evaluations have no result, or not all of it, and why."""

    run: str
    policy: str
    file: str
    state: str
    steps: int
    hours: float
    accuracy_before: float | None
    accuracy_after: float | None
    reward: float | None
    policy_lag_mean: float | None
    policy_lag_max: int | None
    busy_share: float | None
    trained_tokens: int
    tokens: int | None
    cost_usd: float | None
    rewards: dict[int, float]
    accuracies: dict[int, float]
    not_evaluated: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``RUN`` or, where the run's folder is called otherwise, ``FOLDER``; with the policy."""
        file = Path(self.file)
        return f"{(_up_folder(file) or file.parent).name}/{policy_name(self.policy)}"


class _Line(msgspec.Struct):
    type: str = ""
    wall_s: float = 0.0


class _End(msgspec.Struct):
    reason: str = ""
    cost_usd: float | None = None
    tokens: int | None = None


def find_records(paths: Iterable[Path]) -> list[Path]:
    """The ``metrics.jsonl`` that are meant by a file, a run's folder, a folder of such folders, or
    a scheduler's folder; each once, in the order of the names. A run of `farflow up` that did not
    end has its records still with its scheduler.

    Raises:
        ConfigError: there is none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            own = [path]
        else:
            within = (child for child in sorted(path.glob("*")) if child.is_dir())
            own = (
                _of_run(path)
                or [file for child in within for file in _of_run(child)]
                or sorted(path.glob(f"runs/*/{FILE_NAME}"))
            )
        if not own:
            raise ConfigError(
                f"{path}: no {FILE_NAME} there, in its folders or in its runs; name a run's folder,"
                " a scheduler's folder, or local.runs of `farflow up`"
            )
        found.update(dict.fromkeys(own))
    return list(found)


def _of_run(folder: Path) -> list[Path]:
    """The record in a run's folder; that of its scheduler until `farflow up` has ended."""
    ended = folder / FILE_NAME
    return [ended] if ended.is_file() else sorted(folder.glob(f"{_UP_RECORDS}/*/{FILE_NAME}"))


def _up_folder(file: Path) -> Path | None:
    """The folder of `farflow up` whose scheduler has the record ``file``."""
    parents = file.absolute().parents
    inner = len(Path(_UP_RECORDS).parts) + 1
    if len(parents) <= inner or not parents[1].match(_UP_RECORDS):
        return None
    return parents[inner]


def _open_state(file: Path) -> str:
    """What a run is whose end is not recorded."""
    folder = _up_folder(file)
    try:
        return "interrupted" if folder is not None and folder_holder(folder) is None else "open"
    except StoreError:  # not for us to look
        return "open"


def read_record(file: Path) -> list[PolicyRecord]:
    """The policies of one run, by name; none where nothing was recorded yet.

    Raises:
        ConfigError: the file cannot be read.
    """
    steps: dict[str, dict[int, StepStatus]] = {}
    evaluations: dict[str, list[EvaluationStatus]] = {}
    times: list[float] = []
    end: _End | None = None
    try:
        with open_regular(file) as lines:
            for raw in lines:
                if len(raw) > _MAX_LINE_BYTES:
                    continue
                try:
                    line = msgspec.json.decode(raw, type=_Line)
                    if line.type == "step":
                        step = msgspec.json.decode(raw, type=StepStatus)
                        steps.setdefault(step.policy, {})[step.step] = step
                        end = None  # a run that goes on after all
                    elif line.type == "evaluation":
                        evaluation = msgspec.json.decode(raw, type=EvaluationStatus)
                        evaluations.setdefault(evaluation.policy, []).append(evaluation)
                    elif line.type == "end":
                        end = msgspec.json.decode(raw, type=_End)
                    else:
                        continue
                    times.append(line.wall_s)
                except (msgspec.DecodeError, RecursionError):
                    continue
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    hours = (max(times) - min(times)) / 3600 if times else 0.0
    return [
        _policy(file, policy, steps.get(policy, {}), evaluations.get(policy, []), hours, end)
        for policy in sorted({*steps, *evaluations})
    ]


def _policy(
    file: Path,
    policy: str,
    by_step: dict[int, StepStatus],
    evaluations: Sequence[EvaluationStatus],
    hours: float,
    end: _End | None,
) -> PolicyRecord:
    steps = [by_step[number] for number in sorted(by_step)]
    held_out = [e for e in evaluations if (e.done or e.failure) and e.name == HELD_OUT]
    known = {e.step: e.accuracy for e in held_out if e.done and e.scored}
    rewards = {step.step: step.reward_mean for step in steps}
    busy_s, waiting_s = sum(s.busy_s for s in steps), sum(s.waiting_s for s in steps)
    return PolicyRecord(
        run=policy.split("/")[0],
        policy=policy,
        file=str(file),
        state=_open_state(file) if end is None else end.reason,
        steps=max(by_step, default=0),
        hours=hours,
        accuracy_before=known.get(held_out[0].step) if held_out else None,
        accuracy_after=known.get(held_out[-1].step) if held_out else None,
        reward=mean([*rewards.values()][-LAST_STEPS:]),
        policy_lag_mean=mean([step.policy_lag_mean for step in steps]),
        policy_lag_max=max((step.policy_lag_max for step in steps), default=None),
        busy_share=busy_s / (busy_s + waiting_s) if busy_s + waiting_s else None,
        trained_tokens=sum(step.response_tokens for step in steps),
        tokens=None if end is None else end.tokens,
        cost_usd=None if end is None else end.cost_usd,
        rewards=rewards,
        accuracies=known,
        not_evaluated=tuple(
            f"{e.name} v{e.version} {failure_text(e)}" for e in evaluations if e.failure
        ),
    )


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def facts(record: PolicyRecord) -> dict[str, Any]:
    """A record without its curves, for ``--json``."""
    built = msgspec.to_builtins(record)
    return {key: value for key, value in built.items() if key not in ("rewards", "accuracies")}


def reward_until(record: PolicyRecord, step: int, window: int) -> float | None:
    """The mean reward of the ``window`` steps up to ``step``; None where it has none of them."""
    return mean([r for s, r in record.rewards.items() if step - window < s <= step])
