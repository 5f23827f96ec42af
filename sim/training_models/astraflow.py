"""AstraFlow as its code and documents describe it: one pool, EDF buffers, lock step.

Parts and constants are from the study of its public repository (commit 343e808) and of its figures;
each is marked. What the study does not tell is chosen in AstraFlow's favour where possible.

    dataflow   polls every instance's availability, which is 0 or 4 groups (bang-bang on the queue
               against 4 x GPUs), submits to the one with most free slots; never looks at how full
               the buffers are; every call is a new connection, two round trips
    instances  hosts with all policies' engines, each on its slice of GPUs; a trajectory goes
               through the engines of its instance in order
    buffers    one per policy, of single trajectories, earliest ``min_version`` first; at ``pop``
               one older than ``max_lag`` is dropped
    trainers   batch, step, offload, delta, then all policies meet (lock step) and the versions of
               all advance
    updates    per policy and instance: eight round trips, the payload through one lock at the
               sender, then a pause of grace and reload; every tenth and after a missed one in full

What always holds: a trajectory reaches the buffer of every policy once all its turns are drawn;
there it is trained on, dropped or left over; a dropped one was too old for that policy, or the
buffer was full.
"""

import heapq
from dataclasses import dataclass
from typing import Final

from sim.kernel import Kernel
from sim.training_models.colocated import turns_of
from sim.training_models.decoding import Decoder
from sim.training_models.parameters import Model, Outcome, Setting, pace

AVAILABLE_GROUPS: Final = 4  # the adaptive mode's step [study]
QUEUE_PER_GPU: Final = 4  # ... as long as less than this waits per GPU [study]
SUBMIT_THREADS: Final = 8  # [study]
MAX_PROMPTS: Final = 256  # per tick [study]
TICK_S: Final = 0.1  # between ticks [assumed; the study gives none]
POLL_S: Final = 0.05  # until a result is pulled, half of the 0.1 s timeout [study]
CALL_RTTS: Final = 2  # a new connection per call [study]
UPDATE_RTTS: Final = 8  # per version and instance [study]
GRACE_S: Final = 3.0  # before a reload [study]
SLEEP_S: Final = 0.05  # per 8 trajectories of a batch [study]
FULL_EVERY: Final = 10  # versions [study]
CHANGED: Final = 0.0112  # share of elements per step, 8B [study]
BYTES_PER_CHANGED: Final = {False: 6, True: 10}  # u32, or u64 above 2^32 elements [study]
TOKEN_BYTES: Final = 25  # of a trajectory on the wire, with model ids [study]
INSTANCE_GPUS: Final = 8  # at most; one instance is one host [study]
BUFFER: Final = 4096  # trajectories, the head is evicted [assumed]


@dataclass(frozen=True, slots=True)
class Links:
    """Between the trainers' site and every instance."""

    rtt_s: float = 0.001
    bytes_s: float = 1.25e9


def reload_s(model: Model) -> float:
    """Of an engine: 0.7 s for 1.7B, about 10 s for 14.8B, a straight line between [study]."""
    return 0.7 + (model.parameters - 1.7e9) * (10.0 - 0.7) / (14.8e9 - 1.7e9)


def offload_s(model: Model) -> float:
    """Trainer to shared memory: 0.5 s for 1.7B, about 6 s for 14.8B, a straight line [study]."""
    return 0.5 + (model.parameters - 1.7e9) * (6.0 - 0.5) / (14.8e9 - 1.7e9)


def compare_s(model: Model) -> float:
    """Making a delta on the CPU: 1.8 s for 1.7B, 12 s for 8B; the trainer waits for it [study]."""
    return 1.8 + (model.parameters - 1.7e9) * (12.0 - 1.8) / (8.2e9 - 1.7e9)


def delta_bytes(model: Model) -> float:
    return CHANGED * model.parameters * BYTES_PER_CHANGED[model.parameters >= 2**32]


