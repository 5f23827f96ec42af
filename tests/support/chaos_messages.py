"""Messages that are valid and make no sense: what a peer with a real key may come up with.

What always holds: the same ``random.Random`` gives the same messages; every message has been
through the codec, so that what is given is what a core can be told.

Values are drawn from bounds, from what is just beyond them, and from ``Names``: ids that mean
something to whoever is told, so that a message gets further than "unknown".
"""

import random
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import inspect

from transport.envelope import LIMITS, PAYLOAD_FRAMES, decode, encode
from transport.errors import FarflowError
from transport.messages import Message, Plane

INTEGERS: Final = (0, 1, 2, 3, 5, -1, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
FLOATS: Final = (
    0.0,
    0.5,
    1.0,
    -1.0,
    60.0,
    1e-9,
    1e9,
    1e15,
    -1e15,
    1e308,
    float("nan"),
    float("inf"),
)
TEXTS: Final = (
    "",
    "x",
    "a/b",
    "a/b#1",
    "#",
    "/",
    "\0",
    "é" * 40,
    "x" * 200,
    "x" * 5000,
    "..",
    "a|b",
)
MOST_ITEMS: Final = 3
TRIES: Final = 20


@dataclass
class Names:
    """Ids that exist: any texts, and (attempt, fence, job) of leases."""

    texts: list[str] = field(default_factory=list)
    leases: list[tuple[str, tuple[int, int], str]] = field(default_factory=list)


class Absurd:
    """A source of messages."""

    def __init__(self, rng: random.Random, names: Names) -> None:
        self.rng = rng
        self.names = names

    def message(self, kind: type[Message], plane: Plane = Plane.CONTROL) -> Message | None:
        """One of ``kind`` as it arrives; None when nothing that was tried is valid."""
        payload = (b"",) if kind in PAYLOAD_FRAMES else ()
        for _ in range(TRIES):
            values = self._struct(inspect.type_info(kind))
            try:
                return decode(encode(kind(**values), payload), LIMITS[plane])[0]
            except (FarflowError, msgspec.MsgspecError, ValueError, TypeError):
                continue
        return None

    def _struct(self, kind: Any) -> dict[str, Any]:
        rng = self.rng
        values = {
            entry.name: self.value(entry.type)
            for entry in kind.fields
            if entry.required or rng.random() < (0.1 if entry.name == "protocol" else 0.6)
        }
        fields = {entry.name for entry in kind.fields}
        if "attempt" in fields and self.names.leases and rng.random() < 0.7:
            attempt, fence, job = rng.choice(self.names.leases)
            known = {"attempt": attempt, "fence": fence, "job": job}
            values |= {name: value for name, value in known.items() if name in fields}
        return values

    def value(self, kind: Any) -> Any:
        """Something of a type, mostly within its bounds."""
        rng = self.rng
        match kind:
            case inspect.IntType():
                return self._number(INTEGERS, kind)
            case inspect.FloatType():
                return self._number(FLOATS, kind)
            case inspect.StrType():
                known = self.names.texts and rng.random() < 0.7
                return rng.choice(self.names.texts if known else TEXTS)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.BytesType():
                return rng.choice((b"", b"\0", b"x" * 32, b"y" * 64))
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return rng.choice(values)
            case inspect.EnumType(cls=cls):
                return rng.choice(list(cls))
            case inspect.UnionType(types=types):
                return self.value(rng.choice(types))
            case inspect.TupleType(item_types=types):
                return tuple(self.value(one) for one in types)
            case inspect.VarTupleType() | inspect.ListType():
                count = max(kind.min_length or 0, rng.choice((0, 1, 1, MOST_ITEMS)))
                found = tuple(self.value(kind.item_type) for _ in range(count))
                return list(found) if isinstance(kind, inspect.ListType) else found
            case inspect.DictType(key_type=keys, value_type=values):
                count = rng.choice((0, 1, MOST_ITEMS))
                return {self.value(keys): self.value(values) for _ in range(count)}
            case inspect.StructType(cls=cls):
                return cls(**self._struct(kind))
            case inspect.AnyType() | inspect.RawType():
                return rng.choice((0, "x", {"a": [1, 2]}))
        raise AssertionError(f"no value of {kind}")

    def _number(self, choices: tuple[Any, ...], kind: Any) -> Any:
        bounds = [bound for bound in (kind.ge, kind.le, kind.gt, kind.lt) if bound is not None]
        if bounds and self.rng.random() < 0.9:
            choices = tuple(
                number
                for number in (*choices, *bounds)
                if (kind.ge is None or number >= kind.ge)
                and (kind.le is None or number <= kind.le)
                and (kind.gt is None or number > kind.gt)
                and (kind.lt is None or number < kind.lt)
            )
        return self.rng.choice(choices)
