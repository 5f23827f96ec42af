"""Checkpoints of a trainer: exact state, and the jobs that its lineage was trained on.

    FOLDER/checkpoints/step-00000040/state.safetensors   the trainer's arrays
    FOLDER/checkpoints/step-00000040/checkpoint.msgpack  SHA-256 (32 bytes), ``CheckpointMeta``
    FOLDER/checkpoints/step-00000040.incomplete/         being written, or never committed
    FOLDER/checkpoints/step-00000040.damaged/            did not verify; kept to be looked at
    FOLDER/lineage/00000040-DIGEST.msgpack               ``LineageSegment``

What always holds: a checkpoint has its name only after everything in it is durable, so it is whole
or not there; what is loaded was verified against its digests; no pickle is read or written.

The lineage is a chain of segments that are written once: each holds the jobs of the steps since
the checkpoint before and the name of that one's segment, and a checkpoint names the newest. So a
checkpoint costs the same at step 100 000 as at step 100, two lineages share their common past, and
a name, which holds a digest of the contents, vouches for the whole chain behind it.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog

from cloud_trainer.core.effects import LineageStep
from cloud_trainer.trainer import Arrays
from transport.errors import ChecksumMismatch, IntegrityError, TruncatedBlob
from transport.runtime.files import atomic_write, fsync_dir, store_errors
from transport.weights.tensors import TensorBytes, read_safetensors, safetensors_parts

FORMAT = 1

_STATE, _META = "state.safetensors", "checkpoint.msgpack"
_INCOMPLETE, _DAMAGED = ".incomplete", ".damaged"
_DIGEST_BYTES = 32
_NAME_DIGITS = 32
_HASH_BYTES = 1 << 22
_MAX_META_BYTES = 64 << 20

_DTYPES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16",
    "float16": "F16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip
_NUMPY = {name: np.dtype(dtype).newbyteorder("<") for dtype, name in _DTYPES.items()}

_log = structlog.get_logger()

T = TypeVar("T")


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint but its arrays. ``spec_digest`` tells one training effort from another;
    ``lineage`` names the newest segment."""

    format: int
    run: str
    policy: str
    step: int
    version: int
    spec_digest: str
    build: str
    trainer: dict[str, Any]
    state_bytes: int
    state_digest: str
    lineage: str


