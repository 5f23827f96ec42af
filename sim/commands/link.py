"""``farflow sim link``: the emulated link as a command.

``link run`` is made to be a child process. It prints one JSON line when it listens and one per
command; commands are JSON lines on standard input or on ``--control``::

    {"down": 20.0}                  an outage of 20 s; {"down": true} lasts until "up"
    {"down": 20.0, "reset": true}   ... that also kills the connections
    {"up": true}
    {"profile": "wan-80ms"}         or a table as in profiles.toml: {"profile": {"rtt": "80ms"}}
    {"stats": true}
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from transport.errors import ConfigError
from transport.runtime.daemon_cli import foreseen_errors

if TYPE_CHECKING:
    import random

    from sim.link_profile import LinkProfile
    from sim.link_proxy import LinkProxy

MAX_COMMAND_BYTES: Final = 64 * 1024

Address = tuple[str, int]
Reply = Callable[[bytes], None]


@click.group("link")
def link_group() -> None:
    """One agent's wide-area link, emulated in real time on this machine."""


@link_group.command("profiles")
@click.option("--profiles", "path", type=click.Path(path_type=Path), help="Your own profiles.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per profile.")
def profiles_command(path: Path | None, as_json: bool) -> None:
    """Lists the link profiles."""
    from sim.link_profile import load_profiles

    with foreseen_errors("link"):
        profiles = load_profiles(path)
    for name in sorted(profiles):
        profile = profiles[name]
        click.echo(msgspec.json.encode(profile).decode() if as_json else _describe(profile))


@link_group.command("run")
@click.option("--profile", "profile_name", default="local", show_default=True, help="Its name.")
@click.option("--profiles", "path", type=click.Path(path_type=Path), help="Your own profiles.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    required=True,
    metavar="NAME=HOST:PORT",
    help="Where a plane really is; repeatable, all share the link.",
)
@click.option(
    "--listen",
    "listens",
    multiple=True,
    metavar="NAME=HOST:PORT",
    help="A fixed listening address for a target; default: a free port of 127.0.0.1.",
)
@click.option("--seed", default=0, show_default=True, help="Of the jitter.")
@click.option(
    "--control", metavar="PORT|SOCKET", help="Take commands on a loopback port or a Unix socket."
)
@click.option("--stop-on-eof", is_flag=True, help="End when standard input does (as a child).")
@click.option("--log-level", default="info", show_default=True)
def run_command(
    profile_name: str,
    path: Path | None,
    targets: tuple[str, ...],
    listens: tuple[str, ...],
    seed: int,
    control: str | None,
    stop_on_eof: bool,
    log_level: str,
) -> None:
    """Emulates a link between an agent and the cloud until told to stop."""
    import random

    from sim.link_profile import find_profile
    from transport.runtime.logs import configure_logging

    with foreseen_errors("link"):
        configure_logging(log_level, component="link")
        asyncio.run(
            _run_link(
                find_profile(profile_name, path),
                parse_targets(targets),
                parse_targets(listens),
                random.Random(seed),  # noqa: S311 - jitter, no secret
                path,
                control,
                stop_on_eof,
            )
        )


def parse_target(text: str) -> tuple[str, Address]:
    """``NAME=HOST:PORT`` as a name and an address; raises ``ConfigError`` showing the form."""
    name, equals, address = text.partition("=")
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # [::1]:7700
    if not (name and equals and host and colon and port.isascii() and port.isdigit()):
        raise ConfigError(f"{text!r} is not NAME=HOST:PORT, e.g. control=127.0.0.1:7700")
    if int(port) > 65_535:
        raise ConfigError(f"{text!r}: there is no port {port}")
    return name, (host, int(port))


