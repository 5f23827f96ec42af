"""The command line of the agent daemon."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transport.runtime.daemon_cli import EXIT_FAILED, Serve, daemon_command, foreseen_errors
from transport.runtime.service_commands import place_options, say_lines, uninstall_command

if TYPE_CHECKING:
    from edge_agent.config import AgentConfig


_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


@click.group("agent")
def agent_group() -> None:
    """The agent on a remote machine: generates rollouts."""


def _load() -> "tuple[type[AgentConfig], Serve[AgentConfig]]":
    from edge_agent.config import AgentConfig
    from edge_agent.daemon import run_daemon

    return AgentConfig, run_daemon


agent_group.add_command(
    daemon_command(
        "agent",
        _load,
        help="""Generate rollouts for the scheduler until told to stop.

        Prints one line of JSON once it is on its way to the scheduler; logs go to standard error.
        SIGTERM and Ctrl-C finish what runs, or hand it back within [agent].drain_s, and leave.
        """,
    )
)


@agent_group.command("drain")
@click.option(
    "--config",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="The agent's file; may repeat, later ones win.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override table.field, as agent.folder=FOLDER; may repeat.",
)
@click.option(
    "--deadline", metavar="DURATION", help="Time to finish, as 10min; agent.drain_s by default."
)
@click.option("--no-wait", is_flag=True, help="Return once the agent was told.")
@_json
def drain(
    files: tuple[str, ...],
    overrides: tuple[str, ...],
    deadline: str | None,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Let the agent that runs on this box finish or hand back what it holds, and leave.

    It is found through its folder. Finished work that the scheduler does not have yet stays in the
    folder and leaves with the next start. Exit status 1 when no agent runs there, or when it still
    does after its time and as much again as it takes to close.
    """
    from edge_agent.config import AgentConfig
    from edge_agent.draining import CLOSING_S, ask_to_drain, wait_for_end
    from transport.runtime.config import load_config
    from transport.runtime.units import parse_duration_s

    with foreseen_errors("farflow agent drain"):
        table = load_config(AgentConfig, files, overrides).value.agent
        deadline_s = None if deadline is None else parse_duration_s(deadline, "--deadline")
        pid = ask_to_drain(Path(table.folder), deadline_s)
    within_s = (table.drain_s if deadline_s is None else deadline_s) + CLOSING_S
    left = not no_wait and wait_for_end(pid, within_s)
    if as_json:
        click.echo(json.dumps({"process": pid, "left": left}))
    elif no_wait:
        click.echo(f"the agent (process {pid}) was told to drain")
    elif left:
        click.echo(f"the agent (process {pid}) has left")
    else:
        click.echo(f"the agent (process {pid}) still runs after {within_s:g} s", err=True)
    if not (no_wait or left):
        raise SystemExit(EXIT_FAILED)


@agent_group.command("enrol")
@click.option(
    "--token-file",
    required=True,
    metavar="FILE",
    help="The token, as `farflow token create` wrote it; - reads standard input.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("farflow-agent"),
    show_default=True,
    help="Gets agent.toml, keys/ and, later, what the agent keeps.",
)
@click.option("--name", default="", help="What to be called; the host's name by default.")
@click.option(
    "--new-key",
    is_flag=True,
    help="Make another key in a folder that has one, as after `farflow keys revoke`.",
)
@_json
def enrol(token_file: str, folder: Path, name: str, new_key: bool, as_json: bool) -> None:
    """Make a key for this box and let it in with a token.

    The key is made here and never leaves. Running it again goes on with an enrolment that was cut
    off; once it is complete, it asks the scheduler whether the key is let in and changes nothing.
    """
    import asyncio

    from edge_agent.agent_file import leads_elsewhere, write_config
    from edge_agent.enrol import another_name
    from edge_agent.enrol import enrol as let_in
    from transport.runtime.files import private_dir
    from transport.runtime.logs import configure_logging
    from transport.token_files import Enrolment, load_token
    from transport.zmq_links import ZmqNetwork

    async def run() -> Enrolment:
        network = ZmqNetwork()
        try:
            return await let_in(
                network, load_token(token_file), folder / "keys", name=name, new_key=new_key
            )
        finally:
            await network.close()

    configure_logging("warning", component="agent enrol")
    with foreseen_errors("farflow agent enrol"):
        folder = private_dir(folder.absolute())
        facts = asyncio.run(run())
        path = write_config(folder, facts)
        notes = [*another_name(facts, name), *leads_elsewhere(path, facts)]
    if as_json:
        click.echo(json.dumps({"name": facts.name, "host": facts.host, "config": str(path)}))
        return
    click.echo(f"enrolled as {facts.name} with {facts.host}")
    for line in notes:
        click.echo(line)
    click.echo(f"start it with: farflow agent run --config {path}")


