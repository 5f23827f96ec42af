"""The weights in a vLLM server that the user runs, through its own routes for RL.

What always holds: the server was started with farflow's backend and extension, so a change is what
it is in ``vllm_policy``: worked out here, handed over in a file that both sides see, staged beside
the running model, written between two steps. Versions carry a name that no other agent and no
other life of the server has, so tokens that anything else drew are told from ours. After a failure
that may have left the weights of no version the server stays paused until they are written anew.
"""

import contextlib
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from edge_agent.engine import Positions, inside
from edge_agent.engines.openai_wire import Address, ServerAway, ServerBusy
from edge_agent.engines.vllm_exchange import Exchange
from edge_agent.engines.vllm_map import (
    TensorForm,
    WorkerMap,
    check_maps,
    kept_type,
    published_cells,
    writes,
)
from transport.errors import (
    EngineCrashed,
    EngineError,
    GenerationFailed,
    ModelError,
    StoreError,
    WeightApplyFailed,
)
from transport.runtime.clock import Clock
from transport.weights.patch import Patch
from transport.weights.tensors import ITEM_BYTES, Cells, TensorBytes

T = TypeVar("T")

EXTENSION: Final = "edge_agent.engines.openai_worker.FarflowServerExtension"
_STAGED_S: Final = (0.005, 0.1)
"""Between two looks at whether weights are staged: at first, and at most."""
_HOW: Final = (
    "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --weight-transfer-config"
    f' \'{{"backend": "farflow"}}\' and --worker-extension-cls {EXTENSION}'
)


class _Results(msgspec.Struct):
    results: list[Any] = []


class _Label(msgspec.Struct):
    weight_version: str | None = None


class Forms(NamedTuple):
    """Tensors as they are published: type and number of cells, and shape, in canonical order."""

    forms: dict[str, TensorForm]
    shapes: dict[str, tuple[int, ...]]


def wake(address: Address, within_s: float) -> None:
    """End what an earlier life of an agent may have left half done: an update, a pause. Blocks.

    Raises:
        ModelError: the server has no such routes; says how to start it.
        ServerAway, ServerBusy: try again.
    """
    with contextlib.suppress(GenerationFailed):  # no update is under way
        address.call("POST", "/finish_weight_update", {}, within_s=within_s)
    try:
        address.call("POST", "/resume", within_s=within_s)
    except ServerBusy:
        raise
    except GenerationFailed as error:
        raise ModelError(f"{error}; {_HOW}") from error


