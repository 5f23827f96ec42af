"""What leaves the origin with and without a relay, rows of ``bench.fanout``.

::

    weight store ─ emulated link ─┬─ farflow relay ─ agents of a region: chunks
                                  └─ the same agents: plans and manifests

What always holds: bytes are counted where they pass the origin's link, plans, manifests, heartbeats
and encryption included; relay and agents are the production processes.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.fanout_cloud import Cloud
from bench.fanout_link import FARFLOW, REGION, START_S, Emulator
from bench.fanout_transport import Bench, Push, Setup
from bench.report import Row
from transport.runtime.processes import ChildSpec, start_child

RELAY = "harbour"
RELAYED = Setup("relayed", REGION, 8)
TARGET = 1.05


@asynccontextmanager
async def relay(made: Cloud, link: Emulator) -> AsyncIterator[dict[str, Any]]:
    """A relay that reaches the store through ``link``; gives its entry in ``transport.relays``."""
    argv = [*FARFLOW, "relay", "run", "--stop-on-eof"]
    settings = {
        "transport.host": "127.0.0.1",
        "transport.weights_port": link.ports["weights"],
        "transport.keys": str(made.folder / "keys"),
        "relay.folder": str(made.folder / "relay"),
        "relay.key": str(made.folder / "keys" / f"{RELAY}.toml"),
        "relay.port": 0,
        "log.level": "warning",
    }
    for key, value in settings.items():
        argv += ["--set", f"{key}={json.dumps(value)}"]
    child = await start_child(
        ChildSpec(
            name="relay",
            argv=tuple(argv),
            log_path=made.folder / "relay.log",
            capture_stdout=True,
            grace_s=5.0,
        )
    )
    try:
        ready = json.loads(await child.read_line(START_S))
        yield {"name": RELAY, "host": "127.0.0.1", "port": int(ready["port"])}
    finally:
        await child.terminate()


async def egress_rows(direct: tuple[Setup, Push], relayed: Bench, repeats: int) -> list[Row]:
    """Bytes that pass the origin's link for one version, in copies of the version's delta."""
    await relayed.push()
    with_relay = await relayed.pushes(repeats)
    rows = []
    for setup, push, how in ((*direct, "no relay"), (RELAYED, with_relay, "one relay")):
        copies = push.egress_bytes / push.size_bytes
        judged = setup is RELAYED
        rows.append(
            Row(
                metric=f"origin egress, {setup.title} of one region, {how}",
                value=push.egress_bytes / 1e6,
                unit="MB",
                reference="one delta",
                ratio=copies,
                target=f"<= {TARGET}" if judged else "",
                ok=copies <= TARGET or not judged,
            )
        )
    return [
        *rows,
        Row(
            metric=f"transport, {RELAYED.title} of one region, one relay, warm",
            value=with_relay.took_s,
            unit="s",
            reference="without a relay",
            ratio=with_relay.took_s / direct[1].took_s,
        ),
    ]
