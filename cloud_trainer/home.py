"""A trainer's folder: what it starts from, and what it may write.

    FOLDER/incarnation   how often this trainer was started (or the time in ms, if that is more)
    FOLDER/checkpoints, FOLDER/lineage   see ``cloud_trainer.checkpoints``
    FOLDER/outbox        see ``cloud_trainer.outbox``
    FOLDER/metrics.jsonl see ``cloud_trainer.tracking``
    FOLDER/model         the exported model, after the run

What always holds: one process uses a folder at a time; incarnations grow with every start, also
after the folder was lost.
"""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import structlog

from cloud_trainer.checkpoints import CheckpointFolder, CheckpointMeta
from cloud_trainer.core.settings import PendingVersion, StartPosition
from cloud_trainer.core.trained_jobs import TrainedJobs
from cloud_trainer.outbox import Outbox
from cloud_trainer.trainer import Trainer
from transport.runtime.clock import Clock
from transport.runtime.files import (
    fsync_dir,
    lock_folder,
    next_incarnation,
    private_dir,
    remove_temporaries,
    store_errors,
)

_log = structlog.get_logger()


class Start(NamedTuple):
    """Where one incarnation begins."""

    incarnation: int
    meta: CheckpointMeta | None
    position: StartPosition
    trained: TrainedJobs
    outbox: Outbox


class TrainerHome:
    """The folder, claimed for this process until ``release``. Blocks."""

    def __init__(self, folder: Path, *, keep_checkpoints: int) -> None:
        """Raises StoreError when another process uses it or the disk refuses."""
        self.folder = private_dir(folder)
        self._lock = lock_folder(self.folder)
        remove_temporaries(self.folder)
        self.checkpoints = CheckpointFolder(self.folder, keep=keep_checkpoints)

    def release(self) -> None:
        self._lock.release()

    def start(self, clock: Clock, *, republish: bool = False) -> Start:
        """A new incarnation at the newest checkpoint. With ``republish`` its version is published
        whole, whatever the outbox says.

        Raises:
            StoreError: the disk refused.
            IntegrityError: the lineage of the newest checkpoint is damaged.
        """
        meta = self.checkpoints.latest()
        lineage = [] if meta is None else self.checkpoints.lineage(meta)
        outbox = Outbox(self.folder / "outbox")
        step, version = (0, 0) if meta is None else (meta.step, meta.version)
        first = PendingVersion(version=version, parent=None, step=step, whole=True)
        if republish:
            outbox.clear()
            pending = [first]
        else:
            version = outbox.newest_number(version, step)
            pending = outbox.ancestry(version)
            outbox.keep_only([p.version for p in pending])
            if not pending and version == 0:
                pending = [first]
        position = StartPosition(
            step=step,
            version=version,
            highest_version=outbox.highest,
            pending=tuple(pending),
        )
        trained = TrainedJobs(job for entry in lineage for job in entry.jobs)
        incarnation = next_incarnation(self.folder, clock.wall_s())
        _log.info(
            "trainer.start", incarnation=incarnation, step=step, version=version,
            highest=outbox.highest, jobs=len(trained), unpublished=[p.version for p in pending],
        )  # fmt: skip
        return Start(incarnation, meta, position, trained, outbox)

    def export(self, trainer: Trainer) -> Path:
        """Replace ``FOLDER/model`` by the trainer's model.

        Raises:
            StoreError: the disk refused.
        """
        target, incoming = self.folder / "model", self.folder / "model.new"
        with store_errors("export", target):
            shutil.rmtree(incoming, ignore_errors=True)
            trainer.export(incoming)
            if target.exists():
                shutil.rmtree(target)
            os.replace(incoming, target)
            fsync_dir(self.folder)
        return target
