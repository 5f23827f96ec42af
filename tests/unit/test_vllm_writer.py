"""What runs in a vLLM worker, without vLLM: recording a loader, writing, putting back, reading."""

import os

import msgspec
import numpy as np
import pytest

from edge_agent.engines.private_folder import PrivateFolder
from edge_agent.engines.vllm_exchange import Exchange
from edge_agent.engines.vllm_map import TensorForm, check_maps, writes
from transport.errors import ModelError
from transport.weights.patch import CellList, CellRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHAPES = {"q": (4, 6), "k": (2, 6), "head": (5, 6), "t": (6, 3)}
FORMS = {name: TensorForm("BF16", int(np.prod(shape))) for name, shape in SHAPES.items()}


class Loaded:
    """A model whose loader fuses q and k, pads the head, keeps columns of t, and transposes them;
    ``spoil`` makes it do more than copy."""

    def __init__(self, spoil=""):
        import torch

        from edge_agent.engines.vllm_writer import WeightWriter

        self.model = torch.nn.Module()
        for name, shape in {"qk": (6, 6), "head": (8, 6), "t": (2, 6)}.items():
            values = torch.arange(int(np.prod(shape)), dtype=torch.int16) + 0x3F00
            parameter = torch.nn.Parameter(values.view(torch.bfloat16).reshape(shape))
            self.model.register_parameter(name, parameter)
        self.spoil = spoil
        self.before = self.bits()
        self.writer = WeightWriter(torch.device("cpu"))
        tensors = [(name, "BF16", shape) for name, shape in SHAPES.items()]
        self.map = self.writer.record(tensors, self.model.named_parameters(), self.load)
        self.exchange = Exchange()

    def load(self, weights):
        model = self.model
        for name, weight in weights.items():
            if name == "q":
                model.qk.data[:4].copy_(weight)
            elif name == "k":
                model.qk.data.narrow(0, 4, 2).copy_(weight * 2 if self.spoil == "k" else weight)
            elif name == "head":
                model.head.data[:5].copy_(weight)
                model.head.data[5:].fill_(0)
            elif self.spoil == "t":
                model.t[0] = weight.float().sum()
            else:
                model.t.data.copy_(weight[:, 1:].t())

    def bits(self):
        import torch

        return {
            name: parameter.data.view(torch.int16).numpy().astype(np.uint16)
            for name, parameter in self.model.named_parameters()
        }

    def stage(self, patch):
        with self.exchange.writes([writes(self.map, FORMS, patch, "v")]) as (path, entries):
            self.writer.stage(path, msgspec.msgpack.decode(msgspec.msgpack.encode(entries[0])))
            while not self.writer.staged()[0]:
                pass
        return self.writer.staged()[1]


@pytest.fixture
def loaded():
    made = Loaded()
    yield made
    made.exchange.close()


def cells(name, start):
    return np.arange(start, start + FORMS[name].cells, dtype=np.uint16)


def test_recording_writes_nothing_and_finds_every_cell(loaded):
    for name, bits in loaded.bits().items():
        assert (bits == loaded.before[name]).all()
    forms = {**FORMS, "t": TensorForm("BF16", 12)}  # the loader takes two columns of three
    check_maps(forms, [loaded.map])
    with pytest.raises(ModelError, match="12 of the 18 cells of tensor 't'"):
        check_maps(FORMS, [loaded.map])


def test_parameters_that_no_tensor_fills_are_seen_and_padding_is_not(loaded):
    from torch import nn

    loaded.model.register_parameter("bias", nn.Parameter(loaded.model.t.data[0].clone()))
    loaded.model.register_buffer("table", loaded.model.t.data[0].clone())
    forms = {**FORMS, "t": TensorForm("BF16", 12)}
    for left_out, what in {"k": "12 of the 36 .*'qk'", "": "6 of the 6 .*'bias'"}.items():
        brought = {name: shape for name, shape in SHAPES.items() if name != left_out}
        tensors = [(name, "BF16", shape) for name, shape in brought.items()]
        places = (*loaded.model.named_parameters(), *loaded.model.named_buffers())
        found = loaded.writer.record(tensors, places, loaded.load)
        assert {each.name: each.wanted for each in found.storages}["head"] == 30
        with pytest.raises(ModelError, match=what):
            check_maps({name: forms[name] for name in brought}, [found])


