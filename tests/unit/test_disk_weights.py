"""The weight store on a disk that makes trouble: a version is there whole, or was not added and is
offered again; what was there before stays usable.
"""

from pathlib import Path

import pytest
from chaos_disk import SmallDisk, files_in, small_disk  # noqa: F401
from version_store import POLICY, Publisher, add, filled, follow, make_all, opened

from scheduler.weight_versions import WeightVersions
from transport.errors import StoreError


def check(store: WeightVersions, publisher: Publisher, head: int, folder: Path) -> None:
    """An agent with nothing gets ``head``, bit by bit."""
    assert [manifest.version for manifest in store.versions(POLICY)] == list(range(head + 1))
    assert follow(store, store.plan(POLICY), folder).tensors == publisher.states[head]


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "model")


def test_a_full_disk_adds_no_version_and_takes_it_when_there_is_room(
    small_disk: SmallDisk,  # noqa: F811
    publisher: Publisher,
    tmp_path: Path,
) -> None:
    folder = small_disk.folder / "weights"
    store = filled(opened(folder), publisher, 2)
    before = files_in(folder)
    small_disk.fill()
    third = publisher.next(3)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"(?i)no space"):
            add(store, third)
    check(store, publisher, 2, tmp_path / "agent-1")
    check(opened(folder), publisher, 2, tmp_path / "agent-2")
    assert files_in(folder) == before
    small_disk.make_room()
    add(store, third)
    check(store, publisher, 3, tmp_path / "agent-3")
    check(opened(folder), publisher, 3, tmp_path / "agent-4")


def test_a_disk_too_full_for_composites_serves_versions_without_them(
    small_disk: SmallDisk,  # noqa: F811
    publisher: Publisher,
    tmp_path: Path,
) -> None:
    folder = small_disk.folder / "weights"
    store = filled(opened(folder, cumulative_every=2), publisher, 4)
    small_disk.fill()
    with pytest.raises(StoreError, match=r"(?i)no space"):
        make_all(store)
    check(store, publisher, 4, tmp_path / "agent-1")
    small_disk.make_room()
    assert make_all(store)
    check(opened(folder), publisher, 4, tmp_path / "agent-2")


def test_a_read_only_disk_is_named_and_changes_nothing(
    small_disk: SmallDisk,  # noqa: F811
    publisher: Publisher,
    tmp_path: Path,
) -> None:
    folder = small_disk.folder / "weights"
    store = filled(opened(folder), publisher, 1)
    small_disk.set("ro")
    with pytest.raises(StoreError, match=r"(?i)read-only"):
        add(store, publisher.next(2))
    check(store, publisher, 1, tmp_path / "agent-1")
    small_disk.set("rw")
    store = opened(folder)
    check(store, publisher, 1, tmp_path / "agent-2")
    add(store, publisher.publications[2])
    check(store, publisher, 2, tmp_path / "agent-3")


def test_whatever_small_file_is_cut_short_no_wrong_weights_come_out(
    publisher: Publisher, tmp_path: Path
) -> None:
    """Manifests, signatures, deltas: at any length a version is right or is not there."""
    folder = tmp_path / "weights"
    filled(opened(folder), publisher, 3)
    small = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    small = [path for path in small if path.stat().st_size < 2000]
    assert len(small) > 6
    number = 0
    for path in small:
        content = path.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:size])
            number += 1
            store = opened(folder)
            try:
                arena = follow(store, store.plan(POLICY), tmp_path / f"agent-{number}")
            except (StoreError, AssertionError):
                assert store.warnings or store.suspects, path
            else:
                version = store.versions(POLICY)[-1].version
                assert arena.tensors == publisher.states[version]
        path.write_bytes(content)
