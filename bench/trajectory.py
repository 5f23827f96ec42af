"""Bytes per token of packed trajectories, and of the ways that others send them.

A token is an id, an f32 log-probability, whether it is trained on and the version that drew it;
groups are 8 siblings of one prompt, with two moves of the weights and a tool's output in each, so
that masks and versions are not trivial. Everything here is lossless and measured in whole messages.

Where the tokens come from is in the row:

* ``text``: a small language model that learnt Python source in this run, vocabulary 8 192, drawn
  from by the torch engine's own code at temperature 1 (flat) and 0.7 (peaky). These have the
  target. Large models after training are more certain than this one, which makes both ids and
  log-probabilities smaller, and have vocabularies of 150 000, which makes rare ids larger.
* ``arithmetic``: the project's example, going on after its answer: next to no entropy.
* ``uniform``: ids and log-probabilities of nearly uniform draws from 151 936 tokens: not a model,
  but the worst that can come.

The bound beside it is what no code can beat that treats tokens one by one: the entropy of ids, of
sign and exponent, and 23 bits for each mantissa, which is noise in log-probabilities of fp32
(measured: 15 900 different ones in 16 400). It does not say what a model of the context could do.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.report import Row, main
from bench.trajectory_model import POLICY, TextModel, arithmetic_model, group_of, text_model
from transport.trajectory import SequenceRecord, TrajectoryGroup, expand, pack, run_length, unpack

TARGET_BYTES = 5.0
SIBLINGS = 8
QUICK_TOKENS, FULL_TOKENS = 512, 2048
QUICK_STEPS, FULL_STEPS = 25, 400
LARGE_VOCABULARY = 151_936
_MANTISSA_BITS = 23
_ZSTD_LEVEL = 3


def references(group: TrajectoryGroup) -> Iterator[tuple[str, int]]:
    """The same group in other forms, each sibling with its own prompt, as they are usually sent."""
    lists, arrays = [], []
    for record in group.sequences:
        policies, versions = expand(record.segments)
        mask = [policy >= 0 for policy in policies]
        prompt = group.prompts[record.prompt]
        lists.append(
            {
                "prompt": list(prompt),
                "tokens": list(record.tokens),
                "logprobs": record.logprobs.tolist(),
                "mask": mask,
                "versions": list(versions),
                "reward": record.reward,
            }
        )
        arrays += [
            np.array(prompt, np.uint32).tobytes(),
            np.array(record.tokens, np.uint32).tobytes(),
            record.logprobs.tobytes(),
            np.array(mask, np.uint8).tobytes(),
            np.array(versions, np.uint32).tobytes(),
        ]
    raw = b"".join(arrays)
    yield "MessagePack lists", len(msgpack.packb(lists))
    yield "raw arrays", len(raw)
    yield "raw arrays + zstd", len(zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw))


def _entropy_bits(values: NDArray[Any]) -> float:
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def bound_bytes(group: TrajectoryGroup) -> float:
    """Per token: entropy of ids and of sign with exponent, and a mantissa where it is not zero."""
    ids = np.concatenate([np.array(record.tokens, np.uint32) for record in group.sequences])
    bits = np.concatenate([record.logprobs for record in group.sequences]).view(np.uint32)
    noise = _MANTISSA_BITS * np.count_nonzero(bits) / len(bits)
    return (_entropy_bits(ids) + _entropy_bits(bits >> _MANTISSA_BITS) + noise) / 8


def uniform_group(tokens: int) -> TrajectoryGroup:
    """Nearly uniform draws: normal logits of deviation 1 over a large vocabulary."""
    rng = np.random.default_rng(0)
    log_sum = np.log(LARGE_VOCABULARY) + 0.5
    records = tuple(
        SequenceRecord(
            prompt=0,
            tokens=tuple(rng.integers(0, LARGE_VOCABULARY, tokens).tolist()),
            logprobs=(rng.normal(1.0, 1.0, tokens) - log_sum).astype(np.float32),
            segments=run_length((0,) * tokens, (7,) * tokens),
            reward=0.0,
            finish_reason="length",
        )
        for _ in range(SIBLINGS)
    )
    prompt = tuple(rng.integers(0, LARGE_VOCABULARY, 96).tolist())
    return TrajectoryGroup(
        job="bench/t-000000", attempt="bench/t-000000#1", policies=(POLICY,), prompts=(prompt,),
        sequences=records,
    )  # fmt: skip


def group_rows(name: str, group: TrajectoryGroup, *, target: bool) -> list[Row]:
    """What one group takes, per generated token."""
    tokens = sum(len(record.tokens) for record in group.sequences)
    began_s = time.perf_counter()
    data = pack(group)
    packed_s = time.perf_counter() - began_s
    assert unpack(data) == group  # bit for bit
    drawn = np.concatenate([record.logprobs for record in group.sequences])
    what = f"{name}, 8 x {tokens // SIBLINGS:,} tokens, {-drawn.mean():.2f} nats/token"
    ours = len(data) / tokens
    rows = [
        Row(
            metric=what,
            value=ours,
            unit="B/token",
            reference="entropy of ids and exponents + mantissas",
            ratio=ours / bound_bytes(group),
            target=f"<= {TARGET_BYTES:g} B/token" if target else "",
            ok=not target or ours <= TARGET_BYTES,
        )
    ]
    for reference, size_bytes in references(group):
        rows.append(
            Row(
                metric=f"{reference}: {name}",
                value=size_bytes / tokens,
                unit="B/token",
                reference="ours",
                ratio=size_bytes / len(data),
            )
        )
    rows.append(Row(metric=f"packing: {name}", value=tokens / packed_s / 1e6, unit="M tokens/s"))
    return rows


def measure(quick: bool) -> list[Row]:
    tokens = QUICK_TOKENS if quick else FULL_TOKENS
    rows = []
    text = text_model(QUICK_STEPS if quick else FULL_STEPS)

    def drawn(source: TextModel, temperature: float) -> TrajectoryGroup:
        return group_of(source, 0, siblings=SIBLINGS, tokens=tokens, temperature=temperature)

    for temperature in (1.0, 0.7):
        group = drawn(text, temperature)
        rows += group_rows(f"text at temperature {temperature:g}", group, target=True)
    rows += group_rows("arithmetic at temperature 1", drawn(arithmetic_model(), 1.0), target=False)
    return rows + group_rows("uniform", uniform_group(tokens), target=False)


if __name__ == "__main__":
    main("trajectory", measure)
