"""What the trainer daemon needs from whatever computes gradients.

A trainer is deterministic: the same initial folder, settings and groups give the same weights,
and ``load_state_dict(*state_dict())`` continues bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.messages import GroupDrift
from transport.weights.tensors import TensorBytes

Arrays = dict[str, NDArray[np.generic]]


class TrainingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling of a group as the loss sees it; the five token fields are of equal length.

    ``logprobs`` are the behaviour policy's, recorded where the token was drawn; ``loss_mask`` is
    true on tokens that this trainer's policy produced.
    """

    group: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    reward: float


class Trainer(Protocol):
    """One policy's optimizer and weights."""

    step_count: int

    def load(self, folder: Path) -> None:
        """Start from a Hugging Face folder.

        Raises:
            ModelError: the folder does not load; names the file and what is wrong.
        """
        ...

    def step(self, groups: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """One optimizer step over whole groups; returns metrics by name."""
        ...

    def drifts(self) -> tuple[GroupDrift, ...]:
        """How far the recorded log-probabilities of the last step's groups were from those of the
        weights before it, by group and oldest version; nothing from a trainer that cannot say."""
        ...

    def moved(self) -> float | None:
        """How far the last step moved the policy, in nats a token (``cloud_trainer.honesty``); None
        from a trainer that cannot say."""
        ...

    def published_state(self) -> dict[str, TensorBytes]:
        """The weights in the published type under canonical names, sorted, tied ones once."""
        ...

    def artefacts(self) -> dict[str, bytes]:
        """The files that travel with the published weights, by name: those of the loaded folder,
        or an adapter's."""
        ...

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything that an exact resume needs: arrays, and MessagePack-able scalars."""
        ...

    def load_state_dict(self, arrays: Arrays, meta: dict[str, Any]) -> None: ...

    def export(self, folder: Path) -> None:
        """Write what is published as a stock Hugging Face folder, which plain ``transformers``
        loads, or ``peft`` where it is an adapter."""
        ...
