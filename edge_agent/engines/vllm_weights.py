"""The weights of a policy in the workers of a vLLM, whoever runs it: calls, changes, reading back.

What always holds: what a worker is asked is ``farflow_call`` of ``vllm_worker``, which answers what
went wrong instead of raising; what is written is worked out here, from the published bits and the
map that the workers recorded; what is read comes back in the published type, and cells that are
not what the version makes of them come back as others.
"""

import contextlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import msgspec
import numpy as np

from edge_agent.engine import Positions, inside
from edge_agent.engines.vllm_exchange import Exchange
from edge_agent.engines.vllm_map import (
    TensorForm,
    WorkerMap,
    check_maps,
    exactly,
    kept_type,
    published_cells,
    writes,
)
from transport.errors import EngineError, StoreError, WeightApplyFailed
from transport.weights.patch import Patch
from transport.weights.tensors import ITEM_BYTES, Cells, TensorBytes

CALL: Final = "farflow_call"
TEXT_CALL: Final = "farflow_text_call"
"""The same for servers, in Base64."""

Ask = Callable[..., list[Any]]
"""A call by its name and arguments on all workers; their answers. Blocks."""


class WorkerFault(EngineError):
    """A worker could not do what it was asked; it says why."""

    code: ClassVar[str] = "engine.worker"


class _Answer(msgspec.Struct, array_like=True):
    fault: str
    value: Any


def question(name: str, *arguments: Any) -> bytes:
    """The argument of ``CALL``."""
    return msgspec.msgpack.encode((name, arguments))


def answers(found: Sequence[bytes]) -> list[Any]:
    """What each worker answered.

    Raises:
        WorkerFault: one of them could not.
        EngineError: an answer is malformed.
    """
    try:
        decoded = [msgspec.msgpack.decode(one, type=_Answer) for one in found]
    except (msgspec.DecodeError, TypeError) as error:
        raise EngineError(f"a worker's answer is malformed: {error}") from error
    if faults := {one.fault for one in decoded if one.fault}:
        raise WorkerFault("; ".join(sorted(faults)))
    return [one.value for one in decoded]


def text_question(name: str, *arguments: Any) -> str:
    """The argument of ``TEXT_CALL``."""
    return b64encode(question(name, *arguments)).decode()


def text_answers(found: Sequence[Any]) -> list[Any]:
    """As ``answers``, out of text."""
    try:
        decoded = [b64decode(one, validate=True) for one in found]
    except (TypeError, ValueError) as error:
        raise EngineError(f"a worker's answer is malformed: {error}") from error
    return answers(decoded)


def staged_fault(found: Sequence[tuple[bool, str]]) -> str | None:
    """What ``staged`` says of all workers: None while one is at it, then what went wrong."""
    if not all(over for over, _ in found):
        return None
    return "; ".join(problem for _, problem in found if problem)


class Bits(Protocol):
    """What of the published cells is in vLLM."""

    def record(self, ask: Ask, tensors: Sequence[Any]) -> list[Any]:
        """Let the workers record where the tensors lie."""
        ...

    def check(self, forms: Mapping[str, TensorForm], maps: Sequence[WorkerMap]) -> None:
        """Raises ModelError when vLLM has no place for a tensor."""
        ...

    def stored(self, name: str, cells: Cells, form: TensorForm, kept: str) -> Cells:
        """Bit patterns in the type ``kept``; raises IntegrityError when that cannot hold them."""
        ...

    def published(
        self, name: str, cells: Cells, form: TensorForm, kept: str, at: Positions | None
    ) -> Cells:
        """The published bit patterns of ``cells``, which are those at ``at``, or all."""
        ...

    def written(self, patch: Patch) -> None:
        """A patch is in use."""
        ...


