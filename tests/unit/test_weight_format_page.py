"""The format page cannot rot: what its examples say is what the code makes of the same weights, and
its programs decode what the code encodes."""

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from deltas import arena_of

from transport.keys import SigningKey
from transport.weights import coders, layout
from transport.weights.cell_sums import run_sum
from transport.weights.delta_encode import encode_delta
from transport.weights.delta_file import decode_delta
from transport.weights.delta_format import FORMAT, DeltaHeader, Row
from transport.weights.digest import (
    fingerprint,
    full_digest,
    state_digest,
    tensor_key,
    tensor_kind,
    tensor_sum,
)
from transport.weights.layout import class_layout
from transport.weights.manifest import (
    FileEntry,
    SignedManifest,
    VersionManifest,
    chunk_bytes_for,
    sign,
    verify,
)
from transport.weights.publication import publish_delta
from transport.weights.range_coder import encode_range
from transport.weights.segments import CODERS, CodecSettings, decode_segment
from transport.weights.static_streams import pack_gaps, pack_steps
from transport.weights.symbols import symbols_of
from transport.weights.tensors import ITEM_BYTES, TensorBytes

PAGE = (Path(__file__).parents[2] / "docs" / "weight-format.md").read_text(encoding="utf-8")
ZSTD_CODERS = ("split.zstd", "list.zstd", "dense.zstd")


def hexadecimal(data):
    return bytes(data).hex()


def numbers(values):
    return ",".join(str(int(value)) for value in values)


def tensor(dtype, shape, cells, item_bytes):
    return TensorBytes(dtype, shape, np.asarray(cells, f"<u{item_bytes}").tobytes())


# ---- what the examples are made of ---------------------------------------------------------------

STATE = {
    "b": tensor("F32", (2,), [0x3F800000, 0x80000000], 4),
    "n": tensor("I64", (), [258], 8),
    "z": tensor("F16", (0, 2), [], 2),
}
OLD_CELLS = np.concatenate([0x3C00 + np.arange(40), 0xBC7C + np.arange(8)]).astype("<u2")
NEW_CELLS = OLD_CELLS.copy()
NEW_CELLS[[3, 25, 42, 45, 47]] = [0x3C04, 0x3C18, 0xBC81, 0x0001, 0xBC6F]
OLDS, NEWS = [OLD_CELLS[:40], OLD_CELLS[40:]], [NEW_CELLS[:40], NEW_CELLS[40:]]


def model(w, n):
    return {
        "n": tensor("I8", (6,), n, 1),
        "w.a": tensor("BF16", (5, 8), w[:40], 2),
        "w.b": tensor("BF16", (8,), w[40:], 2),
    }


OLD, NEW = model(OLD_CELLS, range(6)), model(NEW_CELLS, [9, 200, 3, 77, 5, 1])
KEY = SigningKey(
    name="solver",
    policy="r/solver",
    verify_key="3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29",
    secret_key="00" * 32,
)


def delta_and_signed():
    delta = encode_delta(
        OLD, NEW, run="r", policy="r/solver", version=2, parent=1,
        settings=CodecSettings(coder="small"),
    )  # fmt: skip
    publication = publish_delta(delta, step=2, created_wall_s=0.5)
    return delta, sign(publication.manifest, KEY)


# ---- the examples --------------------------------------------------------------------------------


def state_example():
    kinds = {name: tensor_kind(t.dtype, t.shape) for name, t in STATE.items()}
    keys = {name: tensor_key(name, kind) for name, kind in kinds.items()}
    made = {f"kind.{name}": hexadecimal(kind) for name, kind in kinds.items()}
    made |= {f"key.{name}": f"{key:016x}" for name, key in keys.items()}
    for cell in range(2):
        one = run_sum(keys["b"], cell, STATE["b"].cells()[cell : cell + 1])
        for lane, part in (("x", one[:8]), ("y", one[8:])):
            made[f"{lane}.b.{cell}"] = f"{int.from_bytes(part, 'little'):016x}"
    made |= {f"sum.{name}": hexadecimal(tensor_sum(name, STATE[name])) for name in STATE}
    return made | {
        "state_digest": state_digest(STATE),
        "fingerprint": fingerprint(STATE),
        "full_digest": full_digest(STATE),
    }


def symbols_example():
    symbols = symbols_of(OLDS, NEWS, class_layout("BF16"))
    (kinds,) = np.nonzero(symbols.counts)
    return {
        "old": hexadecimal(OLD_CELLS.tobytes()),
        "new": hexadecimal(NEW_CELLS.tobytes()),
        "classes": numbers(kinds),
        "counts": numbers(symbols.counts[kinds]),
        "gaps": numbers(symbols.gaps),
        "steps": numbers(symbols.steps),
    }


def static_example():
    symbols = symbols_of(OLDS, NEWS, class_layout("BF16"))
    gaps, steps = pack_gaps(symbols.gaps), pack_steps(symbols.steps, symbols.counts, 16)
    return {
        "table": hexadecimal(coders.table_bytes(symbols.counts)),
        "frame1.holds": hexadecimal(gaps.symbols),
        "frame2.holds": hexadecimal(steps.symbols),
        "gap.extra": hexadecimal(gaps.extra),
        "step.extra": hexadecimal(steps.extra),
        "body": hexadecimal(coders.static_body(symbols.counts, gaps, steps)),
    }


