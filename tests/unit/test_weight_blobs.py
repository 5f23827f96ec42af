"""Hash-addressed files, chunk by chunk."""

import os

import pytest

from transport.errors import ChecksumMismatch, StoreError, TruncatedBlob
from transport.weights.blobs import BlobFolder, link_or_copy, write_durably
from transport.weights.manifest import describe_file

DATA = bytes(range(256)) * 5


@pytest.fixture
def blobs(tmp_path):
    return BlobFolder(tmp_path / "blobs")


def entry_of(data=DATA, chunk_bytes=300):
    return describe_file("delta.safetensors", "delta", data, chunk_bytes=chunk_bytes)


def chunk(entry, index, data=DATA):
    start = index * entry.chunk_bytes
    return data[start : start + entry.chunk_size_bytes(index)]


def test_a_file_is_built_from_chunks_in_any_order(blobs):
    entry = entry_of()
    for index in (4, 0, 2, 1, 3):
        assert not blobs.has(entry.digest)
        blobs.write_chunk(entry, index, chunk(entry, index))
    path = blobs.complete(entry)
    assert path.read_bytes() == DATA == bytes(blobs.data(entry.digest))
    assert blobs.complete(entry) == path
    assert os.listdir(blobs.folder) == [entry.digest]
    assert blobs.read_chunk(entry, 4) == chunk(entry, 4)
    assert blobs.verify(entry)


def test_after_a_crash_only_chunks_that_are_right_are_kept(blobs):
    entry = entry_of()
    blobs.write_chunk(entry, 3, chunk(entry, 3))
    blobs.write_chunk(entry, 1, chunk(entry, 1))
    blobs.write_chunk(entry, 2, b"z" * entry.chunk_size_bytes(2))
    again = BlobFolder(blobs.folder)
    assert again.present(entry) == {1, 3}
    for index in (0, 2, 4):
        again.write_chunk(entry, index, chunk(entry, index))
    again.complete(entry)
    assert again.present(entry) == {0, 1, 2, 3, 4}
    assert again.present(entry_of(b"unknown")) == frozenset()


def test_other_temporary_files_do_not_survive_a_restart(blobs):
    (blobs.folder / "x.tmp").write_bytes(b"torn")
    BlobFolder(blobs.folder)
    assert os.listdir(blobs.folder) == []


def test_an_incomplete_file_is_never_named(blobs):
    entry = entry_of()
    for index in range(4):
        blobs.write_chunk(entry, index, chunk(entry, index))
    with pytest.raises(TruncatedBlob):
        blobs.complete(entry)
    assert blobs.present(entry) == frozenset()
    for index in range(5):
        blobs.write_chunk(entry, index, chunk(entry, index))
    blobs.write_chunk(entry, 0, b"z" * 300)
    with pytest.raises(ChecksumMismatch):
        blobs.complete(entry)
    assert not blobs.has(entry.digest)
    with pytest.raises(StoreError):
        blobs.complete(entry)


def test_an_empty_file_needs_no_chunk(blobs):
    entry = entry_of(b"")
    blobs.complete(entry)
    assert bytes(blobs.data(entry.digest)) == b""
    assert blobs.present(entry) == frozenset()


def test_putting_other_contents_is_refused(blobs):
    entry = entry_of()
    with pytest.raises(ChecksumMismatch):
        blobs.put(entry.digest, (DATA[:-1],))
    assert not blobs.has(entry.digest)
    blobs.put(entry.digest, (DATA[:7], memoryview(DATA)[7:]))
    assert blobs.verify(entry)


def test_storing_pieces_describes_them(blobs):
    entry = blobs.store("model.safetensors", "snapshot", (DATA[:9], DATA[9:]), chunk_bytes=300)
    assert entry == describe_file("model.safetensors", "snapshot", DATA, chunk_bytes=300)
    assert blobs.verify(entry)
    assert os.listdir(blobs.folder) == [entry.digest]


def test_damage_on_disk_is_found_when_read(blobs):
    entry = entry_of()
    path = blobs.put(entry.digest, (DATA,))
    damaged = bytearray(DATA)
    damaged[700] ^= 1
    path.write_bytes(damaged)
    assert blobs.read_chunk(entry, 1) == chunk(entry, 1)
    with pytest.raises(ChecksumMismatch, match="chunk 2"):
        blobs.read_chunk(entry, 2)
    assert not blobs.verify(entry)
    path.write_bytes(DATA[:-1])
    assert not blobs.verify(entry)
    blobs.remove(entry.digest)
    assert not blobs.verify(entry)
    with pytest.raises(StoreError):
        blobs.read_chunk(entry, 0)
    with pytest.raises(TruncatedBlob):
        blobs.read_chunk(entry, 5)
    with pytest.raises(StoreError):
        blobs.data(entry.digest)


def test_sweeping_keeps_what_is_asked_for_and_open_views_stay_readable(blobs):
    kept, coming, gone = entry_of(), entry_of(b"coming"), entry_of(b"gone")
    blobs.put(kept.digest, (DATA,))
    blobs.put(gone.digest, (b"gone",))
    blobs.write_chunk(coming, 0, b"coming")
    view = blobs.data(gone.digest)
    assert blobs.sweep({kept.digest, coming.digest}) == 1
    assert bytes(view) == b"gone"
    assert blobs.has(kept.digest)
    assert blobs.present(coming) == {0}
    assert blobs.sweep(()) == 2


def test_a_disk_that_refuses_is_a_store_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        BlobFolder(tmp_path / "file" / "blobs")
    with pytest.raises(StoreError, match="absent"):
        write_durably(tmp_path / "absent" / "x", (b"",))


def test_a_link_shares_the_file_and_a_copy_replaces_it_where_links_fail(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(DATA)
    link_or_copy(source, tmp_path / "link")
    assert (tmp_path / "link").samefile(source)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert not (tmp_path / "copy").samefile(source)
