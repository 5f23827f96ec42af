"""Signing keys of tests: the same ones in every run."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from transport.keys import SigningKey


def signing_key(secret: str = "11" * 32, policy: str = "r/p") -> SigningKey:
    """The key whose secret half is ``secret`` (64 hexadecimal digits)."""
    public = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)).public_key()
    return SigningKey(
        name="signer",
        policy=policy,
        verify_key=public.public_bytes_raw().hex(),
        secret_key=secret,
    )
