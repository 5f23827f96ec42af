"""Key files and folders of them that cannot be read: skipped with a warning, whatever is wrong."""

import errno
import os

import pytest

from transport import authorized
from transport.authorized import AllowList, Refresh, read_authorized
from transport.errors import ConfigError
from transport.key_files import files_with
from transport.keys import KeyPair, Peer
from transport.messages import Role


def let_in(folder):
    pair = KeyPair.generate("paris", Role.AGENT)
    (folder / "paris.toml").write_text(
        f'name = "paris"\nrole = "agent"\npublic_key = "{pair.public_key}"\n'
    )
    return pair


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "a." * 200 + "a = 1", "a = " + "{a=" * 3000])
def test_a_key_file_that_nests_too_deep_is_refused_and_skipped(tmp_path, text):
    path = tmp_path / "deep.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"deep.toml: nested too deep"):
        KeyPair.load(path)
    found, warnings = read_authorized(tmp_path)
    assert not found
    assert warnings[0].endswith("; skipped")


@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_skipped_and_keeps_nobody_waiting(tmp_path):
    pair = let_in(tmp_path)
    (tmp_path / "paris.toml").rename(tmp_path / "elsewhere")
    (tmp_path / "paris.toml").symlink_to("elsewhere")  # a link to a file is as good as one
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    found, warnings = read_authorized(tmp_path)
    assert [one.name for one in found] == ["paris"]
    assert len(warnings) == 3
    assert all("it is not a regular file" in warning for warning in warnings)
    assert list(files_with(tmp_path, pair.public_key)) == [tmp_path / "paris.toml"]


def test_a_folder_that_cannot_be_read_is_said_once_and_read_as_soon_as_it_can(
    tmp_path, monkeypatch
):
    pair = let_in(tmp_path)
    allowed = AllowList(tmp_path, 0.0)

    def refuse(_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("transport.authorized.os.scandir", refuse)
        [warning] = allowed.refresh(1.0).warnings
        assert "Too many open files; who was let in stays" in warning
        assert allowed.refresh(2.0) == Refresh()
        assert allowed.lookup(pair.public_key) == Peer(name="paris", role=Role.AGENT)
    (tmp_path / "paris.toml").unlink()
    assert allowed.refresh(3.0).removed == (pair.public_key,)
    assert allowed.warnings == ()


def test_one_more_key_costs_the_reading_of_one_file(tmp_path, monkeypatch):
    pair = let_in(tmp_path)
    (tmp_path / "bad.toml").write_text("no key")
    allowed = AllowList(tmp_path, 0.0)
    read, load = [], authorized.load_toml

    def noted(path, kind):
        read.append(path.name)
        return load(path, kind)

    monkeypatch.setattr(authorized, "load_toml", noted)
    other = KeyPair.generate("oslo", Role.AGENT)
    (tmp_path / "oslo.toml").write_text(
        f'name = "oslo"\nrole = "agent"\npublic_key = "{other.public_key}"\n'
    )
    assert allowed.refresh(1.0).added == (other.public_key,)
    assert read == ["bad.toml", "oslo.toml"]  # what did not load is tried again
    let_in(tmp_path)
    refresh = allowed.refresh(2.0)
    assert refresh.removed == (pair.public_key,)
    assert len(refresh.added) == 1
    assert read[2:] == ["bad.toml", "paris.toml"]
