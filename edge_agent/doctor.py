"""``farflow agent doctor``: what stands between this box and work, first things first.

What always holds: probes run in the order in which each needs the ones before it, and what needs a
probe that failed is skipped, so that the first thing named is the cause; each probe is bounded in
time; nothing that an agent of the same key does meanwhile is disturbed: the doctor says no hello.

    keys, disk, DNS, TCP per port, CURVE and authorisation, protocol, build, clock, GPU, engine,
    memory, models, sandbox
"""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from edge_agent.config import AgentConfig
from edge_agent.daemon import load_keys
from edge_agent.engine_probes import (
    Verdict,
    gpu_verdict,
    models_verdict,
    serving_verdict,
    vllm_memory_verdict,
)
from edge_agent.enrol import (
    enrolled,
    enrolled_transport,
    new_key_remedy,
    why_not_connected,
)
from edge_agent.installation import build_verdict
from edge_agent.sandbox import probe_sandbox
from transport.envelope import LIMITS, decode, encode
from transport.errors import ConfigError, FarflowError, LinkError, ProtocolError, StoreError
from transport.links import Link, Network, ServerKeys
from transport.messages import PROTOCOL_VERSION, Plane, Probe, ProbeReply, Refuse
from transport.plane_links import bracketed, link_options
from transport.reaching import family_of, refuses_key
from transport.runtime.clock import Clock
from transport.runtime.commands import run_command
from transport.runtime.files import atomic_write, private_dir

if TYPE_CHECKING:
    from transport.keys import KeyPair

State = Literal["ok", "wrong", "warning", "skipped"]

DNS_S: Final = 5.0
TCP_S: Final = 5.0
LINK_S: Final = 8.0
ENGINE_S: Final = 120.0
GPU_S: Final = 15.0
MAX_OFFSET_S: Final = 5.0
"""Log lines and metrics of two machines are put in order by their wall clocks; leases are not."""
SLOW_FSYNC_S: Final = 0.25
_SAMPLES: Final = 4


class Finding(NamedTuple):
    """What one probe found; ``remedy`` is set unless all is well."""

    probe: str
    state: State
    text: str
    remedy: str = ""


