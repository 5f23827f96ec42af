"""The file that a token is handed over in, and what an agent keeps of its enrolment.

What always holds: a secret is read from a private file or from standard input, never from an
argument, where every user of the machine could see it; the file names the server's key, so that
whoever has it talks to nobody else.
"""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from transport.errors import ConfigError
from transport.hosts import host_fault
from transport.key_files import check_curve, load_toml, parse_toml
from transport.runtime.settings import Port

STANDARD_INPUT = "-"
_MAX_CHARACTERS = 4096
_MADE_WITH = "farflow token create"

Text = Annotated[str, Meta(max_length=256)]


class TokenFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token as ``farflow token create`` writes it. ``host`` and ``enrolment_port`` are where the
    scheduler is reached from outside."""

    host: Text
    enrolment_port: Port
    server_key: Text
    id: Text
    secret: Text

    def __post_init__(self) -> None:
        fault = host_fault(self.host)
        if fault:
            raise ValueError(f"host: {fault}")
        check_curve("server_key", self.server_key)

    def __repr__(self) -> str:
        return f"TokenFile(host={self.host!r}, id={self.id!r})"

    def text(self) -> str:
        """The content of the file."""
        return (
            "# farflow enrolment token: whoever has this file can let an agent in.\n"
            f'host = "{self.host}"\n'
            f"enrolment_port = {self.enrolment_port}\n"
            f'server_key = "{self.server_key}"\n'
            f'id = "{self.id}"\n'
            f'secret = "{self.secret}"\n'
        )


class Enrolment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``enrolment.toml`` beside an agent's keys: as whom it was let in, and where."""

    name: str
    host: str
    control_port: Port
    trajectories_port: Port
    weights_port: Port

    def text(self) -> str:
        return (
            f'name = "{self.name}"\n'
            f'host = "{self.host}"\n'
            f"control_port = {self.control_port}\n"
            f"trajectories_port = {self.trajectories_port}\n"
            f"weights_port = {self.weights_port}\n"
        )


def load_token(source: str) -> TokenFile:
    """The token in the file ``source``, or on standard input for ``-``.

    Raises:
        ConfigError: it is no token, or not all of one, or others can read the file.
    """
    if source == STANDARD_INPUT:
        text = sys.stdin.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(
                f"standard input: over {_MAX_CHARACTERS} characters, this is no token"
            )
        return parse_toml("standard input", text, TokenFile, made_with=_MADE_WITH)
    return load_toml(Path(source), TokenFile, secret=True, made_with=_MADE_WITH)
