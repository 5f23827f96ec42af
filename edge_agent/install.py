"""``farflow agent install``: from a token to an agent that systemd keeps running.

What always holds: key and ``agent.toml`` that are there stay as they are; nothing is started that
the doctor finds something wrong with. A unit for an image is started by nobody here, and written
whatever the doctor finds on the machine that makes the image.
"""

import asyncio
import os
import pwd
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_agent.agent_file import leads_elsewhere, write_config
from edge_agent.config import AgentConfig, AgentTable
from edge_agent.draining import CLOSING_S
from edge_agent.enrol import another_name, enrol, enrolled
from transport.errors import ConfigError
from transport.runtime.config import load_config
from transport.runtime.config_text import toml_value
from transport.runtime.files import private_dir
from transport.runtime.service_install import Place, become, check_unit, farflow_argv, give
from transport.runtime.service_install import install as install_service
from transport.runtime.service_unit import Service
from transport.token_files import Enrolment, load_token
from transport.zmq_links import ZmqNetwork

SYSTEM_FOLDER: Final = Path("/var/lib/farflow-agent")
DOCTOR_S: Final = 300.0
"""More than all of its probes may take."""
MARGIN_S: Final = 15.0
"""Beyond what an agent takes to drain and close."""
_OPTIONS: Final = ("engine", "device", "slots")


def install_agent(
    place: Place,
    service: str,
    *,
    token_file: str | None,
    folder: Path | None,
    name: str,
    settings: Mapping[str, Any],
) -> tuple[list[str], bool]:
    """Enrol with ``token_file`` unless that was done, write ``agent.toml`` with ``settings`` of
    ``[agent]`` unless there is one, examine the box, and install the unit ``service``. Returns
    lines that say what was done, and whether all is well.

    Raises:
        ConfigError: no token for a box that needs one, the token is refused, or a setting is wrong
            or another one than in the ``agent.toml`` that is there; or as ``check_unit``.
        PeerUnreachable: the scheduler does not answer.
        StoreError, ProcessFailed: the disk or systemd refused.
    """
    check_unit(service, place, "agent")  # before the token is used up
    folder = (folder or default_folder(place.user_units)).absolute()
    if not (folder.is_dir() and os.geteuid() == 0):  # root upgrades what belongs to the agent
        private_dir(folder)
    file = folder / "agent.toml"
    if file.exists():
        _check_kept(file, settings)
    facts = enrolled(folder / "keys")
    if facts is None:
        if token_file is None:
            raise ConfigError(
                f"{folder}: no agent is enrolled there; name its token with --token-file, as"
                " `farflow token create` made it on the cloud host"
            )
        facts = asyncio.run(_enrol(token_file, folder / "keys", name))
        token_file = None
    kept = file.exists()
    write_config(folder, facts, settings)
    table = load_config(AgentConfig, [file], environ={}).value.agent
    lines = [f"agent {facts.name} of {facts.host}", *another_name(facts, name)]
    if token_file is not None:
        lines.append(f"kept: the enrolment in {folder / 'keys'}; {token_file} was not used")
    lines += [f"kept: {_said(table)} ({file}); change it there" if kept else f"wrote: {file}"]
    lines += leads_elsewhere(file, facts)
    writable = _writable(Path(table.folder).absolute(), folder, file, place.run_as)
    give(writable, place.run_as)
    cache = folder / "cache"
    # What engines compile goes where the agent may write.
    environment = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    found, healthy = _doctor(file, place, environment)
    lines += found
    if not healthy and not place.image:
        return [*lines, "not started"], False
    if not healthy:  # it may lack here what the box has that the image is for, a GPU say
        lines.append(
            "warning: something is wrong on this machine, and the unit is written all the same, as"
            f" for an image; where it is to run: farflow agent doctor --config {file}"
        )
    unit = Service(
        name=service,
        description=f"farflow agent {facts.name}",
        argv=farflow_argv("agent", "run", "--config", str(file)),
        folder=folder,
        writable=writable,
        stop_s=table.drain_s + CLOSING_S + MARGIN_S,
        user=place.run_as,
        devices=True,
        sandboxes=True,
        environment=tuple(environment.items()),
    )
    return [*lines, *install_service(unit, place)], True


def _said(table: AgentTable) -> str:
    return ", ".join(f"{key} = {toml_value(key, getattr(table, key))}" for key in _OPTIONS)


def _check_kept(file: Path, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where ``settings`` ask for something else than the file that stays."""
    table = load_config(AgentConfig, [file], environ={}).value.agent
    for key, value in settings.items():
        if getattr(table, key) != value:
            there = toml_value(key, getattr(table, key))
            raise ConfigError(
                f"--{key} {value}: {file} has {key} = {there}, and a file that is there stays as it"
                f" is; change agent.{key} there, then give the command without --{key}"
            )


def default_folder(user_units: bool) -> Path:
    """Where an agent lives that is told nothing else."""
    if not user_units:
        return SYSTEM_FOLDER
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "farflow-agent"


def _writable(state: Path, folder: Path, file: Path, name: str) -> tuple[Path, ...]:
    """The folders of an agent that keeps its state in ``state``. Once ``file`` belongs to the user
    ``name``, it says no more what else root gives that user; raises ConfigError. What is below
    ``folder`` comes with it: by its own path it could be exchanged meanwhile."""
    if state.resolve().is_relative_to(folder.resolve()):
        return (folder,)
    if name and os.geteuid() == 0 and state.exists():
        uid = pwd.getpwnam(name).pw_uid
        if file.stat().st_uid != uid or state.stat().st_uid == uid:
            return (folder, state)
        raise ConfigError(
            f"{file}: agent.folder: {state}: is not {name}'s, nor is that for {name} to say; give"
            f" it with chown, or name one below {folder}"
        )
    return (folder, state)


def _doctor(file: Path, place: Place, environment: Mapping[str, str]) -> tuple[list[str], bool]:
    """What the doctor says of ``file``, and whether all is well. It runs as the daemon will: as
    that user, who may be kept from this installation, with its environment."""
    argv = farflow_argv("agent", "doctor", "--config", str(file))
    try:
        done = subprocess.run(
            argv,
            cwd=file.parent,
            env={"PATH": os.environ.get("PATH", os.defpath), **environment},
            capture_output=True,
            text=True,
            timeout=DOCTOR_S,
            check=False,
            **become(place.run_as),
        )
    except OSError as error:
        who = place.run_as or "you"
        remedy = f"install farflow where {who} may read it, or choose another --run-as"
        return [f"wrong    start             {argv[0]}: {error.strerror}; {remedy}"], False
    except subprocess.TimeoutExpired:
        return [f"wrong    doctor            no end within {DOCTOR_S:g} s; run it by hand"], False
    return (done.stdout + done.stderr).splitlines(), done.returncode == 0


async def _enrol(token_file: str, keys: Path, name: str) -> Enrolment:
    network = ZmqNetwork()
    try:
        return await enrol(network, load_token(token_file), keys, name=name)
    finally:
        await network.close()
