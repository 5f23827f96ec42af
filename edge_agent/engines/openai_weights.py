"""The weights in a vLLM server that the user runs, through its own routes for RL.

What always holds: the server was started with farflow's extension, so a change is what it is in
``vllm_policy``: worked out here, handed over in a file that both sides see, staged beside the
running model, written between two steps. Versions carry a name that no other agent and no other
life of the server has, so tokens that anything else drew are told from ours. After a failure that
may have left the weights of no version the server stays paused until they are written anew.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from edge_agent.engines.openai_wire import MALFORMED, Address, ServerAway, ServerBusy
from edge_agent.engines.vllm_map import TensorForm
from edge_agent.engines.vllm_weights import (
    TEXT_CALL,
    WorkerWeights,
    staged_fault,
    text_answers,
    text_question,
)
from transport.errors import (
    EngineCrashed,
    EngineError,
    GenerationFailed,
    ModelError,
    WeightApplyFailed,
)
from transport.runtime.clock import Clock
from transport.weights.patch import Patch

T = TypeVar("T")

EXTENSION: Final = "edge_agent.engines.openai_worker.FarflowServerExtension"
_STAGED_S: Final = (0.005, 0.1)
"""Between two looks at whether weights are staged: at first, and at most."""
_HOW: Final = (
    "start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and"
    f" --worker-extension-cls {EXTENSION}"
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
    """End a pause that an earlier life of an agent may have left. Blocks.

    Raises:
        ModelError: the server has no such routes; says how to start it.
        ServerAway, ServerBusy: try again.
    """
    try:
        address.call("POST", "/resume", within_s=within_s)
    except ServerBusy:
        raise
    except GenerationFailed as error:
        raise ModelError(f"{error}; {_HOW}") from error


class ServerWeights:
    """Weights of the policy ``name`` in the server at ``address``; ``cells`` reads them. Methods
    block, ``within_s`` bounds each wait for the server; ``life`` names this agent's life in the
    versions.

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
        self._life = life
        self._within_s = within_s
        self._clock = clock
        self._label = ""
        self.cells = WorkerWeights(name, *tensors, self._ask, place=place)
        try:
            self.cells.record()
        except ServerAway:
            self.close()
            raise
        except EngineError as error:
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
        self.cells.close()

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
        if self._label and self._now() != self._label:
            raise EngineCrashed(f"{where}: the server was started anew, or others write to it, too")
        with self.cells.change(version, patch) as (path, entries):
            self._stage(where, path, entries)
            return self._commit(where, version, paused)

    def _stage(self, where: str, path: str, entries: list[list[dict[str, Any]]]) -> None:
        try:
            self._ask("stage", path, entries)
            if problem := self._staged():
                self._ask("drop")
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
            self._ask("commit")
            self._post("/update_weight_version", {"new_version": label})
            self._label = label
            paused()
            self._post("/resume")
        except EngineError as error:
            raise EngineCrashed(f"{where} may be half written: {error}") from error
        return self._clock.monotonic_s() - began_s

    def _now(self) -> str | None:
        data = self._address.call("GET", "/weight_info", within_s=self._within_s)
        return _read(data, _Label).weight_version

    def _staged(self) -> str:
        """Wait until all workers have staged; returns what went wrong."""
        pause_s, longest_s = _STAGED_S
        ends_s = self._clock.monotonic_s() + self._within_s
        while True:
            problem = staged_fault(self._ask("staged"))
            if problem is not None:
                return problem
            if self._clock.monotonic_s() > ends_s:
                raise ServerAway(f"staging takes over {self._within_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _post(self, path: str, body: Any = None) -> bytes:
        return self._address.call("POST", path, body, within_s=self._within_s)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """What all workers answer."""
        body = {"method": TEXT_CALL, "args": [text_question(name, *arguments)]}
        return text_answers(_read(self._post("/collective_rpc", body), _Results).results)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise GenerationFailed(f"the server's answer is malformed: {error}") from error
