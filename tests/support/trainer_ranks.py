"""One rank of a torch trainer that carries out plans, one trainer after the other; for torchrun.

    python -m torch.distributed.run ... trainer_ranks.py PLANS.json

A plan: ``settings``, ``model``, ``seeds`` (one step each), ``restore`` (a folder that such a run
left, or null), ``out``. Rank 0 leaves in ``out``: facts.json (metrics by step), state.npz and
meta.json (the checkpoint), published.safetensors.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

from cloud_trainer.config import TrainerTable
from cloud_trainer.factory import make_trainer
from cloud_trainer.process_group import ranks_from
from cloud_trainer.ranks import LeadTrainer, follow
from transport.runs import PolicySpec
from transport.weights.tensors import write_safetensors

sys.path.insert(0, str(Path(__file__).parent))

from training_groups import groups_of

TABLE = TrainerTable(policy="run/solver")


def main(plans) -> None:
    ranks = ranks_from(os.environ, timeout_s=60.0)
    make = partial(make_trainer, config=TABLE, ranks=ranks)
    if ranks.rank:
        follow(ranks, make)
    else:
        for plan in plans:
            carry_out(plan, ranks)
    if ranks.world_size > 1:
        ranks.close(tell=ranks.rank == 0)


def carry_out(plan, ranks) -> None:
    spec = PolicySpec(model=plan["model"], settings=plan["settings"])
    trainer = LeadTrainer(make_trainer(spec, TABLE, ranks), ranks, spec)
    out = Path(plan["out"])
    out.mkdir()
    trainer.load(Path(plan["model"]))
    if plan["restore"]:
        saved = Path(plan["restore"])
        with np.load(saved / "state.npz") as arrays:
            trainer.load_state_dict(dict(arrays), json.loads((saved / "meta.json").read_text()))
    facts = [trainer.step(groups_of(seed, groups=5)) for seed in plan["seeds"]]
    (out / "facts.json").write_text(json.dumps(facts))
    arrays, meta = trainer.state_dict()
    np.savez(out / "state.npz", **arrays)
    (out / "meta.json").write_text(json.dumps(meta))
    (out / "published.safetensors").write_bytes(write_safetensors(trainer.published_state()))
    trainer.export(out / "model")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
