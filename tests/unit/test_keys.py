"""Key files, the authorized folder and manifest signatures."""

import os
import stat
from pathlib import Path

import pytest
import zmq

from cloud_trainer.trainer_keys import load_keys
from transport.authorized import AllowList, Refresh
from transport.errors import ConfigError
from transport.keys import (
    SERVICES,
    KeyPair,
    Peer,
    PublicKey,
    SignerKey,
    SigningKey,
    create_keys,
    load_relay_key,
    load_signers,
    load_toml,
    trainer_name,
)
from transport.messages import Role
from transport.runtime.settings import TransportConfig

POLICY = "arithmetic/solver"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_public(folder: Path, name: str, key: KeyPair, **other: str) -> None:
    fields = {"name": name, "role": key.role.value, "public_key": key.public_key, **other}
    text = "".join(f'{field} = "{value}"\n' for field, value in fields.items())
    (folder / f"{name}.toml").write_text(text)


# ---- one key ---------------------------------------------------------------------------------


def test_a_saved_pair_loads_equal_and_only_its_owner_can_read_it(tmp_path):
    for pair in (
        KeyPair.generate("paris", Role.AGENT),
        KeyPair.generate("trainer", Role.TRAINER, POLICY),
    ):
        path = tmp_path / f"{pair.name}.toml"
        pair.save(path)
        assert mode(path) == 0o600
        assert KeyPair.load(path) == pair
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_pair_is_a_curve_key_pair():
    pair = KeyPair.generate("paris", Role.AGENT)
    assert zmq.curve_public(pair.secret_key.encode()).decode() == pair.public_key
    assert pair != KeyPair.generate("paris", Role.AGENT)


def test_no_secret_appears_in_what_is_printed():
    pair, signing = KeyPair.generate("paris", Role.AGENT), SigningKey.generate("t", POLICY)
    assert pair.secret_key not in repr(pair) + str(pair) + f"{[pair]}"
    assert signing.secret_key not in repr(signing) + str(signing) + f"{[signing]}"


@pytest.mark.parametrize("bits", [0o604, 0o640, 0o644, 0o660, 0o606])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(tmp_path, bits):
    path = tmp_path / "paris.toml"
    KeyPair.generate("paris", Role.AGENT).save(path)
    path.chmod(bits)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        KeyPair.load(path)
    path.chmod(0o400)
    KeyPair.load(path)


def test_a_key_file_is_never_replaced(tmp_path):
    path = tmp_path / "paris.toml"
    first = KeyPair.generate("paris", Role.AGENT)
    first.save(path)
    with pytest.raises(ConfigError, match="exists; move it away"):
        KeyPair.generate("paris", Role.AGENT).save(path)
    assert KeyPair.load(path) == first
    assert os.listdir(tmp_path) == ["paris.toml"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:40], "paris.toml"),
        (lambda text: text + 'colour = "red"\n', "colour"),
        (lambda text: text.replace('"agent"', '"king"'), r"role"),
        (lambda text: text.replace('"agent"', '"trainer"'), "policy"),
        (lambda text: text + f'policy = "{POLICY}"\n', "policy"),
        (lambda text: text.replace('"paris"', '"../paris"'), "name"),
        (lambda text: text.replace("secret_key", "secrets"), "secret"),
        (lambda text: text.replace('secret_key = "', 'secret_key = "x'), "secret_key is not 40"),
        (lambda text: "\xff" * 70_000, "no key file"),
    ],
)
def test_a_malformed_file_is_named_with_its_field(tmp_path, change, problem):
    path = tmp_path / "paris.toml"
    KeyPair.generate("paris", Role.AGENT).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=problem) as caught:
        KeyPair.load(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_a_config_error(tmp_path):
    path = tmp_path / "paris.toml"
    path.write_bytes(b'name = "\xff\xfe"')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"paris\.toml"):
        KeyPair.load(path)


def test_a_public_key_of_another_pair_is_refused(tmp_path):
    one, two = KeyPair.generate("a", Role.AGENT), KeyPair.generate("b", Role.AGENT)
    path = tmp_path / "a.toml"
    one.save(path)
    path.write_text(path.read_text().replace(one.public_key, two.public_key))
    with pytest.raises(ConfigError, match="does not belong"):
        KeyPair.load(path)


