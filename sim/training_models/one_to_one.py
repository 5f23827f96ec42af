"""Asynchronous, trainer-centred training: every trainer owns its rollout GPUs.

What always holds: no more than (bound + version + 1) batches of groups were ever begun, so lag
stays within the bound and nothing is thrown away (AReaL's admission [study]); groups go to the
trainer's GPUs in turn (its round-robin router [study]); a new version pauses all its GPUs for
``PAUSE_S`` and generation then goes on (interruptible generation).

With one-to-one links no trajectory reaches a second trainer. So each trainer generates whole
trajectories, the other policies' turns included, for itself: with P policies the same steps need
P times the tokens. The trainers are alike and do not meet, so one of them is simulated.
"""

from collections import deque
from typing import Final

from sim.kernel import Kernel
from sim.training_models.decoding import Decoder
from sim.training_models.parameters import Outcome, Setting, pace

PAUSE_S: Final = 3.0
"""Interrupt, load the new weights, prefill what was interrupted [assumed]."""


def train_one_to_one(setting: Setting) -> Outcome:
    """Simulate one of the trainers with its share of the rollout GPUs.

    Raises:
        ValueError: there are too few GPUs.
    """
    rollout, each = setting.split(setting.policies)
    if not rollout:
        raise ValueError("gpus: too few to give generation and training their own")
    trainer = _Trainer(setting, rollout // setting.policies, each)
    trainer.admit()
    trainer.kernel.run(1e12)
    ends_s = trainer.ends_s
    # Tokens of unfinished work do not count; every one of the alike trainers draws these.
    return Outcome(
        system="one-to-one",
        step_s=pace(ends_s, setting.warm_up),
        waiting_share=1.0 - len(ends_s) * setting.train_s(each) / ends_s[-1],
        lag_mean=sum(trainer.lags) / len(trainer.lags),
        drawn_tokens=sum(decoder.drawn for decoder in trainer.decoders) * setting.policies,
        trained_tokens=trainer.trained * setting.policies,
    )


class _Trainer:
    def __init__(self, setting: Setting, rollout: int, each: int) -> None:
        self.kernel = Kernel()
        self.setting = setting
        self.train_s = setting.train_s(each)
        self.decoders = [
            Decoder(self.kernel, setting.slots, setting.token_s) for _ in range(rollout)
        ]
        self.version = 0
        self.begun = 0
        self.ready: deque[tuple[int, int]] = deque()
        """(oldest version, tokens) of finished groups."""
        self.lags: list[int] = []
        self.ends_s: list[float] = []
        self.trained = 0
        self._training = False

    def admit(self) -> None:
        most = (
            min(self.setting.max_lag + self.version + 1, self.setting.steps)
            * self.setting.batch_groups
        )
        while self.begun < most:
            self._begin(self.setting.group(self.begun))

    def _begin(self, lengths: tuple[int, ...]) -> None:
        decoder = self.decoders[self.begun % len(self.decoders)]
        self.begun += 1
        oldest: int | None = None
        left = len(lengths)

        def started() -> None:
            nonlocal oldest
            if oldest is None:
                oldest = self.version

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                assert oldest is not None  # noqa: S101 - it has ended, so it has started
                self.ready.append((oldest, sum(lengths)))
                self._step()

        for tokens in lengths:
            decoder.submit(tokens, ended, started)

    def _step(self) -> None:
        if self._training or len(self.ready) < self.setting.batch_groups:
            return
        self._training = True
        for _ in range(self.setting.batch_groups):
            version, tokens = self.ready.popleft()
            self.lags.append(self.version - version)
            self.trained += tokens
        self.kernel.after(self.train_s, self._stepped)

    def _stepped(self, _: object) -> None:
        self._training = False
        self.version += 1
        self.ends_s.append(self.kernel.now)
        if len(self.ends_s) == self.setting.steps:
            self.kernel.stop()
            return
        for decoder in self.decoders:
            decoder.pause(PAUSE_S)
        self.admit()
        self._step()
