"""Whatever arrives: a message or a ``ProtocolError``, never anything else."""

import golden
import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.envelope import LIMITS, decode, encode, peek
from transport.errors import ProtocolError
from transport.messages import KINDS, PROTOCOL_VERSION, Plane

WEIGHTS = LIMITS[Plane.WEIGHTS]
ENCODED = [encode(message, payload) for message, payload in golden.SAMPLES]

planes = st.sampled_from(Plane)
kinds = st.sampled_from(sorted(KINDS))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=12,
)


def survives(frames: list[bytes], plane: Plane) -> None:
    try:
        message, payload = decode(frames, LIMITS[plane])
    except ProtocolError:
        return
    assert type(message) is peek(frames)
    assert payload == list(frames[2:])
    # What was taken can be passed on.
    encode(message, payload)


@given(st.lists(st.binary(max_size=64), max_size=6), planes)
def test_any_frames(frames, plane):
    survives(frames, plane)


@given(kinds, st.binary(max_size=200), planes)
def test_any_header_of_any_kind(kind, header, plane):
    survives([bytes([PROTOCOL_VERSION, kind]), header], plane)


@given(kinds, values, planes)
def test_any_well_formed_value_of_any_kind(kind, value, plane):
    survives([bytes([PROTOCOL_VERSION, kind]), msgpack.packb(value)], plane)


@settings(max_examples=200)
@given(st.data())
def test_a_message_with_one_field_exchanged(data):
    frames = data.draw(st.sampled_from(ENCODED))
    header = msgpack.unpackb(frames[1])
    if header:
        header[data.draw(st.sampled_from(sorted(header)))] = data.draw(values)
    survives([frames[0], msgpack.packb(header), *frames[2:]], Plane.WEIGHTS)


@settings(max_examples=200)
@given(st.data())
def test_a_message_with_a_few_bytes_damaged_cut_or_added(data):
    frames = data.draw(st.sampled_from(ENCODED))
    header = bytearray(frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, max(0, len(header) - 1)))
        header[position : position + 1] = data.draw(st.binary(max_size=2))
    survives([frames[0], bytes(header), *frames[2:]], Plane.WEIGHTS)


@given(st.sampled_from(golden.SAMPLES))
def test_what_is_encoded_decodes_equal(sample):
    message, payload = sample
    assert decode(encode(message, payload), WEIGHTS) == (message, list(payload))
