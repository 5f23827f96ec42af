"""Tensors as bytes and safetensors files of them."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from transport.errors import IntegrityError, ModelError, SizeLimitExceeded, TruncatedBlob
from transport.weights.tensors import (
    ITEM_BYTES,
    TensorBytes,
    read_header,
    read_safetensors,
    safetensors_parts,
    write_safetensors,
)


def file_of(header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(start, end, dtype="U8", shape=None):
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_every_dtype_and_shape_survives_and_opens_with_the_stock_library(dtype, shape):
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    tensor = TensorBytes(dtype, shape, bytes(range(200, 256))[:size].ljust(size, b"\x01"))
    data = write_safetensors({"w": tensor}, {"note": "x"})
    assert read_safetensors(data) == {"w": tensor}
    ((name, stock),) = safetensors.deserialize(data)
    assert (name, stock["dtype"], tuple(stock["shape"])) == ("w", dtype, shape)
    assert bytes(stock["data"]) == tensor.data


def test_names_that_no_model_has_are_exact():
    names = ["", " ", "a/b\\c", 'quo"te', "new\nline", "ünïcødé.重み", "a#0", "\x00"]
    tensors = {n: TensorBytes("I8", (1,), bytes([i])) for i, n in enumerate(names)}
    data = write_safetensors(tensors)
    assert read_safetensors(data) == tensors
    assert list(read_safetensors(data)) == sorted(names)
    assert {n: bytes(t["data"]) for n, t in safetensors.deserialize(data)} == {
        n: t.data for n, t in tensors.items()
    }


def test_equal_tensors_give_equal_bytes_whatever_their_order():
    tensors = {n: TensorBytes("F32", (2,), n.encode() * 8) for n in "bca"}
    assert write_safetensors(tensors) == write_safetensors(dict(sorted(tensors.items())))
    assert b"".join(safetensors_parts(tensors)) == write_safetensors(tensors)


def test_every_tensor_is_aligned_to_its_item():
    tensors = {
        "a": TensorBytes("U8", (3,), b"abc"),
        "b": TensorBytes("F64", (1,), bytes(8)),
        "c": TensorBytes("BF16", (1,), bytes(2)),
    }
    regions, _ = read_header(write_safetensors(tensors, {"k": "v"}))
    assert all(region.start % ITEM_BYTES[region.dtype] == 0 for region in regions.values())


def test_files_of_the_stock_library_are_read(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64)}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    for mapped in (False, True):
        tensors = read_safetensors(path, mapped=mapped)
        assert tensors["x"] == TensorBytes("F32", (2, 3), arrays["x"].tobytes())
        assert tensors["n"] == TensorBytes("I64", (), arrays["n"].tobytes())
    assert read_header(path.read_bytes())[1] == {"format": "pt"}


def test_views_of_other_formats_become_bytes():
    array = np.arange(4, dtype=np.uint16).reshape(2, 2)
    tensor = TensorBytes("BF16", (2, 2), array.data)
    assert tensor == TensorBytes("BF16", (2, 2), array.tobytes())
    assert tensor.cells().tolist() == [0, 1, 2, 3]
    assert TensorBytes("F32", (0, 3), np.empty((0, 3), np.float32).data).data == b""


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F4", (2,), 1), ("BF16", (3,), 4), ("U8", (-1,), 0)]
)
def test_a_tensor_that_does_not_fit_itself_is_refused(dtype, shape, size):
    with pytest.raises(ModelError):
        TensorBytes(dtype, shape, bytes(size))


def test_a_file_cut_anywhere_is_refused():
    data = write_safetensors({"a": TensorBytes("U8", (5,), b"hello")}, {"k": "v"})
    for size in range(len(data)):
        with pytest.raises(IntegrityError):
            read_safetensors(data[:size])


@pytest.mark.parametrize(
    ("error", "data"),
    [
        (TruncatedBlob, b"1234567"),
        (SizeLimitExceeded, (1 << 40).to_bytes(8, "little") + b"{}"),
        (TruncatedBlob, (90).to_bytes(8, "little") + b"{}"),
        (IntegrityError, file_of(b"\xff\xfe")),
        (IntegrityError, file_of(b"[]")),
        (IntegrityError, file_of(b"[" * 100_000)),
        (IntegrityError, file_of(b'{"a":' + b"[" * 100_000)),
        (IntegrityError, file_of({"a": 1})),
        (IntegrityError, file_of({"__metadata__": {"a": 1}})),
        (IntegrityError, file_of({"a": entry(0, 4, "F4")}, bytes(4))),
        (IntegrityError, file_of({"a": entry(0, 4, "F32", [2])}, bytes(4))),
        (IntegrityError, file_of({"a": entry(0, 4, "U8", [-2, -2])}, bytes(4))),
        (IntegrityError, file_of({"a": entry(4, 0, "U8", [0])}, bytes(4))),
        (IntegrityError, file_of({"a": entry(-4, 0)}, bytes(4))),
        (IntegrityError, file_of({"a": entry(0, 4, "U8", [1] * 65 + [4])}, bytes(4))),
        (IntegrityError, file_of({"a": entry(1, 4)}, bytes(4))),
        (IntegrityError, file_of({"a": entry(0, 3), "b": entry(2, 4)}, bytes(4))),
        (IntegrityError, file_of({"a": entry(0, 3)}, bytes(4))),
        (TruncatedBlob, file_of({"a": entry(0, 1 << 50)}, bytes(4))),
        (
            IntegrityError,
            file_of(
                b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
                b'"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
                bytes(4),
            ),
        ),
    ],
)
def test_hostile_files_are_refused(error, data):
    with pytest.raises(error):
        read_safetensors(data)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_the_format_cannot_hold_are_refused(name):
    with pytest.raises(ModelError):
        write_safetensors({name: TensorBytes("U8", (0,), b"")})


def test_a_dimension_that_no_format_holds_is_refused_beside_a_zero_too():
    for size in (2**63, 2**64):
        with pytest.raises(IntegrityError, match="impossible shape"):
            read_header(file_of({"w": entry(0, 0, shape=[0, size])}))
        with pytest.raises(ModelError, match="2\\^63"):
            TensorBytes("U8", (0, size), b"")
    assert read_safetensors(file_of({"w": entry(0, 0, shape=[0, 2**63 - 1])}))