def test_a_missing_file_tells_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="farflow keys"):
        KeyPair.load(tmp_path / "nobody.toml")
    with pytest.raises(ConfigError, match="name another folder"):
        KeyPair.generate("a", Role.AGENT).save(tmp_path / "nowhere" / "a.toml")


# ---- signatures ------------------------------------------------------------------------------


def test_a_signature_is_believed_for_exactly_its_bytes_and_key(tmp_path):
    key = SigningKey.generate("trainer", POLICY)
    key.save(tmp_path / "t.toml")
    assert mode(tmp_path / "t.toml") == 0o600
    again = SigningKey.load(tmp_path / "t.toml")
    signature = again.sign(b"manifest")
    assert len(signature) == 64
    assert signature == key.sign(b"manifest")
    assert key.public.verify(b"manifest", signature)
    assert not key.public.verify(b"manifesto", signature)
    assert not key.public.verify(b"manifest", signature[:-1])
    assert not key.public.verify(b"manifest", bytes(64))
    assert not SigningKey.generate("other", POLICY).public.verify(b"manifest", signature)


def test_signers_are_found_by_key_id_and_none_twice(tmp_path):
    one, two = SigningKey.generate("a", POLICY), SigningKey.generate("b", "arithmetic/critic")
    for key in (one, two):
        (tmp_path / f"{key.name}.toml").write_text(
            f'name = "{key.name}"\npolicy = "{key.policy}"\nverify_key = "{key.verify_key}"\n'
        )
    signers = load_signers(tmp_path)
    assert signers[one.public.key_id] == one.public
    assert signers[two.public.key_id].policy == "arithmetic/critic"
    (tmp_path / "c.toml").write_text((tmp_path / "a.toml").read_text())
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load_signers(tmp_path)


@pytest.mark.parametrize("verify_key", ["", "ab", "AB" * 32, "zz" * 32])
def test_a_malformed_verify_key_is_refused(verify_key):
    with pytest.raises(ValueError, match="verify_key"):
        SignerKey(name="a", policy=POLICY, verify_key=verify_key)


# ---- the authorized folder -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "authorized"
    made.mkdir()
    return made


def test_a_key_stands_for_its_name_role_and_policy(folder):
    agent = KeyPair.generate("paris", Role.AGENT)
    trainer = KeyPair.generate("t", Role.TRAINER, POLICY)
    write_public(folder, "paris", agent)
    write_public(folder, "t", trainer, policy=POLICY)
    allowed = AllowList(folder, now=0.0)
    assert len(allowed) == 2
    assert allowed.lookup(agent.public_key) == Peer(name="paris", role=Role.AGENT)
    assert allowed.lookup(trainer.public_key) == Peer(name="t", role=Role.TRAINER, policy=POLICY)
    assert allowed.lookup(KeyPair.generate("x", Role.AGENT).public_key) is None
    assert allowed.lookup("") is None


def test_changes_are_seen_at_most_once_per_interval(folder):
    allowed = AllowList(folder, now=0.0)
    key = KeyPair.generate("paris", Role.AGENT)
    write_public(folder, "paris", key)
    assert allowed.refresh(now=0.9 * AllowList.SCAN_INTERVAL_S) == Refresh()
    assert allowed.lookup(key.public_key) is None
    assert allowed.refresh(now=1.0).added == (key.public_key,)
    assert allowed.refresh(now=2.0) == Refresh()
    (folder / "paris.toml").unlink()
    assert allowed.refresh(now=2.0 + 0.9 * AllowList.SCAN_INTERVAL_S) == Refresh()
    assert allowed.refresh(now=3.0).removed == (key.public_key,)
    assert allowed.lookup(key.public_key) is None


def test_another_key_or_role_under_a_name_removes_the_old_one(folder):
    old, new = KeyPair.generate("paris", Role.AGENT), KeyPair.generate("paris", Role.AGENT)
    write_public(folder, "paris", old)
    allowed = AllowList(folder, now=0.0)
    write_public(folder, "paris", new)
    change = allowed.refresh(now=1.0)
    assert (change.added, change.removed) == ((new.public_key,), (old.public_key,))
    write_public(folder, "paris", new, role="operator")
    change = allowed.refresh(now=2.0)
    assert change.added == change.removed == (new.public_key,)
    assert allowed.lookup(new.public_key).role is Role.OPERATOR


