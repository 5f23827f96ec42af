"""What programs ask of the chat endpoint and what they are told: shapes of the OpenAI API.

What always holds: a request has passed every bound before anything is done for it; what we do not
do is refused by name, never left out silently, unless it has no bearing on the answer (``user``,
``metadata`` and the like); every refusal has the API's error shape and a stable code.

The shapes are those of https://platform.openai.com/docs/api-reference/chat.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from transport.errors import FarflowError

T = TypeVar("T")

MAX_MESSAGES: Final = 1024
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 4
MAX_TOOLS: Final = 128

Name = Annotated[str, Meta(max_length=200)]


class ChatRefused(FarflowError):
    """A request that is not answered. ``status`` is HTTP's, ``reason`` the API's ``code``."""

    code: ClassVar[str] = "chat.refused"

    def __init__(
        self, status: int, reason: str, text: str, param: str | None = None, *, retry: bool = False
    ) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.param = param
        self.retry = retry


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TextPart(_Strict, frozen=True, kw_only=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments`` is JSON, as the policy wrote it."""

    name: Name
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the policy asks for."""

    id: Name
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(_Strict, frozen=True, kw_only=True):
    """One message. The fields that may only be null or empty are those that clients send back with
    an answer of ours."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[TextPart, ...] | None = None
    name: Name | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    parsed: None = None
    annotations: Annotated[tuple[Any, ...], Meta(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """As chat templates take it; arguments of tool calls are objects there, not texts."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        for field in ("name", "tool_call_id"):
            value = getattr(self, field)
            if value is not None:
                message[field] = value
        return message


class Function(_Strict, frozen=True, kw_only=True):
    """What a tool is called, and its parameters as a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(_Strict, frozen=True, kw_only=True):
    """A tool that the policy may ask to be called."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters,
        }
        return {"type": "function", "function": function}


class StreamOptions(_Strict, frozen=True, kw_only=True):
    """``include_usage``: one more piece at the end, with the numbers of tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(_Strict, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    model: Name
    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    stop: str | Annotated[tuple[str, ...], Meta(max_length=MAX_STOPS)] | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    # Only with the value that changes nothing: see ``_NEUTRAL``.
    top_logprobs: Any = None
    top_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    parallel_tool_calls: Any = None
    response_format: Any = None
    seed: Any = None
    # Without a bearing on the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the policy gets to see."""
        return () if self.tool_choice == "none" else self.tools or ()


_NEUTRAL: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "top_logprobs": ((0,), "only the log-probability of the token itself is known"),
    "top_p": ((1,), "tokens are drawn from the whole distribution"),
    "frequency_penalty": ((0,), "the trainer could not follow it"),
    "presence_penalty": ((0,), "the trainer could not follow it"),
    "logit_bias": (({},), "the trainer could not follow it"),
    "parallel_tool_calls": ((True,), "the policy decides how many tools it calls"),
    "response_format": (({"type": "text"},), "nothing makes the policy keep to a format"),
    "seed": ((), "the run's seed decides"),
    "tool_choice": (("auto", "none"), "nothing makes the policy call a tool"),
}


class RewardRequest(_Strict, frozen=True, kw_only=True):
    """The body of ``POST /v1/farflow/reward``."""

    reward: float


def chat_request(body: bytes) -> ChatRequest:
    """Raises ChatRefused, status 400, for a request that is malformed or asks for what we lack."""
    request = decoded(body, ChatRequest)
    for field, (accepted, why) in _NEUTRAL.items():
        value = getattr(request, field)
        if value is not None and value not in accepted:
            raise ChatRefused(
                400, "unsupported_parameter", f"{field} is not supported: {why}", field
            )
    if "" in request.stops:
        raise ChatRefused(400, "invalid_value", "stop: an empty text ends nothing", "stop")
    return request


def decoded(body: bytes, type_: type[T]) -> T:
    """A body as ``type_``; raises ChatRefused, status 400."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        unknown = "unknown field" in str(error)
        text = f"{error}; leave out what is not supported here" if unknown else str(error)
        reason = "unsupported_parameter" if unknown else "invalid_request"
        raise ChatRefused(400, reason, text) from error


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as the program sees it: ``tokens`` are (text, log-probability) pairs, None when
    they were not asked for."""

    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    tokens: tuple[tuple[str, float], ...] | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one call with what is said beside them."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int


class _Shown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of ours, and in a stream a piece of one."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


def whole(answer: Answer) -> bytes:
    """The answer in one piece."""
    choices = [
        {
            "index": number,
            "message": _shown(choice),
            "finish_reason": choice.finish_reason,
            "logprobs": _logprobs(choice),
        }
        for number, choice in enumerate(answer.choices)
    ]
    return msgspec.json.encode(
        {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}
    )


def pieces(answer: Answer, *, usage: bool) -> list[bytes]:
    """The answer as server-sent events, the end mark included."""
    head = _head(answer, "chat.completion.chunk")
    events = []
    for number, choice in enumerate(answer.choices):
        said = {
            "index": number,
            "delta": _shown(choice, numbered=True),
            "finish_reason": None,
            "logprobs": _logprobs(choice),
        }
        end = {"index": number, "delta": {}, "finish_reason": choice.finish_reason}
        events += [{**head, "choices": [said]}, {**head, "choices": [end]}]
    if usage:
        events.append({**head, "choices": [], "usage": _usage(answer)})
    return [b"data: %b\n\n" % msgspec.json.encode(event) for event in events] + [
        b"data: [DONE]\n\n"
    ]


def models(names: Sequence[str]) -> bytes:
    """The policies that a program may name as ``model``."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "farflow"} for name in names]
    return msgspec.json.encode({"object": "list", "data": data})


def refusal(refused: ChatRefused) -> bytes:
    """The API's error shape."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return msgspec.json.encode(
        {
            "error": {
                "message": str(refused),
                "type": kind,
                "param": refused.param,
                "code": refused.reason,
            }
        }
    )


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _shown(choice: Choice, *, numbered: bool = False) -> _Shown:
    calls = [msgspec.to_builtins(call) for call in choice.tool_calls]
    if numbered:
        calls = [{"index": number, **call} for number, call in enumerate(calls)]
    return _Shown(role="assistant", content=choice.content, tool_calls=calls or UNSET)


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in choice.tokens
    ]
    return {"content": content, "refusal": None}


def _plain_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError):
        arguments = call.function.arguments  # the program's own doing; templates may take it
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
