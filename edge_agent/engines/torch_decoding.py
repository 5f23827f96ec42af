"""One wave of sequences through a causal language model with a key-value cache.

What always holds:

1. Each distinct prompt is computed once and its cache shared out to the siblings.
2. Prompts are padded on the left, so all rows write to the same column; a wave without padding
   passes no mask, which is the faster path of every attention implementation.
3. Finished and aborted rows leave the batch before the next step.
4. A token carries the version of the weights that computed its logits: weights may change between
   steps and never within one.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_agent.engine import Completion, GenerationRequest
from edge_agent.engines.sampling import choose, uniform_numbers
from transport.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


EndsIn = Callable[[Sequence[int], Sequence[str]], bool]
"""Whether one of some texts has just come up in what tokens decode to."""


@dataclass(slots=True)
class Row:
    """One sibling of a request while it is generated."""

    request: GenerationRequest
    sibling: int
    stop_tokens: frozenset[int]
    ends_in: EndsIn
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    aborted: bool = False
    uniform: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.uniform = uniform_numbers(
            sampling.seed, self.request.request_id, self.sibling, sampling.max_new_tokens
        )

    def add(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        stop = self.request.sampling.stop
        if token in self.stop_tokens or (stop and self.ends_in(self.tokens, stop)):
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.sampling.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish_reason or "length",
        )


class Forward:
    """A model's forward call, whatever this version of transformers calls its arguments.

    Raises:
        ModelError: the model has no attention mask or no cache that can be reordered.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        accepted = inspect.signature(model.forward).parameters
        cache_names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not cache_names or "attention_mask" not in accepted:
            raise ModelError(
                f"{type(model).__name__} takes no attention mask and key-value cache, which the "
                "torch engine needs; use another engine"
            )
        self._model = model
        self._cache_name = cache_names[0]
        self._positions = "position_ids" in accepted
        self._extra: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._extra["logits_to_keep"] = 1

    def __call__(
        self,
        tokens: "torch.Tensor",
        mask: "torch.Tensor | None" = None,
        positions: "torch.Tensor | None" = None,
        cache: Any = None,
    ) -> tuple["torch.Tensor", Any]:
        """Logits [rows, vocabulary] behind the last of ``tokens`` [rows, columns], and the cache.

        ``mask`` [rows, columns so far] and ``positions`` [rows, columns] are None without padding.
        """
        arguments = dict(self._extra)
        if mask is not None:
            arguments["attention_mask"] = mask
            if self._positions:
                arguments["position_ids"] = positions
        arguments[self._cache_name] = cache
        output: Any = self._model(input_ids=tokens, **arguments)
        return output.logits[:, -1], getattr(output, self._cache_name)


class Wave:
    """Rows that are generated together. Constructing it computes the prompts and draws each row's
    first token; ``advance`` draws one more token for every row."""

    def __init__(self, forward: Forward, rows: Sequence[Row], *, version: int, device: str) -> None:
        self.rows = list(rows)
        self._forward = forward
        self._device = device
        prompts = {row.request.prompt_tokens: 0 for row in rows}
        longest = max(map(len, prompts))
        tokens = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(tokens)
        for number, prompt in enumerate(prompts):
            prompts[prompt] = number
            tokens[number, longest - len(prompt) :] = prompt
            mask[number, longest - len(prompt) :] = 1
        self._mask: torch.Tensor | None = None
        self._position: torch.Tensor | None = None
        positions = None
        if not mask.all():
            self._mask = self._tensor(mask)
            positions = (self._mask.cumsum(dim=-1) - 1).clamp_(min=0)
            self._position = self._mask.sum(dim=-1, keepdim=True)
        logits, self._cache = forward(self._tensor(tokens), self._mask, positions)
        origin = [prompts[row.request.prompt_tokens] for row in rows]
        if origin != list(range(len(prompts))):
            logits = logits[self._select(origin)]
        self._set_sampling()
        self._draw(logits, version)

    def advance(self, version: int) -> None:
        """Leave out what is finished or aborted, then draw the next token of the others with the
        weights of ``version``."""
        self._compact()
        if not self.rows:
            return
        last = self._tensor(np.array([[row.tokens[-1]] for row in self.rows], np.int64))
        position = self._position
        if self._mask is not None:
            import torch

            self._mask = torch.cat([self._mask, torch.ones_like(last)], dim=-1)
        logits, self._cache = self._forward(last, self._mask, position, self._cache)
        if position is not None:
            self._position = position + 1
        self._draw(logits, version)

    def _draw(self, logits: "torch.Tensor", version: int) -> None:
        numbers = np.array([row.uniform[len(row.tokens)] for row in self.rows])
        tokens, logprobs = choose(logits, self._temperature, self._top_p, self._tensor(numbers))
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.add(token, logprob, version)

    def _compact(self) -> None:
        kept = [n for n, row in enumerate(self.rows) if not (row.finish_reason or row.aborted)]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in kept]
        if kept:
            self._select(kept)
            self._set_sampling()

    def _select(self, numbers: list[int]) -> "torch.Tensor":
        index = self._tensor(np.array(numbers, np.int64))
        self._cache.batch_select_indices(index)
        if self._mask is not None and self._position is not None:
            self._mask, self._position = self._mask[index], self._position[index]
        return index

    def _set_sampling(self) -> None:
        sampling = [row.request.sampling for row in self.rows]
        self._temperature = self._tensor(np.array([s.temperature for s in sampling], np.float32))
        self._top_p = None
        if any(s.top_p < 1 for s in sampling):
            self._top_p = self._tensor(np.array([s.top_p for s in sampling], np.float32))

    def _tensor(self, array: NDArray[np.generic]) -> "torch.Tensor":
        import torch

        return torch.from_numpy(array).to(self._device)


def end_tokens(model: "PreTrainedModel", tokenizer: Any) -> frozenset[int]:
    """What ends a sequence, from the generation config, the model config and the tokenizer."""
    sources: Iterable[Any] = (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    found: set[int] = set()
    for source in sources:
        if isinstance(source, int):
            found.add(source)
        elif source is not None:
            found.update(int(token) for token in source)
    return frozenset(found)
