"""Who may read over HTTP, and how the way there is kept private: a bearer token and TLS.

What always holds: the token is a secret file of mode 0600, made at the first start, and is not
read from a file that others can read.
"""

import secrets
import ssl
from pathlib import Path
from typing import Final

import msgspec

from transport.errors import ConfigError
from transport.key_files import load_toml, to_toml, write_new

TOKEN_NAME: Final = "http-token.toml"  # noqa: S105 - a file name


class HttpToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the token file."""

    token: str


def load_token(path: Path) -> str:
    """The bearer token; made when there is none.

    Raises:
        ConfigError: the file does not load, or others can read it.
    """
    if not path.exists():
        write_new(path, to_toml(HttpToken(token=secrets.token_urlsafe(32))), mode=0o600)
    token = load_toml(path, HttpToken, secret=True).token
    if len(token) < 16:
        raise ConfigError(f"{path}: the token is too short; remove the file to get a new one")
    return token


def tls_context(certificate: Path, key: Path, setting: str) -> ssl.SSLContext:
    """``setting`` is what the names of both settings begin with.

    Raises:
        ConfigError: the files do not load or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{setting}certificate {certificate}, {setting}key {key}: {error}; "
            "name a PEM certificate (chain) and its unencrypted key"
        ) from error
    return context
