"""A delta file as it was published once: bytes that every later release understands."""

import base64

import msgspec
import numpy as np
from deltas import after, arena_of, with_file

from transport.weights.delta_file import decode_delta, read_delta_table
from transport.weights.digest import state_digest
from transport.weights.manifest import VersionManifest
from transport.weights.tensors import TensorBytes, read_header

GOLDEN = base64.b64decode(
    b"eAMAAAAAAAB7Il9fbWV0YWRhdGFfXyI6eyJmb3JtYXQiOiJmYXJmbG93LmRlbHRhLjIiLCJoZWFkZXIiOiJ7XCJy"
    b"dW5cIjpcInJcIixcInBvbGljeVwiOlwici9wXCIsXCJ2ZXJzaW9uXCI6MixcInBhcmVudFwiOjEsXCJiYXNlX2Rp"
    b"Z2VzdFwiOlwiYjRmOTc0NDc2OTg4N2M1NzI5OTUxNWZmYzg4ZWM0MDJiN2U5ZGNhODlkN2JhNzczNjgyZDg0MjEy"
    b"OTViOTlhOFwiLFwiZGlnZXN0XCI6XCJmOWJhYjUyNzNlMjU2NWNjMzY3MjMxYTZlNDBjOWE4NDNjYTY2M2I4OTJj"
    b"MzFiZjM5NTZkZTY4YjQ0OWRiM2MzXCIsXCJmaW5nZXJwcmludFwiOlwiMjVlYmY1MjRmZDExOGIyZWJiMjdlMjUz"
    b"MGQxMjdjM2RkOGY2NmY5NDVhZjU2ZDMxYzQ4NzhkMzk3NjE0NDExZFwifSIsInNlZ21lbnRzIjoiW1tcImNsYXNz"
    b"LnpzdGRcIixcIkJGMTZcIixbW1wiYVwiLDAsNjBdXSw0LDQ1LDE0NzY0MTg0OTRdLFtcImNsYXNzLnJhbmdlXCIs"
    b"XCJCRjE2XCIsW1tcImFcIiw2MCwzNl1dLDEsMTMsMzAyNDM3MjQzOF0sW1wibGlzdC56c3RkXCIsXCJGMzJcIixb"
    b"W1wiYlwiLDIwLDIwXSxbXCJiXCIsMCwyMF1dLDIsMjUsMjg5Mjg4MjIwM10sW1wicmF3XCIsXCJJOFwiLFtbXCJj"
    b"XCIsMCw2XV0sNiw2LDc5MTYxOTI5NV1dIn0sInNlZ21lbnQuMDAwMDAwIjp7ImR0eXBlIjoiVTgiLCJzaGFwZSI6"
    b"WzQ1XSwiZGF0YV9vZmZzZXRzIjpbMCw0NV19LCJzZWdtZW50LjAwMDAwMSI6eyJkdHlwZSI6IlU4Iiwic2hhcGUi"
    b"OlsxM10sImRhdGFfb2Zmc2V0cyI6WzQ1LDU4XX0sInNlZ21lbnQuMDAwMDAyIjp7ImR0eXBlIjoiVTgiLCJzaGFw"
    b"ZSI6WzI1XSwiZGF0YV9vZmZzZXRzIjpbNTgsODNdfSwic2VnbWVudC4wMDAwMDMiOnsiZHR5cGUiOiJVOCIsInNo"
    b"YXBlIjpbNl0sImRhdGFfb2Zmc2V0cyI6WzgzLDg5XX19ICAgICACAHgBAAAAeQMAAAANAAAADAAAACi1L/0gBCEA"
    b"AAMOAAgotS/9IAMZAAAAAAMBAHsBAAAAAPF/4vwAKLUv/SAQgQAAExcAAAAAAAAlAQAAgIA/PwnIA00FAQ=="
)


def tensor(dtype, values, item_bytes):
    cells = np.asarray(values, f"<u{item_bytes}")
    return TensorBytes(dtype, (cells.size,), cells.tobytes())


def test_a_published_delta_stays_readable():
    """Never edit the bytes: files like this one lie in stores."""
    old = {
        "a": tensor("BF16", 0x3C00 + np.arange(96) * 5, 2),
        "b": tensor("F32", 0x3F800000 + np.arange(40), 4),
        "c": tensor("I8", np.arange(6), 1),
        "kept": tensor("BOOL", [1], 1),
    }
    a, b = old["a"].cells().copy(), old["b"].cells().copy()
    a[[3, 40, 41, 95]] += np.uint16(1)
    a[50] -= np.uint16(2)
    b[[3, 39]] -= np.uint32(2)
    new = {
        **old,
        "a": tensor("BF16", a, 2),
        "b": tensor("F32", b, 4),
        "c": tensor("I8", [9, 200, 3, 77, 5, 1], 1),
    }
    header = read_delta_table(GOLDEN)[0]
    manifest = VersionManifest(
        run="r",
        policy="r/p",
        version=2,
        parent=1,
        step=2,
        digest="f9bab5273e2565cc367231a6e40c9a843ca663b892c31bf3956de68b449db3c3",
        base_digest="b4f9744769887c57299515ffc88ec402b7e9dca89d7ba773682d8421295b99a8",
        files=(),
        full_bytes=0,
        fingerprint="25ebf524fd118b2ebb27e2530d127c3dd8f66f945af56d31c4878d397614411d",
        created_wall_s=0.0,
    )
    manifest = with_file(manifest, GOLDEN)
    assert header.digest == manifest.digest == state_digest(new)
    assert header.base_digest == state_digest(old)
    delta = decode_delta(arena_of(old), GOLDEN, manifest, manifest.delta)
    assert after(old, delta) == new
    rows = msgspec.json.decode(read_header(GOLDEN)[1]["segments"])
    assert [row[0] for row in rows] == ["class.zstd", "class.range", "list.zstd", "raw"]
