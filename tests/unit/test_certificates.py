"""What the root key says, and that nothing else is taken for it."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.certificates import (
    RootKey,
    certify,
    load_certificates,
    load_root,
    name_next,
    of_policies,
)
from transport.errors import ConfigError
from transport.keys import KeyPair, SigningKey, create_keys, load_signers
from transport.messages import NextServerKey, Role, SignerCertificate

POLICY = "arithmetic/solver"
ROOT = RootKey.generate()
SIGNER = SigningKey.generate("t", POLICY)


def certificate(**changes) -> SignerCertificate:
    made = certify(ROOT, POLICY, SIGNER.verify_key).certificate
    return msgspec.structs.replace(made, **changes)


def test_the_root_certifies_exactly_what_it_signed():
    assert ROOT.public.certifies(certificate())
    other = SigningKey.generate("u", POLICY).verify_key
    for changed in (
        {"policy": "arithmetic/judge"},
        {"policy": "arithmetic"},
        {"verify_key": other},
        {"verify_key": SIGNER.verify_key.upper()},
        {"verify_key": ""},
        {"signature": b""},
        {"signature": b"\0" * 64},
        {"signature": certificate().signature + b"\0"},
    ):
        assert not ROOT.public.certifies(certificate(**changed)), changed
    assert not RootKey.generate().public.certifies(certificate())


def test_the_signed_bytes_are_those_of_the_page():
    """Built here from the format's description alone."""
    expected = b"farflow signer certificate v1\0"
    for part in (POLICY.encode(), SIGNER.verify_key.encode()):
        expected += len(part).to_bytes(4, "little") + part
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(ROOT.verify_key))
    key.verify(certificate().signature, expected)


def test_no_statement_is_taken_for_one_of_another_purpose():
    server = KeyPair.generate("server", Role.SCHEDULER).public_key
    following = name_next(ROOT, server).message
    assert ROOT.public.names_next(following)
    crossed = NextServerKey(public_key=server, signature=certificate().signature)
    assert not ROOT.public.names_next(crossed)
    assert not ROOT.public.certifies(certificate(signature=following.signature))
    as_manifest = SIGNER.sign(b"farflow signer certificate v1\0")
    assert not ROOT.public.certifies(certificate(signature=as_manifest))
    assert not ROOT.public.names_next(NextServerKey(public_key="x", signature=b""))


@given(st.text(max_size=60), st.text(max_size=60), st.binary(max_size=70))
@settings(max_examples=100)
def test_nonsense_is_refused_and_never_raises(policy, verify_key, signature):
    made = SignerCertificate(policy=policy, verify_key=verify_key, signature=signature)
    assert not ROOT.public.certifies(made)


def test_create_keys_makes_the_root_once_and_certifies_every_trainer(tmp_path):
    keys = create_keys(tmp_path, trainers=[POLICY])
    root = load_root(tmp_path)
    assert root == keys.root.public
    found, warnings = load_certificates(tmp_path / "certificates", root)
    assert warnings == []
    (one,) = found
    assert (one.policy, one.verify_key) == (POLICY, keys.signers[POLICY].verify_key)
    again = create_keys(tmp_path, trainers=[POLICY, "second/solver"])
    assert again.root == keys.root
    found, _ = load_certificates(tmp_path / "certificates", root)
    assert [c.policy for c in of_policies(found, ["second/solver", "x/y"])] == ["second/solver"]
    assert (tmp_path / "signing" / "root.toml").stat().st_mode & 0o077 == 0
    assert len(load_signers(tmp_path / "signers")) == 2


def test_the_root_key_may_be_elsewhere_except_for_new_trainers(tmp_path):
    create_keys(tmp_path, trainers=[POLICY])
    (tmp_path / "signing" / "root.toml").rename(tmp_path / "safe")
    assert create_keys(tmp_path, agents=["paris"], trainers=[POLICY]).root is None
    assert not (tmp_path / "signing" / "root.toml").exists()
    with pytest.raises(ConfigError, match="put the root key there"):
        create_keys(tmp_path, trainers=["second/solver"])


def test_what_another_root_signed_is_left_out_with_a_warning(tmp_path):
    create_keys(tmp_path, trainers=[POLICY])
    found, warnings = load_certificates(tmp_path / "certificates", RootKey.generate().public)
    assert found == []
    assert "farflow keys create" in warnings[0]
    (tmp_path / "certificates" / "x.toml").write_text("policy = 3\n")
    _, warnings = load_certificates(tmp_path / "certificates", load_root(tmp_path))
    assert "x.toml" in warnings[0]
    other = tmp_path / "other"
    create_keys(other)
    (tmp_path / "signing" / "root.toml").unlink()
    (other / "signing" / "root.toml").rename(tmp_path / "signing" / "root.toml")
    with pytest.raises(ConfigError, match="another root"):
        create_keys(tmp_path, trainers=[POLICY])


def test_a_root_key_does_not_show_its_secret_and_must_fit_itself(tmp_path):
    assert ROOT.secret_key not in repr(ROOT)
    with pytest.raises(ValueError, match="does not belong"):
        RootKey(verify_key=RootKey.generate().verify_key, secret_key=ROOT.secret_key)
    ROOT.save(tmp_path / "root.toml")
    with pytest.raises(ConfigError, match="is the deployment's root key"):
        SigningKey.load(tmp_path / "root.toml")
    (tmp_path / "root.toml").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        RootKey.load(tmp_path / "root.toml")
