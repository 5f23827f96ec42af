"""The torch trainer: the right gradient, exact resume, exact publication, nothing non-finite."""

import msgspec
import numpy as np
import pytest
from torch_models import random_gemma2, random_gpt2, random_qwen3
from training_groups import groups_of

from cloud_trainer.advantages import group_advantages
from cloud_trainer.torch_trainer import TorchTrainer
from transport.errors import ConfigError, LocalProtocolError, ModelError
from transport.weights.folder import read_model_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return random_qwen3(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return random_gpt2(tmp_path_factory.mktemp("gpt2") / "model")


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    return random_gemma2(tmp_path_factory.mktemp("gemma2") / "model")


def trainer_of(folder, **settings):
    trainer = TorchTrainer({"lr": 1e-3, "warmup_steps": 0, **settings})
    trainer.load(folder)
    return trainer


def equal_arrays(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


def log_probabilities(folder, sequence, temperature=1.0):
    """Of each response token under the stock model, one sequence at a time, with gradient."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[*sequence.prompt_tokens, *sequence.tokens]])
    logits = model(input_ids=tokens).logits[0, len(sequence.prompt_tokens) - 1 : -1] / temperature
    chosen = logits.log_softmax(-1)[range(len(sequence.tokens)), list(sequence.tokens)]
    return chosen.tolist()


def reference_facts(folder, groups, temperature):
    """Loss and KL by the formula, token by token."""
    loss = kl = 0.0
    tokens = trained = 0
    for group in groups:
        advantages = group_advantages([s.reward for s in group], "group_std")
        for sequence, advantage in zip(group, advantages, strict=True):
            now = log_probabilities(folder, sequence, temperature)
            for n, b, own in zip(now, sequence.logprobs, sequence.loss_mask, strict=True):
                tokens += own
                if not own or advantage == 0:
                    continue
                trained += 1
                log_ratio = min(20.0, max(-20.0, n - b))
                ratio = np.exp(log_ratio)
                value = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
                loss -= value if advantage > 0 else max(value, 3.0 * advantage)
                kl += ratio - 1 - log_ratio
    return loss / tokens, kl / trained


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("model", ["qwen", "gpt2", "gemma2"])
def test_loss_and_kl_are_those_of_the_formula_computed_token_by_token(request, model, temperature):
    folder = request.getfixturevalue(model)
    groups = groups_of(1)
    facts = trainer_of(folder, temperature=temperature).step(groups)
    loss, kl = reference_facts(folder, groups, temperature)
    assert facts["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-4)
    assert facts["kl_behaviour"] == pytest.approx(kl, rel=1e-3)
    assert facts["grad_norm"] > 0
    assert facts["skipped"] == 0


@pytest.mark.parametrize("model", ["qwen", "gpt2", "gemma2"])
def test_the_output_layer_computes_trained_tokens_only(request, model):
    trainer = trainer_of(request.getfixturevalue(model), micro_batch_tokens=60)
    computed = []
    output = trainer._loaded().model.get_output_embeddings()
    output.register_forward_hook(lambda _, inputs, logits: computed.append(logits.shape[:-1]))
    groups = groups_of(2, groups=6)
    facts = trainer.step(groups)
    del computed[-1]  # the sample whose movement is measured
    assert {rows for rows, _ in computed} == {1}
    places = {
        (s.prompt_tokens, s.tokens, place)
        for group in groups
        if len({s.reward for s in group}) > 1
        for s in group
        for place, own in enumerate(s.loss_mask)
        if own
    }
    assert sum(count for _, count in computed) == len(places) <= facts["trained_tokens"]
    assert len(computed) > 2


def test_a_model_that_does_not_say_its_output_layer_learns_the_same(qwen):
    plain, other = trainer_of(qwen), trainer_of(qwen)
    other._loaded().model.get_output_embeddings = lambda: None
    for seed in range(2):
        assert other.step(groups_of(seed)) == pytest.approx(plain.step(groups_of(seed)), rel=1e-4)


def test_an_output_layer_that_gets_something_else_than_a_state_per_token_is_left_alone(qwen):
    import torch

    class Flat(torch.nn.Module):
        """Gets all states one after another [tokens, features], as some models' layers do."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    plain, other = trainer_of(qwen), trainer_of(qwen)
    model = other._loaded().model
    inner = model.lm_head
    model.lm_head = Flat(inner)
    model.get_output_embeddings = lambda: inner
    assert other.step(groups_of(1)) == pytest.approx(plain.step(groups_of(1)), rel=1e-4)


@pytest.mark.parametrize("model", ["qwen", "gpt2"])
def test_the_size_of_micro_batches_changes_only_rounding(request, model):
    folder = request.getfixturevalue(model)
    norms, losses = set(), []
    for size in (1, 30, 10_000):
        facts = trainer_of(folder, micro_batch_tokens=size).step(groups_of(2, groups=6))
        norms.add(round(facts["grad_norm"], 3))
        losses.append(facts["loss"])
    assert len(norms) == 1
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4, abs=1e-6)


def test_training_makes_rewarded_sequences_likelier_and_the_others_rarer(qwen, tmp_path):
    trainer = trainer_of(qwen)
    (group,) = groups_of(4, groups=1, siblings=6)
    before = [log_probabilities(qwen, sequence) for sequence in group]
    for _ in range(5):
        current = msgspec.structs.replace
        batch = [
            current(s, logprobs=tuple(b), loss_mask=(True,) * len(b))
            for s, b in zip(group, before, strict=True)
        ]
        trainer.step([batch])
    trainer.export(tmp_path / "after")
    after = [log_probabilities(tmp_path / "after", sequence) for sequence in group]
    gains = [sum(a) - sum(b) for a, b in zip(after, before, strict=True)]
    good = [gain for gain, s in zip(gains, group, strict=True) if s.reward]
    bad = [gain for gain, s in zip(gains, group, strict=True) if not s.reward]
    assert good
    assert bad
    assert min(good) > 0 > max(bad)


def test_the_movement_of_a_step_is_how_far_it_takes_what_was_recorded_before_it(qwen):
    trainer = trainer_of(qwen)
    assert trainer.moved() == 0.0
    group = [
        msgspec.structs.replace(
            sequence,
            reward=float(number % 2),
            logprobs=tuple(log_probabilities(qwen, sequence)),
            loss_mask=(True,) * len(sequence.tokens),
            versions=(3,) * len(sequence.tokens),
        )
        for number, sequence in enumerate(groups_of(4, groups=1, siblings=6)[0])
    ]
    trainer.step([group])
    assert trainer.drifts()[0].difference == pytest.approx(0.0, abs=1e-4)
    moved = trainer.moved()
    trainer.step([group])
    assert trainer.drifts()[0].difference == pytest.approx(moved, rel=1e-3)
    assert moved > 0.01
    trainer.step([[msgspec.structs.replace(s, reward=1.0) for s in group]])
    assert trainer.moved() == 0.0


def test_three_and_three_steps_are_six_bit_for_bit(qwen):
    whole = trainer_of(qwen, warmup_steps=4)
    for seed in range(6):
        whole.step(groups_of(seed))

    first = trainer_of(qwen, warmup_steps=4)
    for seed in range(3):
        first.step(groups_of(seed))
    arrays, meta = first.state_dict()
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(meta))
    second = trainer_of(qwen, warmup_steps=4)
    second.step(groups_of(77))  # forgotten by what is loaded over it
    second.load_state_dict(arrays, packed)
    assert equal_arrays(second.state_dict()[0], arrays)
    for seed in range(3, 6):
        second.step(groups_of(seed))

    assert second.step_count == whole.step_count == 6
    assert equal_arrays(second.state_dict()[0], whole.state_dict()[0])
    assert second.published_state() == whole.published_state()


