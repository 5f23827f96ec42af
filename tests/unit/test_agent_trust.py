"""Whose manifests an agent believes."""

from pathlib import Path

import pytest

from edge_agent.trust import AgentTrust
from transport.certificates import RootKey, certify, name_next
from transport.keys import DeploymentKeys, KeyPair, SigningKey, create_keys
from transport.messages import HostedPolicies, Pong, Role, SignerCertificate, Welcome
from transport.server_keys import PinnedServerKeys

POLICY, SECOND = "run/solver", "second/solver"


@pytest.fixture
def keys(tmp_path: Path) -> DeploymentKeys:
    return create_keys(tmp_path / "cloud", trainers=[POLICY, SECOND])


@pytest.fixture
def box(tmp_path: Path, keys: DeploymentKeys) -> Path:
    """The folder of an enrolled box: server key, root, no signers."""
    folder = tmp_path / "box"
    (folder / "signers").mkdir(parents=True)
    for name in ("server.public.toml", "root.public.toml"):
        (folder / name).write_text((tmp_path / "cloud" / name).read_text())
    return folder


def trust(box: Path) -> AgentTrust:
    (box / "state").mkdir(exist_ok=True)
    return AgentTrust(box, box / "state")


def certified(keys: DeploymentKeys, policy: str = POLICY) -> SignerCertificate:
    return certify(keys.root, policy, keys.signers[policy].verify_key).certificate


def welcome(*signers: SignerCertificate, policies: tuple[str, ...] = (POLICY,)) -> Welcome:
    return Welcome(term=1, heartbeat_s=1, lost_after_s=9, policies=policies, signers=signers)


def test_a_certified_signer_is_believed_and_still_after_a_restart(keys, box):
    agent = trust(box)
    assert agent.signers == {}
    held = agent.signers
    assert agent.take(welcome(certified(keys)))
    signer = keys.signers[POLICY]
    assert held[signer.key_id].verify(b"data", signer.sign(b"data"))
    assert held[signer.key_id].policy == POLICY
    agent.keep()
    assert not agent.take(welcome(certified(keys))), "nothing new to write down"
    assert trust(box).signers.keys() == {signer.key_id}


def test_a_further_run_needs_no_new_files(keys, box):
    agent = trust(box)
    agent.take(welcome(certified(keys)))
    agent.take(HostedPolicies(policies=(POLICY, SECOND), signers=(certified(keys, SECOND),)))
    assert agent.signers.keys() == {key.key_id for key in keys.signers.values()}


@pytest.mark.parametrize("case", ["other root", "changed policy", "not hosted", "no signature"])
def test_nothing_else_is_believed(keys, box, case):
    agent = trust(box)
    good = certified(keys)
    told, policies = {
        "other root": (
            certify(RootKey.generate(), POLICY, good.verify_key).certificate,
            (POLICY,),
        ),
        "changed policy": (
            SignerCertificate(policy=SECOND, verify_key=good.verify_key, signature=good.signature),
            (POLICY, SECOND),
        ),
        "not hosted": (good, (SECOND,)),
        "no signature": (
            SignerCertificate(policy=POLICY, verify_key=good.verify_key, signature=b""),
            (POLICY,),
        ),
    }[case]
    assert not agent.take(welcome(told, policies=policies))
    assert agent.signers == {}


def test_without_a_root_only_the_files_count(keys, box, tmp_path):
    (box / "root.public.toml").unlink()
    agent = trust(box)
    agent.take(welcome(certified(keys)))
    assert agent.signers == {}
    (signer,) = (tmp_path / "cloud" / "signers").glob("trainer-run*")
    (box / "signers" / signer.name).write_text(signer.read_text())
    agent.refresh()
    assert agent.signers.keys() == {keys.signers[POLICY].key_id}


def test_a_new_certificate_of_a_policy_replaces_the_old_one(keys, box):
    agent = trust(box)
    agent.take(welcome(certified(keys)))
    fresh = SigningKey.generate("t", POLICY)
    agent.take(welcome(certify(keys.root, POLICY, fresh.verify_key).certificate))
    assert agent.signers.keys() == {fresh.key_id}


def test_a_file_of_the_owner_stays_whatever_the_scheduler_says(keys, box, tmp_path):
    for signer in (tmp_path / "cloud" / "signers").glob("*.toml"):
        (box / "signers" / signer.name).write_text(signer.read_text())
    agent = trust(box)
    fresh = SigningKey.generate("t", POLICY)
    agent.take(welcome(certify(keys.root, POLICY, fresh.verify_key).certificate))
    assert keys.signers[POLICY].key_id in agent.signers
    assert fresh.key_id in agent.signers


def test_what_was_kept_is_checked_again_when_it_is_read(keys, box):
    agent = trust(box)
    agent.take(welcome(certified(keys)))
    agent.keep()
    file = box / "state" / "certified.json"
    file.write_text(file.read_text().replace(POLICY, SECOND))
    assert trust(box).signers == {}
    file.write_text("not JSON")
    assert trust(box).signers == {}


def test_how_many_are_kept_is_bounded_and_the_newest_stay(keys, box, monkeypatch):
    monkeypatch.setattr("edge_agent.trust.MAX_CERTIFIED", 3)
    agent = trust(box)
    made = []
    for number in range(6):
        policy = f"run{number}/p"
        made.append(SigningKey.generate("t", policy))
        one = certify(keys.root, policy, made[-1].verify_key).certificate
        agent.take(HostedPolicies(policies=(policy,), signers=(one,)))
    assert agent.signers.keys() == {key.key_id for key in made[3:]}


def test_the_next_server_key_counts_only_with_the_roots_signature(keys, box):
    following = KeyPair.generate("server", Role.SCHEDULER).public_key
    agent = trust(box)
    forged = name_next(RootKey.generate(), following).message
    assert not agent.take(forged)
    assert PinnedServerKeys(box).candidates() == (keys.server.public_key,)
    assert agent.take(name_next(keys.root, following).message)
    agent.keep()
    assert PinnedServerKeys(box).candidates() == (keys.server.public_key, following)
    assert not agent.take(Pong(sequence=1, sent_s=0.0))
