"""What the modelled systems run on and are asked to do; every constant with where it comes from.

What always holds: all systems get the same GPUs, the same decoding speed, the same jobs with the
same lengths and the same training cost per token; they differ only in how they arrange them.

Marks: [study] the public study of AstraFlow's code, documents and figures that
``docs/experiments/index.md`` summarises; [data sheet] the vendor's; [bench] ``bench/results``;
[assumed] nobody's measurement, a choice that the pages vary or state.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from sim.workload import Draws, Workload, make_items
from transport.ids import item_seed
from transport.messages import LeaseOffer, RewardSpec

STATE_BYTES: Final = 14
"""Of a parameter in training between steps: bf16 weights, fp32 master, two fp32 moments
(2 + 4 + 4 + 4), what a colocated trainer moves out of and into the GPUs' memory."""
TRAIN_FLOPS: Final = 10
"""Per parameter and token: forward and backward 6, recomputed activations 2, one pass for the old
log-probabilities 2 [assumed; no reference model, for any system]."""
WEIGHT_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Model:
    """``kv_bytes`` per token of context; ``trainer_gpus`` is the least that holds its training."""

    name: str
    parameters: float
    kv_bytes: float
    trainer_gpus: int

    @property
    def weight_bytes(self) -> float:
        return self.parameters * WEIGHT_BYTES


QWEN3_8B: Final = Model("Qwen3-8B", 8.2e9, 36 * 8 * 128 * 2 * 2, 2)
QWEN3_1_7B: Final = Model("Qwen3-1.7B", 1.7e9, 28 * 8 * 128 * 2 * 2, 1)


@dataclass(frozen=True, slots=True)
class Gpu:
    """H100 SXM: memory rate and dense bf16 rate [data sheet]; shares of them that are reached, and
    ``decode_overhead_s`` per decoding step [assumed]. ``host_copy_bytes_s``: pinned copies to the
    host, 29.3 GB/s, pageable ones 1.3 GB/s [study]."""

    memory_bytes_s: float = 3.35e12
    memory_share: float = 0.7
    flops: float = 989e12
    train_share: float = 0.35
    decode_overhead_s: float = 0.002
    host_copy_bytes_s: float = 29.3e9

    def token_s(self, model: Model, running: int, context_tokens: float) -> float:
        """Seconds per decoding step of ``running`` sequences, each of which gets one token: the
        weights and every sequence's keys and values are read once.

        Example: 8.2e9 parameters, 64 sequences of 1400 tokens of context at 2.3 TB/s:
        7.0 + 5.6 + 2 ms, that is 68 tokens per second each; alone a sequence gets 110.
        """
        rate = self.memory_bytes_s * self.memory_share
        read = model.weight_bytes + running * context_tokens * model.kv_bytes
        return read / rate + self.decode_overhead_s

    def train_s(self, model: Model, tokens: float, gpus: int, overhead_s: float) -> float:
        """An optimizer step over ``tokens``, split over ``gpus``."""
        work = TRAIN_FLOPS * model.parameters * tokens
        return overhead_s + work / (gpus * self.flops * self.train_share)


H100: Final = Gpu()
PAGEABLE_BYTES_S: Final = 1.3e9


