"""How the MQTT bridge proves itself to a broker, and the broker to it: the files of ``[mqtt]``.

Looked at by the daemon before it starts anything, so that a file that does not load is an error of
the configuration and no bridge that never comes.
"""

import ssl
from pathlib import Path
from typing import Final

from scheduler.config import MqttTable
from transport.errors import ConfigError, FarflowError
from transport.runtime.files import read_limited

MAX_PASSWORD_BYTES: Final = 1024


def check_broker_access(table: MqttTable) -> None:
    """Whether everything that ``table`` names loads; nothing of a bridge that is off. Blocks.

    Raises:
        ConfigError: as ``broker_password`` and ``broker_tls``.
    """
    if table.enabled:
        broker_password(table)
        broker_tls(table)


def broker_password(table: MqttTable) -> str | None:
    """What ``password_file`` holds, without spaces and line ends around it.

    Raises:
        ConfigError: it cannot be read, is no text, or is empty.
    """
    path = table.password_file
    if not path:
        return None
    try:
        found = read_limited(Path(path), MAX_PASSWORD_BYTES).decode().strip()
    except (FileNotFoundError, UnicodeDecodeError, FarflowError) as error:
        raise ConfigError(f"mqtt.password_file: {path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"mqtt.password_file: {path} is empty; write the password into it")
    return found


def broker_tls(table: MqttTable) -> ssl.SSLContext | None:
    """Against whom a broker is checked.

    Raises:
        ConfigError: ``ca_file`` does not load.
    """
    if not table.tls:
        return None
    try:
        return ssl.create_default_context(cafile=table.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"mqtt.ca_file: {table.ca_file}: {error}; name a PEM file") from error
