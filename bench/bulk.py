"""How much of a long link the bulk streams use, in both directions, and what it does to lease
renewals.

Every byte passes the real-time emulator (``farflow sim link run``), a Python process, as one
agent's link of 150 ms: up an agent's spool goes into the trajectory log (offers, chunks, fsync,
acks), down a version's chunks go from the weight store to an agent. CURVE is on, both ends are
processes of their own, and an agent's heartbeats (8 held leases) go over the same link's control
plane meanwhile. The reference is one plain TCP stream with large buffers through the same emulator,
in the same run.

Rates are sustained ones: counted from ``WARM_S`` after the first byte that counts. What the
emulator itself can move on this machine, without rate or delay, is a row: no stream can have more.

``--quick`` measures for shorter (the seconds are in the rows) and keeps every row.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.bulk_ends import EndSpec
from bench.fanout_cloud import Cloud, cloud
from bench.fanout_link import START_S, Emulator, LinkPath, emulated
from bench.report import Row, main
from bench.uplink import fill
from transport.envelope import LIMITS, decode, encode
from transport.keys import KeyPair, load_server_key
from transport.messages import Heartbeat, HeartbeatReply, HeldAttempt, Plane
from transport.plane_links import link_options
from transport.runtime.logs import configure_logging
from transport.runtime.processes import ChildProcess, ChildSpec, start_child
from transport.weights.tensors import TensorBytes

RTT_S = 0.150
RATES_MBIT_S = (50, 200, 1000)
TARGET = 0.85
RENEWAL_TARGET = 2.0
BODY_S = 0.08
MIN_BODY_BYTES, MAX_BODY_BYTES = 256 << 10, 4 << 20
"""A body takes the link ``BODY_S``: what is counted when it is acknowledged must not be coarse."""
RENEW_EVERY_S = 0.03
POLICY = "bench/bulk"
AGENT = "far"
UNLIMITED = LinkPath("no shaping", 0.0, 0.0)
QUICK_SIZE_BYTES, FULL_SIZE_BYTES = 192 << 20, 1 << 30
"""Of the version that is fetched."""


@dataclass(frozen=True)
class Times:
    """Seconds that are not counted, and that are: of the reference and of ours."""

    raw_warm_s: float
    raw_s: float
    warm_s: float
    counted_s: float


QUICK = Times(0.4, 0.6, 1.2, 1.3)
FULL = Times(2.0, 4.0, 3.0, 8.0)


@dataclass(frozen=True)
class Setting:
    """What all measurements share."""

    folder: Path
    cloud: Cloud
    link: Emulator
    times: Times
    entries: Path
    sink: ChildProcess


@asynccontextmanager
async def end(folder: Path, *arguments: str) -> AsyncIterator[ChildProcess]:
    """One end of a stream, ended with the block."""
    child = await start_child(
        ChildSpec(
            name="end",
            argv=(sys.executable, "-m", "bench.bulk_ends", *arguments),
            log_path=folder / "ends.log",
            capture_stdout=True,
            environment={"PYTHONPATH": str(Path(__file__).parents[1])},
            grace_s=2.0,
        )
    )
    try:
        yield child
    finally:
        await child.terminate()


async def sustained(child: ChildProcess, warm_s: float, counted_s: float) -> float:
    """Bytes a second that the child counts, from ``warm_s`` after its first ones."""
    first_s = 0.0
    start: tuple[float, int] | None = None
    last = (0.0, 0)
    while True:
        said = json.loads(await child.read_line(START_S))
        at_s, count = said or last
        if not first_s:
            first_s = at_s
        last = (at_s, count)
        if start is None and at_s >= first_s + warm_s:
            start = last
        over = not said  # all has come before the time was up
        if start is not None and (over or at_s >= start[0] + counted_s):
            return (last[1] - start[1]) / (last[0] - start[0])


async def raw(setting: Setting, *, up: bool) -> float:
    """The reference, in bytes a second."""
    times, target = setting.times, "sink" if up else "source"
    port = str(setting.link.ports[target])
    async with end(setting.folder, "raw-client", "source" if up else "sink", port) as client:
        if not up:
            return await sustained(client, times.raw_warm_s, times.raw_s)
        server = setting.sink
        while json.loads(await server.read_line(START_S)):  # what is left of the one before
            pass
        return await sustained(server, times.raw_warm_s, times.raw_s)


async def renewals(setting: Setting, until: asyncio.Event) -> list[float]:
    """Seconds from each heartbeat with 8 held leases to its answer, over the emulated link."""
    keys = setting.folder / "keys"
    link = setting.cloud.network.link(
        f"tcp://127.0.0.1:{setting.link.ports['control']}",
        link_options(setting.cloud.transport(0), Plane.CONTROL),
        key=KeyPair.load(keys / f"{AGENT}.toml"),
        server_key=load_server_key(keys),
    )
    limits = LIMITS[Plane.CONTROL]
    held = tuple(
        HeldAttempt(attempt=f"bench/t-{number:06d}#1", fence=(1, number), started=True)
        for number in range(8)
    )
    sent: dict[int, float] = {}
    took: list[float] = []

    async def receive() -> None:
        while True:
            for frames in await link.recv():
                message, _ = decode(frames, limits)
                if isinstance(message, HeartbeatReply) and message.sequence in sent:
                    took.append(time.monotonic() - sent.pop(message.sequence))

    receiving = asyncio.create_task(receive())
    try:
        await link.wait_connected()
        for sequence in range(1 << 20):
            if until.is_set():
                break
            now = sent[sequence] = time.monotonic()
            link.send(encode(Heartbeat(sequence=sequence, sent_s=now, held=held), limits=limits))
            await asyncio.sleep(RENEW_EVERY_S)
        # One that is never answered counts as slow as it is.
        return [*took, *(time.monotonic() - at for at in sent.values() if _is_late(at))]
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await link.close()


def _is_late(sent_s: float) -> bool:
    return time.monotonic() - sent_s > RENEWAL_TARGET * RTT_S


async def ours(setting: Setting, mbit_s: int, *, up: bool) -> tuple[float, list[float]]:
    """Our stream in bytes a second, and how long lease renewals took beside it."""
    times, folder = setting.times, setting.folder
    spec = EndSpec(
        keys=str(folder / "keys"),
        name=AGENT,
        transport={
            **msgspec.to_builtins(setting.cloud.transport(setting.link.ports["weights"])),
            "trajectories_port": setting.link.ports["trajectories"],
        },
        spool=str(folder / f"spool-{mbit_s}"),
        entries=str(setting.entries),
    )
    if up:
        seconds = times.warm_s + times.counted_s + 0.5
        body_bytes = int(BODY_S * mbit_s * 125_000)
        body_bytes = min(max(body_bytes, MIN_BODY_BYTES), MAX_BODY_BYTES)
        bodies = int(seconds * mbit_s * 125_000 / body_bytes) + 4
        await asyncio.to_thread(fill, Path(spec.spool), bodies, body_bytes, seed=mbit_s)
    path = folder / f"end-{mbit_s}-{up}.json"
    await asyncio.to_thread(path.write_bytes, msgspec.json.encode(spec))
    async with end(folder, "agent-up" if up else "agent-down", str(path)) as child:
        over = asyncio.Event()
        renewing = asyncio.create_task(renewals(setting, over))
        try:
            rate = await sustained(child, times.warm_s, times.counted_s)
        except BaseException:
            renewing.cancel()
            raise
        over.set()
        return rate, await renewing


def _rate_row(which: str, mbit_s: int, value: float, reference: float, counted_s: float) -> Row:
    return Row(
        metric=f"{which}, {mbit_s} Mbit/s, 150 ms, over {counted_s:g} s",
        value=value * 8 / 1e6,
        unit="Mbit/s",
        reference="one tuned TCP stream through the same emulator",
        ratio=value / reference,
        target=f">= {TARGET}",
        ok=value / reference >= TARGET,
    )


def _renewal_row(which: str, mbit_s: int, took: list[float]) -> Row:
    p99 = float(np.percentile(took, 99, method="higher"))
    return Row(
        metric=f"lease renewal p99 of {len(took)} beside {which}, {mbit_s} Mbit/s",
        value=p99 * 1e3,
        unit="ms",
        reference="RTT of the link",
        ratio=p99 / RTT_S,
        target=f"< {RENEWAL_TARGET:g}",
        ok=p99 / RTT_S < RENEWAL_TARGET,
    )


async def rate_rows(setting: Setting, mbit_s: int) -> list[Row]:
    """Both directions at one rate."""
    await setting.link.shape(LinkPath(f"{mbit_s} Mbit/s", mbit_s * 1e6, RTT_S))
    rows = []
    for up, which in ((True, "agent to log"), (False, "store to agent")):
        reference = await raw(setting, up=up)
        value, took = await ours(setting, mbit_s, up=up)
        nominal = mbit_s * 125_000
        rows += [
            Row(
                metric=f"plain TCP, {'up' if up else 'down'}, {mbit_s} Mbit/s, 150 ms",
                value=reference * 8 / 1e6,
                unit="Mbit/s",
                reference="rate of the link",
                ratio=reference / nominal,
            ),
            _rate_row(which, mbit_s, value, reference, setting.times.counted_s),
            _renewal_row(which, mbit_s, took),
        ]
    return rows


async def ceiling_rows(setting: Setting) -> list[Row]:
    """What the emulator moves when it does not have to wait."""
    await setting.link.command({"profile": {}})
    rows = []
    for up in (True, False):
        value = await raw(setting, up=up)
        rows.append(
            Row(
                metric=f"the emulator's own ceiling, {'up' if up else 'down'}, no rate, no delay",
                value=value * 8 / 1e6,
                unit="Mbit/s",
                reference="1 Gbit/s",
                ratio=value / 125e6,
            )
        )
    return rows


async def _published(made: Cloud, size_bytes: int) -> Path:
    """A version of random cells in the store; where its file entries are written."""
    bits = np.random.default_rng(1).integers(0, 1 << 16, size_bytes // 2, np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] ^= 0x4000  # finite
    tensors = {"weight": TensorBytes("BF16", (len(bits),), bits.tobytes())}
    publishing = made.publishing(POLICY)
    version = await asyncio.to_thread(publishing.first, tensors, {"config.json": b"{}"})
    await publishing.publish(version)
    path = made.folder / "entries"
    entries = version.manifest.of_kind("snapshot")
    await asyncio.to_thread(path.write_bytes, msgspec.msgpack.encode(entries))
    return path


@asynccontextmanager
async def _log(made: Cloud) -> AsyncIterator[int]:
    """The trajectory log as a process; gives its port."""
    argv = [sys.executable, "-m", "scheduler.trajectory_log", "--stop-on-eof"]
    transport = msgspec.to_builtins(made.transport(0)) | {"trajectories_port": 0}
    settings = {
        **{f"transport.{key}": value for key, value in transport.items()},
        "scheduler.folder": str(made.folder / "scheduler"),
        "log.level": "warning",
    }
    for key, value in settings.items():
        argv += ["--set", f"{key}={json.dumps(value)}"]
    log_path = made.folder / "trajectory-log.log"
    child = await start_child(
        ChildSpec(name="log", argv=tuple(argv), log_path=log_path, capture_stdout=True)
    )
    try:
        yield int(json.loads(await child.read_line(START_S))["port"])
    finally:
        await child.terminate()


async def all_rows(folder: Path, times: Times, size_bytes: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(cloud(folder, hosted={AGENT: (POLICY,)}))
        log_port = await stack.enter_async_context(_log(made))
        targets = {
            "control": made.control_port,
            "trajectories": log_port,
            "weights": made.store_port,
        }
        for role in ("sink", "source"):
            server = await stack.enter_async_context(end(folder, "raw-server", role))
            targets[role] = int(json.loads(await server.read_line(START_S))["port"])
            if role == "sink":
                sink = server
        entries = await _published(made, size_bytes)
        link = await stack.enter_async_context(emulated(UNLIMITED, targets, folder))
        setting = Setting(folder, made, link, times, entries, sink)
        rows = await ceiling_rows(setting)
        for mbit_s in RATES_MBIT_S:
            rows += await rate_rows(setting, mbit_s)
        return rows


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    with tempfile.TemporaryDirectory(prefix="farflow-bulk-") as scratch:
        size_bytes = QUICK_SIZE_BYTES if quick else FULL_SIZE_BYTES
        return asyncio.run(all_rows(Path(scratch), QUICK if quick else FULL, size_bytes))


if __name__ == "__main__":
    main("bulk", measure)
