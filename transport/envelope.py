"""Frames of one message: ``[version byte | kind byte] [MessagePack header] [payload frames...]``.

What always holds: the kind is known from two bytes, so a router never decodes a header; every
size is checked before anything is decoded; hostile frames raise ``VersionRefused`` or
``RemoteProtocolError`` and nothing else; a header is plain MessagePack, a map with string keys
that any MessagePack library reads.

A message either has payload frames by its kind (``PAYLOAD_FRAMES``) or carries none. NaN and
infinite floats pass: who computes with a number from outside checks it first. A text that UTF-8 has
no bytes for (foreign code may say anything) is sent as ``transport.texts`` writes it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from transport.errors import LocalProtocolError, RemoteProtocolError, UnknownKind, VersionRefused
from transport.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Body,
    Chunk,
    Message,
    PartialPut,
    Plane,
    TrajectoryPut,
)
from transport.texts import all_encodable

KIB = 1024
MIB = 1024 * KIB

CONTROL_FRAME_BYTES = 256 * KIB
BULK_FRAME_BYTES = 4 * MIB
MAX_BODY_FRAMES = 16
"""A packed trajectory on its way to a trainer: 64 MiB."""


class Limits(NamedTuple):
    """What one plane accepts, in bytes per frame and in frames per message."""

    header_bytes: int
    payload_frame_bytes: int
    payload_frames: int

    @property
    def frame_bytes(self) -> int:
        """The largest frame of any kind."""
        return max(self.header_bytes, self.payload_frame_bytes)

    @property
    def frames(self) -> int:
        """The most frames of one message."""
        return 2 + self.payload_frames


LIMITS: dict[Plane, Limits] = {
    Plane.CONTROL: Limits(CONTROL_FRAME_BYTES, 0, 0),
    Plane.TRAJECTORIES: Limits(CONTROL_FRAME_BYTES, BULK_FRAME_BYTES, MAX_BODY_FRAMES),
    # A plan carries whole signed manifests in its header, so that one may be large as well.
    Plane.WEIGHTS: Limits(BULK_FRAME_BYTES, BULK_FRAME_BYTES, 1),
    Plane.ENROLMENT: Limits(16 * KIB, 0, 0),
}

PAYLOAD_FRAMES: dict[type[Message], int] = {
    TrajectoryPut: 1,
    PartialPut: 1,
    Body: MAX_BODY_FRAMES,
    Chunk: 1,
}
"""The most payload frames of a kind; kinds that are not here carry none."""

KIND_OF: dict[type[Message], int] = {kind_type: kind for kind, kind_type in KINDS.items()}

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind: msgspec.msgpack.Decoder(kind_type) for kind, kind_type in KINDS.items()}
_PREFIXES = {kind_type: bytes((PROTOCOL_VERSION, kind)) for kind_type, kind in KIND_OF.items()}


def encode(
    message: Message, payload: Sequence[bytes] = (), limits: Limits | None = None
) -> list[bytes]:
    """Frames of ``message``. With ``limits`` our own oversized messages are found here, where the
    cause is, and not at the peer.

    Raises:
        LocalProtocolError: not a message, more payload than its kind has, or above ``limits``.
    """
    message_type = type(message)
    prefix = _PREFIXES.get(message_type)
    if prefix is None:
        raise LocalProtocolError(f"{message_type.__name__} has no kind byte in KINDS")
    if len(payload) > PAYLOAD_FRAMES.get(message_type, 0):
        raise LocalProtocolError(f"{message_type.__name__} with {len(payload)} payload frames")
    try:
        header = _header(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"{message_type.__name__} does not encode: {error}") from error
    frames = [prefix, header, *payload]
    if limits is not None:
        excess = _excess(frames, limits)
        if excess is not None:
            raise LocalProtocolError(f"{message_type.__name__}: {excess}")
    return frames


def _header(message: Message) -> bytes:
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview))
        return _ENCODER.encode(all_encodable(plain))


def peek(frames: Sequence[bytes]) -> type[Message]:
    """The message's type from its first frame, without decoding anything.

    Raises:
        VersionRefused: another protocol version.
        UnknownKind: a message of a newer farflow, or of none.
        RemoteProtocolError: no such frame.
    """
    if not frames or not frames[0]:
        raise RemoteProtocolError("version: the first frame is missing or empty")
    prefix = frames[0]
    if prefix[0] != PROTOCOL_VERSION:
        raise VersionRefused(
            f"version: the peer speaks protocol {prefix[0]}, we speak {PROTOCOL_VERSION}"
        )
    if len(prefix) != 2:
        raise RemoteProtocolError(f"version: first frame of {len(prefix)} bytes, 2 expected")
    kind_type = KINDS.get(prefix[1])
    if kind_type is None:
        raise UnknownKind(f"kind: 0x{prefix[1]:02x} is unknown")
    return kind_type


def decode(frames: Sequence[bytes], limits: Limits) -> tuple[Message, list[bytes]]:
    """The message and its payload frames.

    Raises:
        VersionRefused: another protocol version.
        RemoteProtocolError: anything else that is wrong; the text starts with the field.
    """
    kind_type = peek(frames)
    name = kind_type.__name__
    if len(frames) < 2:
        raise RemoteProtocolError(f"header: {name} has none")
    excess = _excess(frames, limits)
    if excess is not None:
        raise RemoteProtocolError(f"{excess} ({name})")
    payload_frames = len(frames) - 2
    if payload_frames > PAYLOAD_FRAMES.get(kind_type, 0):
        raise RemoteProtocolError(f"payload: {name} with {payload_frames} payload frames")
    try:
        message = _DECODERS[frames[0][1]].decode(frames[1])
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        # msgspec names the field: "Expected `int`, got `str` - at `$.sequence`".
        raise RemoteProtocolError(f"header: {name}: {error}") from error
    return message, list(frames[2:])


def _excess(frames: Sequence[bytes], limits: Limits) -> str | None:
    """What is above the limits, or None."""
    if len(frames[1]) > limits.header_bytes:
        return f"header: {len(frames[1])} bytes, at most {limits.header_bytes}"
    if len(frames) > limits.frames:
        return f"payload: {len(frames) - 2} frames, at most {limits.payload_frames}"
    for index, frame in enumerate(frames[2:]):
        size_bytes = memoryview(frame).nbytes
        if size_bytes > limits.payload_frame_bytes:
            return f"payload[{index}]: {size_bytes} bytes, at most {limits.payload_frame_bytes}"
    return None
