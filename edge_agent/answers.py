"""The answer within a response, in one of the forms that models are asked for (``task.answer``).

What always holds: a pure function of the text, in time linear in its length; of several answers the
last one counts, as a model that thinks aloud comes to it at the end; no answer is None, never "".
"""

import re
from typing import Final

from transport.runs import AnswerForm

_OPEN, _CLOSE = "<answer>", "</answer>"
_BRACES: Final = re.compile(r"\\boxed\s{0,8}\{|\\.|[{}]", re.DOTALL)
_NUMBER: Final = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?"  # a minus behind a number or a bracket subtracts
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![.0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)


def answer_in(response: str, form: AnswerForm) -> str | None:
    """The answer that ``response`` gives in this form, without white space around it; None where
    there is none, or an empty one. ``last-number`` is written without thousands' commas, as
    ``-1234.5``."""
    match form:
        case "whole":
            found = response
        case "tags":
            found = _tagged(response)
        case "boxed":
            found = _boxed(response)
        case "last-number":
            found = _last_number(response)
    return found.strip() or None


def _tagged(text: str) -> str:
    """Between the last tags that are closed."""
    start = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if start < 0:
        return ""
    start += len(_OPEN)
    return text[start : text.index(_CLOSE, start)]


def _boxed(text: str) -> str:
    """In the braces of the last ``\\boxed`` that is closed; of nested ones the innermost."""
    open_at: list[int] = []
    start, found = -1, ""
    for token in _BRACES.finditer(text):
        said = token[0]
        if said.endswith("{") and said != r"\{":
            open_at.append(token.end() if len(said) > 1 else -1)
        elif said == "}" and open_at:
            begins = open_at.pop()
            if begins > start:
                start, found = begins, text[begins : token.start()]
    return found


def _last_number(text: str) -> str:
    found = ""
    for number in _NUMBER.finditer(text):
        found = number[0]
    found = found.replace(",", "").replace("\u2212", "-")
    return re.sub(r"^(-?)\.", r"\g<1>0.", found)
