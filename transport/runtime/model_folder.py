"""Hugging Face model folders as torch sees them: one loader for engines and trainers.

What always holds:

1. A folder either loads whole or is refused with a ``ModelError`` that names the file and what is
   wrong with it: no parameter is ever left at its random initial value.
2. Weights have the names and types that the folder's own files give them (``ModelWeights``), so
   what a trainer publishes fits every copy of the folder, bit for bit.
3. Nothing is downloaded and no program text of the folder is run.

A model is computed in float32, or in its published type on devices that are fast at that. Both
hold the published values exactly, so ``published_tensor`` gives back the bits that were read.
"""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from transport.errors import ConfigError, ModelError
from transport.weights.folder import SINGLE_NAME, read_model_folder
from transport.weights.manifest import INDEX_NAME
from transport.weights.tensors import TensorBytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ComputeType = Literal["float32", "published"]

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


class FolderDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a model folder says about itself; ``architecture`` is empty where it does not say."""

    folder: str
    model_type: str
    architecture: str
    tensors: int
    parameters: int
    size_bytes: int


class _Config(msgspec.Struct):
    model_type: str
    architectures: list[str] | None = None
    quantization_config: Any = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A live model's weights under the names of its folder's files, in canonical order.

    ``parameters`` are the model's own (a tied one appears once), ``dtypes`` the safetensors types
    they are published in, ``fixed`` what the files hold beside them (masks, tables): it travels
    with the model and never changes.
    """

    parameters: "dict[str, torch.nn.Parameter]"
    dtypes: dict[str, str]
    fixed: dict[str, TensorBytes]

    def published(self) -> Iterator[tuple[str, TensorBytes]]:
        """All tensors in canonical order, in the published types; copies."""
        for name in sorted(self.parameters.keys() | self.fixed.keys()):
            if name in self.fixed:
                yield name, self.fixed[name]
            else:
                yield name, published_tensor(self.parameters[name], self.dtypes[name])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode (no dropout) with its weights by name."""

    model: "PreTrainedModel"
    weights: ModelWeights


def require_torch(what: str) -> None:
    """Say what to install before anything else fails; imports nothing.

    Raises:
        ConfigError: torch or transformers is not installed.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{what} needs {name}; run: pip install 'farflow[torch]'")


def describe_folder(folder: Path) -> FolderDescription:
    """Check a folder as far as that goes without torch, and say what is in it.

    Raises:
        ModelError: a file is missing, malformed or truncated, or the model is quantised.
    """
    description, _ = _inspect(folder)
    return description


def load_model(
    folder: Path, *, device: str = "cpu", compute: ComputeType = "float32"
) -> LoadedModel:
    """Load a causal language model of any architecture that ``AutoModelForCausalLM`` knows.

    Raises:
        ModelError: the folder does not load; names the file and what is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM

    description, tensors = _inspect(folder)
    _check_architecture(folder, description)
    types = {tensor.dtype for tensor in tensors.values()} & _TORCH_NAMES.keys()
    exact = compute == "published" and len(types) == 1
    dtype = getattr(torch, _TORCH_NAMES[types.pop()] if exact else "float32")
    with _quiet():
        try:
            # Mismatched shapes are refused below, where we can say which tensor it is.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # configurations raise whatever they like
            raise ModelError(f"{folder}: the model does not load: {_short(error)}") from error
    model: PreTrainedModel = loaded[0]
    unexpected = sorted(loaded[1]["unexpected_keys"])
    if unexpected:
        raise ModelError(
            f"{folder}: {type(model).__name__} has no place for {len(unexpected)} of the tensors "
            f"in the files, the first is {unexpected[0]!r}; config.json and weights do not belong "
            "together"
        )
    weights = _name_weights(folder, model, tensors)
    try:
        moved: PreTrainedModel = loaded[0].to(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ModelError(f"{folder}: not to device {device!r}: {_short(error)}") from error
    moved.eval()  # type: ignore[no-untyped-call]
    return LoadedModel(moved, weights)


def load_tokenizer(folder: Path, *, vocabulary: int | None = None) -> "PreTrainedTokenizerBase":
    """The folder's tokenizer; with ``vocabulary`` it must fit an embedding of so many rows.

    Raises:
        ModelError: no tokenizer files, or they do not load or fit; names the file.
    """
    from transformers import AutoTokenizer

    path = tokenizer_file(folder)
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises bare ones
            raise ModelError(f"{path}: does not load: {_short(error)}") from error
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise ModelError(
            f"{path}: has {len(tokenizer)} tokens, but the model embeds only {vocabulary}; "
            "model and tokenizer do not belong together"
        )
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def vocabulary_of(model: "PreTrainedModel") -> int:
    """Rows of the input embedding: token ids from 0 to one less can be fed in."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def torch_type(dtype: str) -> "torch.dtype":
    """What torch calls a safetensors type of floating-point numbers."""
    import torch

    found: torch.dtype = getattr(torch, _TORCH_NAMES[dtype])
    return found


