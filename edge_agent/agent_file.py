"""The file that an enrolled agent is started with.

What always holds: a file that is there is its owner's and never changed; what in it leads
elsewhere than the enrolment is said.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_agent.config import AgentConfig
from edge_agent.enrol import KEY, enrolled_transport
from transport.key_files import write_new
from transport.runtime.config import convert, load_config
from transport.runtime.config_text import commented_toml
from transport.token_files import Enrolment

_ADDRESS = ("host", "control_port", "trajectories_port", "weights_port")


def config_text(folder: Path, facts: Enrolment, settings: Mapping[str, Any]) -> str:
    """The ``agent.toml`` of an enrolled agent, with every key that it could have; ``settings`` are
    those of ``[agent]`` that its owner chose.

    Raises:
        ConfigError: a value of ``settings`` is wrong.
    """
    own = {**settings, "folder": str(folder / "state"), "key": str(folder / "keys" / KEY)}
    transport = {key: getattr(facts, key) for key in _ADDRESS} | {"keys": str(folder / "keys")}
    convert({"agent": own, "transport": transport}, AgentConfig)
    return commented_toml(
        AgentConfig,
        f"Agent {facts.name}, enrolled with {facts.host}. A line that begins with # and a key is a"
        " setting at its default.\nStart it with: farflow agent run --config agent.toml",
        {"transport": transport, "agent": own},
    )


def write_config(folder: Path, facts: Enrolment, settings: Mapping[str, Any] | None = None) -> Path:
    """Write ``agent.toml`` unless there is one; returns its path.

    Raises:
        ConfigError: the folder cannot be written, or as ``config_text``.
    """
    path = folder / "agent.toml"
    if not path.exists():
        write_new(path, config_text(folder, facts, settings or {}), mode=0o644)
    return path


def leads_elsewhere(path: Path, facts: Enrolment) -> list[str]:
    """What to say where the file leads elsewhere than the enrolment: it may be meant, as through a
    tunnel, or of before the scheduler moved.

    Raises:
        ConfigError: the file does not load.
    """
    written = load_config(AgentConfig, [path], environ={}).value.transport
    wanted = enrolled_transport(written, facts)
    differing = [key for key in _ADDRESS if getattr(written, key) != getattr(wanted, key)]
    if not differing:
        return []
    here = ", ".join(f"transport.{key} = {getattr(written, key)}" for key in differing)
    there = ", ".join(str(getattr(wanted, key)) for key in differing)
    return [f"kept: {here} in {path}; the enrolment says {there}: change it there unless meant"]
