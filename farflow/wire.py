"""Recorded messages as text, read by the independent ``msgpack`` package.

A file holds one message: each frame behind its length as u32, little-endian.
"""

import json
import struct
from pathlib import Path
from typing import Any

import msgpack

from transport.errors import RemoteProtocolError, TruncatedBlob
from transport.messages import KINDS

_MAX_FILE_BYTES = 16 << 20
_PREFIX = struct.Struct("<I")


def decode_file(path: Path) -> str:
    """Protocol version, kind, header and payload sizes of a recorded message, as JSON.

    Raises:
        TruncatedBlob: a frame ends early.
        RemoteProtocolError: not a message of ours.
    """
    data = path.read_bytes()[: _MAX_FILE_BYTES + 1]
    frames: list[bytes] = []
    while data:
        if len(data) < _PREFIX.size:
            raise TruncatedBlob(f"{path}: ends within the length of frame {len(frames)}")
        (size,) = _PREFIX.unpack_from(data)
        frame, data = data[_PREFIX.size : _PREFIX.size + size], data[_PREFIX.size + size :]
        if len(frame) != size:
            raise TruncatedBlob(f"{path}: frame {len(frames)} has {len(frame)} of {size} bytes")
        frames.append(frame)
    if len(frames) < 2 or len(frames[0]) != 2:
        raise RemoteProtocolError(f"{path}: needs a frame of version and kind byte, and a header")
    version, kind = frames[0]
    try:
        header = msgpack.unpackb(frames[1])
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{path}: the header is not MessagePack: {error}") from error
    name = KINDS[kind].__name__ if kind in KINDS else "unknown"
    shown = {
        "protocol_version": version,
        "kind": f"0x{kind:02x} {name}",
        "header": header,
        "payload_bytes": [len(frame) for frame in frames[2:]],
    }
    return json.dumps(shown, indent=2, default=_plain)


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