class LineageSegment(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by step since the checkpoint before, whose segment is ``previous``."""

    format: int
    previous: str | None
    steps: tuple[LineageStep, ...]


class CheckpointFolder:
    """The checkpoints of one trainer. Blocks; one call at a time."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Raises StoreError when the folder cannot be used."""
        self._keep = keep
        self._checkpoints = folder / "checkpoints"
        self._lineage = folder / "lineage"
        for path in (self._checkpoints, self._lineage):
            with store_errors("create", path):
                path.mkdir(parents=True, exist_ok=True)

    # ---- writing ---------------------------------------------------------------------------

    def write(
        self,
        arrays: Arrays,
        trainer: dict[str, Any],
        *,
        run: str,
        policy: str,
        step: int,
        version: int,
        spec_digest: str,
        build: str,
        trained: Sequence[LineageStep],
        previous: CheckpointMeta | None,
    ) -> CheckpointMeta:
        """Write a checkpoint durably, without making it count. ``trained`` are the steps since
        ``previous``.

        Raises:
            StoreError: the disk refused.
        """
        segment = LineageSegment(
            format=FORMAT,
            previous=None if previous is None else previous.lineage,
            steps=tuple(trained),
        )
        folder = self._path(step, _INCOMPLETE)
        with store_errors("write", folder):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            state_bytes, state_digest = _write_state(folder / _STATE, arrays)
        meta = CheckpointMeta(
            format=FORMAT,
            run=run,
            policy=policy,
            step=step,
            version=version,
            spec_digest=spec_digest,
            build=build,
            trainer=trainer,
            state_bytes=state_bytes,
            state_digest=state_digest,
            lineage=self._write_segment(step, segment),
        )
        data = msgspec.msgpack.encode(meta)
        atomic_write(folder / _META, hashlib.sha256(data).digest() + data)
        return meta

    def commit(self, step: int) -> None:
        """Make a written checkpoint count, and drop what is older than ``keep`` of them.

        Raises:
            StoreError: the disk refused.
        """
        source, target = self._path(step, _INCOMPLETE), self._path(step)
        with store_errors("commit", target):
            if target.exists():  # of a lineage that was given up
                shutil.rmtree(target)
            os.replace(source, target)
            fsync_dir(self._checkpoints)
            for old in self._steps()[self._keep :]:
                shutil.rmtree(self._path(old))

    def _write_segment(self, step: int, segment: LineageSegment) -> str:
        data = msgspec.msgpack.encode(segment)
        name = f"{step:08d}-{hashlib.sha256(data).hexdigest()[:_NAME_DIGITS]}"
        atomic_write(self._segment_path(name), data)
        return name

    # ---- reading ---------------------------------------------------------------------------

    def latest(self) -> CheckpointMeta | None:
        """The newest checkpoint that verifies; others are set aside with a warning. Also clears
        what a crash left half written.

        Raises:
            StoreError: the folder cannot be read or cleaned.
        """
        with store_errors("clean", self._checkpoints):
            for path in sorted(self._checkpoints.glob(f"*{_INCOMPLETE}")):
                shutil.rmtree(path)
        for step in self._steps():
            try:
                meta = self._verified(step)
                for _ in self._segments(meta):
                    pass
            except IntegrityError as error:
                _log.warning("checkpoint.damaged", step=step, reason=str(error))
                self._set_aside(step)
                continue
            self._sweep_segments()
            return meta
        return None

    def newest(self) -> CheckpointMeta | None:
        """The newest checkpoint, verified; changes nothing. Raises ``IntegrityError``."""
        steps = self._steps()
        return self._verified(steps[0]) if steps else None

    def load_arrays(self, meta: CheckpointMeta) -> Arrays:
        """The arrays of a checkpoint, as copies that may be changed.

        Raises:
            IntegrityError: they are not those of ``meta``.
            StoreError: they cannot be read.
        """
        path = self._path(meta.step) / _STATE
        _check_state(path, meta)
        with store_errors("read", path):
            tensors = read_safetensors(path, mapped=True)
        arrays: Arrays = {}
        for name, tensor in tensors.items():
            flat = np.frombuffer(tensor.data, dtype=_NUMPY[tensor.dtype])
            arrays[name] = flat.reshape(tensor.shape).copy()
        return arrays

    def lineage(self, meta: CheckpointMeta) -> list[LineageStep]:
        """Every step of a checkpoint's lineage, from the first.

        Raises:
            IntegrityError: a segment is missing or damaged.
        """
        steps: list[LineageStep] = []
        for segment in self._segments(meta):
            steps.extend(reversed(segment.steps))
        return steps[::-1]

    def _segments(self, meta: CheckpointMeta) -> Iterable[LineageSegment]:
        """From the newest to the first."""
        name: str | None = meta.lineage
        while name is not None:
            path = self._segment_path(name)
            data = _read(path)
            if hashlib.sha256(data).hexdigest()[:_NAME_DIGITS] != name.rpartition("-")[2]:
                raise ChecksumMismatch(f"{path}: contents are not those of its name")
            segment = _decode(path, data, LineageSegment)
            yield segment
            name = segment.previous

    def _verified(self, step: int) -> CheckpointMeta:
        meta = self._meta(step)
        _check_state(self._path(step) / _STATE, meta)
        return meta

    def _meta(self, step: int) -> CheckpointMeta:
        path = self._path(step) / _META
        data = _read(path)
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            raise ChecksumMismatch(f"{path}: SHA-256 differs")
        meta = _decode(path, body, CheckpointMeta)
        if meta.format != FORMAT or meta.step != step:
            raise IntegrityError(f"{path}: is of format {meta.format} and step {meta.step}")
        return meta

    # ---- folders ---------------------------------------------------------------------------

    def _path(self, step: int, suffix: str = "") -> Path:
        return self._checkpoints / f"step-{step:08d}{suffix}"

    def _segment_path(self, name: str) -> Path:
        if not name.replace("-", "").isalnum():
            raise IntegrityError(f"{name!r} is no name of a lineage segment")
        return self._lineage / f"{name}.msgpack"

    def _steps(self) -> list[int]:
        """Committed steps, newest first."""
        with store_errors("list", self._checkpoints):
            names = [path.name for path in self._checkpoints.iterdir()]
        numbers = [name.removeprefix("step-") for name in names if name.startswith("step-")]
        return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)

    def _set_aside(self, step: int) -> None:
        target = self._path(step, _DAMAGED)
        with store_errors("set aside", self._path(step)):
            if target.exists():
                shutil.rmtree(target)
            os.replace(self._path(step), target)

    def _sweep_segments(self) -> None:
        """Remove segments of lineages that no checkpoint continues."""
        keep: set[str] = set()
        for step in self._steps():
            try:
                meta = self._meta(step)
                keep.add(meta.lineage)
                for segment in self._segments(meta):
                    if segment.previous in keep:
                        break
                    if segment.previous is not None:
                        keep.add(segment.previous)
            except IntegrityError:
                return  # it is looked at when its turn comes; until then nothing is removed
        with store_errors("sweep", self._lineage):
            for path in sorted(self._lineage.glob("*.msgpack")):
                if path.stem not in keep:
                    path.unlink()


def lineage_ids(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Step and job ids of every step that the newest checkpoint in a trainer's folder descends
    from, first step first; empty without a checkpoint. For audits: changes nothing.

    Raises:
        IntegrityError: the newest checkpoint or its lineage is damaged.
    """
    if not (folder / "lineage").is_dir():
        return []
    checkpoints = CheckpointFolder(folder, keep=1)
    meta = checkpoints.newest()
    return [] if meta is None else [(e.step, e.jobs) for e in checkpoints.lineage(meta)]


def _write_state(path: Path, arrays: Arrays) -> tuple[int, str]:
    """Size and SHA-256 of the safetensors file that now holds ``arrays``, durably."""
    tensors: dict[str, TensorBytes] = {}
    for name, array in arrays.items():
        dtype = _DTYPES.get(array.dtype.name)
        if dtype is None:
            raise IntegrityError(f"array {name!r} is {array.dtype}; a checkpoint cannot hold that")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        data = little.reshape(-1).view(np.uint8).data if little.size else b""
        tensors[name] = TensorBytes(dtype, array.shape, data)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in safetensors_parts(tensors):
            digest.update(part)
            size += len(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _check_state(path: Path, meta: CheckpointMeta) -> None:
    with store_errors("read", path):
        if not path.is_file():
            raise TruncatedBlob(f"{path}: is missing")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != meta.state_bytes:
                raise TruncatedBlob(f"{path}: has {size} of {meta.state_bytes} bytes")
            digest = hashlib.sha256()
            while part := file.read(_HASH_BYTES):
                digest.update(part)
    if digest.hexdigest() != meta.state_digest:
        raise ChecksumMismatch(f"{path}: SHA-256 differs")


def _read(path: Path) -> bytes:
    with store_errors("read", path):
        if not path.is_file():
            raise TruncatedBlob(f"{path}: is missing")
        if path.stat().st_size > _MAX_META_BYTES:
            raise IntegrityError(f"{path}: larger than {_MAX_META_BYTES} bytes")
        return path.read_bytes()


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{path}: malformed: {error}") from error
