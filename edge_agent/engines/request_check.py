"""What is wrong with a request, before it is in an engine, where it could spoil others."""

import math
from typing import Final

from edge_agent.engine import GenerationRequest, stop_fault

_VLLM_TEMPERATURES: Final = (0.01, 2.0)
"""Below, vLLM takes 0.01 without a word; above, it refuses."""


def vllm_fault(request: GenerationRequest, vocabulary: int, context_tokens: float) -> str:
    """As ``request_fault``, and what vLLM would do otherwise than asked."""
    low, high = _VLLM_TEMPERATURES
    temperature = request.sampling.temperature
    problem = request_fault(request, vocabulary, context_tokens)
    if not problem and temperature and not low <= temperature <= high:
        problem = f"temperature {temperature} must be 0 or {low} to {high}"
    return problem


def request_fault(
    request: GenerationRequest, vocabulary: int, context_tokens: float = math.inf
) -> str:
    """The first thing, or nothing; ``context_tokens`` is the longest prompt with its answer."""
    sampling = request.sampling
    prompt_tokens = len(request.prompt_tokens)
    if not request.prompt_tokens:
        return "the prompt has no tokens"
    if request.n < 1 or sampling.max_new_tokens < 1:
        return "n and max_new_tokens must be at least 1"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature {sampling.temperature} must be 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} must be above 0 and at most 1"
    if prompt_tokens + sampling.max_new_tokens > context_tokens:
        return (
            f"{prompt_tokens} prompt tokens and max_new_tokens {sampling.max_new_tokens} "
            f"exceed the model's {context_tokens} positions"
        )
    if not all(0 <= token < vocabulary for token in request.prompt_tokens):
        return f"a prompt token is outside the vocabulary of {vocabulary}"
    return stop_fault(sampling)
