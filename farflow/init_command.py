"""``farflow init``: the folder of a new deployment, with its file and keys."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from farflow.options import json_option

FILE_NAME: Final = "deployment.toml"

_HEAD: Final = """\
A deployment of farflow. Every table of its scheduler is here; a line that begins with # and a key\
 is a setting at its default: take the # away to change it.
Check it with: farflow config check {name}
Sizes take texts such as "64MiB", times "1500ms". What is learnt is in files of its own (runs).
"""


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where agents and trainers reach this machine.",
)
@click.option(
    "--trainer", "trainers", multiple=True, metavar="RUN/POLICY", help="Keys for it; may repeat."
)
@json_option
def init(folder: Path, host: str, trainers: tuple[str, ...], as_json: bool) -> None:
    """Write the deployment's file and keys to FOLDER, and say what to do next.

    Nothing that is there is replaced: run it again for the keys of further trainers.
    """
    from transport.errors import ConfigError
    from transport.hosts import host_fault
    from transport.key_files import write_new
    from transport.keys import create_keys
    from transport.runtime.files import private_dir

    fault = host_fault(host)
    if fault:
        raise ConfigError(f"--host: {fault}")
    folder = private_dir(folder.absolute())
    file = folder / FILE_NAME
    fresh = not file.exists()
    if fresh:
        write_new(file, deployment_text(folder, host), mode=0o644)
    create_keys(folder / "keys", trainers=trainers, submitters=("submitter",))
    if as_json:
        facts = {"file": str(file), "written": fresh, "keys": str(folder / "keys")}
        click.echo(json.dumps(facts))
        return
    click.echo(f"{'wrote' if fresh else 'kept, as it was there'}: {file}")
    click.echo(f"keys in {folder / 'keys'}")
    click.echo("next:")
    for line in next_commands(file, host, trainers):
        click.echo(f"  {line}")


def deployment_text(folder: Path, host: str) -> str:
    """The file of a deployment in ``folder`` whose agents reach it as ``host``."""
    from farflow.deployment import DeploymentConfig
    from transport.runtime.config_text import commented_toml

    return commented_toml(
        DeploymentConfig,
        _HEAD.format(name=FILE_NAME),
        {
            "transport": {"host": _listen(host), "keys": str(folder / "keys")},
            "scheduler": {"folder": str(folder / "scheduler")},
        },
    )


def next_commands(file: Path, host: str, trainers: Sequence[str] = ()) -> list[str]:
    """What to type after ``init``, a command with a remark each; ``trainers`` have keys."""
    import shlex

    from farflow.token_commands import GPU_OPTIONS

    config = f"--config {shlex.quote(str(file))}"
    told = "" if _listen(host) == host else f" --host {shlex.quote(host)}"
    return [
        f"farflow config check {shlex.quote(str(file))}",
        f"farflow scheduler run {config}   # or: farflow scheduler install {config}",
        f"farflow token create {config}{told} --out box1.token   # for each box",
        "farflow agent install --token-file box1.token   # on the box; with a GPU: " + GPU_OPTIONS,
        *_trainer_commands(file, host, trainers),
        f"farflow run submit RUN.toml {config}",
        f"farflow top {config}",
    ]


def _trainer_commands(file: Path, host: str, trainers: Sequence[str]) -> list[str]:
    """How each trainer is started: here, or with copies of its keys where its GPU is."""
    import shlex

    if not trainers:
        again = f"farflow init {shlex.quote(str(file.parent))} --trainer RUN/POLICY"
        return [f"{again}   # keys for the trainer of each policy"]
    here = _listen(host) == host
    folder = file.parent / "keys" if here else Path("keys")
    lines = []
    for policy in trainers:
        name = f"trainer-{policy.replace('/', '-')}.toml"
        if not here:
            own = file.parent / "keys"
            found = (own / "server.public.toml", own / name)
            lines += [
                "mkdir -p keys/signing   # on the trainer's host, and bring there:",
                f"#   to keys: {' '.join(shlex.quote(str(path)) for path in found)}",
                f"#   to keys/signing: {shlex.quote(str(own / 'signing' / name))}",
            ]
        settings = {
            **({} if here else {"transport.host": host}),
            "trainer.policy": policy,
            "trainer.key": str(folder / name),
            "trainer.signing_key": str(folder / "signing" / name),
        }
        told = [f"--set {shlex.quote(f'{key}={value}')}" for key, value in settings.items()]
        config = [f"--config {shlex.quote(str(file))}"] if here else []
        remark = "  # with a GPU: --set trainer.device=cuda"
        lines.append(" ".join(["farflow trainer run", *config, *told, remark]))
    return lines


def _listen(host: str) -> str:
    """Where a scheduler listens that is reached as ``host``."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return host
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - agents are elsewhere
