"""Which trainer a policy asks for; imports what computes gradients only then."""

import hashlib
from collections.abc import Callable

import msgspec

from cloud_trainer.config import TrainerTable
from cloud_trainer.ranks import Ranks
from cloud_trainer.trainer import Trainer
from transport.errors import ConfigError
from transport.ids import policy_name
from transport.runs import PolicySpec, RunSpec

MakeTrainer = Callable[[PolicySpec, TrainerTable], Trainer]


def make_trainer(spec: PolicySpec, config: TrainerTable, ranks: Ranks | None = None) -> Trainer:
    """The trainer named by ``spec.trainer``, with its settings checked, not loaded yet.

    Raises:
        ConfigError: a setting is unknown or out of range, torch is not installed, or the trainer
            cannot be shared by several ``ranks``.
    """
    if ranks is not None and ranks.world_size > 1 and spec.trainer != "torch":
        raise ConfigError(
            f"trainer.ranks: {ranks.world_size} ranks, but trainer = {spec.trainer!r} works in one "
            'process; set trainer.ranks = 1, or trainer = "torch" for the policy'
        )
    where = f"policies.{policy_name(config.policy)}.settings"
    if spec.trainer == "numpy":
        from cloud_trainer.numpy_trainer import NumpyTrainer

        return NumpyTrainer(spec.settings, where=where)
    if spec.trainer == "emulated":
        from cloud_trainer.emulated_trainer import EmulatedTrainer

        return EmulatedTrainer(spec.settings, where=where)
    from cloud_trainer.torch_trainer import TorchTrainer

    return TorchTrainer(
        spec.settings, where=where, device=config.device, threads=config.threads, ranks=ranks
    )


def spec_digest(run: RunSpec, policy: str) -> str:
    """What makes a checkpoint one of this training effort: run, policy, model, trainer and
    settings. Its length may be changed."""
    spec = run.policies[policy_name(policy)]
    settings = msgspec.json.encode(spec.settings, order="deterministic")
    parts = (run.name, policy, spec.model, spec.trainer, settings.decode(), str(run.seed))
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()
