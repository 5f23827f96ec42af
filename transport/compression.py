"""Named lossless codecs with bounded output.

What always holds: ``decompress(name, compress(name, data), max_bytes=n) == data`` whenever ``data``
has at most ``n`` bytes; no byte of output is allocated before the size that the blob declares is
known to be within ``max_bytes``; damaged input raises an ``IntegrityError``, never returns wrong
bytes (zstd frames carry a checksum).
"""

from collections.abc import Callable
from typing import NamedTuple

import zstandard

from transport.errors import (
    ChecksumMismatch,
    ConfigError,
    RemoteProtocolError,
    SizeLimitExceeded,
    TruncatedBlob,
)

Buffer = bytes | bytearray | memoryview

ZSTD_LEVEL = 3
"""Above 3 token columns shrink by a few percent for several times the CPU."""

_MAX_WINDOW_LOG = 27
_UNKNOWN_SIZE = 2**64 - 1


class Codec(NamedTuple):
    """``decompress`` takes the blob and the largest acceptable output in bytes."""

    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]


def _copy(data: Buffer) -> bytes:
    return bytes(data)


def _copy_bounded(blob: Buffer, max_bytes: int) -> bytes:
    size_bytes = memoryview(blob).nbytes
    if size_bytes > max_bytes:
        raise SizeLimitExceeded(f"blob of {size_bytes} bytes is above the limit of {max_bytes}")
    return bytes(blob)


def _zstd(data: Buffer) -> bytes:
    compressor = zstandard.ZstdCompressor(
        level=ZSTD_LEVEL, write_checksum=True, write_content_size=True
    )
    return compressor.compress(data)


def _unzstd(blob: Buffer, max_bytes: int) -> bytes:
    try:
        parameters = zstandard.get_frame_parameters(blob)
    except zstandard.ZstdError as error:
        raise TruncatedBlob(f"zstd: no whole frame header ({error})") from error
    # python-zstandard allocates what the header declares whatever max_output_size says, so the
    # declared size is checked first and a frame without one is not taken.
    if parameters.content_size == _UNKNOWN_SIZE:
        raise SizeLimitExceeded("zstd: the frame declares no content size, so it cannot be bounded")
    if parameters.content_size > max_bytes:
        raise SizeLimitExceeded(
            f"zstd: {parameters.content_size} bytes declared, above the limit of {max_bytes}"
        )
    if parameters.window_size > 2**_MAX_WINDOW_LOG:
        raise SizeLimitExceeded(f"zstd: window of {parameters.window_size} bytes is too large")
    if not parameters.has_checksum:
        raise ChecksumMismatch("zstd: the frame carries no checksum")
    try:
        return zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        # The library tells the two apart only in its text; either class is an IntegrityError.
        text = str(error)
        if "Src size is incorrect" in text or "did not decompress full frame" in text:
            raise TruncatedBlob(f"zstd: {text}") from error
        raise ChecksumMismatch(f"zstd: {text}") from error


CODECS: dict[str, Codec] = {
    "none": Codec(_copy, _copy_bounded),
    "zstd": Codec(_zstd, _unzstd),
}
"""By the name that travels with the blob. Names are never reused with another meaning."""


def compress(codec: str, data: Buffer) -> bytes:
    """``data`` under the named codec.

    Raises:
        ConfigError: no such codec.
    """
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is unknown; use one of {', '.join(sorted(CODECS))}")
    return CODECS[codec].compress(data)


def decompress(codec: str, blob: Buffer, *, max_bytes: int, size_bytes: int | None = None) -> bytes:
    """The bytes that ``compress`` was given; ``size_bytes`` is their promised number, if any.

    Raises:
        RemoteProtocolError: no such codec.
        SizeLimitExceeded: more than ``max_bytes``, found before anything is allocated.
        TruncatedBlob: the blob ends early, or its size is not ``size_bytes``.
        ChecksumMismatch: the blob is damaged.
    """
    if codec not in CODECS:
        raise RemoteProtocolError(f"codec {codec!r} is unknown")
    data = CODECS[codec].decompress(blob, max_bytes)
    if size_bytes is not None and len(data) != size_bytes:
        raise TruncatedBlob(f"{codec}: {len(data)} bytes where {size_bytes} were promised")
    return data
