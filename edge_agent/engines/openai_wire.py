"""What goes to a server that speaks the OpenAI protocol and what comes back, as HTTP and JSON.

Two ways to ask for tokens: ``/v1/completions``, which every such server has, and vLLM's own
``/inference/v1/generate``, which also says which weights drew each token.

What always holds: whatever a server says becomes a value or a ``GenerationFailed``, with its own
words in it, shortened; ``ServerAway`` and ``ServerBusy`` are those where trying again may help, and
nothing was drawn that could be kept; a key is never in an error.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from edge_agent.config import OpenaiServer
from edge_agent.engine import GenerationRequest
from edge_agent.engines.vllm_sequence import sequence_seed
from transport.errors import ConfigError, EngineCrashed, GenerationFailed

COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/inference/v1/generate"
STREAM_TOKENS: Final = 16
_SHOWN: Final = 300
_BUSY: Final = (429, 502, 503, 504)
_MOST_BYTES: Final = 64 * 2**20
MALFORMED: Final = (msgspec.DecodeError, RecursionError)
"""What decoding raises, the latter for what is nested without end."""
NO_LOGPROB: Final = -9999.0
"""What vLLM sends for a log-probability that is no number."""


class ServerAway(EngineCrashed):
    """Nobody answers there, or the answer broke off."""

    code: ClassVar[str] = "engine.away"


class ServerBusy(GenerationFailed):
    """It refuses for now; ``after_s`` is how long to wait, as far as it says so."""

    code: ClassVar[str] = "engine.busy"
    retryable: ClassVar[bool] = True

    def __init__(self, text: str, after_s: float) -> None:
        super().__init__(text)
        self.after_s = after_s


class Span(msgspec.Struct, frozen=True):
    """Tokens ``start`` to ``end`` were drawn by the weights of this label."""

    version: str
    start: int
    end: int


class Piece(NamedTuple):
    """What a stream brings at a time; ``spans`` are of all tokens, with the last piece."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    spans: tuple[Span, ...]


