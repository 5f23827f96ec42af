"""What agents have to do: items, lengths and rewards of sequences, times of steps and swaps.

What always holds: a sequence's length and reward are functions of its job's seed and its place
in the group, never of the agent, the attempt or the time, so that two placement rules are compared
on the same work.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from edge_agent.config import FakeEngineTable
from edge_agent.engines.fake import ServiceTimes, place_uniform
from transport.messages import Item, LeaseOffer

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths are log-normal in tokens, cut off at ``max_new_tokens``. ``body_bytes_per_token`` is
    what a packed trajectory takes. ``delta_bytes`` is the size of a version's delta, ``full_bytes``
    of the whole model. ``train_s`` is the time of a step, ``publish_s`` until its version's files
    are ready, ``apply_s`` from a version's last byte until an agent can serve it, ``swap_s`` the
    pause of an engine that takes new weights, ``store_s`` the time in which a body or version
    becomes durable."""

    mean_tokens: Annotated[float, Meta(gt=0.0, le=1e6)] = 1200.0
    cv_tokens: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.2
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 16_384
    prompt_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    first_token_s: Seconds = 0.0
    body_bytes_per_token: Annotated[float, Meta(gt=0.0, le=1e4)] = 5.0
    train_s: Seconds = 12.0
    publish_s: Seconds = 0.0
    apply_s: Seconds = 0.0
    delta_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 150_000_000
    full_bytes: Annotated[int, Meta(ge=1, le=2**50)] = 1_200_000_000
    swap_s: Seconds = 0.3
    store_s: Seconds = 0.005
    items_s: Seconds = 0.002

    def gap_bytes(self, versions: int) -> int:
        """Bytes that lead over ``versions`` versions at once: the changed cells' union, assuming
        that steps change cells independently, which is the most that it can be.

        Example: a delta of 1/8 of the model; two versions take 1 - (7/8)^2 = 15/64 of it.
        """
        share = min(1.0, self.delta_bytes / self.full_bytes)
        return round(self.full_bytes * (1.0 - (1.0 - share) ** max(0, versions)))


class Draws:
    """Lengths and rewards of ``workload``."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        table = FakeEngineTable(mean_tokens=workload.mean_tokens, cv_tokens=workload.cv_tokens)
        self._times = ServiceTimes(table)

    def lengths(self, offer: LeaseOffer) -> list[int]:
        """Tokens of each sequence of a group, in order."""
        most = min(self.workload.max_new_tokens, offer.max_new_tokens)
        count = len(offer.items) * offer.group_size
        return [self._times.tokens(place_uniform(offer.seed, n), most) for n in range(count)]

    def rewards(self, offer: LeaseOffer) -> tuple[float, ...]:
        count = len(offer.items) * offer.group_size
        return tuple(float(place_uniform(offer.seed, -1 - n) < 0.5) for n in range(count))


def make_items(start: int, count: int) -> tuple[Item, ...]:
    """Prompts of a usual size."""
    return tuple(
        Item(
            index=index,
            prompt=f"{index:08d} " + "a word or two about the problem " * 12,
            answer="1",
        )
        for index in range(start, start + count)
    )


def make_digest(*parts: object) -> str:
    """64 hexadecimal digits that stand for content."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
