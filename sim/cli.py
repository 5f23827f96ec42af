"""``farflow sim``: the simulator and the emulated links.

What always holds: asking for help imports nothing but click and the commands' own modules; what
they need is imported inside them.
"""

import click

from sim.commands.compare import compare_command
from sim.commands.experiment import experiment_command
from sim.commands.export import export_command
from sim.commands.link import link_group
from sim.commands.plan import plan_command
from sim.commands.replay import replay_command
from sim.commands.run import list_command, run_command
from sim.commands.sweep import sweep_command


@click.group("sim")
def sim_group() -> None:
    """Emulated and simulated networks around the production code."""


for command in (
    compare_command,
    experiment_command,
    export_command,
    link_group,
    list_command,
    plan_command,
    replay_command,
    run_command,
    sweep_command,
):
    sim_group.add_command(command)

if __name__ == "__main__":
    sim_group()
