"""The text of a systemd unit for a daemon of farflow.

What always holds: the daemon writes nowhere but below the folders that it is given and its own
``/tmp``, gains no privilege, and is started again after a failure, ever more rarely, but not when
its configuration is wrong (exit status 78), nor after it left in order. SIGTERM goes to the daemon
alone, which ends its children itself; what is left after ``stop_s`` is killed.

Meaning of the directives: systemd.exec(5), systemd.service(5), systemd.kill(5).
"""

from pathlib import Path
from typing import Final, NamedTuple

from transport.errors import ConfigError
from transport.runtime.origin import EXIT_CONFIG

STEPS_SINCE: Final = 254
"""The version of systemd that first knew ``RestartSteps``."""
_FIRST_PAUSE_S: Final = 2
_LAST_PAUSE_S: Final = 120
_PAUSES: Final = 6
_ONLY_PAUSE_S: Final = 15
"""Where systemd cannot wait longer each time."""

_ALWAYS: Final = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "RestrictSUIDSGID=yes",
    "RestrictRealtime=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "UMask=0077",
    "LimitNOFILE=65536",
)
_SYSTEM: Final = (
    "CapabilityBoundingSet=",
    "ProtectKernelModules=yes",
    "ProtectControlGroups=yes",
)
"""A user's manager may not take capabilities away: there they would keep the daemon from starting.
"""
_NO_DEVICES: Final = ("PrivateDevices=yes", "ProtectClock=yes")
_NO_SANDBOX: Final = (
    "ProtectKernelTunables=yes",
    "ProtectKernelLogs=yes",
    "ProtectHostname=yes",
)
"""With a /proc that is partly covered nobody may mount one in a sandbox."""


MARK: Final = "# Written by farflow;"
"""How every unit of ours begins."""


class Service(NamedTuple):
    """A daemon as systemd is to run it: in ``folder``, as ``user`` ("" where a user's own manager
    runs it). ``argv`` begins with the program's whole path; ``writable`` are absolute folders;
    ``devices`` says that it may use accelerators, ``sandboxes`` that it runs programs in
    namespaces of their own."""

    name: str
    description: str
    argv: tuple[str, ...]
    folder: Path
    writable: tuple[Path, ...]
    stop_s: float
    user: str = ""
    devices: bool = False
    sandboxes: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def unit_text(service: Service, systemd_version: int) -> str:
    """The unit's file.

    Raises:
        ConfigError: a path or argument has a character that no unit can hold.
    """
    system = bool(service.user)
    unit = [f"Description={_plain(service.description)}", "StartLimitIntervalSec=0"]
    if system:
        unit += ["Wants=network-online.target", "After=network-online.target"]
    private_tmp = not any(_is_temporary(path) for path in (service.folder, *service.writable))
    body = [
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word, variables=True) for word in service.argv)}",
        f"WorkingDirectory={_plain(str(service.folder))}",
        *([f"User={_plain(service.user)}"] if system else []),
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environment),
        "KillMode=mixed",
        f"TimeoutStopSec={service.stop_s:g}",
        "Restart=on-failure",
        f"RestartPreventExitStatus={EXIT_CONFIG}",
    ]
    if systemd_version >= STEPS_SINCE:
        body += [
            f"RestartSec={_FIRST_PAUSE_S}",
            f"RestartSteps={_PAUSES}",
            f"RestartMaxDelaySec={_LAST_PAUSE_S}",
        ]
    else:
        body.append(f"RestartSec={_ONLY_PAUSE_S}")
    body += _ALWAYS
    body += ["PrivateTmp=yes"] if private_tmp else []
    body += _SYSTEM if system else ()
    body += _NO_DEVICES if system and not service.devices else ()
    body += _NO_SANDBOX if system and not service.sandboxes else ()
    body += [] if service.sandboxes else ["RestrictNamespaces=yes"]
    body.append(f"ReadWritePaths={' '.join(_quoted(str(path)) for path in service.writable)}")
    target = "multi-user.target" if system else "default.target"
    sections = (("Unit", unit), ("Service", body), ("Install", [f"WantedBy={target}"]))
    text = "\n".join("\n".join((f"[{name}]", *lines, "")) for name, lines in sections)
    return f"{MARK} written anew by the command that installs it.\n{text}"


def _is_temporary(path: Path) -> bool:
    """Whether a private ``/tmp`` would hide it."""
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp"))  # noqa: S108


def _plain(text: str) -> str:
    """A whole value: only specifiers are special in it."""
    if not text.isprintable():
        raise ConfigError(f"{text!r}: no unit of systemd can hold this; choose a plainer path")
    return text.replace("%", "%%")


def _quoted(text: str, *, variables: bool = False) -> str:
    """One word of a value, as systemd.syntax(7) quotes it; ``variables`` where ``$`` is special."""
    plain = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain.replace("$", "$$") if variables else plain}"'
