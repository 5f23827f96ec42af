"""Torch trainers of several processes under torchrun: what one process would have done."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch_models import random_gpt2, random_qwen3
from trainer_ranks import carry_out

from cloud_trainer.ranks import SingleRank
from transport.weights.folder import read_model_folder
from transport.weights.tensors import read_safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
# An epsilon above rounding: where a gradient is zero, AdamW would turn noise into whole steps.
SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 60, "epsilon": 1e-4}


CRITIC = {
    **SETTINGS,
    "preset": "ppo",
    "critic": {"lr": 1e-2, "trunk_coefficient": 0.5, "warmup_steps": 3},
}
KINDS = {"": SETTINGS, "-critic": CRITIC}
WITH = {
    "blank": {"micro_batch_tokens": 100_000},  # less to do than there are ranks
    "lora": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "lr": 1e-2},
    "adapter": {"lora": {"rank": 4, "publish": "adapter"}, "lr": 1e-2},
    "checkpointing": {"gradient_checkpointing": True, "max_grad_norm": 0.05},
    # By the batch, since the deviation in a group of equal rewards is that of its KL: divided by
    # it, rounding would become as large as a reward.
    "batch-wide": {
        "second_moment_budget": 3.0,
        "kl_coefficient": 0.1,
        "kl_in": "reward",
        "normalisation": "batch_std",
    },
    "critic": {
        "preset": "ppo",
        "kl_coefficient": 0.1,
        "critic": {"lr": 1e-2, "trunk_coefficient": 0.5, "warmup_steps": 1},
        "gradient_checkpointing": True,
    },
    "critic-lora": {
        "preset": "ppo",
        "critic": {"lr": 1e-2, "trunk_coefficient": 0.0},
        "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
        "micro_batch_tokens": 100_000,
    },
    "sequence": {"preset": "gspo", "kl_coefficient": 0.1, "importance_cap": 2.0},
}
ROUGH = {
    "bfloat16": {"gradient_checkpointing": True},
    "bfloat16-lora": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "lr": 1e-2},
    "bfloat16-critic": {
        "preset": "ppo",
        "kl_coefficient": 0.1,
        "critic": {"lr": 1e-2, "trunk_coefficient": 0.5},
    },
}
"""With ``precision = "bfloat16"``."""


def plan(out, *, model, seeds, settings=SETTINGS, restore=None):
    return {
        "model": str(model),
        "settings": settings,
        "seeds": list(seeds),
        "restore": None if restore is None else str(restore),
        "out": str(out),
    }


def under_torchrun(plans, path, *, ranks):
    path.write_text(json.dumps(plans))
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(ROOT / "tests" / "support" / "trainer_ranks.py"), str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    """By name what the same plan left with one rank and with two; one start for all of the two."""
    folder = tmp_path_factory.mktemp("ranks")
    model = random_qwen3(folder / "model")
    changed = {
        name: {"seeds": range(3), "settings": {**SETTINGS, **more}} for name, more in WITH.items()
    }
    for name, more in ROUGH.items():
        rough = {**SETTINGS, "precision": "bfloat16", **more}
        changed[name] = {"seeds": range(3), "settings": rough}
    plans = {"whole": {"seeds": range(6)}, **changed}
    plans["whole-critic"] = {"seeds": range(6), "settings": CRITIC}
    for name, about in plans.items():
        carry_out(plan(folder / f"{name}-1", model=model, **about), SingleRank())
    of_two = [plan(folder / f"{name}-2", model=model, **about) for name, about in plans.items()]

    def part(name, seeds, kind, settings, restore=None):
        about = {"model": model, "seeds": seeds, "settings": settings}
        after = None if restore is None else folder / f"{restore}{kind}"
        return plan(folder / f"{name}{kind}", restore=after, **about)

    for kind, settings in KINDS.items():
        carry_out(part("begun", range(2), kind, settings), SingleRank())
        of_two.append(part("middle", range(2, 4), kind, settings, "begun"))
    under_torchrun(of_two, folder / "plans.json", ranks=2)
    for kind, settings in KINDS.items():
        carry_out(part("end", range(4, 6), kind, settings, "middle"), SingleRank())
    return folder


def facts_of(out):
    return json.loads((out / "facts.json").read_text())


def state_of(out):
    with np.load(out / "state.npz") as arrays:
        return dict(arrays)


def assert_same(one, other, *, relative=1e-5):
    """Metrics by step, checkpoint and published weights agree."""
    for step, (a, b) in enumerate(zip(facts_of(one), facts_of(other), strict=True)):
        assert a == pytest.approx(b, rel=relative, abs=1e-6), step
    assert_same_state(one, other, relative=relative)


def assert_same_state(one, other, *, relative=1e-5):
    mine, theirs = state_of(one), state_of(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        scale = np.abs(mine[name]).max()
        assert np.abs(mine[name] - theirs[name]).max() <= relative * scale + 1e-9, name
    published = [read_safetensors(out / "published.safetensors") for out in (one, other)]
    assert published[0].keys() == published[1].keys()
    for name, tensor in published[0].items():
        a, b = (tensors[name].cells() for tensors in published)
        if tensor.dtype == "F32":
            assert np.allclose(a.view("f4"), b.view("f4"), rtol=relative, atol=relative), name
        else:  # a master near the middle between two values may go either way
            assert (a != b).mean() <= 2e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_learns(kind, outs):
    one, two = outs / f"whole{kind}-1", outs / f"whole{kind}-2"
    assert len({step["loss"] for step in facts_of(one)}) == 6
    assert_same(one, two)
    assert read_model_folder(two / "model") == read_safetensors(two / "published.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_either_continues_what_the_other_saved(kind, outs):
    end = outs / f"end{kind}"
    assert json.loads((end / "meta.json").read_text())["step_count"] == 6
    whole = facts_of(outs / f"whole{kind}-1")
    parts = [
        fact for name in ("begun", "middle", "end") for fact in facts_of(outs / f"{name}{kind}")
    ]
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_state(end, outs / f"whole{kind}-1")


@pytest.mark.parametrize("name", WITH)
def test_the_number_of_ranks_changes_nothing_with(name, outs):
    one, two = outs / f"{name}-1", outs / f"{name}-2"
    assert facts_of(one)[-1]["grad_norm"] > 0
    assert_same(one, two)


@pytest.mark.parametrize("name", ROUGH)
def test_the_number_of_ranks_changes_nothing_in_bfloat16_with(name, outs):
    one, two = outs / f"{name}-1", outs / f"{name}-2"
    assert facts_of(one)[-1]["grad_norm"] > 0
    # 1e-5 was measured too. But masters that differ by rounding may be computed with as the one or
    # the other of two neighbours in bfloat16, 2^-8 apart: this leaves room for a few of them.
    assert_same(one, two, relative=1e-3)


def test_three_ranks_share_an_architecture_with_transposed_weights_and_biases(tmp_path):
    model = random_gpt2(tmp_path / "model")
    carry_out(plan(tmp_path / "1", model=model, seeds=range(3)), SingleRank())
    of_three = [plan(tmp_path / "3", model=model, seeds=range(3))]
    under_torchrun(of_three, tmp_path / "plans.json", ranks=3)
    assert_same(tmp_path / "1", tmp_path / "3")


def start_two(code, folders):
    """Two ranks, each in a folder of its own, that run ``code``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, **place, "PYTHONPATH": str(ROOT), "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]


