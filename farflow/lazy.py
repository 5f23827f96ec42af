"""A click group that imports a subcommand only when it is used, so that ``--help`` is instant."""

from collections.abc import Iterable, Mapping
from importlib import import_module

import click


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x' or 'y'?`` with those that are spelt like ``name``, "" without any."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


class LazyGroup(click.Group):
    """Subcommands named as ``module:attribute`` with the help line shown before importing."""

    def __init__(
        self, *args: object, lazy: Mapping[str, tuple[str, str]], **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self._lazy[cmd_name][0]} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self._lazy:
                rows.append((name, self._lazy[name][1]))
            else:
                command = super().get_command(ctx, name)
                rows.append((name, command.get_short_help_str() if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
