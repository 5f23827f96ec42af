"""``farflow completion``: the script with which a shell completes our commands and options."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash, put `eval "$(farflow completion bash)"` into ~/.bashrc; for zsh the same with zsh into
    ~/.zshrc; for fish, `farflow completion fish > ~/.config/fish/completions/farflow.fish`.
    """
    from farflow.cli import PROGRAM, cli

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has all three
    click.echo(kind(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