def parse_targets(texts: Iterable[str]) -> dict[str, Address]:
    """Addresses by name; raises ``ConfigError`` also for a name that is given twice."""
    addresses: dict[str, Address] = {}
    for name, address in map(parse_target, texts):
        if name in addresses:
            raise ConfigError(f"{name!r} is given twice; each name has one address")
        addresses[name] = address
    return addresses


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the first four."""

    down: float | bool | None = None
    up: bool | None = None
    profile: str | dict[str, Any] | None = None
    stats: bool | None = None
    reset: bool = False


def execute(proxy: "LinkProxy", line: bytes, profiles_path: Path | None = None) -> bytes:
    """Runs one command and returns the JSON reply; a bad one is answered, never raised."""
    from sim.link_profile import find_profile, profile_from_table

    try:
        command = msgspec.json.decode(line, type=_Command)
        given = [n for n in ("down", "up", "profile", "stats") if getattr(command, n) is not None]
        if len(given) != 1:
            raise ConfigError("give exactly one of down, up, profile, stats")
        if command.down is not None:
            if command.down is False:
                raise ConfigError('"down" is seconds or true; the opposite is {"up": true}')
            duration_s = None if command.down is True else float(command.down)
            proxy.set_down(duration_s, reset=command.reset)
        elif command.up is not None:
            proxy.set_up()
        elif isinstance(command.profile, str):
            proxy.set_profile(find_profile(command.profile, profiles_path))
        elif command.profile is not None:
            proxy.set_profile(profile_from_table("custom", command.profile))
    except (msgspec.DecodeError, ConfigError) as error:
        return msgspec.json.encode({"error": str(error)})
    if command.stats is not None:
        return msgspec.json.encode({"stats": proxy.stats()})
    return msgspec.json.encode({"ok": given[0]})


class CommandLines:
    """Cuts a byte stream into commands; a line that is too long is refused, not collected."""

    def __init__(self, on_line: Callable[[bytes], None], on_refused: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_refused = on_refused
        self._partial = b""
        self._skipping = False

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if self._skipping or len(line) > MAX_COMMAND_BYTES:
                self._skipping = False
                self._on_refused()
            elif line.strip():
                self._on_line(line)
        if len(self._partial) > MAX_COMMAND_BYTES:
            self._partial = b""
            self._skipping = True


async def _run_link(
    profile: "LinkProfile",
    targets: dict[str, Address],
    listen: dict[str, Address],
    rng: "random.Random",
    profiles_path: Path | None,
    control: str | None,
    stop_on_eof: bool,
) -> None:
    from sim.link_proxy import LinkProxy
    from transport.runtime.shutdown import ShutdownSignal, read_until_eof

    proxy = LinkProxy(profile, targets, rng=rng, listen=listen)

    def commands(reply: Reply) -> Callable[[bytes], None]:
        too_long = msgspec.json.encode(
            {"error": f"a command has {MAX_COMMAND_BYTES} bytes at most"}
        )
        lines = CommandLines(
            lambda line: reply(execute(proxy, line, profiles_path) + b"\n"),
            lambda: reply(too_long + b"\n"),
        )
        return lines.feed

    with ShutdownSignal() as stop:
        control_server = None
        try:
            addresses = await proxy.start()
            control_server = await _serve_control(control, commands) if control else None
            ready = {
                "ready": True,
                "pid": os.getpid(),
                "profile": profile.name,
                "targets": {n: {"host": h, "port": p} for n, (h, p) in addresses.items()},
            }
            click.echo(msgspec.json.encode(ready))
            stdin = asyncio.create_task(
                read_until_eof(commands(lambda line: click.echo(line, nl=False)))
            )
            if stop_on_eof:
                stdin.add_done_callback(lambda _: stop.request("standard input closed"))
            await stop.wait()
            stdin.cancel()
        finally:
            if control_server is not None:
                control_server.close()
                if control is not None and not control.isdigit():
                    Path(control).unlink(missing_ok=True)  # noqa: ASYNC240 - one name, at the end
            await proxy.close()


async def _serve_control(
    control: str, commands: Callable[[Reply], Callable[[bytes], None]]
) -> asyncio.Server:
    """Takes commands on 127.0.0.1:PORT or on a Unix socket that only this user can open."""
    loop = asyncio.get_running_loop()

    class Session(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
            self.feed = commands(transport.write)

        def data_received(self, data: bytes) -> None:
            self.feed(data)

    try:
        if control.isdigit():
            return await loop.create_server(Session, "127.0.0.1", int(control))
        before = os.umask(0o177)
        try:
            return await loop.create_unix_server(Session, control)
        finally:
            os.umask(before)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--control {control}: cannot listen: {error}") from error


def _describe(profile: "LinkProfile") -> str:
    def rate(bits_per_s: float) -> str:
        return f"{bits_per_s / 1e6:g} Mbit/s" if bits_per_s else "unlimited"

    parts = [
        f"{profile.name:<12}",
        f"rtt {profile.rtt_s * 1e3:g} ms",
        f"up {rate(profile.rate_up_bits_per_s)}",
        f"down {rate(profile.rate_down_bits_per_s)}",
    ]
    if profile.jitter_s:
        parts.append(f"jitter {profile.jitter_s * 1e3:g} ms")
    if profile.outages:
        parts.append(f"{len(profile.outages)} outages")
    return "  ".join(parts)
