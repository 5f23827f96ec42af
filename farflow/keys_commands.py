"""``farflow keys``: the keys of a deployment, in the folder where they all are."""

import json
from pathlib import Path
from typing import Any

import click

from farflow.connect import keys_folder
from farflow.options import config_option, json_option, set_option

FOLDER = click.Path(file_okay=False, path_type=Path)
_ADDED = {"agent": "agents", "operator": "operators", "viewer": "viewers",
          "submitter": "submitters", "relay": "relays"}  # fmt: skip


@click.group("keys")
def keys_group() -> None:
    """Create, list, revoke and change the keys of a deployment."""


@keys_group.command("create")
@click.argument("folder", type=FOLDER)
@click.option("--agent", "agents", multiple=True, metavar="NAME", help="May repeat.")
@click.option("--trainer", "trainers", multiple=True, metavar="RUN/POLICY", help="May repeat.")
@click.option(
    "--operator",
    "operators",
    multiple=True,
    metavar="NAME",
    default=("operator",),
    show_default=True,
)
@click.option("--relay", "relays", multiple=True, metavar="NAME", help="May repeat.")
@json_option
def keys_create(
    folder: Path,
    agents: tuple[str, ...],
    trainers: tuple[str, ...],
    operators: tuple[str, ...],
    relays: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the missing keys of a deployment in FOLDER; existing ones are kept.

    Agents come in by `farflow token create` and need no files. A trainer's host needs its own
    NAME.toml, signing/NAME.toml and server.public.toml; a relay's its own NAME.toml,
    server.public.toml and authorized/. An agent whose key is made here needs its own NAME.toml,
    server.public.toml, root.public.toml and relays/.
    """
    from transport.keys import create_keys

    create_keys(folder, agents=agents, trainers=trainers, operators=operators, relays=relays)
    click.echo(json.dumps({"keys": str(folder)}) if as_json else f"keys in {folder}")


@keys_group.command("add")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--role", type=click.Choice(list(_ADDED)), required=True)
@config_option
@set_option
@json_option
def keys_add(
    names: tuple[str, ...],
    role: str,
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a key for each NAME in transport.keys; the scheduler lets it in within a second."""
    from transport.keys import create_keys

    folder = keys_folder(files, overrides)
    wanted: dict[str, Any] = {"operators": (), _ADDED[role]: names}
    create_keys(folder, **wanted)
    for name in names:
        file = folder / f"{name}.toml"
        facts = {"name": name, "role": role, "file": str(file)}
        click.echo(json.dumps(facts) if as_json else file)


@keys_group.command("ls")
@config_option
@set_option
@click.option("--json", "as_json", is_flag=True)
def keys_ls(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """List who may connect, and who was revoked."""
    from transport.authorized import read_authorized

    folder = keys_folder(files, overrides)
    rows = []
    for state in ("authorized", "revoked"):
        revoked = state == "revoked"
        entries, warnings = read_authorized(folder / state, any_file_name=revoked)
        for warning in warnings if state == "authorized" else ():
            click.echo(f"warning: {warning}", err=True)
        rows += [
            {
                "name": entry.name,
                "role": entry.role.value,
                "policy": entry.policy,
                "state": state,
                "public_key": entry.public_key,
            }
            for entry in entries
        ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from farflow.listing import print_list

    heads = ("name", "role", "policy", "state")
    print_list(heads, [[row[head] or "" for head in heads] for row in rows])


@keys_group.command("revoke")
@click.argument("name")
@config_option
@set_option
@json_option
def keys_revoke(
    name: str, files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Refuse the key of NAME from now on and close its connections, within about a second.

    Its public half moves to revoked/, and no token lets it in again. Its name may be given to a new
    key.
    """
    from scheduler.tokens import revoke_key

    public = revoke_key(keys_folder(files, overrides), name)
    if as_json:
        facts = {"name": name, "role": public.role.value, "policy": public.policy}
        click.echo(json.dumps({**facts, "state": "revoked"}))
        return
    click.echo(f"{public.role.value} {name}: revoked")
    if public.policy is not None:
        click.echo(
            f"note: what it has signed for {public.policy} stays believed; to end that as well,"
            f" remove signers/{name}.toml and certificates/{name}.toml"
        )


@keys_group.command("rotate-server")
@config_option
@set_option
@click.option("--finish", is_flag=True, help="Make the next key the present one.")
@click.option("--abandon", is_flag=True, help="Forget the next key.")
@click.option("--status", is_flag=True, help="Say how many connected agents know the next key.")
@json_option
def keys_rotate_server(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    finish: bool,
    abandon: bool,
    status: bool,
    as_json: bool,
) -> None:
    """Change the server's key, in two steps with time in between.

    The first makes the next key, which the running scheduler tells its agents (signed by the root
    key); they believe both from then on. Wait until every agent has been connected since (--status
    counts those that are connected). Then --finish and restart the scheduler. Agents that were away
    meanwhile need the new server.public.toml, and open tokens must be made again.
    """
    from transport.server_rotation import abandon_rotation, begin_rotation, finish_rotation

    if finish + abandon + status > 1:
        raise click.UsageError("one of --finish, --abandon and --status")
    folder = keys_folder(files, overrides)
    key: str | None = None
    if status:
        said = _rotation(folder, files, overrides)
    elif finish:
        key = finish_rotation(folder)
        said = f"server key is {key}; restart the scheduler now"
    elif abandon:
        abandon_rotation(folder)
        said = "the next key is forgotten"
    else:
        key = begin_rotation(folder)
        said = f"next server key is {key}; agents that are connected learn it within seconds"
        said += "\nlater: farflow keys rotate-server --finish, and restart the scheduler"
    click.echo(json.dumps({"server_key": key, "message": said}) if as_json else said)


def _rotation(folder: Path, files: tuple[Path, ...], overrides: tuple[str, ...]) -> str:
    """How far a change of the server's key is; asks the running scheduler during one."""
    from farflow.connect import with_operator
    from transport.server_keys import FOLLOWING

    if not (folder / FOLLOWING).exists():
        return "no change of the server's key is under way"
    counters = with_operator(files, overrides, None, lambda operator: operator.status()).counters
    told = counters.get("control.server_key.told_next")
    missing = counters.get("control.server_key.not_told_next", 0)
    if told is None:
        return "the scheduler has not seen the next key yet; ask again in a few seconds"
    text = f"of {told + missing} connected agents {told} were told the next key"
    return text + ("; wait for the others" if missing else "; those that are away were not counted")
