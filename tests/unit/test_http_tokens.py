"""Tokens of the HTTP interface: the commands, the files, how often they may ask."""

import json
import os

import pytest
from click.testing import CliRunner

from farflow.cli import cli
from scheduler.gateway import access
from scheduler.gateway.access import (
    HttpRole,
    Rates,
    TokenBook,
    create_token,
    first_token,
    revoke_token,
    submitter_key,
    token_names,
)
from scheduler.tokens import TokenStore
from transport.authorized import read_authorized
from transport.errors import ConfigError
from transport.keys import KeyPair, create_keys
from transport.messages import Role


@pytest.fixture
def keys(tmp_path):
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def run(keys, *arguments):
    result = CliRunner().invoke(
        cli, ["token", "http", *arguments, "--set", f"transport.keys={keys}"]
    )
    return result


def test_commands_make_list_and_revoke(keys, tmp_path):
    made = run(keys, "create", "ada", "--role", "operator")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    file = keys / "http" / "ada.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret not in file.read_text()
    out = tmp_path / "wall.token"
    assert run(keys, "create", "wall", "--role", "viewer", "--out", str(out)).exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o600
    book = TokenBook(keys)
    book.refresh()
    assert book.lookup(secret).name == "ada"
    assert book.lookup(out.read_text().strip()).role is HttpRole.VIEWER
    assert book.lookup("") is None
    assert book.lookup(secret[:-1]) is None
    listed = json.loads(run(keys, "ls", "--json").stdout)
    assert listed == [{"name": "ada", "role": "operator"}, {"name": "wall", "role": "viewer"}]
    ada = book.lookup(secret)
    assert run(keys, "revoke", "ada").stdout == "operator ada: revoked\n"
    assert book.valid(ada)  # until it looks
    book.refresh()
    assert not book.valid(ada)
    assert book.lookup(secret) is None
    assert run(keys, "ls").stdout == "name\trole\nwall\tviewer\n"


def test_wrong_use_is_refused_with_a_remedy(keys, tmp_path):
    for arguments, text in (
        (("create", "Ada", "--role", "viewer"), "must be 1 to 48"),
        (("create", "a" * 44, "--role", "viewer"), "43 at most"),
        (("revoke", "nobody"), "tokens: none"),
    ):
        error = run(keys, *arguments).exception
        assert isinstance(error, ConfigError)
        assert text in str(error)
    assert run(keys, "create", "ada", "--role", "king").exit_code == 2
    create_token(keys, "ada", HttpRole.VIEWER)
    with pytest.raises(ConfigError, match="revoke it first"):
        create_token(keys, "ada", HttpRole.VIEWER)
    elsewhere = run(tmp_path / "nowhere", "ls").exception
    assert isinstance(elsewhere, ConfigError)
    assert "no server.toml" in str(elsewhere)


def test_a_submitters_token_has_a_key_that_goes_with_it(keys):
    create_token(keys, "jobs", HttpRole.SUBMITTER)
    pair = KeyPair.load(submitter_key(keys, "jobs"))
    assert (pair.name, pair.role) == ("http-jobs", Role.SUBMITTER)
    assert "http-jobs" in {one.name for one in read_authorized(keys / "authorized")[0]}
    revoke_token(keys, "jobs")
    assert "http-jobs" not in {one.name for one in read_authorized(keys / "authorized")[0]}
    assert not submitter_key(keys, "jobs").exists()
    create_token(keys, "jobs", HttpRole.SUBMITTER)
    assert KeyPair.load(submitter_key(keys, "jobs")).public_key != pair.public_key


def test_the_first_token_is_made_once_and_not_again_after_it_was_revoked(keys, tmp_path):
    folder = tmp_path / "gateway"
    assert first_token(keys, folder)
    secret = (folder / "local-token").read_text().strip()
    book = TokenBook(keys)
    book.refresh()
    assert book.lookup(secret).role is HttpRole.OPERATOR
    assert not first_token(keys, folder)
    revoke_token(keys, "local")
    assert not first_token(keys, folder)


@pytest.mark.parametrize("step", range(6))
def test_a_first_start_that_is_cut_off_is_begun_anew(keys, tmp_path, monkeypatch, step):
    """Power is lost after so many of the calls that change the disk."""
    folder, left = tmp_path / "gateway", [step]

    class PowerLost(BaseException):
        pass

    def cut(call):
        def called(*args, **more):
            if not left[0]:
                raise PowerLost
            left[0] -= 1
            return call(*args, **more)

        return called

    with monkeypatch.context() as patch:
        for name in ("private_dir", "atomic_write", "make_folder", "fsync_dir"):
            patch.setattr(access, name, cut(getattr(access, name)))
        patch.setattr(os, "rename", cut(os.rename))
        with pytest.raises(PowerLost):
            first_token(keys, folder)
    first_token(keys, folder)
    book = TokenBook(keys)
    book.refresh()
    assert book.lookup((folder / "local-token").read_text().strip()).name == "local"
    assert book.names() == {"local"}


def test_somebody_who_made_a_token_before_the_first_start_keeps_it(keys, tmp_path, monkeypatch):
    rename = os.rename

    def meanwhile(*paths):
        create_token(keys, "ada", HttpRole.VIEWER)
        rename(*paths)

    monkeypatch.setattr(os, "rename", meanwhile)
    assert not first_token(keys, tmp_path / "gateway")
    assert token_names(keys) == ["ada"]
    assert not (tmp_path / "gateway" / "local-token").exists()


def test_of_a_token_that_counts_the_secret_is_written(keys, tmp_path):
    for command in (["http", "create", "ada", "--role", "viewer"], ["create", "--host", "h"]):
        for out in (tmp_path / "no" / "folder", keys):  # keys: a folder
            made = CliRunner().invoke(
                cli, ["token", *command, "--set", f"transport.keys={keys}", "--out", str(out)]
            )
            assert made.exit_code != 0
    bad_host = ["token", "create", "--host", ' "', "--set", f"transport.keys={keys}"]
    assert isinstance(CliRunner().invoke(cli, bad_host).exception, ConfigError)
    assert token_names(keys) == []
    assert TokenStore(keys).all() == []
    (keys / "http" / "ada.toml").mkdir()  # the token cannot be written: then nor is its secret
    out = tmp_path / "ada.token"
    with pytest.raises(ConfigError):
        create_token(keys, "ada", HttpRole.VIEWER, out)
    assert not out.exists()


def test_a_file_that_others_can_read_does_not_count(keys):
    secret = create_token(keys, "ada", HttpRole.VIEWER)
    (keys / "http" / "ada.toml").chmod(0o644)
    book = TokenBook(keys)
    book.refresh()
    assert book.lookup(secret) is None
    warned = run(keys, "ls")
    assert "others can read" in warned.stderr
    assert warned.stdout == ""


def test_a_token_may_ask_so_often_and_save_up_two_seconds():
    rates = Rates(2.0)
    assert [rates.take("a", 0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert rates.take("b", 0.0) == 0.0
    assert rates.take("a", 0.25) > 0.0
    assert rates.take("a", 0.5) == 0.0
    assert [rates.take("a", 100.0) for _ in range(5)][-1] > 0.0
    rates.keep({"b"})
    assert rates.take("a", 100.0) == 0.0
    seldom = Rates(0.1)
    assert (seldom.take("a", 0.0), seldom.take("a", 0.0)) == (0.0, 10.0)
