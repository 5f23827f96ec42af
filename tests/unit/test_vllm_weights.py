"""Calls on the workers of a vLLM, as the agent makes them, and what it makes of every answer."""

import msgspec
import numpy as np
import pytest

from edge_agent.engines.vllm_map import Storage, TensorForm, WorkerMap, box
from edge_agent.engines.vllm_weights import (
    WorkerFault,
    WorkerWeights,
    answers,
    question,
    staged_fault,
    text_answers,
    text_question,
)
from transport.errors import EngineError, ModelError, WeightApplyFailed
from transport.weights.patch import CellRun

FORMS = {"none": TensorForm("BF16", 0), "w": TensorForm("BF16", 6)}
SHAPES = {"none": (0, 2), "w": (2, 3)}


class Workers:
    """Two that keep half of ``w`` each; a call that is in ``faults`` fails in the second."""

    def __init__(self):
        self.cells = [np.arange(3, dtype=np.uint16) + 0x100 * rank for rank in (1, 2)]
        self.faults = set()
        self.asked = []

    def maps(self):
        return [
            WorkerMap((Storage("p", "BF16", 3),), {"w": (box(0, (3,), start, (1,), 0, (1,)),)}, {})
            for start in (0, 3)
        ]

    def ask(self, name, *arguments):
        called, given = msgspec.msgpack.decode(question(name, *arguments))
        self.asked.append(called)
        replies = [("", self.reply(called, given, rank)) for rank in (0, 1)]
        if name in self.faults:
            replies[1] = ("ValueError: no", None)
        return answers([msgspec.msgpack.encode(reply) for reply in replies])

    def reply(self, name, given, rank):
        if name == "record":
            return self.maps()[rank]
        if name == "read_cells":
            ((_, at),) = given[0][rank]
            return [self.cells[rank][np.frombuffer(at, np.int64)].tobytes()]
        with open(given[0], "r+b") as file:
            for fields in given[1][rank]:
                file.seek(2 * fields[2])
                file.write(self.cells[rank].tobytes())
        return None


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def weights(workers):
    made = WorkerWeights("run/p", FORMS, SHAPES, workers.ask)
    made.record()
    yield made
    made.close()


def test_cells_of_all_workers_are_put_together(weights, workers):
    assert weights.workers == 2
    read = dict(weights.read_weights())
    assert read["w"].cells().tolist() == [0x100, 0x101, 0x102, 0x200, 0x201, 0x202]
    assert (read["w"].shape, read["none"].data) == ((2, 3), b"")
    assert weights.read_cells("w", np.array([5, 0, 3])).tolist() == [0x202, 0x100, 0x200]
    for name, at in (("w", 6), ("w", -1), ("v", 0)):
        with pytest.raises(WeightApplyFailed, match="no such cells"):
            weights.read_cells(name, np.array([at]))


def test_a_worker_that_could_not_is_told_and_the_next_call_gets_its_own_answers(weights, workers):
    workers.faults = {"read"}
    with pytest.raises(WorkerFault, match="ValueError: no"):
        list(weights.read_weights())
    assert weights.read_cells("w", np.array([3])).tolist() == [0x200]
    workers.faults = set()
    assert dict(weights.read_weights())["w"].cells()[0] == 0x100


def test_a_change_that_does_not_fit_asks_nobody(weights, workers):
    asked = len(workers.asked)
    big = np.full(6, 0x7F80, np.uint16)
    for patch in ({"w": (CellRun(0, big),)}, {"w": (CellRun(1, big),)}, {"v": (CellRun(0, big),)}):
        with pytest.raises(WeightApplyFailed, match=r"run/p version 3: "), weights.change(3, patch):
            pytest.fail("it was taken")
    assert len(workers.asked) == asked
    with weights.change(3, {"w": (CellRun(2, big[:2] - 0x7000),)}) as (_, entries):
        assert [[entry["start"] for entry in rank] for rank in entries] == [[2], [0]]


def test_a_map_that_is_none_and_one_that_lacks_cells_are_refused(workers):
    lacking, strange = Workers(), Workers()
    lacking.maps = lambda: [WorkerMap((), {}, {})] * 2
    strange.maps = lambda: ["map"] * 2
    for one, error in ((lacking, ModelError), (strange, EngineError)):
        made = WorkerWeights("run/p", FORMS, SHAPES, one.ask)
        with pytest.raises(error):
            made.record()
        made.close()


@pytest.mark.parametrize("answer", [b"", b"\xc1", msgspec.msgpack.encode(3), "text", None])
def test_an_answer_that_is_none_is_an_error_of_the_engine(answer):
    with pytest.raises(EngineError, match="malformed"):
        answers([answer])


def test_as_text_it_is_the_same():
    import base64

    called = msgspec.msgpack.decode(
        base64.b64decode(text_question("read_cells", [[(1, b"\0\xff")]]))
    )
    assert called == ["read_cells", [[[[1, b"\0\xff"]]]]]
    good = base64.b64encode(msgspec.msgpack.encode(("", [b"\1"]))).decode()
    assert text_answers([good, good]) == [[b"\1"], [b"\1"]]
    for bad in ("%%%", 3, None, [good]):
        with pytest.raises(EngineError, match="malformed"):
            text_answers([good, bad])


def test_staging_is_over_when_it_is_over_everywhere():
    assert staged_fault([(True, ""), (False, "")]) is None
    assert staged_fault([(True, ""), (True, "")]) == ""
    assert staged_fault([(True, "a"), (True, "b")]) == "a; b"