def test_a_state_is_a_copy_that_later_steps_do_not_touch(qwen):
    trainer = trainer_of(qwen)
    trainer.step(groups_of(1))
    arrays, _ = trainer.state_dict()
    published = trainer.published_state()
    kept = {name: array.copy() for name, array in arrays.items()}
    data = {name: bytes(tensor.data) for name, tensor in published.items()}
    trainer.step(groups_of(2))
    assert equal_arrays(arrays, kept)
    assert {name: bytes(tensor.data) for name, tensor in published.items()} == data


def test_a_fresh_state_continues_like_a_fresh_trainer(qwen):
    arrays, meta = trainer_of(qwen).state_dict()
    restored, plain = trainer_of(qwen), trainer_of(qwen)
    restored.load_state_dict(arrays, meta)
    restored.step(groups_of(1))
    plain.step(groups_of(1))
    assert equal_arrays(restored.state_dict()[0], plain.state_dict()[0])


def test_updates_below_half_an_ulp_accumulate_in_the_masters(qwen):
    trainer = trainer_of(qwen, lr=1e-6)
    start = trainer.published_state()
    masters = trainer.state_dict()[0]
    trainer.step(groups_of(1))
    name = "model.norm.weight"  # ones: half an ulp is 2e-3 below and 4e-3 above
    assert trainer.published_state()[name] == start[name]
    moved = np.abs(trainer.state_dict()[0][f"master.{name}"] - masters[f"master.{name}"])
    assert 0 < moved.max() < 2e-6
    for _ in range(9):
        trainer.step(groups_of(1))
    further = np.abs(trainer.state_dict()[0][f"master.{name}"] - masters[f"master.{name}"])
    assert further.max() > 5e-6