@agent_group.command("doctor")
@click.option(
    "--config",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="The agent's file; may repeat, later ones win.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override table.field; may repeat.",
)
@click.option("--json", "as_json", is_flag=True, help="Everything that was found, as JSON.")
def doctor(files: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Find out what keeps this box from working, and say what to do about it, the cause first.

    A running agent is not disturbed. Exit status: 0 nothing is wrong (warnings aside), 1 something
    is, 78 the configuration does not load.
    """
    import asyncio

    from edge_agent.config import AgentConfig
    from edge_agent.doctor import Doctor, Finding, first_wrong, what_to_do
    from transport.runtime.clock import SystemClock
    from transport.runtime.config import load_config
    from transport.runtime.logs import configure_logging
    from transport.zmq_links import ZmqNetwork

    async def run() -> list[Finding]:
        network = ZmqNetwork()
        try:
            return await Doctor(config, network, SystemClock()).examine()
        finally:
            await network.close()

    configure_logging("error", component="agent doctor")
    with foreseen_errors("farflow agent doctor"):
        config = load_config(AgentConfig, files, overrides).value
        findings = asyncio.run(run())
    wrong = first_wrong(findings)
    if as_json:
        shown = [finding._asdict() for finding in findings]
        first = None if wrong is None else wrong.probe
        click.echo(json.dumps({"healthy": wrong is None, "first": first, "findings": shown}))
    else:
        for finding in findings:
            click.echo(f"{finding.state:<8} {finding.probe:<17} {finding.text}")
        for line in what_to_do(findings):
            click.echo(line)
    raise SystemExit(0 if wrong is None else EXIT_FAILED)


@agent_group.command("install")
@click.option(
    "--token-file", metavar="FILE", help="The token; needed where no agent is enrolled yet."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Gets agent.toml, keys and state; the default is /var/lib/farflow-agent, and with --user"
    " farflow-agent in your data folder.",
)
@click.option("--name", default="", help="What to be called; the host's name by default.")
@click.option("--engine", default="", metavar="ENGINE", help="For a new agent.toml: agent.engine.")
@click.option("--device", default="", metavar="DEVICE", help="Likewise: agent.device.")
@click.option("--slots", type=int, metavar="N", help="Likewise: agent.slots.")
@place_options("agent")
@_json
def install(
    token_file: str | None,
    folder: Path | None,
    name: str,
    engine: str,
    device: str,
    slots: int | None,
    user_units: bool,
    run_as: str,
    service: str,
    unit_folder: Path | None,
    as_json: bool,
) -> None:
    """Make this box an agent that systemd keeps running: enrol, configure, check, start.

    Again it is an upgrade: key and agent.toml stay as they are (an option that says otherwise is
    refused, exit status 78), the unit is written anew and the agent started again. Nothing is
    started while `farflow agent doctor` finds something wrong (exit status 1); what it says is
    printed, and the command can be given again. With --unit-folder, as for an image, the unit is
    written whatever it says: this need not be the box that will run it.
    """
    from edge_agent.install import install_agent
    from transport.runtime.logs import configure_logging
    from transport.runtime.service_install import find_place, service_name

    wanted = {"engine": engine, "device": device, "slots": slots}
    configure_logging("error", component="agent install")
    with foreseen_errors("farflow agent install"):
        place = find_place(user_units=user_units, run_as=run_as, unit_folder=unit_folder)
        lines, healthy = install_agent(
            place,
            service_name(service),
            token_file=token_file,
            folder=folder,
            name=name,
            settings={key: value for key, value in wanted.items() if value not in ("", None)},
        )
    say_lines(lines, as_json=as_json, healthy=healthy)
    raise SystemExit(0 if healthy else EXIT_FAILED)


agent_group.add_command(uninstall_command("agent", 900.0))
