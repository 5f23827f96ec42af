"""A policy that an engine hosts: model, tokenizer and the weights in use.

What always holds: weights are exchanged by reference, never written into, so the exchange takes no
longer for a large model, a failed one has changed nothing, and whoever reads an older version goes
on reading exactly that one; what is staged fits in name, type and shape and is finite.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.engine import GenerationRequest
from edge_agent.engines.torch_decoding import Forward, end_tokens
from transport.errors import GenerationFailed, ModelError, WeightApplyFailed
from transport.runtime.model_folder import (
    ComputeType,
    ModelWeights,
    load_model,
    load_tokenizer,
    published_tensor,
    torch_tensor,
    vocabulary_of,
)
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HostedWeights:
    """One version's tensors. Replaced as a whole, so every reader sees a single version."""

    version: int
    tensors: "Mapping[str, torch.Tensor]"


class HostedPolicy:
    """A loaded policy. Blocks while it loads.

    Raises:
        ModelError: the folder does not load; names the file and what is wrong.
    """

    def __init__(
        self, name: str, folder: Path, version: int, *, device: str, compute: ComputeType
    ) -> None:
        loaded = load_model(folder, device=device, compute=compute)
        self.name = name
        self._vocabulary = vocabulary_of(loaded.model)
        self._tokenizer: Any = load_tokenizer(folder, vocabulary=self._vocabulary)
        try:
            self.forward = Forward(loaded.model)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
        self._stop_tokens = end_tokens(loaded.model, self._tokenizer)
        self._context_tokens = getattr(loaded.model.config, "max_position_embeddings", math.inf)
        self._weights: ModelWeights = loaded.weights
        live = {key: value.data for key, value in self._weights.parameters.items()}
        self._current = HostedWeights(version, live)

    @property
    def version(self) -> int:
        return self._current.version

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Through the chat template as one user message, or as it is where there is none."""
        if self._tokenizer.chat_template is None:
            return tuple(self._tokenizer.encode(prompt))
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def stop_tokens(self, request: GenerationRequest) -> frozenset[int]:
        """What ends a sequence of this request."""
        return self._stop_tokens | frozenset(request.sampling.stop_token_ids)

    def check(self, request: GenerationRequest) -> None:
        """Raises GenerationFailed for what would fail, or spoil others in the batch, later."""
        sampling = request.sampling
        prompt_tokens = len(request.prompt_tokens)
        problem = ""
        if not request.prompt_tokens:
            problem = "the prompt has no tokens"
        elif request.n < 1 or sampling.max_new_tokens < 1:
            problem = "n and max_new_tokens must be at least 1"
        elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            problem = f"temperature {sampling.temperature} must be 0 (greedy) or more"
        elif not 0 < sampling.top_p <= 1:
            problem = f"top_p {sampling.top_p} must be above 0 and at most 1"
        elif prompt_tokens + sampling.max_new_tokens > self._context_tokens:
            problem = (
                f"{prompt_tokens} prompt tokens and max_new_tokens {sampling.max_new_tokens} "
                f"exceed the model's {self._context_tokens} positions"
            )
        elif not all(0 <= token < self._vocabulary for token in request.prompt_tokens):
            problem = f"a prompt token is outside the vocabulary of {self._vocabulary}"
        if problem:
            raise GenerationFailed(f"{request.request_id}: {problem}")

    def read_weights(self) -> Iterator[tuple[str, TensorBytes]]:
        """One version's tensors in canonical order, also while another is swapped in."""
        tensors, fixed = self._current.tensors, self._weights.fixed
        for name in sorted(tensors.keys() | fixed.keys()):
            if name in fixed:
                yield name, fixed[name]
            else:
                yield name, published_tensor(tensors[name], self._weights.dtypes[name])

    def stage(self, version: int, tensors: Mapping[str, TensorBytes]) -> "dict[str, torch.Tensor]":
        """New tensors, checked, on the device and in the type that is computed with.

        Raises:
            WeightApplyFailed: names the first tensor that does not fit.
        """
        import torch

        where = f"{self.name} version {version}"
        staged: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if self._weights.fixed.get(name) == tensor:
                continue
            old = self._current.tensors.get(name)
            if old is None:
                raise WeightApplyFailed(f"{where}: the model has no tensor {name!r} to change")
            expected = (self._weights.dtypes[name], tuple(old.shape))
            if (tensor.dtype, tensor.shape) != expected:
                raise WeightApplyFailed(
                    f"{where}: tensor {name!r} is {tensor.dtype} {tensor.shape}, the model's is "
                    f"{expected[0]} {expected[1]}"
                )
            try:
                staged[name] = torch_tensor(tensor, dtype=old.dtype, device=old.device)
            except RuntimeError as error:  # out of memory
                raise WeightApplyFailed(f"{where}: tensor {name!r}: {error}") from error
            if not bool(torch.isfinite(staged[name]).all()):
                raise WeightApplyFailed(f"{where}: tensor {name!r} has values that are not finite")
        return staged

    def swap(self, version: int, staged: "Mapping[str, torch.Tensor]") -> None:
        """Put staged tensors in use; between two forward passes only."""
        for name, tensor in staged.items():
            self._weights.parameters[name].data = tensor
        self._current = HostedWeights(version, {**self._current.tensors, **staged})
