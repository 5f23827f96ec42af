"""Enrolment tokens: uses, lifetimes, names, and what a crash in between leaves."""

import json
import threading
from pathlib import Path

import pytest

from scheduler.tokens import MAX_USES, REPEAT_S, Enrolled, Refused, Token, TokenStore, revoke_key
from transport.authorized import AllowList, read_authorized
from transport.errors import ConfigError, StoreError
from transport.key_files import load_toml
from transport.keys import KeyPair, PublicKey, create_keys
from transport.messages import Role

HOUR = 3600.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys", agents=["paris"])
    return tmp_path / "keys"


@pytest.fixture
def store(keys: Path) -> TokenStore:
    return TokenStore(keys)


def make(store: TokenStore, uses: int = 1, prefix: str = "") -> tuple[Token, str]:
    return store.create(
        role=Role.AGENT, max_uses=uses, lifetime_s=HOUR, wall_s=0.0, name_prefix=prefix
    )


def key() -> str:
    return KeyPair.generate("x", Role.AGENT).public_key


def code(outcome: Enrolled | Refused) -> str:
    assert isinstance(outcome, Refused)
    assert outcome.message
    return outcome.code


def test_a_token_lets_one_key_in_under_its_name(store, keys):
    token, secret = make(store)
    public = key()
    assert store.redeem(token.id, secret, public, "box", 1.0) == Enrolled("box", Role.AGENT, True)
    peer = AllowList(keys / "authorized", 0.0).lookup(public)
    assert (peer.name, peer.role) == ("box", Role.AGENT)
    (kept,) = store.all()
    assert (kept.state(1.0), len(kept.uses)) == ("used up", 1)


def test_the_secret_is_nowhere_in_the_folder_and_the_token_file_is_private(store, keys):
    token, secret = make(store)
    store.redeem(token.id, secret, key(), "box", 1.0)
    for path in keys.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
    assert (keys / "tokens" / f"{token.id}.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"secret": "0" * 64}, "enrol.token_invalid"),
        ({"secret": ""}, "enrol.token_invalid"),
        ({"token_id": "0" * 16}, "enrol.token_invalid"),
        ({"token_id": "../../server"}, "enrol.token_invalid"),
        ({"token_id": ""}, "enrol.token_invalid"),
        ({"wall_s": HOUR}, "enrol.token_expired"),
        ({"name": ""}, "enrol.name_invalid"),
        ({"name": "../x"}, "enrol.name_invalid"),
        ({"name": "server"}, "enrol.name_invalid"),
        ({"name": "weight-store"}, "enrol.name_invalid"),
        ({"name": "paris"}, "enrol.name_taken"),
    ],
)
def test_what_is_wrong_has_its_own_code_and_uses_nothing_up(store, change, expected):
    token, secret = make(store)
    right = {
        "token_id": token.id,
        "secret": secret,
        "public_key": key(),
        "name": "box",
        "wall_s": 1.0,
    }
    assert code(store.redeem(**{**right, **change})) == expected
    assert store.all()[0].uses == []
    assert isinstance(store.redeem(**right), Enrolled)


def test_a_used_up_or_revoked_token_refuses_new_keys(store):
    token, secret = make(store)
    first = key()
    store.redeem(token.id, secret, first, "box", 1.0)
    assert code(store.redeem(token.id, secret, key(), "other", 2.0)) == "enrol.token_used_up"
    store.revoke(token.id)
    for one in (first, key()):
        assert code(store.redeem(token.id, secret, one, "box", 2.0)) == "enrol.token_revoked"
    with pytest.raises(ConfigError, match="farflow token ls"):
        store.revoke("0" * 16)


def test_the_same_key_again_gets_the_same_answer_and_uses_nothing(store):
    token, secret = make(store, uses=2, prefix="spot-")
    first, second = key(), key()
    assert store.redeem(token.id, secret, first, "", 1.0) == Enrolled("spot-1", Role.AGENT, True)
    for wish in ("", "spot-9", "box"):
        again = store.redeem(token.id, secret, first, wish, 2.0)
        assert again == Enrolled("spot-1", Role.AGENT, False)
    assert store.redeem(token.id, secret, second, "", 3.0) == Enrolled("spot-2", Role.AGENT, True)
    assert code(store.redeem(token.id, secret, key(), "", 3.0)) == "enrol.token_used_up"
    assert store.redeem(token.id, secret, first, "", 4.0) == Enrolled("spot-1", Role.AGENT, False)


