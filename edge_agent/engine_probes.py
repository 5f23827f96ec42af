"""What the doctor looks at for an engine: is it installed, does it fit the device, is there room.

What always holds: a probe returns what it found and, where something is wrong, what to do about it;
it loads no model, and starts other programs only through ``call``, which is bounded in time.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from edge_agent.config import AgentTable
from transport.errors import FarflowError, ModelError
from transport.runtime.model_folder import describe_folder

Call = Callable[..., Awaitable[tuple[int | None, str]]]
"""Status and output of a command, given as its words; None when it does not end in time."""


class Verdict(NamedTuple):
    """``remedy`` is empty when all is well; with ``warning`` the agent works nevertheless."""

    text: str
    remedy: str = ""
    warning: bool = False


SERVER_S: Final = 15.0
"""For each question to a server of the user's."""


async def gpu_verdict(table: AgentTable, call: Call) -> Verdict:
    """Whether the agent's GPU is there, and whether one is that it does not use."""
    device = table.device
    unused = Verdict(f"not needed (agent.device = {device!r})")
    # A server of the user's is on whatever it is on.
    engines = ("torch", "vllm") if device == "cpu" else ("torch", "vllm", "openai")
    if table.engine not in engines or device.partition(":")[0] not in ("cpu", "cuda"):
        return unused
    query = "--query-gpu=name,memory.total,driver_version"
    status, out = await call("nvidia-smi", query, "--format=csv,noheader")
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    if device == "cpu":
        if status != 0 or not lines:
            return unused
        return Verdict(
            f"not used, as agent.device is 'cpu': {'; '.join(lines)}",
            'set agent.device = "cuda", and agent.engine = "vllm" where vLLM is installed, if this'
            " box is to generate with it",
            warning=True,
        )
    if status is None:
        return Verdict("no nvidia-smi here, or it hangs", "install the NVIDIA driver")
    if status != 0 or not lines:
        return Verdict(f"nvidia-smi: {out[-200:].strip()}", "mend the NVIDIA driver")
    index = device.partition(":")[2] or "0"
    if index.isdigit() and int(index) >= len(lines):
        return Verdict(f"agent.device = {device!r}, there are {len(lines)}", "name another one")
    return Verdict("; ".join(lines))


async def serving_verdict(table: AgentTable, call: Call) -> Verdict:
    """Whether what generates, other than torch, can."""
    if table.engine == "openai":
        return await asyncio.to_thread(openai_verdict, table)
    return await vllm_verdict(table, call)


def openai_verdict(table: AgentTable) -> Verdict:
    """Whether the servers are there, and give what training needs. Blocks."""
    from edge_agent.engines.openai_served import check_server

    servers = {"": table.openai} if table.openai.base_url else {}
    found = []
    for name, server in {**servers, **table.openai.servers}.items():
        try:
            found.append(check_server(server, SERVER_S))
        except FarflowError as error:
            where = f"agent.openai.servers.{name}" if name else "agent.openai"
            return Verdict(str(error), f"start the server, or mend [{where}]")
    return Verdict("; ".join(found))


async def vllm_verdict(table: AgentTable, call: Call) -> Verdict:
    """Whether vLLM is there and made for the agent's device."""
    code = (
        "import torch, vllm;"
        "from vllm.platforms import current_platform as p;"
        "print(vllm.__version__, torch.__version__, p.device_type)"
    )
    status, out = await call(sys.executable, "-c", code)
    if status is None:
        return Verdict("import took too long", "check the disk of the installation")
    if status != 0:
        last = (out.strip().splitlines() or ["no word"])[-1]
        return Verdict(f"vllm: {last[:200]}", "pip install 'farflow[vllm]'")
    version, torch, device = out.split()[-3:]
    wanted = table.device.partition(":")[0]
    if device != wanted:
        return Verdict(
            f"vLLM {version} runs on {device!r} here, agent.device is {table.device!r}",
            "set agent.device to that, or install the vLLM that is built for the other",
        )
    return Verdict(f"vLLM {version}, torch {torch}, on {device}")


async def vllm_memory_verdict(table: AgentTable, call: Call) -> Verdict:
    """Whether the memory that vLLM is to take is free now."""
    if not table.device.startswith("cuda"):
        free = _free_bytes()
        need = table.vllm.kv_cache_gib * 2**30
        if not need:
            return Verdict(
                "agent.vllm.kv_cache_gib is not set: on a CPU vLLM takes a share of all memory",
                "set agent.vllm.kv_cache_gib",
            )
        text = f"{free / 1e9:.1f} GB free, {need / 1e9:.1f} GB for a KV cache"
        return Verdict(text, "" if free > need else "lower agent.vllm.kv_cache_gib")
    query = "--query-gpu=memory.free,memory.total"
    status, out = await call("nvidia-smi", query, "--format=csv,noheader,nounits")
    index = table.device.partition(":")[2] or "0"
    lines = out.splitlines()
    if status != 0 or not index.isdigit() or int(index) >= len(lines):
        return Verdict("nvidia-smi does not tell", "mend the NVIDIA driver")
    try:
        free_mib, total_mib = (float(each) for each in lines[int(index)].split(","))
    except ValueError:  # a GPU that shares the memory of the processor
        told = lines[int(index)].strip()
        return Verdict(f"nvidia-smi tells {told!r} of memory", "see that enough of it is free")
    share = sum(table.vllm.memory_shares.values()) or table.vllm.memory_share
    text = f"{free_mib / 1024:.1f} of {total_mib / 1024:.1f} GiB free, vLLM is to take {share:.0%}"
    if free_mib < share * total_mib:
        return Verdict(text, "end what else uses the GPU, or lower agent.vllm.memory_share")
    return Verdict(text)


def models_verdict(table: AgentTable) -> Verdict:
    """Whether the folders of ``agent.local_models`` are models. Blocks."""
    found = []
    for name, folder in table.local_models.items():
        try:
            description = describe_folder(Path(folder))
        except ModelError as error:
            return Verdict(
                f"agent.local_models {name!r}: {error}",
                "mend or remove it: the model is downloaded then",
            )
        found.append(f"{name}: {description.model_type}, {description.parameters / 1e6:.0f} M")
    return Verdict("; ".join(found) or "none on this box, all are downloaded")


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
