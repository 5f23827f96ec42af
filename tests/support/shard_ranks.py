"""One rank of a sharded trainer that publishes one version; started by ``test_sharding.py``.

    python shard_ranks.py RANK RANKS FOLDER

Rank 0 leaves in FOLDER: before.safetensors and after.safetensors (the whole published states, made
without sharding), and what the ranks made of them: delta.bin and digest.txt.
"""

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cloud_trainer.shard_gathering import assemble, gather_deltas, gather_sums
from cloud_trainer.sharding import Shards, encode_shards, local_shards, shard_sums
from transport.errors import ModelError
from transport.runtime.model_folder import published_tensor
from transport.weights.segments import CodecSettings
from transport.weights.tensors import write_safetensors

SETTINGS = CodecSettings()


class Model(nn.Module):
    """Rows that no number of ranks divides, a tensor of one cell, a tied head, a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0))


DTYPES = {
    "embed.weight": "BF16", "middle.weight": "BF16", "middle.bias": "F32", "scale": "F16",
    "table": "F32", "wide": "BF16", "copied": "BF16",
}  # fmt: skip


def main(rank: int, ranks: int, folder: Path) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(0)
    model = Model()
    whole = {**model.state_dict(), "wide": torch.randn(4, 6), "copied": torch.randn(5, 2)}
    after = {
        name: tensor + 0.02 * torch.randn(tensor.shape) if name != "table" else tensor
        for name, tensor in whole.items()
    }
    if rank == 0:
        for name, state in (("before", whole), ("after", after)):
            tensors = {of: published_tensor(state[of], DTYPES[of]) for of in DTYPES}
            (folder / f"{name}.safetensors").write_bytes(write_safetensors(tensors))
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model, mesh=mesh)
    replicas = init_device_mesh("cpu", (ranks, 1))

    def shards(values: Mapping[str, torch.Tensor]) -> Shards:
        state = {
            **model.state_dict(),
            "wide": distribute_tensor(values["wide"], mesh, [Shard(1)]),
            "copied": distribute_tensor(values["copied"], replicas, [Replicate(), Shard(0)]),
        }
        return local_shards(state, DTYPES, rank=rank, ranks=ranks)

    before = shards(whole)
    base = gather_sums(shard_sums(before), before.kinds)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor) and name != "head.weight":
                new = distribute_tensor(after[name], mesh, value.placements)
                value.to_local().copy_(new.to_local())
    now = shards(after)
    check_refusals(mesh)
    deltas = gather_deltas(encode_shards(before, now, SETTINGS, segment_cells=16))
    if deltas is not None and base is not None:
        delta = assemble(deltas, base, run="run", policy="run/solver", version=1, parent=0)
        (folder / "delta.bin").write_bytes(delta.data)
        (folder / "digest.txt").write_text(delta.digests.hex)
    distributed.destroy_process_group()


def check_refusals(mesh: DeviceMesh) -> None:
    """What cannot be published is named."""
    summand = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    for state, reason in (({"x": summand}, "cannot be published"), ({}, "no tensor 'x'")):
        with pytest.raises(ModelError, match=reason):
            local_shards(state, {"x": "BF16"}, rank=0, ranks=2)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
