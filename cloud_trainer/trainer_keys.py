"""The keys of a policy's trainer."""

from pathlib import Path
from typing import NamedTuple

from transport.errors import ConfigError
from transport.keys import KeyPair, SigningKey, trainer_name
from transport.runtime.settings import TransportConfig
from transport.server_keys import PinnedServerKeys


class TrainerKeys(NamedTuple):
    """Our own pair, the scheduler's public keys, and what signs manifests."""

    link: KeyPair
    server: PinnedServerKeys
    signer: SigningKey


def load_keys(transport: TransportConfig, policy: str, *, link: str, signing: str) -> TrainerKeys:
    """The keys of the trainer of ``policy``; empty paths mean the usual files in the keys folder.

    Raises:
        ConfigError: a file is missing, or belongs to another policy.
    """
    folder, name = Path(transport.keys), trainer_name(policy)
    signing_path = Path(signing) if signing else folder / "signing" / f"{name}.toml"
    made_with = f"farflow keys create FOLDER --trainer {policy}"
    signer = SigningKey.load(signing_path, made_with)
    if signer.policy != policy:
        raise ConfigError(f"{signing_path}: signs for {signer.policy}, trainer.policy is {policy}")
    link_path = Path(link) if link else folder / f"{name}.toml"
    pair = KeyPair.load(link_path, made_with)
    if pair.policy is None:
        raise ConfigError(
            f"{link_path}: is the key of {pair.role.value} {pair.name!r}, trainer.key needs the "
            f"one of {policy}"
        )
    if pair.policy != policy:
        raise ConfigError(f"{link_path}: is the key of {pair.policy}, trainer.policy is {policy}")
    return TrainerKeys(pair, PinnedServerKeys(folder), signer)