class ModelBits:
    """Of a whole model: the very bits, in a type that holds them."""

    def record(self, ask: Ask, tensors: Sequence[Any]) -> list[Any]:
        return ask("record", tensors)

    def check(self, forms: Mapping[str, TensorForm], maps: Sequence[WorkerMap]) -> None:
        check_maps(forms, maps)

    def stored(self, name: str, cells: Cells, form: TensorForm, kept: str) -> Cells:
        return exactly(name, cells, form, kept)

    def published(
        self, name: str, cells: Cells, form: TensorForm, kept: str, at: Positions | None
    ) -> Cells:
        return published_cells(cells, form.dtype, kept)

    def written(self, patch: Patch) -> None:
        """Nothing to keep: the bits are in vLLM."""


class WorkerWeights:
    """Weights of the policy ``name``: tensors of these forms and shapes, in canonical order, which
    travel through files in ``place`` (None: memory).

    Raises:
        StoreError: there is no place for files.
    """

    def __init__(
        self,
        name: str,
        forms: Mapping[str, TensorForm],
        shapes: Mapping[str, tuple[int, ...]],
        ask: Ask,
        *,
        bits: Bits | None = None,
        place: Path | None = None,
    ) -> None:
        self._name = name
        self._forms = forms
        self._shapes = shapes
        self._ask = ask
        self._bits = bits or ModelBits()
        self._maps: list[WorkerMap] = []
        self._exchange = Exchange(place)

    def close(self) -> None:
        """Remove the folder of files."""
        self._exchange.close()

    @property
    def workers(self) -> int:
        """How many there are, once ``record`` has asked them."""
        return len(self._maps)

    def record(self) -> None:
        """Find out where in the workers everything lies. Blocks.

        Raises:
            ModelError: vLLM has no place for a tensor, or does more than copy it.
            EngineError: a worker could not, or answers what is no map.
        """
        tensors = [[name, form.dtype, self._shapes[name]] for name, form in self._forms.items()]
        try:
            found = self._bits.record(self._ask, tensors)
            self._maps = [msgspec.convert(one, WorkerMap) for one in found]
        except msgspec.ValidationError as error:
            raise EngineError(f"{self._name}: a worker's map is malformed: {error}") from error
        self._bits.check(self._forms, self._maps)

    @contextlib.contextmanager
    def change(
        self, version: int, patch: Patch
    ) -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
        """A file with what the workers are to write, and the entries about it. What is done with
        them within the context has put the patch in use when it ends.

        Raises:
            WeightApplyFailed: the patch does not fit, or there is no room for a file.
        """
        where = f"{self._name} version {version}"
        of_ranks = [
            writes(found, self._forms, patch, where, self._bits.stored) for found in self._maps
        ]
        try:
            with self._exchange.writes(of_ranks) as written:
                yield written
        except StoreError as error:
            raise WeightApplyFailed(f"{where}: {error}") from error
        self._bits.written(patch)

    def read_weights(self) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``. Blocks."""
        for name, form in self._forms.items():
            with self._exchange.room(name, form, self._maps) as (path, boxes, room):
                if form.cells:
                    asked = [[msgspec.to_builtins(box) for box in each] for each in boxes]
                    self._ask("read", path, asked)
                cells = room.cells()
            kept = kept_type(name, form, self._maps)
            shown = self._bits.published(name, cells, form, kept, None)
            data = np.ascontiguousarray(shown).view(np.uint8).data.toreadonly()
            yield name, TensorBytes(form.dtype, self._shapes[name], data)

    def read_cells(self, name: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``. Blocks."""
        form = self._forms.get(name)
        if form is None or not inside(positions, form.cells):
            raise WeightApplyFailed(f"{self._name}: no such cells of a tensor {name!r}")
        kept = kept_type(name, form, self._maps)
        cells = np.zeros(positions.size, f"<u{ITEM_BYTES[kept]}")
        places = [
            [(box.storage, *box.targets(positions)) for box in found.boxes.get(name, ())]
            for found in self._maps
        ]
        asked = [[(storage, at.tobytes()) for storage, _, at in each] for each in places]
        for each, answer in zip(places, self._ask("read_cells", asked), strict=True):
            for (_, chosen, _), data in zip(each, answer, strict=True):
                cells[chosen] = np.frombuffer(data, cells.dtype)
        return self._bits.published(name, cells, form, kept, positions)
