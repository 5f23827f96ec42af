"""The trainer that only takes time; what every trainer must do is in ``tests/contract``."""

from pathlib import Path

import numpy as np
import pytest

from cloud_trainer.emulated_trainer import EmulatedTrainer
from farflow.emulate_files import changed_share, delta_size_bytes, make_model
from transport.errors import ConfigError, ModelError
from transport.runtime.clock import ManualClock
from transport.weights.folder import write_model_folder
from transport.weights.tensors import TensorBytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", 600_000)


def cells(trainer: EmulatedTrainer) -> np.ndarray:
    state = trainer.published_state()
    return np.concatenate([np.frombuffer(state[name].data, "<u2") for name in state])


def test_a_step_sleeps_what_is_left_of_its_time(model: Path) -> None:
    clock = ManualClock()
    slept: list[float] = []
    trainer = EmulatedTrainer({"step_s": 1.5}, sleep=slept.append, clock=clock)
    trainer.load(model)
    trainer.step(())
    assert slept == [1.5]


def test_a_step_changes_the_share_by_one_unit_in_the_last_place(model: Path) -> None:
    trainer = EmulatedTrainer({"step_s": 0.0, "changed_share": 0.25})
    trainer.load(model)
    before = cells(trainer)
    trainer.step(())
    after = cells(trainer)
    changed = before != after
    assert changed.mean() == pytest.approx(0.25, abs=0.01)
    assert set((before ^ after)[changed]) == {1}
    assert np.isfinite((after.astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("delta_bytes", [2_000, 12_000, 40_000])
def test_the_share_for_a_delta_of_a_size_is_found(model: Path, delta_bytes: int) -> None:
    share = changed_share(model, delta_bytes)
    assert delta_size_bytes(model, share) == pytest.approx(delta_bytes, rel=0.05)


def test_a_delta_that_no_share_makes_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.delta_bytes: 300000 .* raise full_bytes"):
        changed_share(model, 300_000)


def test_another_type_than_bf16_is_refused(tmp_path: Path) -> None:
    tensor = TensorBytes("F32", (2,), np.zeros(2, "<f4").tobytes())
    write_model_folder(tmp_path / "model", {"w": tensor}, {"config.json": b"{}"})
    with pytest.raises(ModelError, match="is F32"):
        EmulatedTrainer({}).load(tmp_path / "model")
