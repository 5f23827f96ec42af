"""A busy deployment for those who look at it: real daemon and gateway, light agents, many jobs.

Agents (``leases_agents``) stand at the sites of the dashboard's map. Their work takes ``WORK_S``,
so that something happens all the time and a hundred thousand queued jobs last for a while. The
services are left out as in the lease bench; the gateway is the real one, in its own process.
"""

import http.client
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from bench.leases import fleet
from bench.leases_load import Load
from bench.leases_world import Started, World, make_world, scheduler
from scheduler.gateway.access import LOCAL_SECRET
from scheduler.gateway.service import ADDRESS
from transport.keys import GATEWAY
from transport.runtime.files import private_dir
from transport.zmq_socket import raise_file_limit

SITES: Final = ("eu-west-3", "us-west-2", "ap-northeast-1", "sa-east-1", "af-south-1", "us-east-2")
HOME: Final = "us-east-1"
HTTP: Final = f"""
port = 0
requests_per_s = 10000.0
open_metrics = true
site = "{HOME}"
"""
SLOTS: Final = 8
WORK_S: Final = 20.0
SPREAD: Final = 0.5
READY_S: Final = 60.0
LOG_TAIL: Final = 2000
SUBMIT_S: Final = 240.0


class Busy(NamedTuple):
    """``token`` is an operator's, ``address`` without a slash at its end."""

    world: World
    started: Started
    address: str
    token: str

    @property
    def keys(self) -> Path:
        return Path(self.world.config.transport.keys)

    @property
    def address_file(self) -> Path:
        """Where the gateway says its address while it listens."""
        return Path(self.world.config.scheduler.folder) / GATEWAY / ADDRESS

    def gateway_pid(self) -> int:
        """The gateway's process; 0 while there is none."""
        pid = self.started.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split():
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if b"scheduler.gateway.service" in command.split(b"\0"):
                return int(child)
        return 0


@contextmanager
def busy(agents: int, jobs: int, *, work_s: float = WORK_S) -> Iterator[Busy]:
    """The deployment, with all agents ready and all jobs submitted."""
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="farflow-operations-") as scratch:
        world = make_world(Path(scratch), agents, http=HTTP)
        private_dir(Path(world.config.scheduler.folder) / "logs")  # the services would make it
        with (
            scheduler(world, real_log=False) as started,
            fleet(world, started, slots=SLOTS, work_s=work_s, sites=SITES, spread=SPREAD),
        ):
            endpoint = f"tcp://127.0.0.1:{started.control_port}"
            load = Load(endpoint, world.server_key, list(world.submitters.values()))
            try:
                taken = load.pile_up(jobs, SUBMIT_S)
                assert taken == jobs, f"{taken} of {jobs} jobs were taken"
            finally:
                load.close()
            folder = Path(world.config.scheduler.folder) / GATEWAY
            address = wait_for(folder / ADDRESS).rstrip("/")
            token = wait_for(folder / LOCAL_SECRET)
            yield Busy(world, started, address, token)


def wait_for(path: Path) -> str:
    """What a file says, once it does."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if path.exists() and (text := path.read_text(encoding="utf-8").strip()):
            return text
        time.sleep(0.05)
    log = path.parent.parent / "logs" / f"{GATEWAY}.log"
    said = log.read_text(encoding="utf-8")[-LOG_TAIL:] if log.exists() else "nothing"
    raise RuntimeError(f"{path} did not come within {READY_S:g} s; the gateway's log: {said}")


class Asking:
    """One kept connection to the gateway."""

    def __init__(self, deployment: Busy) -> None:
        place = urlsplit(deployment.address)
        assert place.hostname
        self._connection = http.client.HTTPConnection(place.hostname, place.port, timeout=READY_S)
        self._headers = {"Authorization": f"Bearer {deployment.token}"}

    def timed(self, path: str, method: str = "GET", body: str | None = None) -> tuple[float, bytes]:
        """Seconds until the whole answer was here, and the answer."""
        began = time.perf_counter()
        self._connection.request(method, path, body, self._headers)
        reply = self._connection.getresponse()
        data = reply.read()
        took_s = time.perf_counter() - began
        assert reply.status == 200, (path, reply.status, data[:200])
        return took_s, data

    def close(self) -> None:
        self._connection.close()
