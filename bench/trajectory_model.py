"""A language model of real text, made in the run: ``bench.trajectory`` draws its groups from it.

No pretrained model comes with this project but ``examples/models/arithmetic-1m``, whose vocabulary
is 317 and whose answers have five tokens. So a small Qwen3 learns the source of Python's standard
library with a byte-level BPE vocabulary made of the same text, and writes on from the beginnings
of files. It is drawn from by the torch engine's own code: bf16 weights and logits,
log-probabilities f32, which is what the engine records.

What always holds: the same seed, steps, versions and kind of processor give the same groups; torch,
transformers and tokenizers are imported only when a model is made.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.torch_decoding import Forward, Row, Wave
from transport.trajectory import SequenceRecord, TrajectoryGroup, run_length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ARITHMETIC = Path(__file__).parents[1] / "examples" / "models" / "arithmetic-1m"
POLICY = "bench/solver"
_CORPUS_BYTES = 2 << 20
_PROMPT_TOKENS = 96
_BATCH, _WINDOW = 8, 128


@dataclass(frozen=True)
class TextModel:
    """A model with its vocabulary size and prompts that it never saw."""

    model: Any
    vocabulary: int
    prompts: tuple[tuple[int, ...], ...]
    loss_nats: float


def _corpus() -> str:
    """Source text of the standard library, files in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(root.glob("*.py")):
        text = path.read_text("utf-8", errors="ignore")
        parts.append(text)
        size += len(text)
        if size >= _CORPUS_BYTES:
            break
    return "\n".join(parts)


def _vocabulary(text: str, size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    step = 1 << 16
    pieces = (text[start : start + step] for start in range(0, len(text), step))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def text_model(steps: int, *, vocabulary: int = 8192, seed: int = 0) -> TextModel:
    """Train for ``steps`` of 1 024 tokens on all of the text but its last twentieth."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)  # small matrices: more threads wait for each other
    text = _corpus()
    tokenizer = _vocabulary(text, vocabulary)
    ids = np.array(tokenizer.encode(text).ids, np.int64)
    held_out = len(ids) // 20
    tokens = torch.from_numpy(ids[:-held_out])
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        starts = torch.randint(len(tokens) - _WINDOW, (_BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + _WINDOW] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    unseen = ids[-held_out:]
    prompts = tuple(
        tuple(unseen[start : start + _PROMPT_TOKENS].tolist())
        for start in range(0, len(unseen) - _PROMPT_TOKENS, 4096)
    )
    return TextModel(model.bfloat16().eval(), vocabulary, prompts, float(loss.detach()))


def arithmetic_model() -> TextModel:
    """The project's example, which goes on after the end of its answer here."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC)
    model: Any = AutoModelForCausalLM.from_pretrained(ARITHMETIC)
    question = "State the final answer to the following arithmetic problem: {} + {} ="
    prompts = tuple(
        tuple(tokenizer.encode(f"<|user|>{question.format(n, 3 * n)}<|assistant|>"))
        for n in range(11, 31)
    )
    return TextModel(model.eval(), 317, prompts, 0.0)


def drawn(
    source: TextModel, prompt: int, *, siblings: int, tokens: int, temperature: float
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.float32]]]:
    """Tokens and log-probabilities of each sibling, as the torch engine draws and records them."""
    import torch

    request = GenerationRequest(
        request_id=f"bench/{prompt}",
        policy=POLICY,
        prompt_tokens=source.prompts[prompt % len(source.prompts)],
        n=siblings,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=prompt),
    )
    rows = [Row(request, sibling, frozenset()) for sibling in range(siblings)]
    with torch.inference_mode():
        wave = Wave(Forward(source.model), rows, version=0, device="cpu")
        while wave.rows:
            wave.advance(0)
    for row in rows:
        yield np.array(row.tokens, np.uint32), np.array(row.logprobs, np.float32)


def group_of(
    source: TextModel, prompt: int, *, siblings: int, tokens: int, temperature: float
) -> TrajectoryGroup:
    """A group as an attempt returns it. Weights moved twice while it was drawn, and a tool's
    output stands in the middle of each sequence: segments and masks are not trivial."""
    sequences = []
    for number, (ids, logprobs) in enumerate(
        drawn(source, prompt, siblings=siblings, tokens=tokens, temperature=temperature)
    ):
        count = len(ids)
        policies = np.zeros(count, np.int64)
        versions = 7 + (np.arange(count) * 3) // count
        tool = slice(count // 2, count // 2 + count // 32)
        policies[tool], versions[tool] = -1, 0
        recorded = logprobs.copy()
        recorded[tool] = 0.0
        sequences.append(
            SequenceRecord(
                prompt=0,
                tokens=tuple(ids.tolist()),
                logprobs=recorded,
                segments=run_length(tuple(policies.tolist()), tuple(versions.tolist())),
                reward=float(number % 2),
                finish_reason="length",
            )
        )
    return TrajectoryGroup(
        job=f"bench/t-{prompt:06d}",
        attempt=f"bench/t-{prompt:06d}#1",
        policies=(POLICY,),
        prompts=(source.prompts[prompt % len(source.prompts)],),
        sequences=tuple(sequences),
    )
