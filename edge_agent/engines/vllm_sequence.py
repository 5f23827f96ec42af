"""One sequence in vLLM: what is asked of it, and what comes back.

What always holds: a sequence none of whose tokens was drawn before new weights came begins anew
with them, so it is of one version from its first token on; one that goes on keeps its cache and
says of each token which version drew it; the cache of a prompt is shared between two swaps only.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable
from typing import Any

from edge_agent.engine import Completion, GenerationRequest
from transport.errors import GenerationFailed


class Sequence:
    """Sibling ``sibling`` of a request. ``drawn`` is told of new tokens, as many as came."""

    def __init__(
        self, request: GenerationRequest, sibling: int, drawn: Callable[[int], None]
    ) -> None:
        self._request = request
        self._sibling = sibling
        self._drawn = drawn
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._starts = 0
        self._stale = False

    @property
    def name(self) -> str:
        """Of the request that vLLM has now."""
        return f"{self._request.request_id}/{self._sibling}/{self._starts}"

    @property
    def begun(self) -> bool:
        return bool(self._tokens)

    def begin_anew(self) -> str:
        """Note that its request is to be aborted, and made once more; returns its name."""
        self._stale = True
        return self.name

    async def run(self, llm: Any, swaps: Callable[[], int], adapter: Any = None) -> Completion:
        """``swaps`` counts changes of the weights, ``adapter`` is vLLM's request of one. Raises
        GenerationFailed when vLLM gave it up."""
        from vllm.inputs.engine import tokens_input

        while True:
            self._starts += 1
            self._stale = False
            # Blocks of the cache are found by what is in them and by this salt.
            tokens = list(self._request.prompt_tokens)
            prompt = tokens_input(tokens, cache_salt=str(swaps()))
            last: Any = None
            stream = llm.generate(prompt, self._sampling(), self.name, lora_request=adapter)
            async with contextlib.aclosing(stream):
                async for output in stream:
                    last = output.outputs[0]
                    if self._stale and not self.begun:
                        break  # on its way to vLLM when it was to be aborted, or a moment too late
                    self._take(last)
            if self._stale and not self.begun:
                continue
            reason = None if last is None else last.finish_reason
            if last is None or reason not in ("stop", "length"):
                raise GenerationFailed(f"{self._request.request_id}: vLLM ended it: {reason}")
            return self._completion(last)

    def _take(self, output: Any) -> None:
        new = len(output.token_ids)
        self._tokens += output.token_ids
        self._logprobs += output.logprobs.logprobs[-new:] if new else ()
        self._drawn(new)

    def _completion(self, last: Any) -> Completion:
        name = self._request.request_id
        versions = [
            int(span.version)
            for span in last.weight_versions or ()
            for _ in range(span.start, span.end)
        ]
        if not len(versions) == len(self._tokens) == len(self._logprobs):
            raise GenerationFailed(
                f"{name}: vLLM gave {len(self._tokens)} tokens, {len(self._logprobs)} "
                f"log-probabilities and {len(versions)} versions"
            )
        if not all(map(math.isfinite, self._logprobs)):
            raise GenerationFailed(f"{name} version {versions[-1]}: the logits are not finite")
        return Completion(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(versions),
            finish_reason="stop" if last.finish_reason == "stop" else "length",
        )

    def _sampling(self) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = self._request.sampling
        greedy = asked.temperature == 0
        return SamplingParams(
            max_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_p=1.0 if greedy else asked.top_p,  # greedy ones report log-probabilities of all
            seed=sequence_seed(asked.seed, self._request.request_id, self._sibling),
            stop=list(asked.stop),
            stop_token_ids=list(asked.stop_token_ids),
            include_stop_str_in_output=True,
            detokenize=bool(asked.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )


def sequence_seed(seed: int, request_id: str, sibling: int) -> int:
    """The same for the same arguments, and unrelated for others; as ``sampling`` does it."""
    name = f"{seed}\0{request_id}\0{sibling}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
