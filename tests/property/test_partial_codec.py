"""Packed finished turns: what comes back is what went in, and hostile bytes are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.errors import FarflowError, LocalProtocolError, SizeLimitExceeded
from transport.partials import (
    Partial,
    PartialPart,
    PartialSibling,
    pack_partial,
    summarise_partial,
    unpack_partial,
)
from transport.summaries import MAX_PARTIAL_BYTES, partial_fault
from transport.trajectory import SequenceRecord, TrajectoryGroup, body_digest, run_length

POLICIES = ("run/judge", "run/solver")


@st.composite
def siblings(draw: st.DrawFn, item: int) -> tuple[PartialSibling, SequenceRecord]:
    parts, tokens, drawn_by, versions = [], [], [], []
    for _ in range(draw(st.integers(0, 4))):
        policy = draw(st.integers(-1, len(POLICIES) - 1))
        count = draw(st.integers(0, 6))
        reason = "" if policy < 0 else draw(st.sampled_from(("stop", "length")))
        parts.append(PartialPart(count, policy, reason))
        tokens += draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
        drawn_by += [policy] * count
        versions += draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    versions = [0 if policy < 0 else v for policy, v in zip(drawn_by, versions, strict=True)]
    finite = st.floats(-1e3, 0.0, width=32)
    record = SequenceRecord(
        prompt=0,
        tokens=tuple(tokens),
        logprobs=np.array([draw(finite) for _ in tokens], dtype=np.float32),
        segments=run_length(tuple(drawn_by), tuple(versions)),
        reward=draw(st.floats(-10, 10)),
        finish_reason=draw(st.sampled_from(("stop", "length"))),
    )
    sibling = PartialSibling(
        item=item,
        turns=draw(st.integers(0, 5)),
        parts=tuple(parts),
        text=draw(st.text(max_size=8)),
        scored=draw(st.booleans()),
        state=draw(st.sampled_from((b"null", b'{"messages":["a"]}'))),
    )
    return sibling, record


@st.composite
def partials(draw: st.DrawFn) -> Partial:
    pairs = [draw(siblings(item)) for item in range(draw(st.integers(1, 3)))]
    group = TrajectoryGroup(
        job="run/t-000001",
        attempt="run/t-000001#1",
        policies=POLICIES,
        prompts=(tuple(draw(st.lists(st.integers(0, 99), max_size=5))),),
        sequences=tuple(record for _, record in pairs),
    )
    return Partial(group=group, code="f" * 64, siblings=tuple(sibling for sibling, _ in pairs))


@given(partials())
def test_what_is_packed_comes_back_bit_for_bit(partial: Partial) -> None:
    data = pack_partial(partial)
    assert unpack_partial(data) == partial
    assert pack_partial(partial) == data
    summary = summarise_partial(partial, data, fence=(1, 2))
    assert (summary.turns, summary.digest) == (partial.turns, body_digest(data))
    drawn = [
        (POLICIES[policy], version)
        for record in partial.group.sequences
        for _, policy, version in record.segments
        if policy >= 0
    ]
    assert summary.oldest == {
        name: min(version for other, version in drawn if other == name) for name, _ in drawn
    }
    assert bool(partial_fault(summary)) == (not drawn or not partial.turns)


@settings(max_examples=300)
@given(partials(), st.data())
def test_damaged_bytes_are_refused_or_whole(partial: Partial, data: st.DataObject) -> None:
    packed = bytearray(pack_partial(partial))
    kind = data.draw(st.sampled_from(("flip", "cut", "more")))
    at = data.draw(st.integers(0, len(packed) - 1))
    if kind == "flip":
        packed[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del packed[at:]
    else:
        packed += b"x"
    with pytest.raises(FarflowError):
        unpack_partial(bytes(packed))


@pytest.mark.parametrize(
    "parts", [(PartialPart(2, 1, "stop"),), (PartialPart(3, 0, "stop"),), (PartialPart(3, 7, ""),)]
)
def test_parts_that_are_not_the_tokens_are_no_partial(parts: tuple[PartialPart, ...]) -> None:
    record = SequenceRecord(
        prompt=0,
        tokens=(1, 2, 3),
        logprobs=np.zeros(3, np.float32),
        segments=((3, 1, 4),),
        reward=0.0,
        finish_reason="stop",
    )
    group = TrajectoryGroup(
        job="run/t-000001",
        attempt="run/t-000001#1",
        policies=POLICIES,
        prompts=((),),
        sequences=(record,),
    )
    sibling = PartialSibling(item=0, turns=1, parts=parts)
    with pytest.raises(LocalProtocolError, match="sibling 0"):
        pack_partial(Partial(group=group, code="", siblings=(sibling,)))


def test_what_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(SizeLimitExceeded):
        unpack_partial(b"fpar" + bytes(MAX_PARTIAL_BYTES))
    bomb = b"fpar\x01" + (2**31).to_bytes(4, "little") + bytes(4)
    with pytest.raises(SizeLimitExceeded):
        unpack_partial(bomb)