class _OneLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    """``token_logprobs`` in completions, ``content`` in vLLM's own."""

    token_logprobs: list[float | None] | None = None
    content: list[_OneLogprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_answers: Final = msgspec.json.Decoder(_Answer)


def read_answer(data: bytes, where: str) -> Piece | None:
    """A chunk of a stream, or a whole answer; None when it brings nothing.

    Raises:
        GenerationFailed: it is malformed, an error, or has no token ids or log-probabilities.
    """
    try:
        answer = _answers.decode(data)
    except MALFORMED as error:
        raise GenerationFailed(f"{where}: the server's answer is malformed: {error}") from error
    if answer.error is not None:
        raise GenerationFailed(f"{where}: the server failed: {_words(answer.error)}")
    if not answer.choices:
        return None
    choice = answer.choices[0]
    tokens = choice.token_ids
    if tokens is None:
        raise GenerationFailed(
            f"{where}: the server gives no token ids; vLLM does with return_token_ids"
        )
    if not tokens and choice.finish_reason is None:
        return None
    logprobs = _numbers(choice.logprobs)
    if len(logprobs) != len(tokens):
        raise GenerationFailed(
            f"{where}: the server gives {len(logprobs)} log-probabilities for {len(tokens)} tokens"
        )
    spans = tuple(choice.weight_versions or ())
    return Piece(tuple(tokens), tuple(logprobs), choice.finish_reason, spans)


def _numbers(found: _Logprobs | None) -> list[float]:
    if found is None:
        return []
    if found.content is not None:
        return [one.logprob for one in found.content]
    numbers = found.token_logprobs or []
    return [NO_LOGPROB if number is None else number for number in numbers]


def ask(
    path: str, model: str, request: GenerationRequest, sibling: int, salt: str = ""
) -> dict[str, Any]:
    """The body that asks ``path`` for a sequence, as a stream. Everything that a server would take
    from the model's ``generation_config.json`` is said, so that nothing else shapes what is drawn.
    """
    asked = request.sampling
    sampling: dict[str, Any] = {
        "max_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p if asked.temperature else 1.0,
        "seed": sequence_seed(asked.seed, request.request_id, sibling),
        "stop": list(asked.stop),
        "stop_token_ids": list(asked.stop_token_ids),
    }
    return _body(path, model, request.prompt_tokens, sampling, salt, stream=True)


def ask_one(path: str, model: str, prompt: tuple[int, ...], token: int) -> dict[str, Any]:
    """The body that asks for one token that can be no other than ``token``: its log-probability is
    0 under the distribution that it is drawn from, whatever the model thinks of it."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "allowed_token_ids": [token]}
    return _body(path, model, prompt, sampling, "", stream=False)


def _body(
    path: str,
    model: str,
    prompt: tuple[int, ...],
    sampling: dict[str, Any],
    salt: str,
    *,
    stream: bool,
) -> dict[str, Any]:
    sampling = {
        **sampling,
        "logprobs": 0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "include_stop_str_in_output": True,
    }
    body: dict[str, Any] = {"model": model, "stream": stream}
    if salt:
        body["cache_salt"] = salt
    if path == GENERATE:
        sampling["stream_interval"] = STREAM_TOKENS
        return {**body, "token_ids": list(prompt), "sampling_params": sampling}
    if stream:
        sampling["stream_interval"] = STREAM_TOKENS
    return {**body, **sampling, "prompt": list(prompt), "return_token_ids": True}


def fault(status: int, data: bytes, retry_after: str | None, where: str) -> GenerationFailed:
    """What a status other than 200 means."""
    try:
        said: Any = json.loads(data)
    except (ValueError, RecursionError):
        said = data.decode("utf-8", "replace")
    words = _words(said.get("error", said) if isinstance(said, Mapping) else said)
    text = f"{where}: HTTP {status}: {words}"
    if status in _BUSY:
        try:
            after_s = float(retry_after or 0)
        except ValueError:  # a date: our own waiting will do
            after_s = 0.0
        return ServerBusy(text, after_s if after_s > 0 else 0.0)
    if status in (401, 403):
        text += " (agent.openai.api_key_file holds the key; --enable-scale-out opens vLLM's routes)"
    return GenerationFailed(text)


def _words(said: Any) -> str:
    """What an error says: OpenAI's servers have it in ``message``."""
    if isinstance(said, Mapping):
        said = said.get("message") or said.get("detail") or dict(said)
    return " ".join(str(said).split())[:_SHOWN]


class Address:
    """Where a server is, and the headers that it wants.

    Raises:
        ConfigError: the address or the key file is none; names the field.
    """

    def __init__(self, server: OpenaiServer) -> None:
        try:
            parts = urlsplit(server.base_url)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no port, or no IPv6 address
            sound = False
        if "@" in server.base_url:  # it would be in logs
            raise ConfigError("agent.openai.base_url: names a user; put a key in api_key_file")
        if not sound or parts.query or parts.fragment:
            raise ConfigError(
                f"agent.openai.base_url {server.base_url!r}: give http://HOST:PORT of the server"
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError("agent.openai.base_url: leave out /v1, farflow adds it")
        self.url = server.base_url.rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if server.api_key_file:
            try:
                key = Path(server.api_key_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"agent.openai.api_key_file: {error}") from error
            if not key or not key.isascii() or any(each.isspace() for each in key):
                raise ConfigError("agent.openai.api_key_file: holds no key on one line")
            self.headers["Authorization"] = f"Bearer {key}"
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def call(self, method: str, path: str, body: Any = None, *, within_s: float) -> bytes:
        """What the server answers. Blocks; ``within_s`` bounds the wait for a connection, and then
        that for all of the answer.

        Raises:
            ServerAway: nobody answers, or the answer breaks off or does not end.
            ServerBusy, GenerationFailed: it refuses.
        """
        where = f"{self.url}{path.partition('?')[0]}"
        link: http.client.HTTPConnection
        if self._tls is None:
            link = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        else:
            link = http.client.HTTPSConnection(
                self._host, self._port, timeout=within_s, context=self._tls
            )
        data = None if body is None else msgspec.json.encode(body)
        try:
            link.connect()
            with _cut_after(link.sock, within_s):
                link.request(method, self._path + path, data, self.headers)
                answer = link.getresponse()
                read = answer.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ServerAway(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            link.close()
        if len(read) > _MOST_BYTES:
            raise GenerationFailed(f"{where}: an answer of over {_MOST_BYTES} bytes")
        if answer.status != 200:
            raise fault(answer.status, read, answer.getheader("Retry-After"), where)
        return read


@contextlib.contextmanager
def _cut_after(link: socket.socket, within_s: float) -> Iterator[None]:
    """End a connection that is used for longer: its own limit begins anew with each byte.

    Raises:
        TimeoutError: it was ended.
    """
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):  # it has just been closed
            socket.socket.shutdown(link, socket.SHUT_RDWR)  # below TLS, which would say goodbye

    timer = threading.Timer(within_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():  # what was read until then may look whole
        raise TimeoutError(f"not all of its answer came within {within_s:g} s")
