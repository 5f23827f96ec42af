"""A policy on a server: whether it is there, is this model, and gives what training needs.

What always holds: what cannot be told from outside is not claimed. Compared are the served name,
the size of the vocabulary, and, where the server names a folder that is on this machine, too, the
weights in it; where the server shows its weights, ``openai_weights`` reads the weights themselves.
"""

import asyncio
import importlib.util
import math
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from edge_agent.config import OpenaiServer, OpenaiTable
from edge_agent.engines.chat_tokenizer import ChatTokenizer
from edge_agent.engines.openai_weights import Forms, ServerWeights, wake
from edge_agent.engines.openai_wire import (
    COMPLETIONS,
    GENERATE,
    MALFORMED,
    Address,
    ServerAway,
    ServerBusy,
    ask_one,
    read_answer,
)
from edge_agent.engines.vllm_arguments import tensor_forms
from transport.errors import ConfigError, GenerationFailed, ModelError
from transport.runtime.clock import Clock
from transport.runtime.model_folder import load_tokenizer
from transport.weights.digest import state_digest
from transport.weights.folder import read_model_folder

_log = structlog.get_logger()

LOOK_S: Final = 1.0
"""Between two looks at whether a server is there, while a policy waits for it."""
_CERTAIN: Final = 0.01
"""A log-probability nearer to 0 than this is that of a token that could be no other."""


FROZEN: Final = (
    'its server takes no new weights (agent.openai.weight_updates is "off"), so it can serve frozen'
    ' policies only; set that to "vllm" for a server that takes them, or give the policy to agents'
    " with another engine"
)


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Served(NamedTuple):
    """A policy at an address. ``path`` is where tokens are asked for; ``weights`` is None where the
    server shows none."""

    policy: str
    address: Address
    path: str
    model: str
    tokenizer: ChatTokenizer
    vocabulary: int
    context_tokens: float
    weights: ServerWeights | None

    def close(self) -> None:
        """Remove what lies between us and the server."""
        if self.weights is not None:
            self.weights.close()


def server_of(table: OpenaiTable, policy: str) -> OpenaiServer:
    """The server that has a policy, by its id or name."""
    name = policy.rpartition("/")[2]
    return table.servers.get(policy) or table.servers.get(name) or table


