"""The ``farflow`` command.

Exit status: 0 done, 1 failed or refused, 2 wrong usage, 78 wrong configuration, 130 interrupted.
"""

import sys

import click

from farflow.lazy import LazyGroup
from transport.runtime.daemon_cli import foreseen_errors
from transport.runtime.origin import verify_origin

PROGRAM = "farflow"
_COMMANDS = {
    "init": ("farflow.init_command:init", "Write the file and keys of a new deployment."),
    "up": ("farflow.commands:up", "Run scheduler, agents and trainer of one file on this machine."),
    "status": ("farflow.commands:status", "Show what a scheduler and its agents are doing."),
    "top": ("farflow.top:top", "Watch runs and agents on the whole screen."),
    "run": ("farflow.commands:run_group", "Submit, list, pause, resume, stop and compare runs."),
    "submit": ("farflow.jobs_commands:submit", "Submit jobs of your own to a run."),
    "results": ("farflow.jobs_commands:results", "Show how those jobs ended."),
    "cancel": ("farflow.jobs_commands:cancel", "Cancel jobs of your own."),
    "dead": ("farflow.jobs_commands:dead_group", "List, show and replay jobs that were given up."),
    "explain": ("farflow.inspect_commands:explain", "Say why something waits or went where."),
    "events": ("farflow.inspect_commands:events", "Show what happens, as it happens."),
    "drain": ("farflow.agents_commands:drain", "Let an agent finish and leave."),
    "cordon": ("farflow.agents_commands:cordon", "Give an agent no more work."),
    "uncordon": ("farflow.agents_commands:uncordon", "Give a cordoned agent work again."),
    "quarantine": ("farflow.agents_commands:quarantine", "Exclude an agent."),
    "release": ("farflow.agents_commands:release", "Take an agent out of quarantine."),
    "logs": ("farflow.agents_commands:logs", "Show the last lines of an agent's log."),
    "config": ("farflow.commands:config_group", "Check a file, or show it resolved."),
    "keys": (
        "farflow.keys_commands:keys_group",
        "Create, list, revoke and change keys of a deployment.",
    ),
    "token": ("farflow.token_commands:token_group", "Create, list and revoke enrolment tokens."),
    "weights": (
        "farflow.weights_commands:weights_group",
        "List, show, compare, verify and export weight versions.",
    ),
    "gc": ("farflow.gc:gc", "Remove what is old: run folders, records, event logs."),
    "mqtt": ("farflow.mqtt_commands:mqtt_group", "Sign commands to agents over MQTT."),
    "wire": ("farflow.commands:wire_group", "Look at recorded messages."),
    "completion": ("farflow.completion:completion", "Print the completion script of a shell."),
    "doctor": ("farflow.commands:doctor", "Check this installation."),
    "scheduler": ("scheduler.cli:scheduler_group", "The rollout scheduler daemon."),
    "agent": ("edge_agent.cli:agent_group", "The edge agent."),
    "trainer": ("cloud_trainer.cli:trainer_group", "The trainer of one policy."),
    "relay": ("transport.relay_cli:relay_group", "The relay of a region's agents."),
    "sim": ("farflow.emulate_command:sim_group", "Emulated links and simulation."),
}


def _say_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from transport.runtime.build import installed_build, version

        click.echo(f"{PROGRAM} {version()}, build {installed_build()}")
        ctx.exit()


@click.group(cls=LazyGroup, lazy=_COMMANDS)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_say_version,
    help="Show the version and the build, which tells installations of one version apart.",
)
def cli() -> None:
    """Reinforcement-learning post-training with the rollouts far away from the trainer."""


def main() -> None:
    """Entry point: checks that the imported packages are ours, then runs the command."""
    verify_origin()
    try:
        with foreseen_errors("farflow"):
            cli(prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
