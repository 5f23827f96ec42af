"""``farflow token``: tokens that let new agents in. Run where the deployment's keys are."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from farflow.connect import keys_folder
from farflow.http_token_commands import http_group
from farflow.options import config_option, json_option, set_option
from transport.errors import ConfigError

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig

GPU_OPTIONS = "--engine vllm --device cuda --slots 0"
"""Of ``farflow agent install`` where there is one: an agent generates on the processor else."""
_ANYWHERE = ("", "*", "0.0.0.0", "::")  # noqa: S104 - compared, not listened on


@click.group("token")
def token_group() -> None:
    """Create, list and revoke enrolment tokens, and those of the HTTP interface.

    A token lets an agent in that makes its own key. The scheduler listens for enrolments, on
    transport.enrolment_port, only while some token is open.
    """


token_group.add_command(http_group)


@token_group.command("create")
@config_option
@set_option
@click.option(
    "--role",
    type=click.Choice(["agent"]),
    default="agent",
    show_default=True,
    help="What those who enrol become; keys of other roles are made with `farflow keys`.",
)
@click.option("--uses", type=int, default=1, show_default=True, help="How many keys it lets in.")
@click.option(
    "--lifetime",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="For example 30min, 24h, 7d.",
)
@click.option(
    "--name-prefix", default="", metavar="TEXT", help="Agents are called TEXT1, TEXT2 and so on."
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Where agents reach the scheduler; the default is transport.host.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the token here (mode 0600) instead of to standard output.",
)
@json_option
def token_create(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    role: str,
    uses: int,
    lifetime: str,
    name_prefix: str,
    host: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Make a token. Its secret is shown once and kept nowhere."""
    from scheduler.tokens import TokenStore
    from transport.hosts import host_fault
    from transport.key_files import secret_file
    from transport.keys import load_server_key
    from transport.messages import Role
    from transport.runtime.clock import SystemClock
    from transport.runtime.units import parse_duration_s
    from transport.token_files import TokenFile

    config = _config(files, overrides)
    keys = Path(config.transport.keys)
    where = host or config.transport.host
    if where in _ANYWHERE:
        raise ConfigError(
            f"transport.host is {where!r}, which no agent can reach: name the scheduler's address"
            " with --host"
        )
    fault = host_fault(where)
    if fault:
        raise ConfigError(f"--host: {fault}")
    lifetime_s = parse_duration_s(lifetime, "--lifetime")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists; choose another name")
    server_key, port = load_server_key(keys), _enrolment_port(config)

    def file_of(id: str, secret: str) -> TokenFile:
        return TokenFile(
            host=where, enrolment_port=port, server_key=server_key, id=id, secret=secret
        )

    token, secret = TokenStore(keys).create(
        role=Role(role),
        max_uses=uses,
        lifetime_s=lifetime_s,
        wall_s=SystemClock().wall_s(),
        name_prefix=name_prefix,
        told=lambda token, secret: secret_file(out, file_of(token.id, secret).text()),
    )
    file = file_of(token.id, secret)
    on_box = [] if out is None else install_lines(config, where, out)
    if as_json:
        facts = {
            "install": on_box,
            "install_options_gpu": [] if out is None else shlex.split(GPU_OPTIONS),
            "id": token.id,
            "uses": uses,
            "lifetime_s": lifetime_s,
            "host": where,
        }
        told = {"token": file.text()} if out is None else {"file": str(out)}
        click.echo(json.dumps({**facts, "port": port, **told}))
        return
    if out is None:
        click.echo(file.text(), nl=False)
    click.echo(f"token {token.id}: {uses} use(s), {lifetime}, {where}:{port}", err=True)
    for line in on_box:
        click.echo(f"on the box: {line}", err=True)
    if on_box:
        click.echo(f"on one with a GPU: {on_box[-1]} {GPU_OPTIONS}", err=True)


def install_lines(config: "SchedulerConfig", host: str, token: Path) -> list[str]:
    """What to type on a box that has the file ``token`` and reaches the scheduler as ``host``."""
    from transport.plane_links import bracketed

    lines = [f"farflow agent install --token-file {shlex.quote(token.name)}"]
    http = config.http
    if http.enabled and http.wheel and http.port:
        scheme = "https" if http.certificate else "http"
        name = quote(Path(http.wheel).name)
        url = f"{scheme}://{bracketed(host)}:{http.port}/v1/wheel/{name}"
        lines.insert(0, f"python3 -m pip install {url}")
    return lines


@token_group.command("ls")
@config_option
@set_option
@click.option("--json", "as_json", is_flag=True)
def token_ls(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """List tokens: who they let in, and what is left of them."""
    from scheduler.tokens import TokenStore
    from transport.runtime.clock import SystemClock

    now = SystemClock().wall_s()
    tokens = TokenStore(keys_folder(files, overrides)).all()
    rows = [
        {
            "id": token.id,
            "role": token.role.value,
            "state": token.state(now),
            "uses": len(token.uses),
            "max_uses": token.max_uses,
            "expires_in_s": round(token.expires_s - now),
            "name_prefix": token.name_prefix,
            "names": [use.name for use in token.uses],
        }
        for token in tokens
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from farflow.listing import print_list

    shown = []
    for token in tokens:
        state = token.state(now)
        left = f"{(token.expires_s - now) / 3600:.1f} h" if state == "valid" else ""
        uses = f"{len(token.uses)}/{token.max_uses}"
        shown.append((token.id, token.role.value, state, uses, left, token.name_prefix))
    print_list(("id", "role", "state", "uses", "time left", "name prefix"), shown)
    if not rows:
        click.echo("no tokens", err=True)


@token_group.command("revoke")
@click.argument("id")
@config_option
@set_option
@json_option
def token_revoke(
    id: str, files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Let nobody in with token ID any more; agents that are in stay in."""
    from scheduler.tokens import TokenStore

    TokenStore(keys_folder(files, overrides)).revoke(id)
    click.echo(json.dumps({"id": id, "state": "revoked"}) if as_json else f"token {id}: revoked")


def _config(files: tuple[Path, ...], overrides: tuple[str, ...]) -> "SchedulerConfig":
    from scheduler.config import SchedulerConfig
    from transport.runtime.config import load_config

    return load_config(SchedulerConfig, files, overrides).value


def _enrolment_port(config: "SchedulerConfig") -> int:
    port = config.transport.enrolment_port
    if port:
        return port
    path = Path(config.scheduler.folder) / "enrolment-port"
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "transport.enrolment_port is 0 and the scheduler has not chosen one yet"
            f" ({path}): set it to a port that agents can reach, 7703 by default"
        ) from error