def check_servers(table: OpenaiTable) -> None:
    """Raises ConfigError when an address or a key file is none, or what reads tokenizers lacks;
    names the field."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "engine = \"openai\" needs transformers for tokenizers: pip install 'farflow[torch]'"
        )
    for server in (*((table,) if table.base_url else ()), *table.servers.values()):
        Address(server)


def check_frozen(policy: str, version: int, server: OpenaiServer) -> None:
    """Raises ModelError for a policy that the settings rule out on a server without updates."""
    if server.weight_updates != "off":
        return
    if version > 0:
        raise ModelError(f"{policy} version {version} is of a policy that is trained: {FROZEN}")
    if not server.accept_unverified:
        raise ModelError(
            f"{policy}: nobody can read which weights its server has (agent.openai.weight_updates"
            ' is "off"); if they are the policy\'s for sure, say so with'
            " agent.openai.accept_unverified = true"
        )


async def wait_for_served(
    policy: str, folder: Path, server: OpenaiServer, table: OpenaiTable, *, life: str, clock: Clock
) -> Served:
    """As ``find_served``, again and again until the server is there or ``away_s`` are over."""
    ends_s = clock.monotonic_s() + table.away_s
    while True:
        try:
            return await asyncio.to_thread(
                find_served,
                policy,
                folder,
                server,
                life=life,
                within_s=table.timeout_s,
                clock=clock,
            )
        except (ServerAway, ServerBusy) as error:
            if clock.monotonic_s() > ends_s:
                raise
            _log.info("engine.server_away", policy=policy, reason=str(error))
            await asyncio.sleep(LOOK_S)


def find_served(
    policy: str,
    folder: Path,
    server: OpenaiServer,
    *,
    life: str,
    within_s: float,
    clock: Clock,
) -> Served:
    """Look at a server once. Blocks.

    Raises:
        ConfigError: ``server`` holds no address, or no key.
        ModelError: the folder does not load, or the server has another model, or does not give what
            training needs.
        ServerAway, ServerBusy: try again.
        StoreError: there is no place for files.
    """
    address = Address(server)
    forms, shapes = tensor_forms(folder)
    tokenizer = ChatTokenizer(policy, load_tokenizer(folder))
    vocabulary = vocabulary_in(folder)
    updates = server.weight_updates == "vllm"
    path = GENERATE if updates else COMPLETIONS
    model = served_model(address, server, within_s)
    if updates:
        wake(address, within_s)
    try:
        check_answers(address, path, model.id, vocabulary, within_s)
    except ServerBusy:
        raise
    except GenerationFailed as error:
        raise ModelError(f"{policy}: {error}") from error
    weights = None
    if updates:
        place = Path(server.exchange_folder) if server.exchange_folder else None
        weights = ServerWeights(
            policy,
            address,
            Forms(forms, shapes),
            life=life,
            place=place,
            within_s=within_s,
            clock=clock,
        )
    else:
        _compare_folders(policy, folder, model.root)
    return Served(
        policy=policy,
        address=address,
        path=path,
        model=model.id,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        context_tokens=model.max_model_len or math.inf,
        weights=weights,
    )


def served_model(address: Address, server: OpenaiServer, within_s: float) -> _Model:
    """The model that is meant, as the server lists it. Blocks.

    Raises:
        ModelError: it is not served, or it is not clear which one is meant.
        ServerAway, ServerBusy: try again.
    """
    try:
        data = address.call("GET", "/v1/models", within_s=within_s)
        listed = msgspec.json.decode(data, type=_Models).data
    except ServerBusy:
        raise
    except (GenerationFailed, *MALFORMED) as error:
        raise ModelError(f"{address.url}: lists no models: {error}") from error
    names = ", ".join(repr(model.id) for model in listed) or "nothing"
    if server.model:
        found = [model for model in listed if model.id == server.model]
    else:
        found = [model for model in listed if model.parent is None]
    if len(found) != 1:
        wanted = repr(server.model) if server.model else "one model (agent.openai.model is empty)"
        raise ModelError(f"{address.url}: serves {names}, not {wanted}; set agent.openai.model")
    return found[0]


def check_answers(
    address: Address, path: str, model: str, vocabulary: int, within_s: float
) -> None:
    """Whether the server takes and gives tokens as training needs it. Blocks.

    A token that alone is allowed has probability 1 under the distribution that it is drawn from.
    Under the model's own, two tokens cannot both have that: so what is reported for two of them
    tells which distribution it is of.

    Raises:
        GenerationFailed: it does not; says what to start it with. ServerBusy: try again.
        ServerAway: try again.
    """
    where = f"{address.url}{path}"
    logprobs: list[float] = []
    for token in (0, 1):
        body = ask_one(path, model, (0,), token)
        piece = read_answer(address.call("POST", path, body, within_s=within_s), where)
        if piece is None or piece.tokens != (token,):
            raise GenerationFailed(f"{where}: ignores allowed_token_ids; vLLM has it")
        logprobs += piece.logprobs
    if not all(abs(logprob) < _CERTAIN for logprob in logprobs):
        raise GenerationFailed(
            f"{where}: log-probabilities are not of the distribution that tokens are drawn from;"
            " start vLLM with --logprobs-mode processed_logprobs"
        )
    try:
        body = ask_one(path, model, (vocabulary,), 0)
        address.call("POST", path, body, within_s=within_s)
    except (ServerAway, ServerBusy):
        raise
    except GenerationFailed:
        return
    raise GenerationFailed(
        f"{where}: takes token {vocabulary}, but the policy has only {vocabulary} tokens: it is"
        " another model"
    )


def vocabulary_in(folder: Path) -> int:
    """Tokens that the model in a folder can be given. Raises ModelError when it does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return int(config.get_text_config().vocab_size)
    except Exception as error:
        raise ModelError(f"{folder}/config.json: no vocabulary in it: {error}") from error


def _compare_folders(policy: str, folder: Path, root: str | None) -> None:
    """Raises ModelError when the server's folder is on this machine, and has other weights."""
    if not root or not (Path(root) / "config.json").is_file():
        return
    try:
        theirs = state_digest(read_model_folder(Path(root), mapped=True))
    except ModelError:
        return  # nothing that could be compared
    ours = state_digest(read_model_folder(folder, mapped=True))
    if theirs != ours:
        raise ModelError(
            f"{policy}: the server was started with {root}, whose weights are {theirs[:12]}, the"
            f" policy's are {ours[:12]}"
        )


def check_server(server: OpenaiServer, within_s: float) -> str:
    """For the doctor: what is served, if tokens and log-probabilities come back. Blocks.

    Raises:
        ConfigError, ModelError, GenerationFailed, ServerAway: what is wrong.
    """
    address = Address(server)
    model = served_model(address, server, within_s)
    path = GENERATE if server.weight_updates == "vllm" else COMPLETIONS
    check_answers(address, path, model.id, 2**31 - 1, within_s)
    return f"{address.url} serves {model.id!r}, tokens and log-probabilities come back"