def test_one_bad_file_costs_only_itself_and_is_named(folder):
    good = KeyPair.generate("good", Role.AGENT)
    write_public(folder, "good", good)
    (folder / "bad.toml").write_text("name = ")
    (folder / "notes.txt").write_text("not a key")
    KeyPair.generate("secret", Role.AGENT).save(folder / "secret.toml")
    write_public(folder, "other", KeyPair.generate("x", Role.AGENT))
    (folder / "other.toml").rename(folder / "renamed.toml")
    allowed = AllowList(folder, now=0.0)
    assert len(allowed) == 1
    assert allowed.lookup(good.public_key) is not None
    texts = " ".join(allowed.warnings)
    assert len(allowed.warnings) == 3
    assert all(name in texts for name in ("bad.toml", "secret.toml", "renamed.toml"))
    assert "secret.toml: is the secret key of a process" in texts


def test_a_link_to_nothing_hides_no_later_change(folder):
    (folder / "dangling.toml").symlink_to(folder / "nowhere")
    allowed = AllowList(folder, now=0.0)
    assert "dangling.toml" in allowed.warnings[0]
    key = KeyPair.generate("paris", Role.AGENT)
    for now in (1.0, 2.0):
        assert allowed.refresh(now).added == ()
    write_public(folder, "paris", key)
    assert allowed.refresh(now=3.0).added == (key.public_key,)


def test_a_key_that_two_names_claim_is_refused_for_both(folder):
    key = KeyPair.generate("a", Role.AGENT)
    write_public(folder, "a", key)
    write_public(folder, "b", key, role="operator")
    allowed = AllowList(folder, now=0.0)
    assert allowed.lookup(key.public_key) is None
    assert "a.toml, b.toml" in allowed.warnings[0]
    (folder / "b.toml").unlink()
    assert allowed.refresh(now=1.0).added == (key.public_key,)
    assert allowed.warnings == ()


def test_without_its_folder_nobody_is_let_in(folder):
    write_public(folder, "a", KeyPair.generate("a", Role.AGENT))
    allowed = AllowList(folder, now=0.0)
    (folder / "a.toml").unlink()
    folder.rmdir()
    assert len(allowed.refresh(now=1.0).removed) == 1
    assert len(allowed) == 0
    with pytest.raises(ConfigError, match="farflow keys"):
        AllowList(folder, now=0.0)


# ---- a deployment ----------------------------------------------------------------------------


def test_a_deployment_gets_every_key_it_needs(tmp_path):
    folder = tmp_path / "keys"
    keys = create_keys(folder, agents=["paris", "tokyo"], trainers=[POLICY], viewers=["wall"])
    assert keys.server.role is Role.SCHEDULER
    assert set(keys.services) == set(SERVICES)
    assert keys.trainers[POLICY].policy == POLICY
    assert keys.signers[POLICY].policy == POLICY
    allowed = AllowList(folder / "authorized", now=0.0)
    assert allowed.warnings == ()
    pairs = [
        *keys.services.values(),
        *keys.operators.values(),
        *keys.viewers.values(),
        *keys.agents.values(),
        *keys.trainers.values(),
    ]
    assert len(allowed) == len(pairs) == 8
    for pair in pairs:
        peer = Peer(name=pair.name, role=pair.role, policy=pair.policy)
        assert allowed.lookup(pair.public_key) == peer
        assert KeyPair.load(folder / f"{pair.name}.toml") == pair
    assert allowed.lookup(keys.server.public_key) is None
    public = load_toml(folder / "server.public.toml", PublicKey)
    assert public == keys.server.public
    assert set(load_signers(folder / "signers")) == {keys.signers[POLICY].public.key_id}


