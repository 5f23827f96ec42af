"""Any group round-trips; any bytes give a group or one of three errors."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.compression import compress, decompress
from transport.errors import IntegrityError, RemoteProtocolError
from transport.trajectory import SequenceRecord, TrajectoryGroup, pack, run_length, unpack

TOKENS = st.integers(0, 2**32 - 1)


@st.composite
def sequences(draw: st.DrawFn, prompts: int, policies: int) -> SequenceRecord:
    tokens = draw(st.lists(TOKENS, max_size=12))
    count = len(tokens)
    logprobs = draw(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            min_size=count,
            max_size=count,
        )
    )
    producers = draw(st.lists(st.integers(-1, policies - 1), min_size=count, max_size=count))
    versions = draw(st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count))
    return SequenceRecord(
        prompt=draw(st.integers(0, prompts - 1)),
        tokens=tuple(tokens),
        logprobs=np.array(logprobs, dtype=np.float32),
        segments=run_length(tuple(producers), tuple(versions)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        finish_reason=draw(st.sampled_from(["stop", "length", "tool", ""])),
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    prompts = draw(st.lists(st.lists(TOKENS, max_size=6).map(tuple), min_size=1, max_size=3))
    policies = draw(st.lists(st.text(max_size=8), max_size=3))
    return TrajectoryGroup(
        job=draw(st.text(max_size=12)),
        attempt=draw(st.text(max_size=12)),
        policies=tuple(policies),
        prompts=tuple(prompts),
        sequences=tuple(
            draw(st.lists(sequences(len(prompts), len(policies)), min_size=1, max_size=4))
        ),
    )


@settings(max_examples=100, deadline=None)
@given(groups())
def test_every_group_survives(group: TrajectoryGroup) -> None:
    data = pack(group)
    assert unpack(data) == group
    assert pack(unpack(data)) == data


def accepts_or_refuses(data: bytes) -> None:
    try:
        group = unpack(data, max_bytes=2**16)
    except (RemoteProtocolError, IntegrityError):
        return
    assert unpack(pack(group)) == group


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    accepts_or_refuses(data)
    accepts_or_refuses(b"fftg\x01" + data)


@settings(max_examples=150, deadline=None)
@given(groups(), st.data())
def test_damaged_bodies_never_raise_anything_else(
    group: TrajectoryGroup, data: st.DataObject
) -> None:
    body = bytearray(decompress("zstd", pack(group)[9:], max_bytes=2**20))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    packed = compress("zstd", bytes(body))
    accepts_or_refuses(b"fftg\x01" + len(body).to_bytes(4, "little") + packed)