def train_astraflow(setting: Setting, links: Links = Links()) -> Outcome:
    """Simulate it. Raises ValueError: there are too few GPUs."""
    rollout, each = setting.split()
    if not rollout:
        raise ValueError("gpus: too few to give generation and training their own")
    flow = _Dataflow(setting, links, rollout, each)
    flow.run()
    ends_s, policies = flow.ends_s, setting.policies
    taken = len(flow.lags) + flow.dropped
    busy_s = len(ends_s) * setting.train_s(each)
    return Outcome(
        system="astraflow",
        step_s=pace(ends_s, setting.warm_up),
        waiting_share=1.0 - busy_s / ends_s[-1],
        wasted_share=flow.dropped / max(1, taken),
        lag_mean=sum(flow.lags) / max(1, len(flow.lags)),
        drawn_tokens=flow.drawn,
        trained_tokens=flow.trained // policies,
    )


class _Instance:
    """A host: engines by policy, their versions."""

    def __init__(self, kernel: Kernel, setting: Setting, gpus: int) -> None:
        decoders = [Decoder(kernel, setting.slots, setting.token_s) for _ in range(gpus)]
        count = setting.policies
        # A slice each; with fewer GPUs than policies, they share.
        self.engines = [
            [decoders[n] for n in range(gpus) if n % count == policy]
            or [decoders[policy % len(decoders)]]
            for policy in range(count)
        ]
        self.versions = [0] * count
        self.wanted = [0] * count
        self.updating = [False] * count
        self.gpus = gpus
        self.turn = 0
        self.decoders = decoders

    @property
    def available(self) -> int:
        waiting = sum(decoder.waiting for decoder in self.decoders)
        return AVAILABLE_GROUPS if waiting < QUEUE_PER_GPU * self.gpus else 0


