"""How fast weights reach the agents, and what leaves the origin for it.

Real processes on this machine: the weight store, agent daemons, a relay, trainers' publishing
sides, and between them the real-time emulator of wide-area links. Rows by file:

    fanout_transport  the stream over three links; control traffic and a slow agent beside it
    fanout_relay      the origin's egress with a relay
    fanout_catchup    bytes for agents that missed versions, and for joiners
    fanout_swap       pause of a swap against an engine's restart
    fanout_publish    the whole way of one version, against int32 + bf16 and full broadcast

``--quick``: 4.4 MB through each link, small models everywhere else; sizes are in the rows. A ratio
that needs a payload of megabytes has no target there.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path

from bench.fanout_agents import agents
from bench.fanout_cloud import Cloud, cloud
from bench.fanout_link import PlainServer, emulated
from bench.fanout_model import FULL_SIZE, QUICK_SIZE, two_versions
from bench.fanout_publish import publish_rows
from bench.fanout_relay import RELAY, RELAYED, egress_rows, relay
from bench.fanout_swap import swap_rows
from bench.fanout_transport import (
    SETUPS,
    SLOW_AGENT,
    Bench,
    Push,
    control_rows,
    setup_rows,
    setup_specs,
    slow_agent_row,
)
from bench.report import Row, main
from transport.runtime.logs import configure_logging

CELLS = 2_200_000  # 4.4 MB
LARGE_CELLS = 8_000_000  # 16 MB
QUICK_REPEATS, FULL_REPEATS = 2, 7
CATCH_UP_S = 1800.0


async def stream_rows(folder: Path, cells: int, repeats: int) -> list[Row]:
    """Everything about the stream, with a payload of ``cells`` opaque BF16 cells."""
    hosted = {name: (setup.policy,) for setup in (*SETUPS, RELAYED) for name in setup.agents}
    hosted[SLOW_AGENT] = (SETUPS[1].policy,)
    plain = await PlainServer.start()
    try:
        async with cloud(folder, hosted=hosted, relays=[RELAY]) as made, AsyncExitStack() as stack:
            benches, relayed = await _open(stack, made, plain.port, cells)
            for bench in (*benches, relayed):
                await bench.begin()
            rows: list[Row] = []
            warm: dict[str, Push] = {}
            for bench in benches:
                more, warm[bench.setup.name] = await setup_rows(bench, repeats)
                rows += more
            rows += await control_rows(made, benches[0])
            region = benches[1]
            alone = warm[region.setup.name]
            rows += await egress_rows((region.setup, alone), relayed, max(1, repeats // 2))
            rows.append(await slow_agent_row(stack, made, region, max(1, repeats // 2), alone))
            return rows
    finally:
        await plain.close()


async def _open(
    stack: AsyncExitStack, made: Cloud, plain_port: int, cells: int
) -> tuple[list[Bench], Bench]:
    """Links, relay and agents; all agents share a process, of which one setup's work at a time."""
    specs, links = [], []
    targets = {"weights": made.store_port, "control": made.control_port, "plain": plain_port}
    for setup in (*SETUPS, RELAYED):
        link = await stack.enter_async_context(emulated(setup.path, targets, made.folder))
        relays = [await stack.enter_async_context(relay(made, link))] if setup is RELAYED else []
        specs += setup_specs(made, setup, link, relays)
        links.append(link)
    fleet = await stack.enter_async_context(agents(specs, made.folder))
    benches = [
        Bench(setup, link, fleet, made.publishing(setup.policy), cells)
        for setup, link in zip((*SETUPS, RELAYED), links, strict=True)
    ]
    return benches[:-1], benches[-1]


def _catching_up(quick: bool) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.fanout_catchup", "--json"]
    return subprocess.Popen(
        [*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True
    )


def _caught_up(child: "subprocess.Popen[str]") -> list[Row]:
    try:
        printed, _ = child.communicate(timeout=CATCH_UP_S)
    finally:
        child.kill()
    return [Row(**row) for row in json.loads(printed)["rows"]]


def measure(quick: bool) -> list[Row]:
    configure_logging("error", component="bench")
    rows: list[Row] = []
    # Takes seconds, in which the daemons of the first rows start anyway.
    importing = threading.Thread(target=import_module, args=("transformers",), daemon=True)
    importing.start()
    with tempfile.TemporaryDirectory(prefix="farflow-fanout-") as scratch:
        folder = Path(scratch)
        for number, cells in enumerate((CELLS,) if quick else (CELLS, LARGE_CELLS)):
            repeats = QUICK_REPEATS if quick else FULL_REPEATS
            (folder / f"stream-{number}").mkdir()
            rows += asyncio.run(stream_rows(folder / f"stream-{number}", cells, repeats))
        importing.join()
        catching = _catching_up(quick)
        if not quick:
            rows += _caught_up(catching)
        size = QUICK_SIZE if quick else FULL_SIZE
        two = two_versions(size)
        rows += asyncio.run(swap_rows(folder / "swap", size, two, quick))
        if quick:  # counts bytes, no seconds: takes the other core meanwhile
            rows += _caught_up(catching)
        (folder / "publish").mkdir()
        rows += asyncio.run(publish_rows(folder / "publish", size, two, quick))
    return rows


if __name__ == "__main__":
    main("fanout", measure)
