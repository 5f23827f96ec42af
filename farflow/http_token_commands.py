"""``farflow token http``: tokens of the HTTP interface and dashboard. Run where the keys are."""

import json
from pathlib import Path

import click

from farflow.connect import keys_folder
from farflow.options import config_option, json_option, set_option
from transport.errors import ConfigError


@click.group("http")
def http_group() -> None:
    """Create, list and revoke tokens of the HTTP interface and dashboard (docs/http-api.md)."""


@http_group.command("create")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["viewer", "operator", "submitter"]),
    required=True,
    help="Look; look and give orders; submit jobs and take their results.",
)
@config_option
@set_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the token here (mode 0600) instead of to standard output.",
)
@json_option
def http_create(
    name: str,
    role: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Make a token called NAME. It counts within a second, is shown once and kept nowhere."""
    from scheduler.gateway.access import HttpRole, create_token

    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists; choose another name")
    secret = create_token(keys_folder(files, overrides), name, HttpRole(role), out)
    if as_json:
        told = {"token": secret} if out is None else {"file": str(out)}
        click.echo(json.dumps({"name": name, "role": role, **told}))
        return
    if out is None:
        click.echo(secret)
    click.echo(f"token {name}: {role}", err=True)


@http_group.command("ls")
@config_option
@set_option
@click.option("--json", "as_json", is_flag=True)
def http_ls(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """List tokens and what they may do."""
    from scheduler.gateway.access import all_tokens

    tokens, warnings = all_tokens(keys_folder(files, overrides))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps([{"name": one.name, "role": one.role.value} for one in tokens]))
        return
    from farflow.listing import print_list

    print_list(("name", "role"), [(one.name, one.role.value) for one in tokens])
    if not tokens:
        click.echo("no tokens", err=True)


@http_group.command("revoke")
@click.argument("name")
@config_option
@set_option
@json_option
def http_revoke(
    name: str, files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Refuse token NAME from now on, within about a second; its event streams end."""
    from scheduler.gateway.access import revoke_token

    token = revoke_token(keys_folder(files, overrides), name)
    facts = {"name": name, "role": token.role.value, "state": "revoked"}
    click.echo(json.dumps(facts) if as_json else f"{token.role.value} {name}: revoked")
