"""In a worker of vLLM: where the loader puts weights, and writing them there.

What always holds: recording runs the model's own loader over tensors without content and lets
nothing of it be written; everything that can fail about a change happens while it is staged, in a
thread of its own, so decoding goes on; what is committed is written as bits, and put back as it was
when a write fails half-way; a file of values is of the agent's, and only read.

Values travel in a file beside a list of entries that say where in it they are: raw cells of the
storage's item size, and positions as 8-byte integers, each aligned to 64 bytes.
"""

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_agent.engines.vllm_map import Box, Storage, WorkerMap, box

_TYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES: Final = {of: name for name, of in _TYPES.items()}
_BITS: Final = {2: torch.int16, 4: torch.int32}
UNDO_BYTES: Final = 1 << 30
"""Former values are kept while they are less than this: a replaced model would need its size."""

Loader = Callable[[Mapping[str, torch.Tensor]], Any]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes note of copies out of ``probes`` and lets nothing be changed that was there before."""

    def __init__(self, probes: Mapping[str, torch.Tensor], homes: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_address(probe): name for name, probe in probes.items() if probe.numel()}
        self._homes = homes
        self._made: set[int] = set()
        self._keep: list[torch.Tensor] = []
        self.boxes: dict[str, list[Box]] = {}
        self.strange: dict[str, str] = {}
        self.filled: Counter[int] = Counter()  # cells of each home that the loader has values for

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target: Any = args[0] if args else None
        changes = func._schema.is_mutable and isinstance(target, torch.Tensor)
        if not changes or _address(target) in self._made:
            result = func(*args, **kwargs)
            self._follow(func, args, result)
            return result
        source = args[1] if len(args) > 1 else None
        if func is torch.ops.aten.copy_.default and isinstance(source, torch.Tensor):
            self._copied(target, source)
        elif isinstance(source, torch.Tensor) and _address(source) in self._names:
            self._note(self._names[_address(source)], f"{func} of it")
        elif _address(target) in self._homes:
            self.filled[self._homes[_address(target)]] += target.numel()
        return target  # nothing is written: what is there stays

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(_address(source))
        home = self._homes.get(_address(target))
        if name is None:
            if home is not None:
                self.filled[home] += target.numel()
            return
        found = None
        if home is not None and target.shape == source.shape and target.numel():
            found = box(
                home,
                tuple(source.shape),
                int(source.storage_offset()),
                source.stride(),
                int(target.storage_offset()),
                target.stride(),
            )
        if found is None or name in self.strange:
            self._note(name, "a copy to what is no parameter, or of another shape")
        else:
            self.boxes.setdefault(name, []).append(found)

    def _follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """What is computed from a probe is no part of it any more: no map leads there."""
        results = result if isinstance(result, list | tuple) else (result,)
        for made in results:
            if not isinstance(made, torch.Tensor) or made.is_meta:
                continue
            address = _address(made)
            if address in self._names or address in self._homes:
                continue  # a view
            self._made.add(address)
            self._keep.append(made)  # so that its address is not used again
            for arg in args:
                if isinstance(arg, torch.Tensor) and _address(arg) in self._names:
                    self._note(self._names[_address(arg)], f"{func} of it")

    def _note(self, name: str, what: str) -> None:
        self.strange.setdefault(name, what)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(slots=True)
class _Entry:
    """A staged write: into ``cells``, at ``index`` (a slice, or positions); or, when that is None,
    into the strided view ``cells`` as a whole."""

    cells: torch.Tensor
    index: slice | torch.Tensor | None
    values: torch.Tensor
    before: torch.Tensor | None = None

    def write(self, values: torch.Tensor) -> None:
        if self.index is None:
            self.cells.copy_(values)
        elif isinstance(self.index, slice):
            self.cells[self.index].copy_(values)
        else:
            self.cells.index_copy_(0, self.index, values)

    def read(self) -> torch.Tensor:
        if self.index is None:
            return self.cells.clone()
        if isinstance(self.index, slice):
            return self.cells[self.index].clone()
        return self.cells.index_select(0, self.index)


@dataclass(slots=True)
class _Stage:
    thread: threading.Thread | None = None
    entries: list[_Entry] = field(default_factory=list)
    error: str = ""


class WeightWriter:
    """Writes and reads weights in place; ``device`` is where they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[torch.Tensor] = []
        self._stage: _Stage | None = None

    # ---- map -----------------------------------------------------------------------------------

    def record(
        self,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        places: Iterable[tuple[str, torch.Tensor]],
        load: Loader,
    ) -> WorkerMap:
        """Where among the tensors ``places`` (with their names) ``load`` puts what it is given:
        tensors of these names, safetensors types and shapes."""
        homes: dict[int, int] = {}
        storages: list[Storage] = []
        self._storages = []
        for name, parameter in places:
            address = _address(parameter)
            if parameter.dtype in _NAMES and parameter.numel() and address not in homes:
                homes[address] = len(storages)
                bits = _BITS[parameter.element_size()]
                # All of the storage as a flat tensor of bit patterns.
                flat = torch.empty(0, dtype=bits, device=parameter.device)
                flat.set_(parameter.untyped_storage())
                self._storages.append(flat)
                wanted = parameter.numel() if isinstance(parameter, torch.nn.Parameter) else 0
                storages.append(Storage(name, _NAMES[parameter.dtype], flat.numel(), wanted))
        probes = {
            name: torch.empty(tuple(shape), dtype=_TYPES[dtype]) for name, dtype, shape in tensors
        }
        recorder = _Recorder(probes, homes)
        with torch.no_grad(), recorder:
            load(probes)
        boxes = {name: tuple(found) for name, found in recorder.boxes.items()}
        known = [
            msgspec.structs.replace(each, wanted=max(0, each.wanted - recorder.filled[number]))
            for number, each in enumerate(storages)
        ]
        return WorkerMap(tuple(known), boxes, recorder.strange)

    # ---- writing -------------------------------------------------------------------------------

    def stage(self, path: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Begin to read what is to be written; ``staged`` tells when that is done."""
        self.drop()
        stage = self._stage = _Stage()
        stage.thread = threading.Thread(
            target=self._read_stage, args=(stage, path, entries), name="farflow-stage", daemon=True
        )
        stage.thread.start()

    def staged(self) -> tuple[bool, str]:
        """Whether staging is over, and what went wrong."""
        stage = self._stage
        if stage is None or stage.thread is None:
            return True, "nothing is being staged"
        return not stage.thread.is_alive(), stage.error

    def drop(self) -> None:
        """Forget what is staged."""
        stage, self._stage = self._stage, None
        if stage is not None and stage.thread is not None:
            stage.thread.join()

    def commit(self) -> None:
        """Write what is staged; between two steps only.

        Raises:
            RuntimeError: nothing (sound) is staged, or a write failed; ``undone`` in its text says
                that the weights are what they were.
        """
        stage = self._stage
        over, error = self.staged()
        if stage is None or not over or error:
            raise RuntimeError(f"undone: not staged: {error or 'still being read'}")
        self._stage = None
        done: list[_Entry] = []
        with torch.inference_mode():
            try:
                for entry in stage.entries:
                    done.append(entry)
                    entry.write(entry.values)
                if self._device.type == "cuda":  # where what failed is told of later
                    torch.cuda.current_stream(self._device).synchronize()
            except Exception as failure:
                raise RuntimeError(f"{_undo(done)}: {failure}") from failure

    def _read_stage(self, stage: _Stage, path: str, entries: Sequence[Mapping[str, Any]]) -> None:
        try:
            with torch.inference_mode(), self._stream():
                data = _mapped(path)
                stage.entries = [self._entry(data, entry) for entry in entries]
                if sum(entry.values.nbytes for entry in stage.entries) <= UNDO_BYTES:
                    for entry in stage.entries:
                        entry.before = entry.read()
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:  # noqa: BLE001 - whatever it was, the agent is told
            stage.entries, stage.error = [], f"{type(error).__name__}: {error}"

    def _stream(self) -> AbstractContextManager[Any]:
        """On a GPU a stream of our own, so that copies do not wait behind the model's kernels."""
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def _entry(self, data: torch.Tensor, entry: Mapping[str, Any]) -> _Entry:
        storage = self._storages[entry["storage"]]
        values = _cells(data, entry["values"], entry["count"], storage.dtype)
        if entry["box"] is not None:
            found = Box(*entry["box"])
            view = torch.as_strided(storage, found.shape, found.target_strides, found.target)
            begin = int(values.storage_offset()) + found.source  # counted in the file
            source = torch.as_strided(values, found.shape, found.source_strides, begin)
            return _Entry(view, None, self._placed(source, dense=True))
        if entry["positions"] is None:
            start, end = entry["start"], entry["start"] + entry["count"]
            if not 0 <= start <= end <= storage.numel():
                raise ValueError(f"cells {start} to {end} of {storage.numel()}")
            large = values.nbytes > UNDO_BYTES
            return _Entry(storage, slice(start, end), self._placed(values, dense=large))
        positions = _cells(data, entry["positions"], entry["count"], torch.int64)
        if positions.numel():
            low, high = torch.aminmax(positions)
            if not 0 <= int(low) <= int(high) < storage.numel():
                raise ValueError(f"cells {int(low)} to {int(high)} of {storage.numel()}")
        return _Entry(
            storage, self._placed(positions, dense=False), self._placed(values, dense=False)
        )

    def _placed(self, tensor: torch.Tensor, *, dense: bool) -> torch.Tensor:
        """On the device, unless it is so large that the device may have no room for it twice."""
        return tensor if dense else tensor.to(self._device)

    # ---- reading -------------------------------------------------------------------------------

    def read(self, path: str, boxes: Sequence[Sequence[Any]]) -> None:
        """Put the cells of a tensor's boxes into a file that has room for all of the tensor."""
        data = _mapped(path, write=True)
        for found in (Box(*fields) for fields in boxes):
            storage = self._storages[found.storage]
            whole = data.view(storage.dtype)
            target = torch.as_strided(whole, found.shape, found.source_strides, found.source)
            view = torch.as_strided(storage, found.shape, found.target_strides, found.target)
            with torch.inference_mode():
                target.copy_(view)

    def read_cells(self, storage: int, positions: bytes) -> bytes:
        """Bit patterns of single cells; ``positions`` are 8-byte integers."""
        index = torch.frombuffer(bytearray(positions), dtype=torch.int64).to(self._device)
        with torch.inference_mode():
            cells = self._storages[storage].index_select(0, index).cpu()
        return cells.numpy().tobytes()


def _undo(done: Sequence[_Entry]) -> str:
    """Put back what was there; says whether that worked."""
    for entry in reversed(done):
        if entry.before is None:
            return "damaged"
        try:
            entry.write(entry.before)
        except Exception:  # noqa: BLE001 - it is told
            return "damaged"
    return "undone"


def _mapped(path: str, *, write: bool = False) -> torch.Tensor:
    """A file's bytes, without reading them yet."""
    with Path(path).open("r+b" if write else "rb") as file:
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)


def _cells(data: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * torch.empty(0, dtype=dtype).element_size()
    return data[start : start + size].view(dtype)