def range_example():
    symbols = symbols_of(OLDS, NEWS, class_layout("BF16"))
    coded = encode_range(symbols.counts, symbols.gaps, symbols.steps, 100, False)
    return {
        "body": hexadecimal(coders.table_bytes(symbols.counts) + coded),
        "decisions": " ".join(first_decisions(coded, symbols.counts)),
    }


def first_decisions(coded, counts):
    """MODEL:BIT of the first symbol, and width and code after it, by the page's own program."""
    names = programs()
    decoder = names["RangeDecoder"](coded)
    found = []
    plain_bit = decoder.bit

    def bit(model):
        value = plain_bit(model)
        found.append(f"{model}:{value}")
        return value

    decoder.bit = bit
    names["read_gap"](decoder)
    names["read_step"](decoder)
    return [*found, f"width={decoder.width:08x}", f"code={decoder.code:08x}"]


def absolute_example():
    (where,) = np.nonzero(OLD_CELLS != NEW_CELLS)
    return {
        "split.zstd": hexadecimal(coders.encode_split(NEW_CELLS)),
        "list.zstd": hexadecimal(coders.encode_list(where.astype(np.uint32), NEW_CELLS[where])),
        "dense.zstd": hexadecimal(coders.encode_dense(OLDS, NEWS)),
    }


def delta_example():
    delta, _ = delta_and_signed()
    return {
        "base_digest": delta.header.base_digest,
        "digest": delta.header.digest,
        "file": hexadecimal(delta.data),
    }


def manifest_example():
    _, signed = delta_and_signed()
    return {
        "verify_key": KEY.verify_key,
        "key_id": signed.key_id,
        "manifest": hexadecimal(signed.manifest),
        "signature": hexadecimal(signed.signature),
    }


EXAMPLES = {
    "state": state_example,
    "symbols": symbols_example,
    "class.zstd": static_example,
    "class.range": range_example,
    "absolute": absolute_example,
    "delta": delta_example,
    "manifest": manifest_example,
}


# ---- the page ------------------------------------------------------------------------------------


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def examples():
    """Of every block that begins with ``example NAME``: values by key, without white space."""
    found = {}
    for block in blocks("text"):
        first, *lines = block.splitlines()
        if not first.startswith("example "):
            continue
        values = found[first.removeprefix("example ")] = {}
        for line in lines:
            if line[:1].strip():
                key, _, line = line.partition(" ")
                values[key] = ""
            values[key] += "".join(line.split())
    return found


def programs():
    names = {}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 - our own page
    return names


def written(name):
    return {key: bytes.fromhex(value) for key, value in examples()[name].items()}


def without_frames(coder, body):
    """Parts of a body with its zstd frames unpacked: frames may differ between releases of zstd."""
    cut = {"split.zstd": NEW_CELLS.size}.get(coder, 0)
    return body[:cut], zstandard.ZstdDecompressor().decompress(body[cut:])


def test_the_page_has_every_example():
    assert examples().keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "absolute"])
def test_an_example_is_what_the_code_makes(name):
    made = {key: "".join(value.split()) for key, value in EXAMPLES[name]().items()}
    shown = examples()[name]
    if name == "class.zstd":
        parts = made.pop("body"), shown.pop("body")
        table = len(bytes.fromhex(made["table"]))
        unpacked = []
        for body in map(bytes.fromhex, parts):
            ends = np.cumsum([table + 8, *np.frombuffer(body, "<u4", 2, table)])
            frames = [body[a:b] for a, b in pairwise(ends)]
            held = [zstandard.ZstdDecompressor().decompress(frame).hex() for frame in frames]
            unpacked.append((body[:table].hex(), held, body[ends[-1] :].hex()))
        assert unpacked[0] == unpacked[1]
        extra = made["gap.extra"] + made["step.extra"]
        assert unpacked[1] == (made["table"], [made["frame1.holds"], made["frame2.holds"]], extra)
    assert shown == made


@pytest.mark.parametrize("coder", ZSTD_CODERS)
def test_bodies_of_absolute_coders_hold_what_the_code_makes(coder):
    made = bytes.fromhex(absolute_example()[coder])
    assert without_frames(coder, written("absolute")[coder]) == without_frames(coder, made)


@pytest.mark.parametrize("coder", [*ZSTD_CODERS, "class.zstd", "class.range"])
def test_the_code_decodes_the_bodies_on_the_page(coder):
    if coder in ZSTD_CODERS:
        body = written("absolute")[coder]
    else:
        body = bytes.fromhex(examples()[coder]["body"])
    changes = decode_segment(coder, "BF16", memoryview(body), OLDS, 5)
    after = [old.copy() for old in OLDS]
    for cells, change in zip(after, changes, strict=True):
        if hasattr(change, "positions"):
            cells[change.positions] = change.values
        else:
            cells[change.start : change.start + change.values.size] = change.values
    assert [cells.tolist() for cells in after] == [cells.tolist() for cells in NEWS]


