"""Recorded log-probabilities against torch's, rows of ``bench.vllm``. The two log-probabilities of
a token, in nats, give ``d = torch - recorded``: its mean absolute value, and the mean of
``exp(d) - 1 - d`` (k3, Schulman 2020), which estimates KL(recorded || torch)."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Row
from edge_agent.engine import Completion, GenerationRequest, SamplingParams
from edge_agent.engines.vllm_engine import VllmEngine

_ASKED = ((31, 4), (12, 55), (70, 29), (48, 48), (19, 83), (65, 7), (90, 11), (27, 36))


async def agreement_rows(engine: VllmEngine, policy: str, folder: Path, name: str) -> list[Row]:
    """Log-probabilities of what ``policy`` draws against torch's of the same weights, those of
    ``folder``, in float32; torch in bfloat16 is as far away as a model in bfloat16 is."""
    questions = [f"State the final answer to: {a} + {b} =" for a, b in _ASKED]
    drawn: list[tuple[tuple[int, ...], Completion]] = []
    for question in questions:
        prompt = engine.encode(policy, question)
        request = GenerationRequest(
            request_id=question,
            policy=policy,
            prompt_tokens=prompt,
            n=32,
            sampling=SamplingParams(max_new_tokens=48),
        )
        drawn += [(prompt, each) for each in await engine.generate(request)]
    theirs = np.concatenate([each.logprobs for _, each in drawn])
    ours = await asyncio.to_thread(_recomputed, folder, drawn, "float32")
    rounded = await asyncio.to_thread(_recomputed, folder, drawn, "bfloat16")
    distance = float(np.abs(ours - theirs).mean())
    own = float(np.abs(ours - rounded).mean())
    d = ours - theirs
    return [
        Row(
            metric=f"log-probabilities from torch's, mean of {theirs.size}, {name}",
            value=distance,
            unit="nats/token",
            reference="torch in bfloat16 from torch in float32",
            ratio=distance / own,
            target="<= 1.5",
            ok=distance <= 1.5 * own,
        ),
        Row(
            metric=f"k3 of the same, {name}",
            value=float((np.exp(d) - 1 - d).mean()),
            unit="nats/token",
        ),
    ]


def _recomputed(
    folder: Path, drawn: list[tuple[tuple[int, ...], Completion]], dtype: str
) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    found = []
    with torch.inference_mode():
        for prompt, completion in drawn:
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
            rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].numpy())
    return np.concatenate(found)