@pytest.mark.parametrize("spoil", ["k", "t"])
def test_a_loader_that_does_more_than_copy_is_seen(spoil):
    made = Loaded(spoil)
    assert set(made.map.strange) == {spoil}
    for name, bits in made.bits().items():
        assert (bits == made.before[name]).all()
    made.exchange.close()


def test_what_is_committed_is_where_the_loader_puts_it_and_reads_back(loaded):
    new = {name: cells(name, 0x100 * (place + 1)) for place, name in enumerate(FORMS)}
    patch = {name: (CellRun(0, values),) for name, values in new.items()}
    patch["q"] += (CellList(np.array([1, 23]), np.array([7, 8], np.uint16)),)
    assert loaded.stage(patch) == ""
    loaded.writer.commit()
    new["q"][[1, 23]] = 7, 8
    bits = loaded.bits()
    assert (bits["qk"][:4].ravel() == new["q"]).all()
    assert (bits["qk"][4:].ravel() == new["k"]).all()
    assert (bits["head"][:5].ravel() == new["head"]).all()
    assert (bits["head"][5:] == loaded.before["head"][5:]).all()
    assert (bits["t"] == new["t"].reshape(6, 3)[:, 1:].T).all()
    for name in ("q", "k", "head"):
        with loaded.exchange.room(name, FORMS[name], [loaded.map]) as (path, boxes, room):
            loaded.writer.read(path, [msgspec.to_builtins(box) for box in boxes[0]])
            assert (room.cells() == new[name]).all()


@pytest.mark.parametrize("undo", [True, False])
def test_a_write_that_fails_half_way_is_put_back_or_told(loaded, undo, monkeypatch):
    import torch

    from edge_agent.engines import vllm_writer

    if not undo:
        monkeypatch.setattr(vllm_writer, "UNDO_BYTES", 0)
    patch = {name: (CellList(np.array([0, 2]), np.array([1, 2], np.uint16)),) for name in FORMS}
    assert loaded.stage(patch) == ""
    loaded.writer._stage.entries[-1].values = torch.zeros(5, dtype=torch.int16)  # too many
    with pytest.raises(RuntimeError, match="undone" if undo else "damaged"):
        loaded.writer.commit()
    same = [bool((bits == loaded.before[name]).all()) for name, bits in loaded.bits().items()]
    assert all(same) == undo
    with pytest.raises(RuntimeError, match="not staged"):
        loaded.writer.commit()


def test_what_lies_outside_is_refused_while_it_is_staged(loaded):
    good = {"q": (CellList(np.array([0, 2]), np.array([1, 2], np.uint16)),)}
    with loaded.exchange.writes([writes(loaded.map, FORMS, good, "v")]) as (path, (entries,)):
        entries[0]["storage"] = 2  # a smaller one
        entries[0]["positions"], entries[0]["values"] = entries[0]["values"], 0
        loaded.writer.stage(path, [{**entries[0], "count": 2}])
        while not loaded.writer.staged()[0]:
            pass
    assert "cells" in loaded.writer.staged()[1]
    with pytest.raises(RuntimeError, match="undone"):
        loaded.writer.commit()
    for name, bits in loaded.bits().items():
        assert (bits == loaded.before[name]).all()


def test_what_a_killed_agent_left_is_removed_and_what_is_in_use_is_not(tmp_path):
    used, left, others = (PrivateFolder(prefix, tmp_path) for prefix in ("mine-", "mine-", "no-"))
    for folder in (used, left, others):
        then_s = folder.path.stat().st_mtime - 10  # an agent is started again that soon
        os.utime(folder.path, (then_s, then_s))
    left._lock.release()  # as the system does at the end of a process
    others._lock.release()
    PrivateFolder("mine-", tmp_path).close()
    assert sorted(tmp_path.iterdir()) == sorted([used.path, others.path])
