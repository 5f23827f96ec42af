"""What a host is called: a name or an address, without scheme, port or path."""

import ipaddress
import re
from typing import Final

MAX_CHARACTERS: Final = 253
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_WITH_PORT: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]+):[0-9]*")
_REMEDY: Final = "give only the host, a name or an IP address (IPv6 too)"
_EVERYWHERE: Final = ("", "*")


def host_fault(host: str) -> str:
    """What is wrong with the name or address of a host, with the remedy, or nothing."""
    if _is_address(host):
        return ""
    if "://" in host or "/" in host:
        return f"{host!r} is a URL or a path; {_REMEDY}{_for_example(_without_url(host))}"
    with_port = _WITH_PORT.fullmatch(host)
    if with_port:
        return (
            f"{host!r} has a port, which is a setting of its own; {_REMEDY}"
            f"{_for_example(with_port[1])}"
        )
    if len(host) > MAX_CHARACTERS or not _NAME.fullmatch(host):
        return f"{host!r} is no host; {_REMEDY}"
    if not host.strip("0123456789."):
        return f"{host!r} is no IP address; give four numbers below 256, or a host name"
    return ""


def listen_fault(host: str) -> str:
    """The same of where to listen, which may be everywhere."""
    return "" if host in _EVERYWHERE else host_fault(host)


def _is_address(host: str) -> bool:
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _without_url(host: str) -> str:
    rest = host.partition("://")[2] or host
    rest = rest.partition("/")[0]
    with_port = _WITH_PORT.fullmatch(rest)
    return with_port[1] if with_port else rest


def _for_example(host: str) -> str:
    host = host.strip("[]") if _is_address(host) else host
    return f", here {host}" if host and not host_fault(host) else ""
