"""What vLLM is started with: our own arguments, those of ``[agent.vllm]``, and its environment.

What always holds: nothing of a model's folder is run, nothing is fetched from or told to anybody;
what farflow depends on (log-probabilities of what was drawn, our weight backend) cannot be set to
something else; an argument that the installed vLLM does not have is refused by name.
"""

import atexit
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_agent.config import VllmTable
from edge_agent.engines.private_folder import PrivateFolder
from edge_agent.engines.vllm_adapter import adapter_arguments, check_takes_adapters
from edge_agent.engines.vllm_map import TensorForm
from edge_agent.engines.vllm_owner import own_processes
from transport.errors import ConfigError, EngineCrashed, FarflowError, ModelError
from transport.weights.folder import is_adapter_folder, read_model_folder

_EXTENSION: Final = "edge_agent.engines.vllm_worker.FarflowExtension"
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes have their sockets."""
_ENDED: Final = "See root cause above"
STREAM_TOKENS: Final = 16
"""Tokens of a sequence that vLLM hands over at once, after the first."""


def tensor_forms(
    folder: Path, *, adapter: bool = False
) -> tuple[dict[str, TensorForm], dict[str, tuple[int, ...]]]:
    """Forms and shapes of the folder's tensors, in canonical order; a model's, or an adapter's.

    Raises:
        ModelError: the folder does not load, is the other of the two, or has tensors that vLLM
            cannot be given.
    """
    if is_adapter_folder(folder) != adapter:
        found, wanted = ("a whole model", "adapter") if adapter else ("an adapter", "model")
        raise ModelError(f"{folder}: is {found}, and not the {wanted} that it is loaded as")
    tensors = read_model_folder(folder, mapped=True)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{folder}: tensor {name!r} is {tensor.dtype}; give BF16, F16 or F32")
    forms = {name: TensorForm(each.dtype, each.cells().size) for name, each in tensors.items()}
    return forms, {name: tensor.shape for name, tensor in tensors.items()}


def engine_arguments(
    table: VllmTable,
    policy: str,
    folder: Path,
    forms: Mapping[str, TensorForm],
    device: str,
    *,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` for one policy: the model in ``folder``, whose tensors have
    these forms, and if one is named the adapter in another folder.

    Raises:
        ConfigError: ``[agent.vllm] extra`` has what vLLM has not, or what is ours; or ``dtype`` is
            one that vLLM has no adapters for.
        ModelError: vLLM has no adapters for this model, or not of this rank.
    """
    from vllm import AsyncEngineArgs

    kinds = [form.dtype for form in forms.values()]
    own: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "served_model_name": policy,
        "trust_remote_code": False,
        "dtype": _DTYPES[max(kinds, key=kinds.count)] if table.dtype == "auto" else table.dtype,
        "tensor_parallel_size": table.tensor_parallel,
        "max_num_seqs": table.max_sequences,
        "enforce_eager": table.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "stream_interval": STREAM_TOKENS,
        "disable_log_stats": True,
        "worker_extension_cls": _EXTENSION,
    }
    if adapter is not None:
        if own["dtype"] == "float32" and not device.startswith("cpu"):
            raise ConfigError(
                f"agent.vllm.dtype: {policy} is an adapter, and vLLM computes adapters of models in"
                " bfloat16 or float16 only; set one of them"
            )
        check_takes_adapters(folder)
        own |= adapter_arguments(adapter)
    if table.max_model_len:
        own["max_model_len"] = table.max_model_len
    if table.kv_cache_gib:
        own["kv_cache_memory_bytes"] = int(table.kv_cache_gib * 2**30)
    else:
        own["gpu_memory_utilization"] = memory_share(table, policy)
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in table.extra:
        if name in own or name == "gpu_memory_utilization":
            raise ConfigError(
                f"agent.vllm.extra.{name}: is farflow's to set; see [agent.vllm] for what can be"
                " chosen"
            )
        if name not in fields:
            raise ConfigError(f"agent.vllm.extra.{name}: the installed vLLM has no such argument")
    return {**own, **table.extra}


def memory_share(table: VllmTable, policy: str) -> float:
    """The part of the device's memory that a policy may take."""
    name = policy.rpartition("/")[2]
    return table.memory_shares.get(policy, table.memory_shares.get(name, table.memory_share))


def environment(threads: int) -> None:
    """What vLLM and its processes read from the environment, unless the user has set it; and whose
    processes they are. Raises StoreError where there is no place for their sockets."""
    own_processes()
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",  # it reports to its makers otherwise
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # we have threads: a fork could hang
        # On a CPU all workers would be bound to the same cores, and one core would lie idle.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }.items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:  # it leaves each of them behind
        sockets = PrivateFolder("farflow-sockets-")
        atexit.register(sockets.close)
        os.environ[_SOCKETS] = str(sockets.path)


def start_fault(folder: Path, error: Exception) -> FarflowError:
    """What vLLM raises before it starts a process is about the model or its arguments; why a
    process of it ended it says in the log only."""
    if _ENDED in str(error):
        return EngineCrashed(
            f"{folder}: a process of vLLM ended while it started; why is in the agent's log, in"
            " vLLM's lines of level ERROR before this one. It may be memory (memory_share,"
            " kv_cache_gib), or an argument in [agent.vllm.extra] that this model or box does not"
            f" take ({error})"
        )
    text = f"{folder}: vLLM does not take it: {type(error).__name__}: {error}"
    if isinstance(error, ValueError | TypeError | NotImplementedError | ImportError):
        return ModelError(text)
    return EngineCrashed(text)
