"""The numpy trainer's arithmetic; what every trainer must do is in ``tests/contract``."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_trainer.numpy_trainer import NumpyTrainer, from_bytes, make_numpy_model, to_bf16
from cloud_trainer.trainer import TrainingSequence
from transport.errors import ConfigError, ModelError
from transport.weights.digest import state_digest
from transport.weights.tensors import TensorBytes


def sequence(tokens: tuple[int, ...], reward: float, **fields: object) -> TrainingSequence:
    values = {
        "group": "run/t-000000",
        "prompt_tokens": (1, 2),
        "tokens": tokens,
        "logprobs": (-2.0,) * len(tokens),
        "versions": (0,) * len(tokens),
        "loss_mask": (True,) * len(tokens),
        "reward": reward,
        **fields,
    }
    return TrainingSequence(**values)  # type: ignore[arg-type]


def trainer(folder: Path, **settings: float) -> NumpyTrainer:
    if not folder.exists():
        make_numpy_model(folder, seed=1)
    made = NumpyTrainer(settings)
    made.load(folder)
    return made


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1.00390625, 0x3F80),  # half an ulp above an even one: down
        (1.01171875, 0x3F82),  # half an ulp above an odd one: up
        (-1.0039064, 0xBF81),
        (3.4028235e38, 0x7F80),  # beyond the largest bf16: infinite
        (float("inf"), 0x7F80),
        (1e-45, 0x0000),
    ],
)
def test_bf16_rounds_to_nearest_and_ties_to_even(value: float, bits: int) -> None:
    (cell,) = to_bf16(np.array([value], np.float32)).cells()
    assert int(cell) == bits


def test_bf16_of_nan_stays_nan_for_every_payload() -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    back = from_bytes("x", to_bf16(bits.view(np.float32)))
    assert np.isnan(back).all()


def test_bf16_values_survive_the_round_trip() -> None:
    rng = np.random.default_rng(0)
    cells = rng.integers(0, 1 << 16, 4096).astype("<u2")
    cells = cells[(cells & 0x7F80) != 0x7F80]
    tensor = TensorBytes("BF16", (len(cells),), cells.tobytes())
    assert to_bf16(from_bytes("x", tensor)).data == tensor.data


def test_a_made_model_is_the_same_for_the_same_seed_and_has_the_size_asked_for(
    tmp_path: Path,
) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = make_numpy_model(tmp_path / name, seed=seed, parameters=100_000)
        state = trainer(folder).published_state()
        digests.append(state_digest(state))
        assert sum(t.size_bytes for t in state.values()) == pytest.approx(200_000, rel=0.01)
    assert digests[0] == digests[1] != digests[2]


def test_what_is_rewarded_becomes_likelier(tmp_path: Path) -> None:
    learner = trainer(tmp_path / "model", lr=0.05)
    groups = [[sequence((5, 6), 1.0), sequence((7, 8), 0.0)]]

    def likelihood(token: int) -> float:
        return float(learner._log_probabilities()[2, token])

    before = likelihood(5), likelihood(7)
    for _ in range(5):
        learner.step(groups)
    assert likelihood(5) > before[0] + 0.1
    assert likelihood(7) < before[1]


def test_the_gradient_is_that_of_the_loss(tmp_path: Path) -> None:
    learner = trainer(make_numpy_model(tmp_path / "model", seed=3, parameters=40, vocab_size=4))
    groups = [
        [sequence((3, 1), 1.0), sequence((0, 2, 2), 0.25), sequence((1,), 0.0)],
        [sequence((2, 2), 0.0), sequence((3, 3), 1.0)],
    ]
    table = learner._log_probabilities()
    weights, facts = learner._token_weights(groups, table)
    gradients = learner._gradients(weights, table)
    assert facts["tokens"] == 10

    def loss() -> float:
        # The importance weights are constants of the surrogate, so they are kept.
        return -float((weights * learner._log_probabilities().astype(np.float64)).sum())

    for name, gradient in zip(("bias", "embed.weight", "output.weight"), gradients, strict=True):
        master = learner._masters[name]
        for index in np.ndindex(master.shape):
            kept = master[index]
            values = []
            for delta in (1e-2, -1e-2):
                master[index] = kept + np.float32(delta)
                values.append(loss())
            master[index] = kept
            assert gradient[index] == pytest.approx((values[0] - values[1]) / 2e-2, abs=2e-3)


def test_masked_tokens_and_groups_without_a_difference_teach_nothing(tmp_path: Path) -> None:
    learner = trainer(tmp_path / "model", lr=0.1)
    before = state_digest(learner.published_state())
    masked = sequence((5, 6), 1.0, loss_mask=(False, False))
    learner.step([[masked, sequence((7, 8), 0.0, loss_mask=(False, False))]])
    learner.step([[sequence((5, 6), 1.0), sequence((7, 8), 1.0)]])
    assert state_digest(learner.published_state()) == before
    assert learner.step_count == 2


def test_updates_below_half_a_bf16_ulp_accumulate_in_the_masters(tmp_path: Path) -> None:
    learner = trainer(tmp_path / "model", lr=2e-5)
    groups = [[sequence((5, 6), 1.0), sequence((7, 8), 0.0)]]
    embed = [learner.published_state()["embed.weight"].data]
    masters = learner._masters["embed.weight"].copy()
    for _ in range(200):
        learner.step(groups)
    embed.append(learner.published_state()["embed.weight"].data)
    moved = np.abs(learner._masters["embed.weight"] - masters).max()
    assert 1e-3 < moved < 1e-2
    assert embed[0] != embed[1]


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    learner = trainer(tmp_path / "model", lr=0.1)
    learner._masters["bias"][3] = np.float32(np.inf)
    before = state_digest(learner.published_state())
    metrics = learner.step([[sequence((5, 6), 1.0), sequence((7, 8), 0.0)]])
    assert metrics["skipped"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert state_digest(learner.published_state()) == before


def test_tokens_beyond_the_vocabulary_are_folded_into_it(tmp_path: Path) -> None:
    inside, beyond = trainer(tmp_path / "model", lr=0.1), trainer(tmp_path / "model", lr=0.1)
    inside.step([[sequence((5, 6), 1.0), sequence((7, 8), 0.0)]])
    beyond.step([[sequence((5 + 64, 6), 1.0), sequence((7, 8 + 640), 0.0)]])
    assert state_digest(inside.published_state()) == state_digest(beyond.published_state())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"learning_rate": 0.1}, r"policies\.solver\.settings\.learning_rate: unknown key"),
        ({"lr": -1.0}, r"policies\.solver\.settings\.lr"),
        ({"lr": "fast"}, r"policies\.solver\.settings\.lr"),
    ],
)
def test_settings_are_checked_with_their_path(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        NumpyTrainer(settings, where="policies.solver.settings")


def test_folders_that_do_not_fit_are_refused_naming_the_file(tmp_path: Path) -> None:
    folder = make_numpy_model(tmp_path / "model")
    config = folder / "config.json"
    with pytest.raises(ModelError, match=r"config\.json"):
        NumpyTrainer({}).load(tmp_path)
    for fields, reason in (
        ({"model_type": "qwen3", "vocab_size": 64, "hidden": 32}, 'use trainer = "torch"'),
        ({"model_type": "farflow-numpy", "vocab_size": 65, "hidden": 32}, "'bias' has shape"),
        ({"model_type": "qwen3"}, "farflow trainer numpy-model FOLDER"),
        ({"model_type": "farflow-numpy"}, "vocab_size"),
    ):
        config.write_bytes(msgspec.json.encode(fields))
        with pytest.raises(ModelError, match=reason):
            NumpyTrainer({}).load(folder)


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    small = trainer(make_numpy_model(tmp_path / "small"))
    large = trainer(make_numpy_model(tmp_path / "large", parameters=9_000))
    with pytest.raises(ModelError, match="state has no float32"):
        small.load_state_dict(*large.state_dict())
