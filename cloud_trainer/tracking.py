"""What a trainer did, for people and plots.

    FOLDER/metrics.jsonl      one object a line: ``kind`` (step, version, checkpoint), ``wall_s``,
    FOLDER/metrics.jsonl.1    and facts; the older file is replaced at each rotation
    FOLDER/tensorboard/       the numbers among them, where ``tensorboard`` is installed
    a project of Weights & Biases, where one is named

What always holds: at most two files of ``limit_bytes`` (and a line), and as many bytes of events
per start; lines are whole, also after a crash in the middle of one; losing them loses nothing that
a restart needs, and whatever goes wrong with them is logged and never stops a trainer.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from cloud_trainer.config import TrainerTable
from transport.errors import ConfigError, StoreError
from transport.runtime.files import store_errors

LIMIT_BYTES = 32 << 20

_log = structlog.get_logger()


def check_tracking(table: TrainerTable) -> None:
    """Raises ConfigError when metrics are to go somewhere that is not installed."""
    if table.wandb and not _installed("wandb"):
        raise ConfigError(
            "trainer.wandb: wandb is not installed; run: pip install wandb, or set trainer.wandb "
            'to ""'
        )


class Sink(Protocol):
    """Where numbers go by name; may raise what it likes."""

    def write(self, kind: str, wall_s: float, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """All of it for one trainer in ``folder``; ``project`` is that of Weights & Biases, or "".
    Blocks; one call at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: str,
        project: str = "",
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        """``sinks`` are more of them, by name."""
        self._file = MetricsFile(folder)
        self._file_works = True
        self._sinks: dict[str, Sink] = dict(sinks or {})
        if _installed("tensorboard"):
            from cloud_trainer.tracking_sinks import TensorBoardSink

            self._sinks["tensorboard"] = TensorBoardSink(folder / "tensorboard")
        if project:
            from cloud_trainer.tracking_sinks import WandbSink

            self._sinks["wandb"] = WandbSink(folder, project=project, name=policy)

    def write(self, kind: str, wall_s: float, facts: dict[str, Any]) -> None:
        """Never raises: a sink that fails is dropped, the file is tried again the next time."""
        try:
            self._file.write(kind, wall_s, facts)
            self._file_works = True
        except StoreError as error:
            if self._file_works:
                _log.warning("metrics.not_written", reason=str(error))
            self._file_works = False
        numbers = {
            name: float(value)
            for name, value in facts.items()
            if isinstance(value, int | float) and name != "step"
        }
        for name in list(self._sinks):
            try:
                self._sinks[name].write(kind, wall_s, int(facts.get("step", 0)), numbers)
            except Exception as error:  # noqa: BLE001 - plots are not worth a run
                _log.warning(
                    "tracking.dropped", sink=name, reason=f"{type(error).__name__}: {error}"
                )
                del self._sinks[name]

    def close(self) -> None:
        """Waits, for a bounded time, until what was written has arrived; never raises."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as above
                _log.warning(
                    "tracking.dropped", sink=name, reason=f"{type(error).__name__}: {error}"
                )
        self._sinks.clear()


def _installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # not just a folder of that name


class MetricsFile:
    """Appends to ``metrics.jsonl`` in ``folder``. Blocks; one call at a time."""

    def __init__(self, folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = folder / "metrics.jsonl"
        self._limit_bytes = limit_bytes
        self._mended = False

    def write(self, kind: str, wall_s: float, facts: dict[str, Any]) -> None:
        """Append one line; floats that are not finite become null.

        Raises:
            StoreError: the disk refused.
        """
        line = msgspec.json.encode({"kind": kind, "wall_s": round(wall_s, 3), **facts}) + b"\n"
        with store_errors("write", self.path):
            self._rotate(len(line))
            with self.path.open("ab") as file:
                if not self._mended and file.tell() and not self._ends_whole():
                    file.write(b"\n")
                self._mended = True
                file.write(line)

    def _rotate(self, more_bytes: int) -> None:
        if self.path.exists() and self.path.stat().st_size + more_bytes > self._limit_bytes:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