class ServerWeights:
    """Weights of the policy ``name`` in the server at ``address``. All methods block; ``within_s``
    bounds each wait for the server. ``life`` names this agent's life in the versions.

    Raises:
        ModelError: the server was not started for this, has another model, or does not see the
            folder that files are exchanged through.
        ServerAway: it does not answer.
        StoreError: there is no place for files.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        tensors: Forms,
        *,
        life: str,
        place: Path | None,
        within_s: float,
        clock: Clock,
    ) -> None:
        self._name = name
        self._address = address
        self._forms, self._shapes = tensors
        self._life = life
        self._within_s = within_s
        self._clock = clock
        self._label = ""
        self._exchange = Exchange(place)
        try:
            described = [
                [tensor, form.dtype, self._shapes[tensor]] for tensor, form in self._forms.items()
            ]
            found = self._rpc("farflow_json_record", described)
            self._maps = [
                msgspec.msgpack.decode(b64decode(data), type=WorkerMap) for (data,) in found
            ]
            check_maps(self._forms, self._maps)
        except ServerAway:
            self.close()
            raise
        except (EngineError, ValueError, TypeError, msgspec.DecodeError) as error:
            self.close()
            raise ModelError(
                f"{name}: the server at {address.url} takes no weights from farflow: {error};"
                f' {_HOW}, or set agent.openai.weight_updates for it to "off"'
            ) from error
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the folder of files."""
        self._exchange.close()

    def version_of(self, label: str) -> int | None:
        """The version that the server's ``label`` means, None if it is none of this life's."""
        life, _, number = label.rpartition("/")
        return int(number) if life == self._life and number.isdigit() else None

    def apply(self, version: int, patch: Patch, paused: Callable[[], None]) -> float:
        """Write the cells in ``patch``; returns the pause in seconds. ``paused`` is called while
        the new weights are there and nothing is drawn yet.

        Raises:
            WeightApplyFailed: the old weights stay in use.
            EngineCrashed: they may be of no version; what the server draws is worth nothing.
        """
        where = f"{self._name} version {version}"
        of_ranks = [writes(found, self._forms, patch, where) for found in self._maps]
        if self._label and self._now() != self._label:
            raise EngineCrashed(f"{where}: the server was started anew, or others write to it, too")
        try:
            with self._exchange.writes(of_ranks) as (path, entries):
                self._stage(where, path, entries)
                return self._commit(where, version, paused)
        except StoreError as error:
            raise WeightApplyFailed(f"{where}: {error}") from error

    def _stage(self, where: str, path: str, entries: list[list[dict[str, Any]]]) -> None:
        try:
            self._post("/start_weight_update")
            self._update({"do": "stage", "path": path, "entries": entries})
            problem = self._staged()
            if problem:
                self._update({"do": "drop"})
                self._post("/finish_weight_update", {"weight_version": self._label or None})
        except EngineError as error:
            raise EngineCrashed(f"{where}: {error}") from error
        if problem:
            raise WeightApplyFailed(
                f"{where}: {problem}; the server must see {Path(path).parent.parent} as the agent"
                " does, or another folder, named in agent.openai.exchange_folder"
            )

    def _commit(self, where: str, version: int, paused: Callable[[], None]) -> float:
        label = f"{self._life}/{version}"
        began_s = self._clock.monotonic_s()
        try:
            self._post("/pause?mode=keep")
            self._update({"do": "commit"})
            self._post("/finish_weight_update", {"weight_version": label})
            self._label = label
            paused()
            self._post("/resume")
        except EngineError as error:
            raise EngineCrashed(f"{where} may be half written: {error}") from error
        return self._clock.monotonic_s() - began_s

    def read_weights(self) -> Iterator[tuple[str, TensorBytes]]:
        """See ``Engine.read_weights``."""
        for name, form in self._forms.items():
            with self._exchange.room(name, form, self._maps) as (path, boxes, room):
                if form.cells:
                    asked = [[msgspec.to_builtins(box) for box in each] for each in boxes]
                    self._rpc("farflow_read", path, asked)
                cells = room.cells()
            data = cells.view(np.uint8).data.toreadonly()
            yield name, TensorBytes(form.dtype, self._shapes[name], data)

    def read_cells(self, name: str, positions: Positions) -> Cells:
        """See ``Engine.read_cells``."""
        form = self._forms.get(name)
        if form is None or not inside(positions, form.cells):
            raise WeightApplyFailed(f"{self._name}: no such cells of a tensor {name!r}")
        kept = kept_type(name, self._maps)
        cells = np.zeros(positions.size, f"<u{ITEM_BYTES[kept]}")
        places = [
            [(box.storage, *box.targets(positions)) for box in found.boxes.get(name, ())]
            for found in self._maps
        ]
        asked = [
            [(storage, b64encode(at.tobytes()).decode()) for storage, _, at in rank]
            for rank in places
        ]
        answers = self._rpc("farflow_json_read_cells", asked)
        for rank, answer in zip(places, answers, strict=True):
            for (_, chosen, _), data in zip(rank, answer, strict=True):
                cells[chosen] = np.frombuffer(b64decode(data), cells.dtype)
        return published_cells(cells, form.dtype, kept)

    def _now(self) -> str | None:
        data = self._address.call("GET", "/weight_info", within_s=self._within_s)
        return _read(data, _Label).weight_version

    def _staged(self) -> str:
        """Wait until all workers have staged; returns what went wrong."""
        pause_s, longest_s = _STAGED_S
        ends_s = self._clock.monotonic_s() + self._within_s
        while True:
            found = self._rpc("farflow_json_staged")
            if all(over for over, _ in found):
                return "; ".join(problem for _, problem in found if problem)
            if self._clock.monotonic_s() > ends_s:
                raise ServerAway(f"staging takes over {self._within_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _update(self, info: Mapping[str, Any]) -> None:
        self._post("/update_weights", {"update_info": info})

    def _post(self, path: str, body: Any = None) -> bytes:
        return self._address.call("POST", path, body, within_s=self._within_s)

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """What all workers answer."""
        data = self._post("/collective_rpc", {"method": method, "args": arguments})
        return _read(data, _Results).results


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise GenerationFailed(f"the server's answer is malformed: {error}") from error
