"""Hugging Face model folders: which files a model consists of, and in what form we write one.

What always holds: tensors are found through ``model.safetensors`` or the shard index, where there
is neither through ``adapter_model.safetensors``, and nothing else; file names taken from an index
stay inside the folder; artefacts are files of known names that describe a model or tokenizer as
data (never program text). The names of an adapter's tensors say that they are one, so whoever
writes weights need not.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from transport.errors import FarflowError, IntegrityError, ModelError, StoreError
from transport.weights.blobs import disk_errors, link_or_copy, sync_folder, write_durably
from transport.weights.manifest import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    BASE_NAME,
    INDEX_NAME,
    MAX_ARTEFACT_BYTES,
    FileEntry,
    is_artefact_name,
)
from transport.weights.tensors import Buffer, TensorBytes, read_safetensors, safetensors_parts

SINGLE_NAME = "model.safetensors"
SHARD_BYTES = 4 << 30
MAX_INDEX_BYTES = 64 << 20
_ADAPTER_TENSOR = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight")

UNFINISHED = ".farflow-unfinished-"
"""Names of model folders that are being written begin so, beside where they will be."""

_FORMAT = {"format": "pt"}  # transformers refuses files without it
_OF_ADAPTERS = (ADAPTER_CONFIG_NAME, BASE_NAME)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def shard_names(folder: Path) -> list[str]:
    """Names of the folder's safetensors files, sorted.

    Raises:
        ModelError: no weights, or an index that is malformed or points outside.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        for name in (SINGLE_NAME, ADAPTER_NAME):
            if (folder / name).is_file():
                return [name]
        raise ModelError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ModelError(f"{index}: more than {MAX_INDEX_BYTES} bytes")
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ModelError(f"{index}: {error}") from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is not the name of a safetensors file beside it")
    return names


def is_adapter_folder(folder: Path) -> bool:
    """Whether its weights are an adapter's, which say nothing without the model below them."""
    weights = (INDEX_NAME, SINGLE_NAME)
    there = (folder / ADAPTER_NAME).is_file()
    return there and not any((folder / name).is_file() for name in weights)


def is_adapter_state(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a LoRA adapter, as peft calls its parts."""
    found = list(names)
    return bool(found) and all(_ADAPTER_TENSOR.fullmatch(name) for name in found)


def read_model_folder(folder: Path, *, mapped: bool = False) -> dict[str, TensorBytes]:
    """All tensors of a model folder, canonical order. ``mapped`` as in ``file_bytes``.

    Raises:
        ModelError: names the file and what is wrong with it.
    """
    tensors: dict[str, TensorBytes] = {}
    for name in shard_names(folder):
        try:
            shard = read_safetensors(folder / name, mapped=mapped)
        except (OSError, FarflowError) as error:
            raise ModelError(f"{folder / name}: {error}") from error
        twice = tensors.keys() & shard.keys()
        if twice:
            raise ModelError(f"{folder / name}: {min(twice)!r} is in another shard too")
        tensors.update(shard)
    return dict(sorted(tensors.items()))


def read_artefacts(folder: Path) -> dict[str, bytes]:
    """Configuration, tokenizer and chat template files of a model folder, sorted by name. What
    describes an adapter counts in an adapter's folder only.

    Raises:
        ModelError: a file is over the size limit or cannot be read.
    """
    artefacts: dict[str, bytes] = {}
    foreign = () if is_adapter_folder(folder) else _OF_ADAPTERS
    try:
        for path in sorted(folder.iterdir()):
            if not is_artefact_name(path.name) or path.name in foreign or not path.is_file():
                continue
            if path.stat().st_size > MAX_ARTEFACT_BYTES:
                raise ModelError(f"{path}: more than {MAX_ARTEFACT_BYTES} bytes")
            artefacts[path.name] = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{folder}: {error}") from error
    return artefacts


def check_artefacts(folder: Path, entries: Iterable[FileEntry]) -> dict[str, bytes]:
    """The artefacts that ``entries`` name, out of a folder that must have exactly these.

    Raises:
        IntegrityError: one is missing or another; names it.
        ModelError: as ``read_artefacts``.
    """
    found = read_artefacts(folder)
    chosen: dict[str, bytes] = {}
    for entry in entries:
        data = found.get(entry.name)
        if data is None or hashlib.sha256(data).hexdigest() != entry.digest:
            raise IntegrityError(f"{folder / entry.name} is missing or not the published one")
        chosen[entry.name] = data
    return chosen


def snapshot_files(
    tensors: Mapping[str, TensorBytes], *, shard_bytes: int = SHARD_BYTES
) -> dict[str, list[Buffer]]:
    """Files of a snapshot by name, each as pieces to be written one after the other.

    One ``model.safetensors``, or shards of about ``shard_bytes`` and an index; of an adapter one
    ``adapter_model.safetensors``. Equal tensors give equal files. Pieces are views of the tensors.
    """
    if is_adapter_state(tensors):
        return {ADAPTER_NAME: list(safetensors_parts(dict(sorted(tensors.items())), _FORMAT))}
    shards: list[dict[str, TensorBytes]] = [{}]
    filled = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if shards[-1] and filled + tensor.size_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.size_bytes
    if len(shards) == 1:
        return {SINGLE_NAME: list(safetensors_parts(shards[0], _FORMAT))}
    files: dict[str, list[Buffer]] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[file_name] = list(safetensors_parts(shard, _FORMAT))
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.size_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files[INDEX_NAME] = [msgspec.json.encode(index)]
    return files


def write_model_folder(
    folder: Path, tensors: Mapping[str, TensorBytes], artefacts: Mapping[str, Buffer]
) -> None:
    """Write a new Hugging Face model folder in one step: it is complete or not there.

    Raises:
        StoreError: it exists already, or the disk refused.
    """
    with _new_folder(folder) as temporary:
        for name, data in artefacts.items():
            write_durably(temporary / name, (data,))
        for name, parts in snapshot_files(tensors).items():
            write_durably(temporary / name, parts)


def link_model_folder(folder: Path, sources: Mapping[str, Path]) -> None:
    """The same out of durable files that nobody writes: second names, no copies.

    Raises:
        StoreError: it exists already, or the disk refused.
    """
    with _new_folder(folder) as temporary:
        for name, source in sources.items():
            link_or_copy(source, temporary / name)
        sync_folder(temporary)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    if os.path.lexists(folder):
        raise StoreError(f"{folder} exists; give a new folder or remove it")
    with disk_errors(f"writing {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A folder inside it, as it is for us alone, and the model for whom the umask lets in.
        beside = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
        try:
            temporary = beside / "model"
            temporary.mkdir()
            yield temporary
            os.replace(temporary, folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def remove_unfinished(parent: Path) -> None:
    """Remove what a crash left of new model folders in a folder that is ours alone.

    Raises:
        StoreError: the disk refused.
    """
    with disk_errors(f"cleaning {parent}"):
        for path in parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)


def full_bytes_of(tensors: Mapping[str, TensorBytes]) -> int:
    """Size of all tensors."""
    return sum(tensor.size_bytes for tensor in tensors.values())