class _Dataflow:
    def __init__(self, setting: Setting, links: Links, rollout: int, each: int) -> None:
        self.kernel = Kernel()
        self.setting = setting
        self.links = links
        self.train_s = setting.train_s(each)
        hosts = -(-rollout // INSTANCE_GPUS)
        self.instances = [
            _Instance(self.kernel, setting, rollout // hosts + (n < rollout % hosts))
            for n in range(hosts)
        ]
        self.version = 0
        self.ends_s: list[float] = []
        self.lags: list[int] = []
        self.dropped = 0
        self.drawn = 0
        self.trained = 0
        self._index = 0
        self._arrivals = 0
        self._buffers: list[list[tuple[int, int, int]]] = [[] for _ in range(setting.policies)]
        self._batches: list[list[tuple[int, int]]] = [[] for _ in range(setting.policies)]
        self._idle = [True] * setting.policies
        self._met = 0
        self._sender_free_s = [0.0] * setting.policies

    def run(self) -> None:
        self.kernel.at(0.0, self._tick)
        self.kernel.run(1e12)

    # ---- rollouts ------------------------------------------------------------------------------

    def _tick(self, _: object) -> None:
        rtt_s = self.links.rtt_s
        free = [instance.available for instance in self.instances]
        count = 0
        while count < MAX_PROMPTS and max(free) > 0:
            chosen = max(range(len(free)), key=lambda n: free[n])
            free[chosen] -= 1
            calls = 1 + count // SUBMIT_THREADS
            at_s = CALL_RTTS * rtt_s * calls + CALL_RTTS * rtt_s
            self.kernel.after(at_s, self._begin, (self.instances[chosen], self._index))
            self._index += 1
            count += 1
        busy_s = CALL_RTTS * rtt_s * (1 + -(-count // SUBMIT_THREADS))
        self.kernel.after(busy_s + TICK_S, self._tick)

    def _begin(self, job: tuple[_Instance, int]) -> None:
        instance, index = job
        for tokens in self.setting.group(index):
            self._turn(instance, tokens, turns_of(tokens, self.setting.policies), [])

    def _turn(
        self, instance: _Instance, tokens: int, turns: list[int], versions: list[int]
    ) -> None:
        policy = len(versions)
        engine = instance.engines[policy]
        instance.turn += 1

        def started() -> None:
            versions.append(instance.versions[policy])

        def ended() -> None:
            if len(versions) < len(turns):
                self._turn(instance, tokens, turns, versions)
            else:
                self.drawn += tokens
                away_s = CALL_RTTS * self.links.rtt_s + POLL_S
                away_s += tokens * TOKEN_BYTES / self.links.bytes_s
                self.kernel.after(away_s, self._arrived, (tokens, versions))

        # The decoder of the slice with the least to do, as a router within a host has it.
        best = min(engine, key=lambda d: d.waiting + d.running)
        best.submit(turns[policy], ended, started)

    def _arrived(self, result: tuple[int, list[int]]) -> None:
        tokens, versions = result
        self._arrivals += 1
        for policy, buffer in enumerate(self._buffers):
            heapq.heappush(buffer, (versions[policy], self._arrivals, tokens))
            if len(buffer) > BUFFER:
                heapq.heappop(buffer)
                self.dropped += 1
            self._gather(policy)

    # ---- training ------------------------------------------------------------------------------

    def _gather(self, policy: int) -> None:
        """Take from the buffer what the next batch lacks."""
        if not self._idle[policy]:
            return
        batch, buffer = self._batches[policy], self._buffers[policy]
        while buffer and len(batch) < self.setting.batch:
            oldest, _, tokens = heapq.heappop(buffer)
            if self.version - oldest > self.setting.max_lag:
                self.dropped += 1
            else:
                batch.append((oldest, tokens))
        if len(batch) == self.setting.batch:
            self._idle[policy] = False
            for oldest, tokens in batch:
                self.lags.append(self.version - oldest)
                self.trained += tokens
            batch.clear()
            model = self.setting.model
            step_s = self.train_s + offload_s(model) + compare_s(model)
            sleeps_s = SLEEP_S * self.setting.batch / 8
            self.kernel.after(sleeps_s + step_s, self._meet)

    def _meet(self, _: object) -> None:
        """A trainer is ready to publish; the last one lets all go on."""
        self._met += 1
        if self._met < self.setting.policies:
            return
        self._met = 0
        self.version += 1
        self.ends_s.append(self.kernel.now)
        if len(self.ends_s) == self.setting.steps:
            self.kernel.stop()
            return
        for policy in range(self.setting.policies):
            for instance in self.instances:
                instance.wanted[policy] = self.version
                self._update(instance, policy)
            self._idle[policy] = True
            self._gather(policy)

    # ---- weights -------------------------------------------------------------------------------

    def _update(self, instance: _Instance, policy: int) -> None:
        if instance.updating[policy] or instance.versions[policy] == instance.wanted[policy]:
            return
        instance.updating[policy] = True
        version = instance.wanted[policy]
        whole = version % FULL_EVERY == 0 or version - instance.versions[policy] > 1
        model = self.setting.model
        size = model.weight_bytes if whole else delta_bytes(model)
        # One lock at the sender: its transfers follow each other.
        asked_s = self.kernel.now + UPDATE_RTTS * self.links.rtt_s
        arrived_s = max(asked_s, self._sender_free_s[policy]) + size / self.links.bytes_s
        self._sender_free_s[policy] = arrived_s
        self.kernel.at(arrived_s, self._pull_done, (instance, policy, version))

    def _pull_done(self, pulled: tuple[_Instance, int, int]) -> None:
        instance, policy, _ = pulled
        pause_s = GRACE_S + reload_s(self.setting.model)
        for decoder in instance.engines[policy]:
            decoder.pause(pause_s)
        self.kernel.after(pause_s, self._loaded, pulled)

    def _loaded(self, pulled: tuple[_Instance, int, int]) -> None:
        instance, policy, version = pulled
        instance.versions[policy] = version
        instance.updating[policy] = False
        self._update(instance, policy)