def test_names_of_a_prefix_leave_out_what_is_taken_and_grant_wishes_of_it(store, keys):
    create_keys(keys, agents=["spot-1"])
    revoke_key(keys, "paris")
    token, secret = make(store, uses=9, prefix="spot-")
    assert store.redeem(token.id, secret, key(), "", 1.0).name == "spot-2"
    assert store.redeem(token.id, secret, key(), "spot-2", 1.0).name == "spot-3"
    assert store.redeem(token.id, secret, key(), "spot-red", 1.0).name == "spot-red"
    assert store.redeem(token.id, secret, key(), "paris", 1.0).name == "spot-4"


def test_a_key_that_is_in_already_stays_who_it_is(store, keys):
    paris = KeyPair.load(keys / "paris.toml")
    token, secret = make(store)
    outcome = store.redeem(token.id, secret, paris.public_key, "paris", 1.0)
    assert outcome == Enrolled("paris", Role.AGENT, False)
    assert code(store.redeem(token.id, secret, paris.public_key, "x", 1.0)) == "enrol.key_known"
    operator = KeyPair.load(keys / "operator.toml").public_key
    assert code(store.redeem(token.id, secret, operator, "", 1.0)) == "enrol.key_known"
    assert store.all()[0].uses == []


def test_the_name_of_a_revoked_key_may_be_given_to_a_new_one(store, keys):
    old = key()
    for public in (old, key(), key()):
        token, secret = make(store)
        assert store.redeem(token.id, secret, public, "box", 1.0) == Enrolled(
            "box", Role.AGENT, True
        )
        assert AllowList(keys / "authorized", 0.0).lookup(public).name == "box"
        revoke_key(keys, "box")
    token, secret = make(store)
    assert code(store.redeem(token.id, secret, old, "box", 1.0)) == "enrol.key_revoked"
    entries, warnings = read_authorized(keys / "revoked", any_file_name=True)
    assert ([entry.name for entry in entries], warnings) == (["box"] * 3, [])


def test_keys_made_here_do_not_come_back_either(keys):
    revoke_key(keys, "paris")
    with pytest.raises(ConfigError, match=r"paris\.toml: this key was revoked.*move the file away"):
        create_keys(keys, agents=["paris"])
    (keys / "paris.toml").rename(keys / "paris.old")
    create_keys(keys, agents=["paris"])
    assert (keys / "authorized" / "paris.toml").exists()


def test_a_revoked_key_does_not_come_back_and_numbered_names_are_not_given_again(store, keys):
    token, secret = make(store, uses=3, prefix="spot-")
    public = key()
    store.redeem(token.id, secret, public, "", 1.0)
    revoke_key(keys, "spot-1")
    assert AllowList(keys / "authorized", 0.0).lookup(public) is None
    other, other_secret = make(store, uses=3, prefix="spot-")
    for one, word in ((token, secret), (other, other_secret)):
        assert code(store.redeem(one.id, word, public, "", 2.0)) == "enrol.key_revoked"
    assert store.redeem(token.id, secret, key(), "", 2.0).name == "spot-2"


def test_a_file_that_somebody_removed_by_hand_is_not_written_again(store, keys):
    token, secret = make(store)
    public = key()
    store.redeem(token.id, secret, public, "box", 1.0)
    (keys / "authorized" / "box.toml").unlink()
    assert code(store.redeem(token.id, secret, public, "box", 2.0)) == "enrol.key_revoked"
    assert not (keys / "authorized" / "box.toml").exists()


def test_a_crash_after_the_use_was_written_is_gone_on_with(store, keys, monkeypatch):
    token, secret = make(store)
    public = key()

    def crash(*args, **options):
        raise RuntimeError("power cut")

    monkeypatch.setattr("scheduler.tokens.write_new", crash)
    with pytest.raises(RuntimeError):
        store.redeem(token.id, secret, public, "box", 1.0)
    monkeypatch.undo()
    assert not (keys / "authorized" / "box.toml").exists()
    again = TokenStore(keys)
    assert code(again.redeem(token.id, secret, key(), "thief", 2.0)) == "enrol.token_used_up"
    outcome = again.redeem(token.id, secret, public, "box", 2.0)
    assert outcome == Enrolled("box", Role.AGENT, False)
    assert load_toml(keys / "authorized" / "box.toml", PublicKey).public_key == public


