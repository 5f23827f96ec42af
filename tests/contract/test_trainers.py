"""What every trainer must do, run against each of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_trainer.config import TrainerTable
from cloud_trainer.factory import make_trainer
from cloud_trainer.numpy_trainer import make_numpy_model
from cloud_trainer.trainer import Trainer, TrainingSequence
from transport.errors import ConfigError, ModelError
from transport.runs import PolicySpec
from transport.weights.digest import is_finite, state_digest
from transport.weights.folder import read_model_folder

TABLE = TrainerTable(policy="run/solver")
Groups = list[list[TrainingSequence]]


class Case:
    """One kind of trainer with a model folder of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.model = folder / "model"
        self.settings = {"step_s": 0.0} if kind == "emulated" else {"lr": 0.01}
        if kind == "torch":
            from torch_models import random_qwen3

            random_qwen3(self.model)
        else:
            make_numpy_model(self.model, seed=7)

    def new(self) -> Trainer:
        spec = PolicySpec(
            model=str(self.model),
            trainer=self.kind,  # type: ignore[arg-type]
            settings=self.settings,
        )
        return make_trainer(spec, TABLE)

    def loaded(self) -> Trainer:
        trainer = self.new()
        trainer.load(self.model)
        return trainer


@pytest.fixture(params=["numpy", "emulated", pytest.param("torch", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


def make_groups(seed: int, groups: int = 3, siblings: int = 4) -> Groups:
    rng = np.random.default_rng(seed)

    def make_sequence(group: int) -> TrainingSequence:
        count = int(rng.integers(1, 7))
        return TrainingSequence(
            group=f"run/t-{group:06d}",
            prompt_tokens=(5, 6, 7 + group),
            tokens=tuple(int(token) for token in rng.integers(2, 60, count)),
            logprobs=tuple(float(value) for value in -rng.random(count) - 3),
            versions=(0,) * count,
            loss_mask=tuple(bool(value) for value in rng.integers(0, 4, count)),
            reward=float(rng.integers(0, 2)),
        )

    return [[make_sequence(group) for _ in range(siblings)] for group in range(groups)]


def digests(trainer: Trainer, batches: Sequence[Groups]) -> list[str]:
    found = []
    for batch in batches:
        trainer.step(batch)
        found.append(state_digest(trainer.published_state()))
    return found


BATCHES = [make_groups(seed) for seed in range(4)]


def test_the_published_state_of_a_loaded_model_is_the_folders(case: Case) -> None:
    state = case.loaded().published_state()
    assert list(state) == sorted(state)
    assert state_digest(state) == state_digest(read_model_folder(case.model))


def test_equal_groups_give_equal_weights_and_every_step_changes_them(case: Case) -> None:
    first, second = digests(case.loaded(), BATCHES), digests(case.loaded(), BATCHES)
    assert first == second
    assert len({state_digest(read_model_folder(case.model)), *first}) == len(BATCHES) + 1


def test_a_published_state_does_not_change_when_training_goes_on(case: Case) -> None:
    trainer = case.loaded()
    trainer.step(BATCHES[0])
    state = trainer.published_state()
    before = state_digest(state)
    trainer.step(BATCHES[1])
    assert state_digest(state) == before


def test_training_continues_bit_for_bit_from_a_state(case: Case) -> None:
    whole = digests(case.loaded(), BATCHES)
    cut = case.loaded()
    digests(cut, BATCHES[:2])
    arrays, meta = cut.state_dict()
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(meta))
    kept = {name: array.copy() for name, array in arrays.items()}
    digests(cut, BATCHES[2:])
    assert all(np.array_equal(arrays[name], array) for name, array in kept.items())
    fresh = case.loaded()
    fresh.load_state_dict(arrays, stored)
    assert fresh.step_count == 2
    assert state_digest(fresh.published_state()) == whole[1]
    assert digests(fresh, BATCHES[2:]) == whole[2:]


def test_a_state_can_be_loaded_into_a_trainer_that_has_trained_on(case: Case) -> None:
    trainer = case.loaded()
    arrays, meta = trainer.state_dict()
    whole = digests(trainer, BATCHES[:2])
    trainer.load_state_dict(arrays, meta)
    assert trainer.step_count == 0
    assert digests(trainer, BATCHES[:2]) == whole


def test_metrics_are_finite_numbers_by_name(case: Case) -> None:
    metrics = case.loaded().step(BATCHES[0])
    assert {"loss", "reward_mean", "grad_norm", "tokens", "skipped"} <= metrics.keys()
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())
    assert metrics["skipped"] == 0.0


def test_a_batch_that_teaches_nothing_counts_as_a_step_and_leaves_a_finite_state(
    case: Case,
) -> None:
    trainer = case.loaded()
    same = [[msgspec.structs.replace(s, reward=1.0) for s in group] for group in BATCHES[0]]
    trainer.step(same)
    assert trainer.step_count == 1
    assert is_finite(trainer.published_state())


def test_an_export_loads_again_as_the_same_weights(case: Case, tmp_path: Path) -> None:
    trainer = case.loaded()
    digests(trainer, BATCHES[:1])
    trainer.export(tmp_path / "exported")
    again = case.new()
    again.load(tmp_path / "exported")
    assert state_digest(again.published_state()) == state_digest(trainer.published_state())


def test_an_unknown_setting_is_refused_with_its_path(case: Case) -> None:
    case.settings |= {"learning_rate": 1.0}
    with pytest.raises(ConfigError, match=r"policies\.solver\.settings\.learning_rate"):
        case.new()


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage", [damage_weights, lambda folder: (folder / "config.json").unlink()]
)
def test_a_folder_that_does_not_load_is_refused(case: Case, damage: Callable[[Path], None]) -> None:
    damage(case.model)
    with pytest.raises(ModelError, match="model"):
        case.new().load(case.model)
