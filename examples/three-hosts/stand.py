"""docs/getting-started.md, "On three hosts", on one Linux machine: three network namespaces, and
every command of the page typed in them.

    python examples/three-hosts/stand.py            # from the folder of the clone, or anywhere

    trainer 10.77.1.2 --- 200 Mbit/s --- 10.77.1.1 cloud 10.77.2.1 --- 20 Mbit/s --- 10.77.2.2 box
                                         cloud is 10.77.0.1 for both

Each host has a network of its own (``veth`` pairs, rates by ``tc tbf``), and its own ``/srv``.
Trainer and box have no route to each other. Needs root or user namespaces, ``ip`` and ``tc``
(iproute2), ``unshare`` and ``nsenter`` (util-linux); touches nothing outside its namespaces and a
temporary folder.
Exit status: 0 all went as the page says, 1 something did not, 77 namespaces cannot be made here.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "getting-started.md"
CLOUD = "10.77.0.1"
LINKS = {"trainer": ("10.77.1", "200mbit"), "box": ("10.77.2", "20mbit")}
HOSTS = ("cloud", *LINKS)
INSIDE = "FARFLOW_THREE_HOSTS_INSIDE"
PROBE = (
    "ip link add a1 type veth peer name a2"
    " && tc qdisc add dev a1 root tbf rate 1mbit burst 9kb latency 9ms && mount --bind /tmp /srv"
)
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""As the kernel writes 127.0.0.1 and ::1."""
CANNOT = 77
READY_S = 60.0
COMMAND_S = 60.0
RUN_S = 120.0
STOP_S = 30.0

_DAEMON = re.compile(r"farflow (scheduler|agent|trainer) run\b")


@dataclass(frozen=True)
class Terminal:
    """What one block of the page has typed in one terminal of ``host``. A daemon is its last line;
    ``after`` is the host whose daemon has to end first."""

    host: str
    lines: tuple[str, ...]
    after: str = ""


def terminals(page: Path) -> tuple[tuple[str, ...], list[Terminal]]:
    """What is typed in every terminal, and the blocks of the page that begin with ``# on HOST``."""
    everywhere: tuple[str, ...] = ()
    found = []
    for block in re.findall(r"```sh\n(# on .*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        first, *lines = block.strip().replace("\\\n", " ").splitlines()
        match = re.fullmatch(
            r"# on (every host|cloud|trainer|box)(?:, when (\w+) has ended)?", first
        )
        if match is None:
            raise SystemExit(f"{page}: {first!r}: no such host")
        if match[1] == "every host":
            everywhere = tuple(lines)
        else:
            found.append(Terminal(match[1], tuple(lines), match[2] or ""))
    return everywhere, found


@dataclass
class Host:
    """A machine: a process that keeps its namespaces, and its daemons."""

    name: str
    keeper: "subprocess.Popen[bytes]"
    disk: Path
    daemons: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def enter(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.keeper.pid), "--net", "--mount", *argv]

    def typed(self, everywhere: Sequence[str], line: str) -> list[str]:
        """``line`` after what is typed in every terminal, by a shell that a daemon replaces."""
        last = f"exec {line}" if _DAEMON.match(line) else line
        return self.enter(["bash", "-euc", "\n".join([*everywhere, last])])

    def listening(self) -> list[str]:
        """Sockets on which others could reach this host: address:port, hexadecimal."""
        found = []
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/{self.keeper.pid}/net/{table}").read_text().splitlines()[1:]
            for _, local, _, state, *_ in (row.split() for row in rows):
                if state == "0A" and local.split(":")[0] not in LOOPBACK:
                    found.append(local)
        return found


def command(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=COMMAND_S)


