"""A model with simulated weights that the torch engine loads, for ``bench.fanout``.

The shapes are those of a Qwen3 of chosen width and depth with the example's tokenizer; the weights
are cut out of ``weight_simulation.one_step``, old and new, so that as many cells differ as a step
at learning rate 1e-6 changes.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.weight_simulation import ROW_CELLS, one_step
from transport.weights.folder import write_model_folder
from transport.weights.tensors import TensorBytes

CHANGED = 0.0097
"""Share of cells that a step at learning rate 1e-6 changes (version 40 of the simulation)."""

EXAMPLE = Path(__file__).parents[1] / "examples" / "models" / "arithmetic-1m"
_VOCABULARY = 317
_HEAD = 64

Tensors = Mapping[str, TensorBytes]


@dataclass(frozen=True)
class ModelSize:
    """Width and depth; the cells follow from them."""

    hidden: int
    layers: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as a tied Qwen3 has them."""
        hidden, wide, kv = self.hidden, 3 * self.hidden, self.hidden // 2
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (_VOCABULARY, hidden),
            "model.norm.weight": (hidden,),
        }
        for layer in range(self.layers):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            shapes |= {
                f"{attention}.q_proj.weight": (hidden, hidden),
                f"{attention}.k_proj.weight": (kv, hidden),
                f"{attention}.v_proj.weight": (kv, hidden),
                f"{attention}.o_proj.weight": (hidden, hidden),
                f"{attention}.q_norm.weight": (_HEAD,),
                f"{attention}.k_norm.weight": (_HEAD,),
                f"{mlp}.gate_proj.weight": (wide, hidden),
                f"{mlp}.up_proj.weight": (wide, hidden),
                f"{mlp}.down_proj.weight": (hidden, wide),
                f"model.layers.{layer}.input_layernorm.weight": (hidden,),
                f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
            }
        return shapes

    def config(self) -> dict[str, object]:
        """``config.json``."""
        heads = self.hidden // _HEAD
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": _VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": _HEAD,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


QUICK_SIZE = ModelSize(hidden=256, layers=5)  # 4 M cells
FULL_SIZE = ModelSize(hidden=1536, layers=14)  # 396 M cells


@dataclass(frozen=True)
class TwoVersions:
    """Weights before and after a step."""

    old: Tensors
    new: Tensors

    @property
    def cells(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.old.values())

    @property
    def full_bytes(self) -> int:
        return 2 * self.cells


def two_versions(size: ModelSize) -> TwoVersions:
    """Simulated weights in the shapes of ``size``."""
    shapes = size.shapes()
    cells = sum(map(math.prod, shapes.values()))
    flat = [_cells(part) for part in one_step(cells + ROW_CELLS, CHANGED, tensors=1)]
    cut: tuple[dict[str, TensorBytes], dict[str, TensorBytes]] = ({}, {})
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        for into, source in zip(cut, flat, strict=True):
            data = source[start:stop].view(np.uint8).data
            into[name] = TensorBytes("BF16", shape, data)
        start = stop
    return TwoVersions(*cut)


def _cells(tensors: Mapping[str, TensorBytes]) -> np.ndarray:
    (tensor,) = tensors.values()
    return np.asarray(tensor.cells())


def artefacts(size: ModelSize) -> dict[str, bytes]:
    """Configuration and tokenizer of the model."""
    files = {"config.json": json.dumps(size.config()).encode()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = (EXAMPLE / name).read_bytes()
    return files


def write_model(folder: Path, size: ModelSize, tensors: Tensors) -> None:
    """A Hugging Face folder of these weights, in place of one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    write_model_folder(folder, tensors, artefacts(size))
