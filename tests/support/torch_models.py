"""Small model folders for the tests that need torch."""

import shutil
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "models" / "arithmetic-1m"
VOCABULARY = 317


def random_qwen3(folder: Path, *, seed: int = 0, chat_template: bool = True) -> Path:
    """A Qwen3 of two layers with random bf16 weights and the example's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return _save(Qwen3ForCausalLM(config).bfloat16(), folder, chat_template)


def random_gpt2(folder: Path, *, seed: int = 0) -> Path:
    """A GPT-2 with random float32 weights: another architecture, absolute positions, dropout in
    its configuration, biases, and no chat template."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        eos_token_id=1,
        bos_token_id=1,
        initializer_range=0.3,
    )
    return _save(GPT2LMHeadModel(config), folder, False)


def random_gemma2(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma 2 with random float32 weights: what its output layer says is bounded afterwards
    (``final_logit_softcapping``), tightly here, and a window slides over its even layers."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(seed)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        final_logit_softcapping=2.0,
        sliding_window=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return _save(Gemma2ForCausalLM(config), folder, False)


def served_qwen3(folder: Path, *, seed: int = 0) -> Path:
    """A tied Qwen3 whose heads are large enough for vLLM's kernels on a CPU (32)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**_SERVED, head_dim=32, tie_word_embeddings=True)
    return _save(Qwen3ForCausalLM(config).bfloat16(), folder, True)


def served_llama(folder: Path, *, seed: int = 0) -> Path:
    """An untied Llama for vLLM; query, key and value, and gate and up, are one matrix there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**_SERVED, tie_word_embeddings=False)
    return _save(LlamaForCausalLM(config).bfloat16(), folder, True)


_SERVED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}


def _save(model, folder: Path, chat_template: bool) -> Path:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder / name)
    if not chat_template:
        path = folder / "tokenizer_config.json"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if '"chat_template"' not in line))
    return folder
