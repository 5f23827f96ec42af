"""``farflow keys`` and ``farflow token`` as an operator types them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from farflow.keys_commands import keys_group
from farflow.token_commands import token_group
from scheduler.tokens import Enrolled, TokenStore
from transport.authorized import AllowList
from transport.errors import ConfigError
from transport.keys import KeyPair, create_keys
from transport.messages import Role
from transport.runtime.clock import SystemClock
from transport.token_files import load_token


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    create_keys(tmp_path / "keys", agents=["paris"])
    return tmp_path / "keys"


def run(group, *argv: str) -> Result:
    result = CliRunner().invoke(group, argv)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_token_is_written_to_a_private_file_that_works(keys, tmp_path):
    run(token_group, "create", "--lifetime", "30min", "--out", "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    token = load_token("token")
    assert (token.host, token.enrolment_port) == ("127.0.0.1", 7703)
    assert token.server_key == KeyPair.load(keys / "server.toml").public_key
    public = KeyPair.generate("x", Role.AGENT).public_key
    now = SystemClock().wall_s()
    outcome = TokenStore(keys).redeem(token.id, token.secret, public, "box", now)
    assert outcome == Enrolled("box", Role.AGENT, fresh=True)
    with pytest.raises(ConfigError, match="--out token: exists"):
        run(token_group, "create", "--out", "token")


def test_a_token_goes_to_standard_output_alone(keys, tmp_path):
    shown = run(token_group, "create", "--host", "203.0.113.5").stdout
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(shown)
    assert load_token("token").host == "203.0.113.5"


def test_tokens_are_listed_and_revoked_without_their_secrets(keys):
    run(token_group, "create", "--uses", "3", "--name-prefix", "spot-", "--out", "token")
    token = load_token("token")
    shown = run(token_group, "ls").stdout
    assert token.id in shown
    assert token.secret not in shown
    (row,) = json.loads(run(token_group, "ls", "--json").stdout)
    assert (row["state"], row["uses"], row["max_uses"], row["names"]) == ("valid", 0, 3, [])
    run(token_group, "revoke", token.id)
    (row,) = json.loads(run(token_group, "ls", "--json").stdout)
    assert row["state"] == "revoked"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--set", "transport.host=0.0.0.0"], "--host"),
        (["--set", "transport.enrolment_port=0"], r"transport\.enrolment_port"),
        (["--lifetime", "soon"], "--lifetime"),
        (["--uses", "5"], "name prefix"),
        (["--set", "transport.keys=elsewhere"], "farflow keys create"),
    ],
)
def test_what_cannot_be_is_said_before_a_token_is_made(keys, argv, problem):
    with pytest.raises(ConfigError, match=problem):
        run(token_group, "create", *argv)
    assert TokenStore(keys).all() == []


def test_a_submitter_gets_a_key_of_its_own_role(keys):
    shown = run(keys_group, "add", "--role", "submitter", "judge", "grader").stdout
    assert shown.split() == ["keys/judge.toml", "keys/grader.toml"]
    pair = KeyPair.load(keys / "judge.toml")
    assert pair.role is Role.SUBMITTER
    peer = AllowList(keys / "authorized", 0.0).lookup(pair.public_key)
    assert (peer.name, peer.role) == ("judge", Role.SUBMITTER)
    with pytest.raises(ConfigError, match="agent 'paris', not of submitter"):
        run(keys_group, "add", "--role", "submitter", "paris")
    with pytest.raises(ConfigError, match="no deployment's folder"):
        run(keys_group, "add", "--role", "viewer", "x", "--set", "transport.keys=elsewhere")
    assert not Path("elsewhere").exists()


def test_keys_are_listed_and_revoked(keys):
    rows = json.loads(run(keys_group, "ls", "--json").stdout)
    assert {(row["name"], row["role"], row["state"]) for row in rows} >= {
        ("paris", "agent", "authorized"),
        ("operator", "operator", "authorized"),
    }
    run(keys_group, "revoke", "paris")
    assert "paris\tagent\t-\trevoked" in run(keys_group, "ls").stdout
    (keys / "paris.toml").unlink()
    run(keys_group, "add", "--role", "agent", "paris")
    run(keys_group, "revoke", "paris")
    assert run(keys_group, "ls").stdout.count("paris\tagent\t-\trevoked") == 2


def test_revoking_a_trainer_says_what_stays_believed(keys):
    run(keys_group, "create", "keys", "--trainer", "run/solver")
    shown = run(keys_group, "revoke", "trainer-run-solver").stdout
    assert "certificates/trainer-run-solver.toml" in shown


def test_the_servers_key_is_changed_in_two_steps(keys):
    old = KeyPair.load(keys / "server.toml")
    assert "no change" in run(keys_group, "rotate-server", "--status").stdout
    with pytest.raises(ConfigError, match="begin with"):
        run(keys_group, "rotate-server", "--finish")
    run(keys_group, "rotate-server")
    assert KeyPair.load(keys / "server.toml") == old
    run(keys_group, "rotate-server", "--abandon")
    assert not (keys / "server.next.toml").exists()
    run(keys_group, "rotate-server")
    run(keys_group, "rotate-server", "--finish")
    new = KeyPair.load(keys / "server.toml")
    assert new.public_key != old.public_key
    assert new.public_key in (keys / "server.public.toml").read_text()
    assert KeyPair.load(keys / "server.previous.toml") == old
    assert create_keys(keys).server == new