def test_a_relay_is_one_peer_more_whose_public_key_agents_can_get(tmp_path):
    keys = create_keys(tmp_path, relays=["eu"])
    relay = keys.relays["eu"]
    assert (relay.role, relay.policy) == (Role.RELAY, None)
    assert load_relay_key(tmp_path, "eu") == relay.public_key
    assert AllowList(tmp_path / "authorized", 0.0).lookup(relay.public_key).role is Role.RELAY
    assert create_keys(tmp_path, relays=["eu"]).relays == keys.relays
    with pytest.raises(ConfigError, match=r"us\.toml"):
        load_relay_key(tmp_path, "us")
    (tmp_path / "relays" / "us.toml").write_text(
        (tmp_path / "authorized" / "operator.toml").read_text()
    )
    with pytest.raises(ConfigError, match="not of a relay"):
        load_relay_key(tmp_path, "us")


def test_secrets_and_their_folder_are_closed_to_others(tmp_path):
    folder = tmp_path / "keys"
    create_keys(folder, agents=["paris"], trainers=[POLICY])
    assert mode(folder) == mode(folder / "signing") == 0o700
    public = {"server.public.toml", "root.public.toml"}
    for path in [*folder.glob("*.toml"), *(folder / "signing").glob("*.toml")]:
        assert mode(path) == (0o644 if path.name in public else 0o600)
    for path in [*(folder / "authorized").iterdir(), *(folder / "signers").iterdir()]:
        assert mode(path) == 0o644
        assert "secret" not in path.read_text()


def test_making_keys_again_keeps_them_and_adds_what_is_new(tmp_path):
    first = create_keys(tmp_path, agents=["paris"], trainers=[POLICY])
    second = create_keys(tmp_path, agents=["paris", "tokyo"], trainers=[POLICY])
    assert second.server == first.server
    assert second.agents["paris"] == first.agents["paris"]
    assert second.signers == first.signers
    assert set(second.agents) == {"paris", "tokyo"}


def test_a_name_cannot_stand_for_two_things(tmp_path):
    create_keys(tmp_path, agents=["paris"])
    with pytest.raises(ConfigError, match="agent 'paris', not of viewer"):
        create_keys(tmp_path, viewers=["paris"])
    with pytest.raises(ConfigError, match="another name"):
        create_keys(tmp_path, agents=["server"])


@pytest.mark.parametrize("name", ["", "Paris", "../up", "a b", ".hidden", "x" * 60])
def test_a_bad_name_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ConfigError, match="name"):
        create_keys(tmp_path, agents=[name])
    assert not (tmp_path / f"{name}.toml").exists()


@pytest.mark.parametrize("policy", ["solver", "a/b/c", "/b", "a/B", 'a/b"'])
def test_a_bad_policy_id_is_refused(tmp_path, policy):
    with pytest.raises(ConfigError, match=r"policy|name"):
        create_keys(tmp_path, trainers=[policy])


def test_a_trainers_key_is_named_after_its_policy():
    assert trainer_name(POLICY) == "trainer-arithmetic-solver"


@pytest.mark.parametrize(
    ("load", "name", "found"),
    [
        (KeyPair.load, "server.public.toml", "is the public key of a process, .*needed is the sec"),
        (KeyPair.load, "signing/trainer-r-p.toml", "is a signing key"),
        (SigningKey.load, "trainer-r-p.toml", "is the secret key of a process"),
        (SigningKey.load, "signers/trainer-r-p.toml", "is the public half of a signing key"),
    ],
)
def test_the_wrong_kind_of_key_file_is_named(tmp_path, load, name, found):
    create_keys(tmp_path, trainers=("r/p",))
    with pytest.raises(ConfigError, match=found):
        load(tmp_path / name)


def test_a_trainer_without_keys_is_told_the_command_that_makes_them(tmp_path):
    transport = TransportConfig(keys=str(tmp_path))
    with pytest.raises(ConfigError, match=r"`farflow keys create FOLDER --trainer run/solver`"):
        load_keys(transport, "run/solver", link="", signing="")
    create_keys(tmp_path, trainers=["run/solver"])
    (tmp_path / "trainer-run-solver.toml").unlink()
    with pytest.raises(ConfigError, match=r"`farflow keys create FOLDER --trainer run/solver`"):
        load_keys(transport, "run/solver", link="", signing="")