SILENT = """
import os, sys
from cloud_trainer.process_group import ranks_from

ranks = ranks_from(os.environ, timeout_s=10.0)
if ranks.rank == 0:
    ranks.idle()
    ranks.idle()
    sys.stdin.read()  # silent, but there
else:
    while True:
        print(type(ranks.receive()).__name__, flush=True)
"""


def test_a_rank_that_hears_nothing_gives_up():
    ranks = start_two(SILENT, [ROOT, ROOT])
    try:
        said, error = ranks[1].communicate(timeout=240)
        assert said.split() == ["IdleOrder", "IdleOrder"]
        assert "RankLost: rank 1: no order from rank 0 within 10 s" in error
        assert ranks[0].poll() is None
        ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 1]


LOAD = """
import os
from functools import partial
from pathlib import Path
from cloud_trainer.config import TrainerTable
from cloud_trainer.factory import make_trainer
from cloud_trainer.process_group import ranks_from
from cloud_trainer.ranks import LeadTrainer, follow
from transport.runs import PolicySpec

ranks = ranks_from(os.environ, timeout_s=60.0)
make = partial(make_trainer, config=TrainerTable(policy="run/solver"), ranks=ranks)
spec = PolicySpec(model="model")
if ranks.rank == 0:
    LeadTrainer(make(spec), ranks, spec).load(Path("model"))
else:
    follow(ranks, make)
"""


def test_ranks_that_find_different_weights_refuse_them(tmp_path):
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        random_qwen3(tmp_path / str(seed) / "model", seed=seed)
    ranks = start_two(LOAD, [tmp_path / "0", tmp_path / "1"])
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=240)
            assert "ModelError: model: the weights that ranks [1] find there" in error
    finally:
        for rank in ranks:
            rank.kill()
