"""Which connections count as one's own: by address, so that one stranger cannot take them all.
Pure.

What always holds: this machine is not bounded by address, as all that comes through a tunnel or a
proxy here has the same one; nor are addresses of which the operator says that many share them. An
address that a request claims for itself (``X-Forwarded-For``) is never looked at.
"""

import ipaddress
from collections.abc import Sequence
from typing import Final

SHARED: Final = ""
"""The group of those who are not told apart."""
_IPV6_BITS: Final = 64
"""One host has as many addresses as it likes below such a prefix (RFC 4291, section 2.5.4)."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(shared: Sequence[str]) -> tuple[_Network, ...]:
    """Addresses and networks (``192.0.2.0/24``) as such.

    Raises:
        ValueError: one is neither.
    """
    return tuple(ipaddress.ip_network(one) for one in shared)


def group_of(address: str, shared: Sequence[_Network] = ()) -> str:
    """Whose connections one from ``address`` is counted with; ``SHARED`` where they are not."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return SHARED  # no network's: a local socket
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback or any(found in network for network in shared):
        return SHARED
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found, _IPV6_BITS), strict=False))
