r"""What a torch trainer needs for the log-probabilities of a large vocabulary and their gradient.

    python -m bench.trainer_memory --json [--quick]

Rows compare ``cloud_trainer.log_probabilities`` with ``log_softmax`` of all logits in float32, the
way it is written down in a line, on logits that come out of a linear layer. Each runs in a process
of its own, one after the other, on one thread. *Memory* is the most that log-probabilities,
entropies and gradient take beyond the logits; *time* is the processor's.

Other rows count what a block keeps for the backward pass: bytes of the tensors that autograd holds,
of weights' roundings and of anything else that does not grow with the tokens apart, from random
blocks of the shapes of Qwen3-0.6B and Qwen3-1.7B (``SHAPES``) in both types.

What always holds: both give the same log-probabilities, and the mark is the kernel's own
(``VmHWM``, reset in between). A GPU has other times; its memory is that of the same tensors.
"""

import functools
import json
import subprocess
import sys
import time
from typing import Any

from bench.delta_memory import extra_bytes
from bench.report import Row, main

VOCABULARY = 151_936
TOKENS = 2048
QUICK_TOKENS = 512
MEMORY_MAX = 0.2
QUICK_MEMORY_MAX = 0.5
"""What does not depend on the number of tokens weighs more then."""
TIME_MAX = 1.2
REFERENCE = "log_softmax of all at once"
SHAPES = {"Qwen3-0.6B": (1024, 3072), "Qwen3-1.7B": (2048, 6144)}
"""Hidden and intermediate size; 16 heads of 128, 8 of keys and values."""
SEQUENCES = (128, 256)
"""Tokens whose difference is counted."""
_FEATURES = 8
_WORK_LIMIT_S = 600


def measure(quick: bool) -> list[Row]:
    tokens = QUICK_TOKENS if quick else TOKENS
    rows = []
    for kind in ("float32", "bfloat16"):
        ours, plain = (_measured(way=way, kind=kind, tokens=tokens) for way in ("ours", "plain"))
        if abs(ours["mean"] - plain["mean"]) > 1e-5:
            raise RuntimeError(f"{kind}: log-probabilities differ: {ours['mean']} {plain['mean']}")
        what = f"{kind} logits of {tokens} tokens x {VOCABULARY}"
        for name, unit, scale, limit in (
            ("memory", "GB", 1e9, QUICK_MEMORY_MAX if quick else MEMORY_MAX),
            ("time", "s", 1.0, TIME_MAX),
        ):
            ratio = ours[name] / plain[name]
            rows.append(
                Row(
                    metric=f"{what}: {name}",
                    value=ours[name] / scale,
                    unit=unit,
                    reference=REFERENCE,
                    ratio=ratio,
                    target=f"<= {limit} x",
                    ok=ratio <= limit,
                )
            )
    for model in SHAPES:
        for kind in ("float32", "bfloat16"):
            facts = _measured(way="block", kind=kind, tokens=0, model=model)
            rows.append(
                Row(
                    metric=f"block of {model} in {kind}: activations",
                    value=facts["bytes"] / 1e3,
                    unit="kB/token",
                )
            )
    return rows


def _measured(**task: Any) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.trainer_memory", "work", json.dumps(task)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_WORK_LIMIT_S,
    )
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


# ---- in the process of its own ------------------------------------------------------------


def _work(way: str, kind: str, tokens: int, model: str = "") -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    if way == "block":
        return {"bytes": _block_bytes(kind, model)}
    passes = {"ours": _ours, "plain": _plain}[way]
    _pass_of(passes, kind, 2)  # what is loaded once is no part of it
    extra, seconds, mean = _pass_of(passes, kind, tokens)
    return {"memory": float(extra), "time": seconds, "mean": mean}


def _pass_of(passes: Any, kind: str, tokens: int) -> tuple[int, float, float]:
    """Bytes, seconds and the mean log-probability."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, kind)
    weight = torch.randn(VOCABULARY, _FEATURES, dtype=dtype, requires_grad=True)
    logits = torch.nn.functional.linear(torch.randn(1, tokens, _FEATURES, dtype=dtype), weight)
    targets = torch.randint(VOCABULARY, (1, tokens))
    begin = time.process_time()
    extra, mean = extra_bytes(functools.partial(passes, logits, targets))
    return extra, time.process_time() - begin, mean


def _ours(logits: Any, targets: Any) -> float:
    import torch

    from cloud_trainer.log_probabilities import token_log_probabilities

    chosen, _ = token_log_probabilities(logits, targets)
    torch.autograd.grad(chosen.sum(), logits)
    return float(chosen.detach().mean())


def _plain(logits: Any, targets: Any) -> float:
    import torch

    everything = torch.log_softmax(logits.float(), dim=-1)
    chosen = everything.gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        everything = everything.detach()
        _ = -(everything.exp() * everything).sum(dim=-1)
    torch.autograd.grad(chosen.sum(), logits)
    return float(chosen.detach().mean())


def _block_bytes(kind: str, model: str) -> float:
    """What one block keeps per token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from cloud_trainer.precision import computing

    hidden, intermediate = SHAPES[model]
    kept: list[int] = []
    for blocks in (1, 2):
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=blocks,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            attn_implementation="sdpa",
        )
        network = Qwen3ForCausalLM(config).train()
        for tokens in SEQUENCES:
            held: dict[int, int] = {}

            def keep(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
                computing("bfloat16" if kind == "bfloat16" else "float32", "cpu"),
            ):
                logits = network(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
            kept.append(sum(held.values()))
            del logits
    one_short, one_long, two_short, two_long = kept
    return ((two_long - two_short) - (one_long - one_short)) / (SEQUENCES[1] - SEQUENCES[0])


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(_work(**json.loads(sys.argv[2]))))
    else:
        main("trainer_memory", measure)