def published_tensor(values: "torch.Tensor", dtype: str) -> TensorBytes:
    """A copy of ``values`` in the safetensors type ``dtype``, rounded to nearest even."""
    import torch

    copied = values.detach().to(device="cpu", dtype=torch_type(dtype), copy=True).contiguous()
    flat = copied.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(dtype, tuple(values.shape), memoryview(flat.data).toreadonly())


def torch_tensor(
    tensor: TensorBytes, *, dtype: "torch.dtype", device: "torch.device | str"
) -> "torch.Tensor":
    """A new torch tensor with the values of ``tensor``."""
    import torch

    raw = torch.empty(tensor.shape, dtype=getattr(torch, _TORCH_NAMES[tensor.dtype]))
    raw.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, np.uint8)
    return raw.to(device=device, dtype=dtype)


# ---- checks ------------------------------------------------------------------------------------


def _inspect(folder: Path) -> tuple[FolderDescription, dict[str, TensorBytes]]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: is not a folder; give a Hugging Face model folder")
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError as error:
        raise ModelError(
            f"{path}: is missing; a model folder holds config.json, {SINGLE_NAME} (or "
            f"{INDEX_NAME}) and tokenizer files"
        ) from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: is malformed: {error}") from error
    if config.quantization_config is not None:
        raise ModelError(f"{path}: the model is quantised; give its bf16, fp16 or fp32 form")
    tensors = read_model_folder(folder, mapped=True)
    tokenizer_file(folder)
    counted = [tensor for tensor in tensors.values() if tensor.dtype in _TORCH_NAMES]
    description = FolderDescription(
        folder=str(folder),
        model_type=config.model_type,
        architecture=(config.architectures or [""])[0],
        tensors=len(tensors),
        parameters=sum(int(np.prod(tensor.shape)) for tensor in counted),
        size_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
    )
    return description, tensors


def tokenizer_file(folder: Path) -> Path:
    """A file of the folder's tokenizer.

    Raises:
        ModelError: there is none.
    """
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"{folder}: no tokenizer; one of {', '.join(_TOKENIZER_FILES)} must be there")


def _check_architecture(folder: Path, description: FolderDescription) -> None:
    """``AutoModelForCausalLM`` must know the type, and make the class that wrote the folder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = folder / "config.json"
    made = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(description.model_type)
    if made is None:
        raise ModelError(
            f"{path}: model_type {description.model_type!r} is not a causal language model that "
            "the installed transformers knows"
        )
    names = (made,) if isinstance(made, str) else tuple(made)
    if description.architecture and description.architecture not in names:
        raise ModelError(
            f"{path}: architecture {description.architecture!r} is not a causal language model; "
            f"expected {' or '.join(names)}"
        )


def _name_weights(
    folder: Path, model: "PreTrainedModel", tensors: Mapping[str, TensorBytes]
) -> ModelWeights:
    """Find each file tensor's parameter: by its name, or below the base model's prefix."""
    everything = dict(model.named_parameters(remove_duplicate=False))
    unnamed = dict(model.named_parameters())  # tied parameters once, under their first name
    preferred = {id(parameter): name for name, parameter in unnamed.items()}
    found: dict[str, torch.nn.Parameter] = {}
    fixed: dict[str, TensorBytes] = {}
    by_parameter: dict[int, str] = {}
    for name, tensor in tensors.items():
        own = name if name in everything else f"{model.base_model_prefix}.{name}"
        parameter = everything.get(own)
        if parameter is None:
            fixed[name] = TensorBytes(tensor.dtype, tensor.shape, bytes(tensor.data))
            continue
        if tuple(parameter.shape) != tensor.shape or tensor.dtype not in _TORCH_NAMES:
            raise ModelError(
                f"{folder}: tensor {name!r} is {tensor.dtype} {tensor.shape}; the model needs "
                f"BF16, F16 or F32 {tuple(parameter.shape)}"
            )
        twin = by_parameter.get(id(parameter))
        if twin is not None:  # both names of a tied parameter are in the files: keep the first
            if own != preferred[id(parameter)]:
                continue
            del found[twin]
        found[name] = parameter
        by_parameter[id(parameter)] = name
    missing = [name for name, parameter in unnamed.items() if id(parameter) not in by_parameter]
    if missing:
        raise ModelError(
            f"{folder}: the files hold no tensor for {len(missing)} parameters of "
            f"{type(model).__name__}, the first is {missing[0]!r}; the checkpoint is incomplete, "
            "or this version of transformers names or fuses them in another way"
        )
    ordered = dict(sorted(found.items()))
    dtypes = {name: tensors[name].dtype for name in ordered}
    return ModelWeights(ordered, dtypes, fixed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' progress bars and notices do not belong into a daemon's output."""
    from transformers.utils import logging as foreign

    foreign.disable_progress_bar()  # type: ignore[no-untyped-call]
    foreign.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
