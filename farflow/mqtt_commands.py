"""``farflow mqtt``: signed commands, for a broker's own client to send (docs/mqtt.md)."""

import json
import secrets
from pathlib import Path

import click

from farflow.options import json_option
from transport.errors import ConfigError


@click.group("mqtt")
def mqtt_group() -> None:
    """Commands to agents over MQTT."""


@mqtt_group.command("command")
@click.argument("agent")
@click.argument("verb", type=click.Choice(["drain", "cordon", "resume"]))
@click.option("--base", default="farflow", show_default=True, help="[mqtt] base_topic.")
@click.option("--token", required=True, help="Name of an operator's HTTP token.")
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="What `farflow token http create` printed.",
)
@click.option("--reason", default="", help="Kept with the record.")
@click.option(
    "--valid-s",
    type=click.FloatRange(1.0, 300.0),
    default=60.0,
    show_default=True,
    help="For how long the command is good.",
)
@json_option
def mqtt_command(
    agent: str,
    verb: str,
    base: str,
    token: str,
    secret_file: Path,
    reason: str,
    valid_s: float,
    as_json: bool,
) -> None:
    """Print topic and payload of a signed command, one line each."""
    from transport.ids import NAME_RULE, is_name
    from transport.mqtt_topics import base_fault, command_topic, signed_command
    from transport.runtime.clock import SystemClock
    from transport.runtime.files import read_limited

    fault = base_fault(base)
    if fault:
        raise ConfigError(f"--base {base!r} {fault}")
    if not is_name(agent):
        raise ConfigError(f"agent {agent!r}: must be {NAME_RULE}")
    secret = read_limited(secret_file, 1024).decode("utf-8", "replace").strip()
    topic = command_topic(base, agent, verb)
    payload = signed_command(
        topic,
        id=secrets.token_hex(8),
        expires=SystemClock().wall_s() + valid_s,
        token=token,
        secret=secret,
        reason=reason,
    ).decode()
    click.echo(
        json.dumps({"topic": topic, "payload": payload}) if as_json else f"{topic}\n{payload}"
    )
