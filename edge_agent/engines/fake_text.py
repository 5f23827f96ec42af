"""What the fake engine reads and writes: tokens for text, conversations, and answers to them.

What always holds: an answer depends on the prompt's tokens alone; a single message of a user is
encoded as its plain text; a spoiled answer is as long as the right one, give or take a character.

Tokens: below ``CHARACTERS`` they are thoughts and decode to nothing; at it the end; above it the
characters of text, and above those the marks of a conversation, which decode to nothing either. An
answer is followed by the end, as it was when it was drawn; any other message begins with the mark
of its role, except a user's at the very beginning; tools come first, as JSON behind a mark.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from edge_agent.engine import Chat, Tools
from transport.errors import GenerationFailed

CHARACTERS: Final = 1 << 16
END: Final = CHARACTERS
_HIGHEST: Final = CHARACTERS + 0x10FFFF
_MARKS: Final = {
    role: _HIGHEST + 1 + n for n, role in enumerate(("tools", "system", "user", "tool"))
}

_SUM = re.compile(r"-?\d+(?:\s*[-+]\s*\d+)+")
_TERM = re.compile(r"([-+]?)\s*(\d+)")
_CLAIM = re.compile(rf"({_SUM.pattern})\s*=\s*((?:-?\d+)?)\?")
_LAST_DIGIT = re.compile(r"\d(?=\D*$)")
_MAX_DIGITS = 100
_OTHER = {"Yes": "No", "No": "Yes"}


def encode_text(text: str) -> tuple[int, ...]:
    """One token per character."""
    return tuple(CHARACTERS + ord(character) for character in text)


def decode_text(tokens: Sequence[int]) -> str:
    """The characters among ``tokens``."""
    return "".join(chr(token - CHARACTERS) for token in tokens if END < token <= _HIGHEST)


def encode_chat(messages: Chat, tools: Tools = ()) -> tuple[int, ...]:
    """A conversation up to its next answer.

    Raises:
        GenerationFailed: a message has no text, or a role that nobody knows.
    """
    tokens: list[int] = []
    if tools:
        tokens = [_MARKS["tools"], *encode_text(_json(list(tools)))]
    for message in messages:
        role, text = message.get("role"), _text(message)
        if role == "assistant":
            tokens += (*encode_text(text), END)
        elif role in _MARKS and role != "tools":
            first = role == "user" and not tokens
            tokens += encode_text(text) if first else (_MARKS[role], *encode_text(text))
        else:
            raise GenerationFailed(f"the fake engine knows no role {role!r}")
    return tuple(tokens)


def encode_next(answer: Sequence[int], messages: Chat) -> tuple[int, ...]:
    """What comes behind an answer when a conversation goes on; raises as ``encode_chat``."""
    ended = tuple(answer[-1:]) == (END,)
    # Behind an answer nothing is at the very beginning: every message has its mark.
    return encode_chat([{"role": "assistant", "content": ""}, *messages])[1 if ended else 0 :]


def answer_to(prompt: Sequence[int]) -> str:
    """What a policy that thinks well says: a call of the calculator if the prompt shows that and a
    sum, what a tool said if that came last; ``Yes`` or ``No`` to a claim like ``1 + 2 = 4?``; the
    value of the last sum or difference of integers otherwise, "" without one."""
    last = max((n for n, token in enumerate(prompt) if token > _HIGHEST), default=-1)
    if last >= 0 and prompt[last] == _MARKS["tool"]:
        return decode_text(prompt[last:])
    text = decode_text(prompt)
    claims = _CLAIM.findall(text)
    if claims:
        left, right = claims[-1]
        return "Yes" if right and solve(left) == right else "No"
    sums = _SUM.findall(text)
    if sums and prompt[0] == _MARKS["tools"] and '"calculator"' in text:
        call = {"name": "calculator", "arguments": {"expression": sums[-1]}}
        return f"<tool_call>{_json(call)}</tool_call>"
    return solve(text)


def spoiled(answer: str) -> str:
    """The same answer, wrong: its last digit is another one, or ``No`` is ``Yes``."""
    if answer in _OTHER:
        return _OTHER[answer]
    return _LAST_DIGIT.sub(lambda found: str((int(found.group()) + 1) % 10), answer)


def solve(prompt: str) -> str:
    """The value of the last sum or difference of integers in ``prompt``; "" without one."""
    sums = _SUM.findall(prompt)
    if not sums or len(sums[-1]) > _MAX_DIGITS:
        return ""
    terms = _TERM.findall(sums[-1])
    return str(sum(-int(digits) if sign == "-" else int(digits) for sign, digits in terms))


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message with its tool calls, as a model would have written them."""
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    if isinstance(content, str) or (content is None and calls):
        written = (f"<tool_call>{_json(call.get('function', call))}</tool_call>" for call in calls)
        return "".join((content or "", *written))
    raise GenerationFailed(f"the fake engine reads messages with a text, not {content!r:.80}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
