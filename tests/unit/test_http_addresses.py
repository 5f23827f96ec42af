"""Whose connections are counted together, and which names are this machine's."""

import pytest

from scheduler.config import HttpTable
from scheduler.http_addresses import SHARED, group_of, networks
from transport.runtime.metrics_http import names_this_machine


def test_one_host_is_one_group_and_this_machine_is_none():
    shared = networks(["192.0.2.0/24", "2001:db8:1::/48"])
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "", "/run/socket",
                    "192.0.2.77", "::ffff:192.0.2.77", "2001:db8:1::5"):  # fmt: skip
        assert group_of(address, shared) == SHARED
    assert group_of("198.51.100.7", shared) == "198.51.100.7"
    assert group_of("::ffff:198.51.100.7") == "198.51.100.7"
    # A host chooses freely among the addresses of its prefix.
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2%eth0") == "2001:db8::/64"
    assert group_of("2001:db8:0:1::1") != group_of("2001:db8::1")


def test_what_is_no_address_is_refused_by_name():
    for wrong in ("office", "192.0.2.1/24", "192.0.2.0/33"):
        with pytest.raises(ValueError, match=r"^shared_addresses: .*write addresses or networks"):
            HttpTable(shared_addresses=(wrong,))
    HttpTable(shared_addresses=("192.0.2.7", "2001:db8::/32"))


@pytest.mark.parametrize(
    "host", [None, "localhost", "LOCALHOST:7780", "127.0.0.1", "127.0.0.1:1", "[::1]:7", "::1"]
)
def test_names_of_this_machine(host):
    assert names_this_machine(host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:7780", "localhost.evil.example", "127.0.0.1.evil.example",
     "10.0.0.1", "[::2]:7", "localhost@evil.example"],
)  # fmt: skip
def test_names_that_others_may_have_made_to_lead_here(host):
    assert not names_this_machine(host)
