"""The process that runs verifiers: foreign code that may hang, crash or print.

What always holds: standard output carries frames only (whatever a verifier prints goes to standard
error); the process ends when its standard input ends, and on Linux with its parent at the latest,
even if a verifier hangs.

A frame is a u32 (little-endian) size and that many bytes of MessagePack: a ``ScoreRequest`` comes
in, a ``ScoreReply`` goes out.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO

import msgspec

from edge_agent.answers import answer_in
from transport.errors import RewardError
from transport.messages import MAX_FINITE, Item, RewardSpec
from transport.texts import cut, told

MAX_FRAME_BYTES = 64 * 2**20
SIZE_BYTES = 4
_PR_SET_PDEATHSIG = 1

_VERIFIER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a verifier raises on input that it cannot handle. Anything else ends the process."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Responses to score, each with the item that it answers."""

    spec: RewardSpec
    pairs: tuple[tuple[Item, str], ...]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards in the order of the pairs, or why there are none."""

    rewards: tuple[float, ...] = ()
    error: str = ""


def exact(item: Item, response: str) -> float:
    """1 if response and answer agree up to white space."""
    return float(response.split() == item.answer.split())


def math_equal(item: Item, response: str) -> float:
    """1 if math-verify finds the response equal to the answer."""
    from math_verify import parse, verify

    # Its own time limits need signals; ours kills this process.
    gold = parse(item.answer, parsing_timeout=None)
    given = parse(response, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


@cache
def _dataset_verifier(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    verifier: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return verifier


def gym_score(dataset: str, item: Item, response: str) -> float:
    """What the data set's own verifier gives for the response."""
    return float(_dataset_verifier(dataset)(response.strip(), json.loads(item.meta)))


def score_one(spec: RewardSpec, item: Item, response: str) -> float:
    """The reward of one response; 0 where it has no answer in the form that ``spec`` asks for.

    Raises:
        RewardError: the verifier failed or gave no number within ``MAX_FINITE``; names both.
    """
    if spec.answer != "whole":
        found = answer_in(response, spec.answer)
        if found is None:
            return 0.0
        response = found
    try:
        match spec.name:
            case "exact":
                reward = exact(item, response)
            case "math-verify":
                reward = math_equal(item, response)
            case "reasoning-gym":
                reward = gym_score(spec.dataset, item, response)
            case "code":
                raise RewardError(f"code, item {item.index}: is scored in sandboxes")
    except _VERIFIER_ERRORS as error:
        where = f"{spec.name} {spec.dataset}".strip()
        raise RewardError(f"{where}, item {item.index}: {told(error)}") from error
    if not -MAX_FINITE <= reward <= MAX_FINITE:
        raise RewardError(
            f"{spec.name} {spec.dataset}, item {item.index}: gave {reward}, not a number between"
            f" {-MAX_FINITE:g} and {MAX_FINITE:g}"
        )
    return reward


def answer(request: ScoreRequest) -> ScoreReply:
    """Score all pairs, or say what is wrong with the first that cannot be scored."""
    try:
        return ScoreReply(
            rewards=tuple(score_one(request.spec, item, text) for item, text in request.pairs)
        )
    except RewardError as error:
        return ScoreReply(error=cut(str(error)))


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until ``source`` ends."""
    decoder = msgspec.msgpack.Decoder(ScoreRequest)
    while len(head := source.read(SIZE_BYTES)) == SIZE_BYTES:
        reply = msgspec.msgpack.encode(
            answer(decoder.decode(source.read(int.from_bytes(head, "little"))))
        )
        sink.write(len(reply).to_bytes(SIZE_BYTES, "little") + reply)
        sink.flush()


def main() -> None:
    """Serve on standard input and output until the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
