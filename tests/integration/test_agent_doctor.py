"""``farflow agent doctor``: the first thing that is wrong, and what to do about it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog
from click.testing import CliRunner
from key_cloud import KeyCloud

from edge_agent import doctor
from edge_agent.cli import agent_group
from edge_agent.config import AgentConfig, AgentTable
from edge_agent.doctor import Doctor, Finding, first_wrong, what_to_do
from scheduler.tokens import revoke_key
from transport.keys import KeyPair, create_keys
from transport.messages import Role
from transport.runtime.build import installed_build
from transport.runtime.clock import ManualClock, SystemClock
from transport.runtime.settings import TransportConfig

PROBES = [
    "keys",
    "disk",
    "dns",
    "tcp control",
    "tcp trajectories",
    "tcp weights",
    "connection",
    "protocol",
    "build",
    "clock",
    "gpu",
    "engine",
    "memory",
    "models",
    "sandbox",
]


class Patient:
    """A healthy box; ``transport`` and ``agent`` change its configuration."""

    def __init__(self, cloud: KeyCloud, bulk_port: int) -> None:
        self.cloud = cloud
        self.keys = cloud.box()
        self.transport: dict[str, Any] = {
            "host": "127.0.0.1",
            "control_port": cloud.port,
            "trajectories_port": bulk_port,
            "weights_port": bulk_port,
            "keys": str(self.keys),
        }
        self.agent: dict[str, Any] = {
            "folder": str(cloud.folder / "state"),
            "key": str(cloud.keys_folder / "a.toml"),
            "engine": "fake",
            "spool_bytes": 1,
        }

    def config(self) -> AgentConfig:
        return AgentConfig(
            transport=TransportConfig(**self.transport), agent=AgentTable(**self.agent)
        )

    async def examine(self) -> dict[str, Finding]:
        findings = await Doctor(self.config(), self.cloud.box_network, SystemClock()).examine()
        assert [finding.probe for finding in findings] == PROBES
        self.first = first_wrong(findings)
        return {finding.probe: finding for finding in findings}


@pytest_asyncio.fixture
async def patient(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Patient]:
    cloud = KeyCloud(tmp_path, getattr(request, "param", None))
    cloud.start()
    bulk = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    yield Patient(cloud, bulk.sockets[0].getsockname()[1])
    bulk.close()
    await bulk.wait_closed()
    await cloud.close()


@pytest.mark.asyncio
async def test_nothing_is_wrong_with_a_healthy_box_and_nobody_is_disturbed(patient):
    found = await patient.examine()
    assert patient.first is None
    assert "knows us as 'a'" in found["protocol"].text
    assert found["build"].text == f"{installed_build()}, as the scheduler's"
    assert found["clock"].state == "ok"
    assert patient.cloud.events == []
    assert list((patient.cloud.folder / "state").iterdir()) == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("transport", "agent", "probe", "remedy"),
    [
        ({}, {"key": "nowhere.toml"}, "keys", "enrol again"),
        ({"keys": "nowhere"}, {}, "keys", "enrol again"),
        ({}, {"token_file": "token"}, "keys", "farflow agent enrol"),
        ({}, {"spool_bytes": 2**60}, "disk", "agent.spool_bytes"),
        ({}, {"folder": "/proc/agent"}, "disk", "agent.folder"),
        ({"host": "nowhere.invalid"}, {}, "dns", "transport.host"),
        ({"control_port": 1}, {}, "tcp control", "transport.control_port"),
        ({"weights_port": 1}, {}, "tcp weights", "transport.weights_port"),
        ({}, {"engine": "torch", "device": "cuda"}, "gpu", "NVIDIA driver"),
    ],
)
async def test_the_first_thing_that_is_wrong_is_named_with_its_remedy(
    patient, monkeypatch, transport, agent, probe, remedy
):
    async def no_such_command(*args: object) -> tuple[None, str]:
        return None, ""

    monkeypatch.setattr(doctor, "_call", no_such_command)
    monkeypatch.chdir(patient.cloud.folder)
    patient.transport.update(transport)
    patient.agent.update(agent)
    await patient.examine()
    assert patient.first is not None
    assert patient.first.probe == probe
    assert remedy in patient.first.remedy


@pytest.mark.asyncio
async def test_a_name_without_an_address_that_links_look_for_is_no_good_name(patient, monkeypatch):
    found = socket.getaddrinfo

    def of_ipv6_alone(host: str, port: Any, family: int = 0, *more: int) -> object:
        if host != "six.example":
            return found(host, port, family, *more)
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", of_ipv6_alone)
    patient.transport["host"] = "six.example"
    await patient.examine()
    assert patient.first is not None
    assert patient.first.probe == "dns"
    assert "IPv4" in patient.first.remedy


@pytest.mark.asyncio
async def test_two_builds_are_both_named_and_how_to_make_them_one(patient, monkeypatch):
    monkeypatch.setattr("edge_agent.installation.installed_build", lambda: "0.1.0+old.old")
    found = (await patient.examine())["build"]
    assert patient.first is None
    assert found.state == "warning"
    assert found.text == f"here 0.1.0+old.old, the scheduler {installed_build()}: they differ"
    assert "--force-reinstall --no-deps" in found.remedy


@pytest.mark.asyncio
async def test_what_needs_a_failed_probe_is_skipped_and_the_rest_is_not(patient):
    patient.transport["control_port"] = 1
    found = await patient.examine()
    assert {found[name].state for name in ("connection", "protocol", "clock")} == {"skipped"}
    assert {found[name].state for name in ("tcp weights", "engine", "disk")} == {"ok"}


@pytest.mark.asyncio
async def test_a_revoked_key_and_another_server_are_told_apart(patient, monkeypatch):
    monkeypatch.setattr(doctor, "LINK_S", 1.5)
    revoke_key(patient.cloud.keys_folder, "a")
    patient.cloud.hub.allowed.refresh(1e12)
    found = await patient.examine()
    assert patient.first is found["connection"]
    assert "revoked" in patient.first.remedy
    assert "with a fresh --folder" in patient.first.remedy
    (patient.keys / "enrolment.toml").touch()
    assert (
        "--new-key"
        not in Doctor(patient.config(), patient.cloud.box_network, SystemClock())._new_key_remedy()
    ), "only a folder that enrol made is one that it can go on with"
    kept = patient.cloud.folder / "of enrol" / "keys"
    kept.parent.mkdir()
    patient.keys = patient.keys.rename(kept)
    patient.transport["keys"] = str(kept)
    await patient.examine()
    assert f"--new-key --token-file FILE --folder {kept.parent}" in patient.first.remedy
    patient.agent["key"] = str(patient.cloud.keys_folder / "b.toml")
    impostor = KeyPair.generate("server", Role.SCHEDULER)
    path = patient.keys / "server.public.toml"
    path.write_text(
        path.read_text().replace(patient.cloud.keys.server.public_key, impostor.public_key)
    )
    found = await patient.examine()
    assert patient.first is found["connection"]
    assert "server.public.toml" in patient.first.remedy


@pytest.mark.asyncio
async def test_a_box_that_would_believe_no_weights_is_told(patient):
    (patient.keys / "root.public.toml").unlink()
    await patient.examine()
    assert patient.first.probe == "keys"
    assert "root.public.toml" in patient.first.remedy


@pytest.mark.asyncio
@pytest.mark.parametrize("patient", [ManualClock(wall_s=1e9)], indirect=True)
async def test_a_wrong_clock_is_a_warning_with_its_size(patient):
    found = await patient.examine()
    assert patient.first is None
    assert found["clock"].state == "warning"
    assert "NTP" in found["clock"].remedy


@pytest.mark.asyncio
async def test_each_thing_that_is_wrong_comes_with_its_remedy(patient, monkeypatch):
    async def fails(_: float, *argv: str) -> tuple[int | None, str]:
        return (None, "") if argv[0] == "nvidia-smi" else (1, "No module named 'vllm'")

    monkeypatch.setattr(doctor, "_call", fails)
    patient.agent.update(engine="vllm", device="cuda")
    lines = what_to_do([*(await patient.examine()).values()])
    assert lines[-4:] == [
        "first: gpu: no nvidia-smi here, or it hangs",
        "remedy: install the NVIDIA driver",
        "also: engine: vllm: No module named 'vllm'",
        "remedy: pip install 'farflow[vllm]'",
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("engine", "device", "gpu", "state"),
    [
        ("torch", "cpu", "NVIDIA X, 24 GiB, 1.2", "warning"),
        ("vllm", "cpu", "NVIDIA X, 24 GiB, 1.2", "warning"),
        ("torch", "cpu", "", "ok"),
        ("torch", "cuda", "NVIDIA X, 24 GiB, 1.2", "ok"),
        ("fake", "cpu", "NVIDIA X, 24 GiB, 1.2", "ok"),
        ("fake", "cuda", "", "ok"),
    ],
)
async def test_a_gpu_that_is_here_and_not_used_is_a_warning(
    patient, monkeypatch, engine, device, gpu, state
):
    async def answers(_: float, *argv: str) -> tuple[int | None, str]:
        return (0 if gpu else None, gpu) if argv[0] == "nvidia-smi" else (0, "2.0 4.0 True")

    monkeypatch.setattr(doctor, "_call", answers)
    patient.agent.update(engine=engine, device=device)
    found = (await patient.examine())["gpu"]
    assert found.state == state
    assert ('agent.device = "cuda"' in found.remedy) == (state == "warning")


@pytest.mark.asyncio
async def test_commands_that_hang_or_are_not_there_are_bounded():
    async with asyncio.timeout(10):
        assert await doctor._call(0.2, "sleep", "60") == (None, "")
        assert await doctor._call(0.2, "/bin/sh", "-c", "sleep 60; true") == (None, "")
    assert await doctor._call(5.0, "no-such-command-here") == (None, "")
    assert await doctor._call(5.0, "echo", "word") == (0, "word\n")


@pytest.fixture
def logging_as_before():
    """The command configures logging, which tests that look at log lines must not inherit."""
    yield
    structlog.reset_defaults()


def test_the_command_says_it_in_json_and_by_its_exit_status(tmp_path, logging_as_before):
    create_keys(tmp_path / "keys", agents=["a"])
    config = {
        "transport": {"control_port": 1, "keys": str(tmp_path / "keys")},
        "agent": {
            "folder": str(tmp_path / "state"),
            "key": str(tmp_path / "keys" / "a.toml"),
            "engine": "fake",
            "spool_bytes": 1,
        },
    }
    options = [
        part
        for table, values in config.items()
        for key, value in values.items()
        for part in ("--set", f"{table}.{key}={json.dumps(value)}")
    ]
    shown = CliRunner().invoke(agent_group, ["doctor", "--json", *options])
    assert shown.exit_code == 1
    told = msgspec.json.decode(shown.stdout)
    assert (told["healthy"], told["first"]) == (False, "tcp control")
    assert [finding["probe"] for finding in told["findings"]] == PROBES
    plain = CliRunner().invoke(agent_group, ["doctor", *options])
    assert "first: tcp control" in plain.stdout
    assert "remedy: check that the scheduler listens there" in plain.stdout
    assert CliRunner().invoke(agent_group, ["doctor", "--set", "agent.slots=0"]).exit_code == 78
