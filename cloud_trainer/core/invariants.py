"""Every rule that the state of a trainer core shows, checked after each event in tests."""

from typing import TYPE_CHECKING

from cloud_trainer.core.phase import Phase
from transport.errors import InvariantViolation

if TYPE_CHECKING:
    from cloud_trainer.core.machine import TrainerCore


def check(core: "TrainerCore") -> None:
    """Check ``core``.

    Raises:
        InvariantViolation: names the rule, with the core's story.
    """
    if core.phase is Phase.EXITED:
        return
    lineage = core.checkpoints.trained
    jobs = [job for entry in lineage for job in entry.jobs]
    steps = list(range(core.checkpoints.step + 1, core.step + 1))
    batch = core.batch
    rules = {
        "groups run only while stepping": bool(core.running) == (core.phase is Phase.STEPPING),
        "a batch is there only while fetching": (batch is not None)
        == (core.phase is Phase.FETCHING),
        "the batch is of the next step": batch is None or batch.step == core.step + 1,
        "the head is not above the highest version": core.head_version <= core.highest_version,
        "few versions are not durable": len(core.publications.undurable) <= core.most_undurable,
        "every step since the checkpoint is in the lineage": [e.step for e in lineage] == steps,
        "no job is trained on twice": len(set(jobs)) == len(jobs)
        and all(job in core.trained for job in jobs)
        and not any((ref.job in core.trained) != ref.replay for ref in core.running),
        "a trainer is done only when all is durable": core.phase is not Phase.DONE
        or (not core.publications.undurable and core.checkpoints.step == core.step),
    }
    for rule, holds in rules.items():
        if not holds:
            story = "\n".join(core.story("")[-20:])
            raise InvariantViolation(f"{rule}: {core.dump()}\n{story}")