class _Wrong(Exception):
    """A probe's verdict."""

    def __init__(self, text: str, remedy: str, *, warning: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy
        self.warning = warning


class Doctor:
    """Examines one configuration. ``network`` makes the links that are tried."""

    def __init__(self, config: AgentConfig, network: Network, clock: Clock) -> None:
        self._config = config
        self._transport = config.transport
        self._network = network
        self._clock = clock
        self._key: KeyPair | None = None
        self._server_keys: ServerKeys | None = None
        self._link: Link | None = None
        self._reply: ProbeReply | None = None
        self._offset_s: tuple[float, float] | None = None

    async def examine(self) -> list[Finding]:
        """Every probe, in order; raises nothing that a sick box could cause."""
        probes: list[tuple[str, tuple[str, ...], Callable[[], Awaitable[str]]]] = [
            ("keys", (), self._keys),
            ("disk", (), self._disk),
            ("dns", (), self._dns),
            ("tcp control", ("dns",), lambda: self._tcp(Plane.CONTROL)),
            ("tcp trajectories", ("dns",), lambda: self._tcp(Plane.TRAJECTORIES)),
            ("tcp weights", ("dns",), lambda: self._tcp(Plane.WEIGHTS)),
            ("connection", ("keys", "tcp control"), self._connection),
            ("protocol", ("connection",), self._protocol),
            ("build", ("protocol",), self._build),
            ("clock", ("protocol",), self._clock_offset),
            ("gpu", (), self._gpu),
            ("engine", (), self._engine),
            ("memory", ("gpu",), self._memory),
            ("models", (), self._models),
            ("sandbox", (), self._sandbox),
        ]
        findings: list[Finding] = []
        bad: set[str] = set()
        try:
            for name, needs, probe in probes:
                missing = [need for need in needs if need in bad]
                if missing:
                    bad.add(name)
                    findings.append(Finding(name, "skipped", f"needs {missing[0]}"))
                    continue
                findings.append(await self._run(name, probe))
                if findings[-1].state == "wrong":
                    bad.add(name)
        finally:
            if self._link is not None:
                await self._link.close()
        return findings

    async def _run(self, name: str, probe: Callable[[], Awaitable[str]]) -> Finding:
        try:
            return Finding(name, "ok", await probe())
        except _Wrong as wrong:
            return Finding(name, "warning" if wrong.warning else "wrong", wrong.text, wrong.remedy)
        except FarflowError as error:
            return Finding(name, "wrong", str(error), "see the text")
        except OSError as error:
            return Finding(name, "wrong", error.strerror or str(error), "see the operating system")

    # ---- this box ------------------------------------------------------------------------------

    async def _keys(self) -> str:
        table, keys = self._config.agent, Path(self._config.transport.keys)
        try:
            facts = await asyncio.to_thread(enrolled, keys) if table.token_file else None
            if table.token_file and facts is None:
                raise _Wrong(
                    f"not enrolled yet: no {keys / 'agent.toml'}",
                    "start the agent once, or run `farflow agent enrol --token-file FILE`",
                )
            path = table.key
            if facts is not None:
                self._transport = enrolled_transport(self._transport, facts)
                path = path or str(keys / "agent.toml")
            own, server_keys = await asyncio.to_thread(load_keys, self._transport, path)
        except ConfigError as error:
            raise _Wrong(str(error), "enrol again in a fresh folder, or mend the file") from error
        if not (keys / "root.public.toml").exists() and not any((keys / "signers").glob("*.toml")):
            raise _Wrong(
                f"no root.public.toml and no signers in {keys}: no weights would be believed",
                "copy root.public.toml from the deployment's folder of keys",
            )
        self._key, self._server_keys = own, server_keys
        return f"agent {own.name!r}, server key and signers"

    async def _disk(self) -> str:
        folder, wanted = Path(self._config.agent.folder), self._config.agent.spool_bytes

        def look() -> tuple[int, float]:
            private_dir(folder)
            free = shutil.disk_usage(folder).free
            with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as place:
                began_s = self._clock.monotonic_s()
                atomic_write(Path(place) / "probe", b"\0" * 65536)
                return free, self._clock.monotonic_s() - began_s

        try:
            free, sync_s = await asyncio.to_thread(look)
        except StoreError as error:
            raise _Wrong(str(error), "name another folder in agent.folder") from error
        if free < wanted:
            raise _Wrong(
                f"{folder}: {_gb(free)} free, the spool alone may take {_gb(wanted)}",
                "free space (weights need room too), or lower agent.spool_bytes",
            )
        if sync_s > SLOW_FSYNC_S:
            raise _Wrong(
                f"{folder}: a durable write of 64 KiB takes {1000 * sync_s:.0f} ms",
                "put agent.folder on a local disk, not on a network file system",
                warning=True,
            )
        return f"{_gb(free)} free, a durable write takes {1000 * sync_s:.1f} ms"

    # ---- the way to the scheduler --------------------------------------------------------------

    async def _dns(self) -> str:
        host = self._transport.host
        try:
            async with asyncio.timeout(DNS_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    host, None, family=family_of(host), type=socket.SOCK_STREAM
                )
        except TimeoutError as error:
            raise _Wrong(f"{host}: no answer in {DNS_S:g} s", "check the name server") from error
        except OSError as error:
            raise _Wrong(
                f"{host}: {error.strerror or error}",
                "check transport.host, and that this box can resolve names; a name needs an IPv4"
                " address",
            ) from error
        return f"{host} is {', '.join(sorted({str(entry[4][0]) for entry in found}))}"

    async def _tcp(self, plane: Plane) -> str:
        setting = f"{plane.value}_port"
        host, port = self._transport.host, getattr(self._transport, setting)
        began_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(TCP_S):
                _, writer = await asyncio.open_connection(host, port, family=family_of(host))
        except TimeoutError as error:
            raise _Wrong(
                f"{host}:{port} does not answer within {TCP_S:g} s",
                f"open outbound TCP {port} in the firewalls between here and {host}",
            ) from error
        except OSError as error:
            raise _Wrong(
                f"{host}:{port}: {error.strerror or error}",
                f"check that the scheduler listens there, and transport.{setting}",
            ) from error
        writer.close()
        return f"{host}:{port} in {1000 * (self._clock.monotonic_s() - began_s):.0f} ms"

    async def _connection(self) -> str:
        transport = self._transport
        link = self._link = self._network.link(
            f"tcp://{bracketed(transport.host)}:{transport.control_port}",
            link_options(transport, Plane.CONTROL),
            key=self._key,
            server_key=self._server_keys,
        )
        why = await why_not_connected(link, LINK_S)
        if why:
            if refuses_key(why):
                remedy = f"the key was revoked or never let in: {self._new_key_remedy()}"
            elif "server key" in why:
                remedy = (
                    "the scheduler has another key than server.public.toml: copy the new one, or"
                    " check that nobody else answers at that address"
                )
            else:
                remedy = "check that the port is farflow's control plane"
            raise _Wrong(why, remedy)
        return "encrypted, both keys proved"

    def _new_key_remedy(self) -> str:
        """Keys that were made on the cloud host have other files than enrolled ones."""
        keys = Path(self._transport.keys)
        return new_key_remedy(keys if (keys / "enrolment.toml").exists() else Path())

    async def _protocol(self) -> str:
        offsets: list[tuple[float, float]] = []
        for sequence in range(_SAMPLES):
            reply, arrived_s = await self._ask(sequence)
            rtt_s = (arrived_s - reply.sent_s) - (reply.replied_s - reply.received_s)
            offset_s = ((reply.received_s - reply.sent_s) + (reply.replied_s - arrived_s)) / 2
            offsets.append((max(rtt_s, 0.0), offset_s))
            self._reply = reply
        # The quickest of a few round trips tells the offset best (RFC 5905, clock filter).
        self._offset_s = min(offsets)
        answered = self._reply
        if answered is None or answered.protocol != PROTOCOL_VERSION:
            raise _Wrong("another protocol", "install the same farflow on both sides")
        rtt_ms = 1000 * self._offset_s[0]
        other = ", an agent with this key is connected now" if answered.known else ""
        return f"the scheduler knows us as {answered.name!r}, RTT {rtt_ms:.1f} ms{other}"

    async def _ask(self, sequence: int) -> tuple[ProbeReply, float]:
        link = self._link
        if link is None:
            raise _Wrong("no connection", "see above")
        try:
            async with asyncio.timeout(LINK_S):
                link.send(encode(Probe(sequence=sequence, sent_s=self._clock.wall_s())))
                while True:
                    for frames in await link.recv():
                        arrived_s = self._clock.wall_s()
                        message, _ = decode(frames, LIMITS[Plane.CONTROL])
                        if isinstance(message, Refuse):
                            raise _Wrong(f"{message.code}: {message.message}", "see the text")
                        if isinstance(message, ProbeReply) and message.sequence == sequence:
                            return message, arrived_s
        except TimeoutError as error:
            raise _Wrong(
                f"connected, but no answer within {LINK_S:g} s",
                "the scheduler is older than this farflow, or held up: see its log",
            ) from error
        except (LinkError, ProtocolError) as error:
            raise _Wrong(str(error), "install the same farflow on both sides") from error

    async def _build(self) -> str:
        return _found(build_verdict("" if self._reply is None else self._reply.build))

    async def _clock_offset(self) -> str:
        if self._offset_s is None:
            raise _Wrong("not measured", "see above")
        rtt_s, offset_s = self._offset_s
        text = f"the scheduler's is {1000 * offset_s:+.0f} ms ahead (± {500 * rtt_s:.0f} ms)"
        if abs(offset_s) > MAX_OFFSET_S + rtt_s / 2:
            raise _Wrong(text, "let NTP set this box's clock (or the scheduler's)", warning=True)
        return text

    # ---- what generates ------------------------------------------------------------------------

    async def _gpu(self) -> str:
        return _found(await gpu_verdict(self._config.agent, partial(_call, GPU_S)))

    async def _engine(self) -> str:
        table = self._config.agent
        if table.engine == "fake":
            return "fake, for tests: it generates nothing of worth"
        if table.engine in ("vllm", "openai"):
            return _found(await serving_verdict(table, partial(_call, ENGINE_S)))
        code = (
            "import torch, transformers;"
            "print(torch.__version__, transformers.__version__, torch.cuda.is_available())"
        )
        status, out = await _call(ENGINE_S, sys.executable, "-c", code)
        if status is None:
            raise _Wrong(f"import took over {ENGINE_S:g} s", "check the disk of the installation")
        if status != 0:
            last = (out.strip().splitlines() or ["no word"])[-1]
            raise _Wrong(f"{table.engine}: {last[:200]}", "pip install 'farflow[torch]'")
        torch, transformers, cuda = out.split()[-3:]
        if table.device.startswith("cuda") and cuda != "True":
            raise _Wrong(
                f"torch {torch} finds no CUDA device",
                "install a torch that is built for this driver's CUDA",
            )
        return f"torch {torch}, transformers {transformers}"

    async def _memory(self) -> str:
        table = self._config.agent
        if table.engine != "vllm":
            return f"not needed (agent.engine = {table.engine!r})"
        return _found(await vllm_memory_verdict(table, partial(_call, GPU_S)))

    async def _models(self) -> str:
        return _found(await asyncio.to_thread(models_verdict, self._config.agent))

    async def _sandbox(self) -> str:
        found = await probe_sandbox()
        if found.why:
            raise _Wrong(
                f'{found.why}: workflows that run code and the reward "code" refuse',
                f"{found.remedy}, if this box is to run code",
                warning=True,
            )
        return "a program ran, without network"


def _found(verdict: Verdict) -> str:
    if verdict.remedy:
        raise _Wrong(verdict.text, verdict.remedy, warning=verdict.warning)
    return verdict.text


def first_wrong(findings: list[Finding]) -> Finding | None:
    """The first thing that keeps the agent from working; None on a healthy box."""
    return next((finding for finding in findings if finding.state == "wrong"), None)


def what_to_do(findings: list[Finding]) -> list[str]:
    """Lines with the remedy of each thing that is wrong or a warning, the cause first: what is
    found wrong later may be right once the first is."""
    lines = [f"advice: {one.probe}: {one.remedy}" for one in findings if one.state == "warning"]
    for place, one in enumerate(one for one in findings if one.state == "wrong"):
        lines.append(f"{'also' if place else 'first'}: {one.probe}: {one.text}")
        lines.append(f"remedy: {one.remedy}")
    return lines


async def _call(within_s: float, *argv: str) -> tuple[int | None, str]:
    """Status and output of a command; None when it cannot be started or does not end in time."""
    try:
        async with asyncio.timeout(within_s):
            status, out = await run_command(argv, environment={**os.environ, "LC_ALL": "C"})
    except (OSError, TimeoutError):
        return None, ""
    return status, out.decode("utf-8", "replace")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
