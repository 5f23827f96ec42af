"""Settings of an edge agent: its table ``[agent]`` and the shared ones."""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from transport.runtime.settings import (
    Bytes,
    Count,
    DaemonConfig,
    Port,
    PositiveSeconds,
    Seconds,
)


class FakeEngineTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent.fake]``: the service-time model of the fake engine. Lengths are log-normal in
    tokens; a sequence takes ``first_token_s + tokens / tokens_per_s``. With ``lengths_by`` place a
    length depends on the job's seed and the place in its group alone, as in the simulator (all
    turns of a sequence are then equally long)."""

    seed: int = 0
    lengths_by: Literal["request", "place"] = "request"
    tokens_per_s: Annotated[float, Meta(gt=0.0)] = 2000.0
    first_token_s: Seconds = 0.005
    mean_tokens: Annotated[float, Meta(gt=0.0)] = 16.0
    cv_tokens: Annotated[float, Meta(ge=0.0)] = 0.5


class VllmTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent.vllm]``: how vLLM is run; each policy has its own. ``dtype`` auto is the folder's;
    ``max_model_len`` is the longest prompt with its answer in tokens (0: the model's own);
    ``max_sequences`` bounds one policy's sequences in generation. A policy takes ``memory_share``
    of the device's memory, or its own in ``memory_shares`` by name or id (at most 1 in all), or,
    if ``kv_cache_gib`` is not 0, so much for the KV cache beside its weights. ``extra`` are
    further arguments of vLLM by the names of ``AsyncEngineArgs``."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    max_sequences: Annotated[int, Meta(ge=1, le=65536)] = 256
    memory_share: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.85
    memory_shares: dict[str, Annotated[float, Meta(gt=0.0, lt=1.0)]] = {}
    kv_cache_gib: Annotated[float, Meta(ge=0.0)] = 0.0
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    enforce_eager: bool = False
    start_timeout_s: PositiveSeconds = 1800.0
    extra: dict[str, bool | int | float | str] = {}

    def __post_init__(self) -> None:
        total = math.fsum(self.memory_shares.values())
        if total > 1.0:
            shares = sorted(self.memory_shares.items())
            fields = ", ".join(f"memory_shares.{name} = {share:g}" for name, share in shares)
            raise ValueError(f"{fields}: together {total:g}, and there is 1; make them smaller")


class OpenaiServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that the user runs. ``base_url`` is without ``/v1``; ``api_key_file`` holds the key
    that it wants, if any; ``model`` is the name that it serves (empty: its only one). With
    ``weight_updates`` vllm new weights are written into it through vLLM's own routes, files in
    ``exchange_folder`` (empty: memory), which server and agent both see; off: it serves frozen
    policies only, and nobody can read its weights, so ``accept_unverified`` must say that they are
    the policy's."""

    base_url: str = ""
    api_key_file: str = ""
    model: str = ""
    weight_updates: Literal["off", "vllm"] = "off"
    exchange_folder: str = ""
    accept_unverified: bool = False


class OpenaiTable(OpenaiServer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent.openai]``: the server that generates. Policies in ``servers``, by name or id, have
    another, as a whole table of those settings. A server that says nothing for ``timeout_s`` while
    it should is given up; one that cannot be reached is waited for ``away_s`` when a policy
    loads."""

    servers: dict[str, OpenaiServer] = {}
    timeout_s: PositiveSeconds = 600.0
    away_s: PositiveSeconds = 120.0


class ProgramTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent.programs.NAME]``: a program that runs may name as their workflow, ``program:NAME``,
    and that nobody but the owner of this agent can add. ``command`` is the program with its
    arguments, no shell reads it; it starts in ``folder`` (the agent's current one if empty). It
    gets ``environment``, the agent's own variables named in ``inherit``, ``PATH`` and what
    ``docs/bring-your-own-agent.md`` names, nothing else. At most ``at_once`` of it run; each is
    killed after ``timeout_s``."""

    command: Annotated[tuple[str, ...], Meta(min_length=1, max_length=256)]
    folder: str = ""
    environment: dict[str, str] = {}
    inherit: tuple[str, ...] = ()
    at_once: Annotated[int, Meta(ge=1, le=1024)] = 16
    timeout_s: PositiveSeconds = 600.0


class AgentTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent]``. ``slots`` is the number of concurrent sequences (engine vllm: 0 is
    what the KV caches have room for); ``local_models`` maps a
    policy's name or id to a folder that spares the download when its digest matches, and that a
    policy which is published as an adapter must have, as the model below it;
    ``decode_threads`` decode arriving weights (0: one a processor, at most four); every
    ``verify_every_swaps`` swaps, and at every version whose full digest is signed, the copy of a
    policy is read again as a whole, after the first two and every ``read_back_every_swaps``-th
    some cells of the engine are compared with it (0: never); ``workflows`` are extra
    ``module:function`` references that this agent offers beside the shipped ones, and so are
    ``programs``;
    a workflow that blocks the whole agent for ``stall_s`` is interrupted, and if that does not
    help the agent ends and is started again;
    ``price_usd_hour`` is what the box costs, ``egress_usd_gb`` what a gigabyte (10^9 bytes) costs
    that leaves it (0: unknown or free), for budgets and for ties between agents; with
    ``token_file`` the agent enrols itself at its first start, and takes key, host and ports from
    that enrolment; ``metrics_port`` serves metrics to Prometheus on this box (0: not at all)."""

    folder: str = "agent"
    key: str = ""
    token_file: str = ""
    engine: Literal["vllm", "torch", "openai", "fake"] = "torch"
    slots: Annotated[int, Meta(ge=0, le=10**9)] = 64
    device: str = "cpu"
    threads: Count = 1
    hardware: str = ""
    labels: dict[str, str] = {}
    price_usd_hour: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    egress_usd_gb: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    workflows: tuple[str, ...] = ()
    programs: dict[str, ProgramTable] = {}
    local_models: dict[str, str] = {}
    spool_bytes: Bytes = 1 * 2**30
    upload_window_bytes: Bytes = 8 * 2**20
    decode_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    verify_every_swaps: Annotated[int, Meta(ge=0)] = 32
    read_back_every_swaps: Annotated[int, Meta(ge=0)] = 4
    download_window_bytes: Bytes = 64 * 2**20
    reward_timeout_s: PositiveSeconds = 30.0
    attempt_timeout_s: PositiveSeconds = 3600.0
    stall_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 30.0
    drain_s: Seconds = 30.0
    metrics_port: Port = 0
    fake: FakeEngineTable = FakeEngineTable()
    vllm: VllmTable = VllmTable()
    openai: OpenaiTable = OpenaiTable()

    def __post_init__(self) -> None:
        if not self.slots and self.engine != "vllm":
            raise ValueError('slots: 0 (what the caches have room for) is for engine "vllm" only')
        if self.engine == "openai" and not (self.openai.base_url or self.openai.servers):
            raise ValueError("openai.base_url: name the server, as in http://127.0.0.1:8000")


class AgentConfig(DaemonConfig, frozen=True, kw_only=True):
    """What ``farflow agent run`` reads."""

    agent: AgentTable = AgentTable()
