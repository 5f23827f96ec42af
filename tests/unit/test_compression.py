"""Codecs: exact, bounded, and honest about damage."""

import random
import tracemalloc

import pytest
import zstandard

from transport.compression import CODECS, compress, decompress
from transport.errors import (
    ChecksumMismatch,
    ConfigError,
    IntegrityError,
    RemoteProtocolError,
    SizeLimitExceeded,
    TruncatedBlob,
)

DATA = b"rollout " * 4000


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("data", [b"", b"x", DATA, random.Random(1).randbytes(70_000)])
def test_what_goes_in_comes_out(codec, data):
    blob = compress(codec, data)
    assert decompress(codec, blob, max_bytes=len(data), size_bytes=len(data)) == data
    assert decompress(codec, memoryview(bytearray(blob)), max_bytes=len(data)) == data


def test_zstd_makes_repetition_small():
    assert len(compress("zstd", DATA)) < len(DATA) / 50


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_one_byte_above_the_limit_is_refused(codec):
    with pytest.raises(SizeLimitExceeded):
        decompress(codec, compress(codec, DATA), max_bytes=len(DATA) - 1)


def test_a_bomb_is_refused_before_its_output_is_allocated():
    bomb = compress("zstd", bytes(200_000_000))
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(SizeLimitExceeded):
        decompress("zstd", bomb, max_bytes=1_000_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_a_frame_that_hides_its_size_is_refused():
    hidden = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(DATA)
    with pytest.raises(SizeLimitExceeded, match="no content size"):
        decompress("zstd", hidden, max_bytes=len(DATA))


def test_a_frame_that_lies_about_its_size_is_refused():
    # Single-segment frame: the two bytes after the descriptor are the content size minus 256.
    blob = bytearray(compress("zstd", b"abcdefgh" * 100))
    parameters = zstandard.get_frame_parameters(bytes(blob))
    assert parameters.content_size == 800
    assert int.from_bytes(blob[5:7], "little") == 800 - 256
    blob[5:7] = (500 - 256).to_bytes(2, "little")
    with pytest.raises(IntegrityError):
        decompress("zstd", bytes(blob), max_bytes=1000)


def test_a_frame_without_checksum_is_refused():
    bare = zstandard.ZstdCompressor(write_checksum=False).compress(DATA)
    with pytest.raises(ChecksumMismatch, match="no checksum"):
        decompress("zstd", bare, max_bytes=len(DATA))


def test_every_truncation_is_noticed():
    blob = compress("zstd", random.Random(2).randbytes(300))
    for size_bytes in range(len(blob)):
        with pytest.raises(TruncatedBlob):
            decompress("zstd", blob[:size_bytes], max_bytes=300)


def test_every_flipped_bit_is_noticed_or_harmless():
    data = b"tokens and their log-probabilities " * 9
    blob = compress("zstd", data)
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            # A few header bits are unused by the format; what comes out is then still exact.
            assert decompress("zstd", bytes(damaged), max_bytes=4096) == data
        except IntegrityError:
            continue


def test_bytes_behind_the_frame_are_refused():
    with pytest.raises(IntegrityError):
        decompress("zstd", compress("zstd", DATA) + b"\0", max_bytes=len(DATA))
    with pytest.raises(IntegrityError):
        decompress("zstd", compress("zstd", DATA) * 2, max_bytes=2 * len(DATA))


def test_another_size_than_promised_is_refused():
    for codec in CODECS:
        with pytest.raises(TruncatedBlob, match="promised"):
            decompress(codec, compress(codec, DATA), max_bytes=10**6, size_bytes=len(DATA) + 1)


def test_an_unknown_codec_is_the_configs_or_the_peers_fault():
    with pytest.raises(ConfigError, match="none, zstd"):
        compress("lz4", DATA)
    with pytest.raises(RemoteProtocolError, match="lz4"):
        decompress("lz4", DATA, max_bytes=10)
