"""Where a trainer's numbers go beside its own file: TensorBoard, Weights & Biases, Prometheus.

What always holds: what is not a finite number is left out; a step that is trained again after a
restart takes the place of what TensorBoard plotted for it (Weights & Biases has a run per start);
the network never makes a caller wait.
"""

import math
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from transport.telemetry import page

EVENTS_LIMIT_BYTES = 256 << 20
"""Of one start; about a million steps."""

_WAITING = 1000
"""Records that wait for the network; then the newest are dropped."""

_CLOSE_S = 30.0

_log = structlog.get_logger()


class TensorBoardSink:
    """Event files in ``folder``, one per start, as ``tensorboard --logdir`` reads them."""

    def __init__(self, folder: Path, *, limit_bytes: int = EVENTS_LIMIT_BYTES) -> None:
        self._folder = folder
        self._left_bytes = limit_bytes
        self._writer: Any = None

    def write(self, kind: str, wall_s: float, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        values = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        event = Event(wall_time=wall_s, step=step, summary=Summary(value=values))
        if event.ByteSize() > self._left_bytes:
            return
        self._left_bytes -= event.ByteSize()
        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=wall_s, step=step, session_log=started))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class LastNumbers:
    """The last numbers of each kind, as a page of metrics."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], float] = {}

    def write(self, kind: str, wall_s: float, step: int, numbers: Mapping[str, float]) -> None:
        self._steps[kind] = step
        self._numbers.update(((kind, name), value) for name, value in numbers.items())

    def page(self) -> bytes:
        """Of what was written since the start."""
        steps, found = dict(self._steps), dict(self._numbers)  # another thread writes
        return page(
            "trainer",
            {
                "farflow_trainer_step": [((kind,), step) for kind, step in steps.items()],
                "farflow_trainer_last_metric": sorted(found.items()),
            },
        )

    def close(self) -> None:
        """They stay until the process ends."""


class WandbSink:
    """A run of ``project``, written by a thread of its own, which also connects."""

    def __init__(self, folder: Path, *, project: str, name: str) -> None:
        self._folder = folder
        self._project = project
        self._name = name
        self._records: queue.Queue[dict[str, float] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="trainer-wandb", daemon=True)
        self._thread.start()

    def write(self, kind: str, wall_s: float, step: int, numbers: Mapping[str, float]) -> None:
        record = {
            f"{kind}/{name}": value for name, value in numbers.items() if math.isfinite(value)
        }
        try:
            self._records.put_nowait({"trainer_step": step, **record})
        except queue.Full:
            _log.debug("wandb.record_dropped", step=step)

    def close(self) -> None:
        try:
            self._records.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # it hangs; the thread ends with the process
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            import wandb

            run = wandb.init(
                project=self._project,
                name=self._name,
                dir=str(self._folder),
                settings=wandb.Settings(silent=True, console="off"),  # our logs stay ours
            )
            run.define_metric("*", step_metric="trainer_step")
            while (record := self._records.get()) is not None:
                run.log(record)
            run.finish()
        except Exception as error:  # noqa: BLE001 - plots are not worth a run
            _log.warning(
                "tracking.dropped", sink="wandb", reason=f"{type(error).__name__}: {error}"
            )
