"""What may be called a host, wherever one is given."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.config import AgentConfig
from farflow.cli import cli
from scheduler.config import SchedulerConfig
from transport.errors import ConfigError
from transport.hosts import host_fault, listen_fault
from transport.relay_config import RelayConfig
from transport.runtime.config import load_config
from transport.token_files import TokenFile

WRONG = [
    ("https://x:7700", "is a URL.*, here x"),
    ("http://[::1]:7700/a", "is a URL.*, here ::1"),
    ("x.example/", "is a URL.*, here x.example"),
    ("x:7700", "has a port, which is a setting of its own.*, here x"),
    ("203.0.113.5:7700", "has a port.*, here 203.0.113.5"),
    ("[2001:db8::1]:7700", "has a port.*, here 2001:db8::1"),
    ("x y", "is no host"),
    ("a..b", "is no host"),
    ("-x", "is no host"),
    ('x"', "is no host"),
    ("a" * 64, "is no host"),
    ("203.0.113.500", "is no IP address"),
]


@pytest.mark.parametrize("host", ["x", "box_1.a-b.example.", "203.0.113.5", "2001:db8::1", "[::1]"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert host_fault(host) == listen_fault(host) == ""


@pytest.mark.parametrize(("host", "words"), WRONG)
def test_everything_that_takes_a_host_refuses_what_is_none(
    host: str, words: str, tmp_path: Path
) -> None:
    asked = {"--host": ["init", str(tmp_path / "d"), "--host", host]}
    assert CliRunner().invoke(cli, ["init", str(tmp_path / "e")]).exit_code == 0
    config = ["--config", str(tmp_path / "e" / "deployment.toml")]
    asked["token"] = ["token", "create", *config, "--host", host]
    for arguments in asked.values():
        error = CliRunner().invoke(cli, arguments).exception
        assert isinstance(error, ConfigError)
        assert error.args[0].startswith(f"--host: {host!r}")
        with pytest.raises(ConfigError, match=words):
            raise error
    assert not (tmp_path / "d").exists(), "nothing is written for a host that is none"
    for kind, key in (
        (SchedulerConfig, "transport.host"),
        (AgentConfig, "transport.host"),
        (SchedulerConfig, "scheduler.weights_http_host"),
        (SchedulerConfig, "http.host"),
        (SchedulerConfig, "mqtt.host"),
        (RelayConfig, "relay.host"),
    ):
        with pytest.raises(ConfigError, match=f"{key.split('.')[1]}: .*{words}"):
            load_config(kind, [], [f"{key}={host!r}"])
    with pytest.raises(ValueError, match=words):
        TokenFile(host=host, enrolment_port=7703, server_key="k" * 40, id="1", secret="")


def test_a_listener_may_be_everywhere() -> None:
    for host in ("", "*", "0.0.0.0", "::"):  # noqa: S104
        assert listen_fault(host) == ""
    assert "is no host" in host_fault("*")


@given(st.text(max_size=300))
def test_whatever_is_given_is_answered_and_a_host_has_no_scheme_port_or_space(host: str) -> None:
    if not host_fault(host):
        assert "/" not in host
        assert host.split() == [host]
        assert ":" not in host or host.count(":") > 1