def test_the_warm_up_is_linear_and_then_constant(qwen):
    trainer = trainer_of(qwen, lr=1e-3, warmup_steps=4)
    rates = [trainer.step(groups_of(seed))["lr"] for seed in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(qwen):
    trainer = trainer_of(qwen)
    trainer.step(groups_of(1))
    arrays, meta = trainer.state_dict()
    arrays["master.model.norm.weight"][:] = 3e38  # logits overflow
    trainer.load_state_dict(arrays, meta)
    facts = trainer.step(groups_of(2))
    assert facts["skipped"] == 1
    assert all(np.isfinite(value) for value in facts.values())
    assert equal_arrays(trainer.state_dict()[0], arrays)
    assert trainer.step_count == 2


def test_a_step_without_signal_changes_nothing(qwen):
    trainer = trainer_of(qwen)
    trainer.step(groups_of(1))
    before = trainer.state_dict()[0]
    group = [msgspec.structs.replace(s, reward=1.0) for s in groups_of(2)[0]]
    facts = trainer.step([group])
    assert (facts["trained_tokens"], facts["skipped"], facts["grad_norm"]) == (0, 0, 0)
    assert facts["reward_mean"] == 1
    assert facts["tokens"] > 0
    assert equal_arrays(trainer.state_dict()[0], before)
    assert trainer.step_count == 2


def test_malformed_groups_are_counted_and_the_others_learnt_from(qwen):
    good, bad = groups_of(1, groups=2)
    bad[0] = msgspec.structs.replace(bad[0], tokens=(10**6,) * len(bad[0].tokens))
    trainer, other = trainer_of(qwen), trainer_of(qwen)
    facts = trainer.step([bad, good])
    assert facts["malformed_groups"] == 1
    assert other.step([good])["grad_norm"] == facts["grad_norm"]


@pytest.mark.parametrize("model", ["qwen", "gpt2"])
def test_before_the_first_step_the_published_state_is_the_folder(request, model):
    folder = request.getfixturevalue(model)
    published = trainer_of(folder).published_state()
    assert published == read_model_folder(folder)
    assert list(published) == sorted(published)


@pytest.mark.parametrize("model", ["qwen", "gpt2"])
def test_what_is_exported_loads_with_plain_transformers(request, model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(model)
    trainer = trainer_of(folder)
    trainer.step(groups_of(1))
    out = tmp_path / "out"
    trainer.export(out)
    assert read_model_folder(out) == trainer.published_state()
    loaded, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.dtype == (torch.bfloat16 if model == "qwen" else torch.float32)
    assert AutoTokenizer.from_pretrained(out).encode("7") == AutoTokenizer.from_pretrained(
        folder
    ).encode("7")


def test_anothers_state_is_refused_and_changes_nothing(qwen):
    trainer = trainer_of(qwen)
    arrays, meta = trainer.state_dict()
    for wrong in (
        {name: array for name, array in arrays.items() if name != "first.model.norm.weight"},
        {**arrays, "first.model.norm.weight": np.zeros(31, np.float32)},
        {**arrays, "first.model.norm.weight": np.zeros(32, np.float64)},
    ):
        with pytest.raises(ModelError, match=r"first\.model\.norm\.weight"):
            trainer.load_state_dict(wrong, meta)
    assert equal_arrays(trainer.state_dict()[0], arrays)


def test_settings_are_checked_with_their_path():
    for settings, message in (
        ({"lrr": 1}, r"policies\.solver\.settings\.lrr: unknown key"),
        ({"lr": -1}, r"policies\.solver\.settings\.lr"),
        ({"advantages": "best"}, r"policies\.solver\.settings\.advantages"),
    ):
        with pytest.raises(ConfigError, match=message):
            TorchTrainer(settings, where="policies.solver.settings")


def test_a_trainer_without_a_model_says_so():
    with pytest.raises(LocalProtocolError, match="call load first"):
        TorchTrainer({}).step([])


def test_a_folder_without_a_tokenizer_is_refused_at_the_start(tmp_path):
    folder = random_qwen3(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        trainer_of(folder)
