"""Synchronous colocated training: all GPUs generate, then all train, one policy after the other.

An iteration: for each turn the engines of its policy wake, every trajectory of the batch gets its
turn, and the last one to end is waited for (batch-wise turns, as a synchronous multi-agent loop
makes them); then for each policy its state comes into the GPUs, it trains on the batch, its state
leaves. On-policy: the next iteration begins with the new weights.

What always holds: nothing is trained on twice, wasted or stale; the parts of an iteration add up to
its time. Groups are dealt out to GPUs in turn, sequences stay on their GPU, as the usual
implementations do it.

``Switches`` turns its losses off one by one, to see where the time goes:

    tail     waiting for the longest response of a turn, with slots that are or become empty; off:
             the batch takes its tokens at the rate of all slots
    swap     moving training state and engines in and out; off: free
    turns    generation and training take turns on all GPUs; off: each has GPUs of its own
             (``Setting.split``) and works on the next batch meanwhile (one step off-policy); then
             there is nothing to swap either
"""

from dataclasses import dataclass
from typing import Final

from sim.kernel import Kernel
from sim.training_models.decoding import Decoder
from sim.training_models.parameters import STATE_BYTES, Outcome, Setting, pace

WAKE_S: Final = 1.0
"""An engine gets its memory, graphs and caches back, or gives them up [assumed]."""
GATHER_BYTES_S: Final = 100e9
"""The engine's weights are gathered from the trainer's shards over the GPUs' links [assumed]."""


@dataclass(frozen=True, slots=True)
class Switches:
    tail: bool = True
    swap: bool = True
    turns: bool = True


def state_s(setting: Setting) -> float:
    """Moving a policy's training state into or out of the GPUs that it is sharded over."""
    total = STATE_BYTES * setting.model.parameters
    return total / setting.gpus / setting.gpu.host_copy_bytes_s


def engine_s(setting: Setting) -> float:
    """Waking an engine with new weights, or sending it to sleep."""
    return WAKE_S + setting.model.weight_bytes / GATHER_BYTES_S


def train_colocated(setting: Setting, switches: Switches = Switches()) -> Outcome:
    """Simulate ``setting.steps`` iterations."""
    loop = _Loop(setting, switches)
    loop.run()
    ends_s = loop.ends_s
    return Outcome(
        system="colocated",
        step_s=pace(ends_s, setting.warm_up),
        waiting_share=1.0 - loop.parts["train"] / ends_s[-1],
        lag_mean=0.0 if switches.turns else 1.0,
        drawn_tokens=loop.drawn,
        trained_tokens=loop.trained,
        parts=tuple((name, s / len(ends_s)) for name, s in loop.parts.items()),
    )


class _Loop:
    """One run; with ``turns`` off, generation is one batch ahead of training."""

    def __init__(self, setting: Setting, switches: Switches) -> None:
        self.kernel = Kernel()
        self.setting = setting
        self.switches = switches
        self.drawn = 0
        self.trained = 0
        self.ends_s: list[float] = []
        self.parts = {"generate": 0.0, "swap": 0.0, "train": 0.0}
        rollout, each = setting.split() if not switches.turns else (setting.gpus, setting.gpus)
        if not switches.turns and not rollout:
            raise ValueError("gpus: too few to give generation and training their own")
        self.rollout = rollout
        # Side by side on GPUs of their own, or one after the other on all.
        after_one_another = setting.policies if switches.turns else 1
        self.train_s = after_one_another * setting.train_s(each)
        self.swap_s = 0.0
        if switches.swap and switches.turns:
            self.swap_s = 2 * setting.policies * (state_s(setting) + engine_s(setting))
        self.decoders = [
            Decoder(self.kernel, setting.slots, setting.token_s) for _ in range(rollout)
        ]
        self.generated = 0
        self._open = 0
        self._began_s = 0.0
        self._generating = False
        self._training = False

    def run(self) -> None:
        self.kernel.at(0.0, self._generate)
        self.kernel.run(1e12)

    def _next(self) -> None:
        """Start whatever may be."""
        done = len(self.ends_s)
        ahead = self.generated - done
        if ahead and not self._training:
            self._training = True
            self.kernel.after(self.train_s + self.swap_s, self._stepped)
        # Generation of batch k + 1 needs the weights of step k, or of step k - 1 if side by side.
        allowed = 0 if self.switches.turns else 1
        if not self._generating and ahead <= allowed and self.generated < self.setting.steps:
            self._generate(None)

    def _stepped(self, _: object) -> None:
        self._training = False
        self.parts["train"] += self.train_s
        self.parts["swap"] += self.swap_s
        self.trained += sum(self._tokens(len(self.ends_s)))
        self.ends_s.append(self.kernel.now)
        self._next()

    def _tokens(self, batch: int) -> list[int]:
        first = batch * self.setting.batch_groups
        return [
            tokens
            for index in range(first, first + self.setting.batch_groups)
            for tokens in self.setting.group(index)
        ]

    def _generate(self, _: object) -> None:
        self._generating = True
        self._began_s = self.kernel.now
        if not self.switches.tail:
            tokens = sum(self._tokens(self.generated))
            rate = self.setting.slots * self.rollout / self.setting.token_s(self.setting.slots)
            self.drawn += tokens
            self.kernel.after(tokens / rate, self._batch_done)
        else:
            self._turn(0)

    def _turn(self, turn: int) -> None:
        size = self.setting.group_size
        lengths = [turns_of(n, self.setting.policies)[turn] for n in self._tokens(self.generated)]
        self._open = len(lengths)

        def ended() -> None:
            self._open -= 1
            if self._open == 0:
                if turn + 1 < self.setting.policies:
                    self._turn(turn + 1)
                else:
                    self._batch_done(None)

        for number, tokens in enumerate(lengths):
            self.drawn += tokens
            self.decoders[number // size % len(self.decoders)].submit(tokens, ended)

    def _batch_done(self, _: object) -> None:
        self.parts["generate"] += self.kernel.now - self._began_s
        self._generating = False
        self.generated += 1
        self._next()


def turns_of(tokens: int, turns: int) -> list[int]:
    """A trajectory's tokens in equal turns, none of which is lost.

    Example: 10 tokens in 4 turns are 2, 3, 2, 3.
    """
    return [tokens * (n + 1) // turns - tokens * n // turns for n in range(turns)]