def prepare_disk(folder: Path, name: str) -> Path:
    """What the host's user has after ``git clone`` and ``make install``, in ``/srv/farflow``; and
    an ``scp`` that copies from the cloud host's disk."""
    disk = folder / name
    clone = disk / "farflow"
    shutil.copytree(ROOT / "examples" / "three-hosts", clone / "examples" / "three-hosts")
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={shlex.quote(str(programs))}:$PATH\n")
    scripts = {
        "farflow": f'exec {shlex.quote(sys.executable)} -m farflow "$@"\n',
        "scp": f'exec cp "{folder}/cloud${{1#*:/srv}}" "$2"\n',
    }
    for script, text in scripts.items():
        (programs / script).write_text(f"#!/bin/sh\n{text}")
        (programs / script).chmod(0o755)
    return disk


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[dict[str, Host]]:
    """Three hosts and their links; every process in them is gone afterwards."""
    made: dict[str, Host] = {}
    try:
        for name in HOSTS:
            disk = prepare_disk(folder, name)
            own_disk = f"mount --bind {shlex.quote(str(disk))} /srv"
            script = f"{own_disk} && ip link set lo up && echo up && read _"
            keeper = subprocess.Popen(
                ["unshare", "--net", "--mount", "bash", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            made[name] = Host(name, keeper, disk)
            if keeper.stdout is None or keeper.stdout.readline() != b"up\n":
                raise OSError(f"{name}: no namespace of its own with another /srv")
        cloud = made["cloud"]
        command(*cloud.enter(["ip", "address", "add", f"{CLOUD}/32", "dev", "lo"]))
        for name, (net, rate) in LINKS.items():
            host = made[name]
            command("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0")
            for end, owner in ((f"to-{name}", cloud), ("eth0", host)):
                command("ip", "link", "set", end, "netns", str(owner.keeper.pid))
                number = 1 if owner is cloud else 2
                for line in (
                    f"ip address add {net}.{number}/24 dev {end}",
                    f"ip link set {end} up",
                    f"tc qdisc add dev {end} root tbf rate {rate} burst 64kb latency 400ms",
                ):
                    command(*owner.enter(line.split()))
            command(*host.enter(["ip", "route", "add", "default", "via", f"{net}.1"]))
        yield made
    finally:
        for host in made.values():
            for daemon in host.daemons:
                daemon.kill()
            host.keeper.kill()
            host.keeper.wait()


def start_daemon(host: Host, everywhere: Sequence[str], line: str) -> None:
    """Start what runs until it is stopped; its log goes to a file, its first line says it is up."""
    path = host.disk / f"{line.split()[1]}.log"
    with path.open("w") as log:
        daemon = subprocess.Popen(
            host.typed(everywhere, line), stdout=subprocess.PIPE, stderr=log, text=True
        )
    host.daemons.append(daemon)
    late = threading.Timer(READY_S, daemon.kill)
    late.start()
    said = daemon.stdout.readline().strip() if daemon.stdout is not None else ""
    late.cancel()
    if not said:
        raise RuntimeError(f"{host.name}: {line}\n{path.read_text()}")
    print(f"    {said}", flush=True)


def follow(page: Path, made: dict[str, Host]) -> None:
    """Type everything; ``RuntimeError`` or ``SubprocessError`` where it does not work."""
    everywhere, blocks = terminals(page)
    for block in blocks:
        host = made[block.host]
        if block.after:
            [awaited] = made[block.after].daemons
            status = awaited.wait(RUN_S)
            print(f"{block.after}: ended with exit status {status}", flush=True)
            if status != 0:
                log = (made[block.after].disk / f"{block.after}.log").read_text()
                raise RuntimeError(f"{block.after} failed\n{log}")
        for line in block.lines:
            print(f"{host.name}$ {line}", flush=True)
            if _DAEMON.match(line):
                start_daemon(host, everywhere, line)
                continue
            found = subprocess.run(
                host.typed(everywhere, line),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            for said in found.stdout.splitlines():
                print(f"    {said}", flush=True)
            if found.returncode != 0:
                raise RuntimeError(f"{host.name}: {line}: exit status {found.returncode}")


def links(made: dict[str, Host]) -> None:
    """Say what went over the box's link, and that nobody can connect to box and trainer."""
    for name in LINKS:
        host = made[name]
        sent = subprocess.run(
            host.enter(["tc", "-s", "qdisc", "show", "dev", "eth0"]),
            capture_output=True,
            text=True,
            check=True,
            timeout=COMMAND_S,
        ).stdout
        match = re.search(r"Sent (\d+) bytes", sent)
        if match is None or "tbf" not in sent or int(match[1]) == 0:
            raise RuntimeError(f"{name}: nothing went over its link: {sent}")
        if open_ports := host.listening():
            raise RuntimeError(f"{name}: listens on {open_ports}")
        print(f"{name}: sent {int(match[1])} bytes through tbf, listens on nothing", flush=True)


def end(made: dict[str, Host]) -> None:
    """Ctrl-C on every daemon that still runs."""
    for name in ("box", "cloud"):
        for daemon in made[name].daemons:
            daemon.send_signal(signal.SIGINT)
            status = daemon.wait(STOP_S)
            print(f"{name}: stopped with exit status {status}", flush=True)
            if status != 0:
                raise RuntimeError(f"{name}: exit status {status} after Ctrl-C")


def go_inside(argv: Sequence[str]) -> int:
    """This program again, as root of a user namespace with an empty network."""
    inside = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # of ip and tc, where users do not have it
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        print(f"not on this machine: {', '.join(missing)}", file=sys.stderr)
        return CANNOT
    tried = subprocess.run(
        [*inside, "bash", "-c", PROBE],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    if tried.returncode != 0:
        print(f"no namespaces here: {tried.stderr.strip()}", file=sys.stderr)
        return CANNOT
    return subprocess.run(
        [*inside, sys.executable, __file__, *argv], env={**os.environ, INSIDE: "1"}, check=False
    ).returncode


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Type the page's commands on three hosts.")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    if os.environ.get(INSIDE) != "1":
        return go_inside(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="three-hosts-") as folder:
        try:
            with hosts(Path(folder)) as made:
                follow(options.page, made)
                links(made)
                end(made)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
