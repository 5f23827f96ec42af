"""Small messages through the real links, beside blocking pyzmq without encryption.

One process sends 256-byte messages over loopback TCP, this one receives them; each way of sending
has its turn in each round, and a row is the median of the rounds' ratios. The links are those of
the daemons: a ``ZmqHub`` here and a ``ZmqLink`` there, each inside asyncio, with the control
plane's options. farflow itself never speaks without CURVE beyond one process; the row without it
uses the open loopback mode of the links' own tests and tells what the link machinery costs.

The reference is DEALER to ROUTER with blocking calls and nothing else: no options, no monitor, no
identity check. ``messages`` are the two frames of a real message, ``frames`` single ones.
"""

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from bench.report import Row, main
from bench.wire_ends import Way, messages_s

SIZE_BYTES: Final = 256
QUICK_MESSAGES, FULL_MESSAGES = 40_000, 200_000
QUICK_ROUNDS, FULL_ROUNDS = 3, 7
PLAIN_TARGET, CURVE_TARGET = 0.6, 0.5

_BLOCKING = "blocking pyzmq, plain"


class Measured(NamedTuple):
    """A way, its row and the least ratio to blocking pyzmq with the same frames."""

    way: Way
    name: str
    least: float | None = None


def frames_of(count: int) -> list[bytes]:
    """One frame, or the two of a message: version and kind, then the header."""
    return [bytes(SIZE_BYTES)] if count == 1 else [b"\x01\x10", bytes(SIZE_BYTES - 2)]


WAYS: Final = (
    Measured(Way("link", curve=False), "link, plain", PLAIN_TARGET),
    Measured(Way("link", curve=True), "link, CURVE", CURVE_TARGET),
    Measured(Way("link", curve=True, outward=True), "hub to link, CURVE", CURVE_TARGET),
    Measured(Way("blocking", curve=True), "blocking pyzmq, CURVE"),
)


def measure(quick: bool) -> list[Row]:
    messages = QUICK_MESSAGES if quick else FULL_MESSAGES
    rounds = QUICK_ROUNDS if quick else FULL_ROUNDS
    rows: list[Row] = []
    for count, unit in ((1, "frames"), (2, "messages")):
        rows += _compared(frames_of(count), unit, messages, rounds)
    return rows


def _compared(frames: Sequence[bytes], unit: str, messages: int, rounds: int) -> list[Row]:
    reference = Way("blocking", curve=False)
    found: dict[Way, list[float]] = {reference: [], **{m.way: [] for m in WAYS}}
    for number in range(rounds):
        order = list(found) if number % 2 == 0 else list(reversed(found))
        for way in order:
            found[way].append(messages_s(way, frames, messages))
    plain = found[reference]
    rows = [Row(metric=f"wire.{unit}: {_BLOCKING}", value=_k(plain), unit="k/s")]
    for measured in WAYS:
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(found[measured.way], plain, strict=True)
        )
        rows.append(
            Row(
                metric=f"wire.{unit}: {measured.name}",
                value=_k(found[measured.way]),
                unit="k/s",
                reference=_BLOCKING,
                ratio=round(ratio, 3),
                target="" if measured.least is None else f">= {measured.least} x",
                ok=measured.least is None or ratio >= measured.least,
            )
        )
    return rows


def _k(rates: Sequence[float]) -> float:
    return round(statistics.median(rates) / 1e3, 1)


if __name__ == "__main__":
    main("wire", measure)