@dataclass(frozen=True)
class Setting:
    """One cluster and task. A trajectory consists of one turn of every policy, in order, each an
    equal share of its tokens; every policy trains on every trajectory, as a whole. ``mean_tokens``
    and ``max_tokens`` are of a trajectory; ``slots`` sequences at most decode at once on a GPU."""

    model: Model
    gpus: int
    policies: int = 1
    batch_groups: int = 32
    group_size: int = 8
    mean_tokens: float = 2400.0
    cv_tokens: float = 0.7
    max_tokens: int = 8192
    prompt_tokens: int = 200
    slots: int = 64
    gpu: Gpu = H100
    max_lag: int = 8
    """In versions, for all asynchronous systems [study: nearly all of AstraFlow's recipes]."""
    train_overhead_s: float = 2.0
    """Per step: packing the batch, the optimizer [assumed]."""
    steps: int = 18
    warm_up: int = 6
    """Steps until rates are measured, so that filling the pipeline does not count."""

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.batch_groups * self.group_size

    def workload(self) -> Workload:
        """Lengths as the simulator of the production cores draws them."""
        return Workload(
            mean_tokens=self.mean_tokens,
            cv_tokens=self.cv_tokens,
            max_new_tokens=self.max_tokens,
            prompt_tokens=self.prompt_tokens,
        )

    def group(self, index: int) -> tuple[int, ...]:
        """Tokens of each trajectory of the run's job of that index: the very lengths that the
        production scheduler's jobs get."""
        return _group(self.workload(), self.group_size, index)

    @cached_property
    def mean(self) -> float:
        """Tokens of a trajectory after the cut at ``max_tokens``, over the first steps' jobs."""
        groups = max(64, 6 * self.batch_groups)
        return sum(sum(self.group(n)) for n in range(groups)) / (groups * self.group_size)

    @cached_property
    def longest(self) -> float:
        """Mean tokens of the longest trajectory of a group, over the same jobs."""
        groups = max(64, 6 * self.batch_groups)
        return sum(max(self.group(n)) for n in range(groups)) / groups

    def token_s(self, running: int) -> float:
        """Seconds per token of each of ``running`` sequences of one GPU."""
        return self.gpu.token_s(self.model, running, self.prompt_tokens + self.mean / 2)

    def train_s(self, gpus: int) -> float:
        """One step of one policy on so many GPUs."""
        tokens = self.batch * (self.mean + self.prompt_tokens)
        return self.gpu.train_s(self.model, tokens, gpus, self.train_overhead_s)

    def decode_s(self, gpus: int) -> float:
        """A batch's tokens at the rate of ``gpus`` with all slots in use: no tail."""
        return self.batch * self.mean * self.token_s(self.slots) / (self.slots * gpus)

    def split(self, rollout_work: float = 1.0) -> tuple[int, int]:
        """GPUs for rollouts and for each policy's trainer that make the slower of both fastest:
        what a decoupled system is given that generates ``rollout_work`` times the batches. Ties go
        to more rollouts. (0, 0): there is no room for both."""
        best, found = float("inf"), (0, 0)
        for each in range(self.model.trainer_gpus, self.gpus // self.policies + 1):
            rollout = (self.gpus - each * self.policies) // self.policies * self.policies
            if rollout < self.policies:
                break
            worst = max(rollout_work * self.decode_s(rollout), self.train_s(each))
            if worst < best:
                best, found = worst, (rollout, each)
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a system made of a setting. ``step_s`` is the time of a step of every policy once the
    pipeline is full; ``waiting_share`` of the trainers' time. ``wasted_share`` is of the
    trajectories whose fate is known; ``lag_mean`` in versions, at consumption."""

    system: str
    step_s: float
    waiting_share: float = 0.0
    wasted_share: float = 0.0
    lag_mean: float = 0.0
    drawn_tokens: int = 0
    trained_tokens: int = 0
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def steps_hour(self) -> float:
        return 3600.0 / self.step_s


def pace(ends_s: list[float], warm_up: int) -> float:
    """Seconds per step after the first ``warm_up`` of those that ended at ``ends_s``."""
    return (ends_s[-1] - ends_s[warm_up - 1]) / (len(ends_s) - warm_up)


@lru_cache(maxsize=8192)
def _group(workload: Workload, group_size: int, index: int) -> tuple[int, ...]:
    offer = LeaseOffer(
        attempt=f"sim/t-{index}#1",
        fence=(1, 1),
        job=f"sim/t-{index}",
        kind="train",
        items=_ONE_ITEM,
        group_size=group_size,
        workflow="single_turn",
        settings={},
        policies={"policy": "sim/policy"},
        reward=RewardSpec(name="exact"),
        max_new_tokens=workload.max_new_tokens,
        temperature=1.0,
        seed=item_seed(0, "train", index),
        lease_s=1.0,
    )
    return tuple(Draws(workload).lengths(offer))


_ONE_ITEM: Final = make_items(0, 1)