def test_the_code_reads_the_file_and_the_manifest_on_the_page():
    shown = written("manifest")
    _, signed = delta_and_signed()
    signed = msgspec.structs.replace(
        signed, manifest=shown["manifest"], signature=shown["signature"]
    )
    manifest = verify(signed, {KEY.key_id: KEY.public})
    delta = decode_delta(arena_of(OLD, 1), written("delta")["file"], manifest, manifest.delta)
    assert delta.digests.hex == state_digest(NEW)


# ---- the programs --------------------------------------------------------------------------------


def test_the_pages_sums_are_the_codes():
    lanes = programs()["lanes"]
    rng = np.random.default_rng(0)
    for bits, start in ((8, 0), (16, 5), (32, (1 << 32) - 2)):
        cells = rng.integers(0, 1 << bits, 4, dtype=np.uint64).astype(f"<u{bits // 8}")
        key = int(rng.integers(0, 1 << 63))
        each = [lanes(start + i, int(cell), key) for i, cell in enumerate(cells)]
        sums = [sum(lane) % (1 << 64) for lane in zip(*each, strict=True)]
        assert b"".join(s.to_bytes(8, "little") for s in sums) == run_sum(key, start, cells)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_the_pages_range_decoder_reads_what_the_code_writes(bits):
    rng = np.random.default_rng(bits)
    counts = np.array([0, 90, 1, 0, 200], np.int64)
    total = int(counts.sum())
    gaps = (2.0 ** rng.uniform(0, 31, total)).astype(np.uint32) - np.uint32(1)
    steps = np.maximum((2.0 ** rng.uniform(0, bits, total)).astype(np.uint32), np.uint32(1))
    steps[-1] = (1 << bits) - 1
    coded = encode_range(counts, gaps, steps, 1 << 16, False)
    read = programs()["read_symbols"](coded, counts[counts > 0].tolist())
    assert read == list(zip(gaps.tolist(), steps.tolist(), strict=True))


def test_the_pages_gap_symbols_are_the_codes():
    gap_of = programs()["gap_of"]
    gaps = np.array([0, 7, 15, 16, 31, 32, 1000, (1 << 31) - 1], np.uint32)
    packed = pack_gaps(gaps)
    bits = iter(np.unpackbits(packed.extra, bitorder="little").tolist())

    def take(count):
        return sum(next(bits) << place for place in range(count))

    assert [gap_of(int(symbol), take) for symbol in packed.symbols] == gaps.tolist()


@pytest.mark.parametrize("item_bits", [8, 16, 32])
def test_the_pages_step_symbols_are_the_codes(item_bits):
    step_of = programs()["step_of"]
    largest = (1 << item_bits) - 1
    steps = np.array([1, 2, 3, 4, 5, 6, 40, 127, 128, 129, 200, largest], np.uint32)
    packed = pack_steps(steps, np.array([steps.size]), item_bits)
    bits = iter(np.unpackbits(packed.extra, bitorder="little").tolist())

    def take(count):
        return sum(next(bits) << place for place in range(count))

    halves = [half for byte in packed.symbols.tolist() for half in (byte & 15, byte >> 4)]
    assert [step_of(half, item_bits, take) for half in halves] == steps.tolist()


# ---- tables --------------------------------------------------------------------------------------


def rows(heading):
    """Cells of the tables under a heading, without their heads and code marks."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()[2:]]
    return [[c.strip().replace("`", "") for c in line.strip("|").split("|")] for line in lines]


def test_the_table_of_types_is_the_codes():
    shown = {}
    for types, size, shift, classes in rows("Cells and classes"):
        for dtype in types.split(", "):
            shown[dtype] = (int(size), shift, int(classes))
    made = {}
    for dtype, size in ITEM_BYTES.items():
        found = class_layout(dtype)
        made[dtype] = (size, str(found.shift) if found.mask else "-", found.classes)
    assert shown == made


def test_the_page_names_what_the_code_knows():
    assert FORMAT in PAGE
    assert {f"`{coder}`" for coder in CODERS} <= set(re.findall(r"`[a-z.]+`", PAGE))
    assert str(layout.MAX_SEGMENT_CELLS) == str(2**31 - 1)
    assert "2^31 - 1" in PAGE
    assert (chunk_bytes_for(1 << 30), chunk_bytes_for((1 << 30) + 1)) == (1 << 20, 4 << 20)


def test_the_page_has_every_field():
    fields = {key for keys, *_ in rows("Manifest") for key in keys.split(", ")}
    structs = (*VersionManifest.__struct_fields__, *FileEntry.__struct_fields__)
    assert fields == set(structs)
    header = dict(rows("Delta file"))["header"]
    assert set(re.findall(r"[a-z_]+", header)) >= set(DeltaHeader.__struct_fields__)
    row = dict(rows("Delta file"))["segments"]
    assert [name for name in Row.__struct_fields__ if name not in row] == ["spans"]
    assert list(SignedManifest.__struct_fields__) == ["manifest", "signature", "key_id"]