def test_a_disk_that_refuses_lets_nobody_in_and_loses_no_use(store, keys, monkeypatch):
    token, secret = make(store)

    def full(*args, **options):
        raise StoreError("no space")

    monkeypatch.setattr("scheduler.tokens.atomic_write", full)
    with pytest.raises(StoreError):
        store.redeem(token.id, secret, key(), "box", 1.0)
    monkeypatch.undo()
    assert store.all()[0].uses == []
    assert not (keys / "authorized" / "box.toml").exists()


def test_many_at_once_use_a_token_exactly_as_often_as_it_says(keys):
    token, secret = make(TokenStore(keys), uses=3, prefix="spot-")
    outcomes: list[Enrolled | Refused] = []

    def ask() -> None:
        outcomes.append(TokenStore(keys).redeem(token.id, secret, key(), "", 1.0))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [outcome.name for outcome in outcomes if isinstance(outcome, Enrolled)]
    assert sorted(names) == [f"spot-{n}" for n in range(1, 4)]
    assert sum(isinstance(o, Refused) and o.code == "enrol.token_used_up" for o in outcomes) == 3


def test_whether_any_token_is_open_follows_the_folder(store, keys):
    assert not store.any_open(0.0)
    token, secret = make(store)
    assert store.any_open(1.0)
    store.redeem(token.id, secret, key(), "box", 1.0)
    assert store.any_open(1.0 + REPEAT_S / 2), "its answer may be asked for again"
    for one in (store, TokenStore(keys)):  # a restart does not open it again
        assert not one.any_open(1.0 + REPEAT_S)
    store.revoke(token.id)
    assert not store.any_open(2.0)
    two, secret = make(store, uses=2, prefix="spot-")
    store.redeem(two.id, secret, key(), "", 3.0)
    assert store.any_open(HOUR - 1.0), "it has a use left"
    assert not store.any_open(HOUR)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_uses": 0}, "uses 0"),
        ({"max_uses": MAX_USES + 1, "name_prefix": "a"}, "uses"),
        ({"max_uses": 2}, "name prefix"),
        ({"name_prefix": "A b"}, "prefix"),
        ({"name_prefix": "x" * 44}, "prefix"),
        ({"lifetime_s": 0.0}, "lifetime"),
        ({"lifetime_s": float("nan")}, "lifetime"),
    ],
)
def test_a_senseless_token_is_not_made(store, options, problem):
    usual = {"role": Role.AGENT, "max_uses": 1, "lifetime_s": HOUR, "wall_s": 0.0}
    with pytest.raises(ConfigError, match=problem):
        store.create(**{**usual, **options})
    assert store.all() == []


def test_a_damaged_token_file_is_named_and_the_others_work(store, keys):
    broken, broken_secret = make(store)
    token, secret = make(store)
    path = keys / "tokens" / f"{broken.id}.json"
    path.write_text(json.dumps({"id": broken.id}))
    with pytest.raises(StoreError, match=str(path)):
        store.redeem(broken.id, broken_secret, key(), "box", 1.0)
    assert isinstance(store.redeem(token.id, secret, key(), "box", 1.0), Enrolled)
    assert [one.id for one in store.all()] == [token.id]


def test_revoking_says_what_it_cannot_do(keys):
    with pytest.raises(ConfigError, match="farflow keys ls"):
        revoke_key(keys, "nobody")
    with pytest.raises(ConfigError, match="farflow keys ls"):
        revoke_key(keys, "../server")
    with pytest.raises(ConfigError, match="service"):
        revoke_key(keys, "weight-store")
    revoke_key(keys, "paris")
    create_keys(keys, agents=["tokyo"])
    (keys / "authorized" / "paris.toml").write_text(
        (keys / "authorized" / "tokyo.toml").read_text().replace('"tokyo"', '"paris"')
    )
    revoke_key(keys, "paris")
    assert len(list((keys / "revoked").glob("*.toml"))) == 2
