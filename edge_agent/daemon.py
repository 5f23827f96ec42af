"""The agent daemon: claims its folder, connects, and serves.

Exit status: 0 asked to stop (work finished or handed back within ``drain_s``, or the time that the
order or ``farflow agent drain`` gave), 1 refused by the
scheduler or failed, 75 a workflow blocked it (``edge_agent.watchdog``), 78 (from the command line)
wrong configuration.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edge_agent.config import AgentConfig
from edge_agent.engine import Engine
from edge_agent.enrol import enrolled_config
from edge_agent.home import AgentHome
from edge_agent.program_marks import ProgramMarks
from edge_agent.sandbox import probe_sandbox
from edge_agent.shell import AgentShell
from edge_agent.watchdog import Watchdog
from transport.errors import ConfigError
from transport.keys import KeyPair
from transport.links import Network
from transport.messages import Role
from transport.plane_links import PlaneLinks
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.files import lock_folder, private_dir
from transport.runtime.log_ring import LogRing
from transport.runtime.settings import TransportConfig
from transport.server_keys import PinnedServerKeys
from transport.source_links import SourceLinks

T = TypeVar("T")
MakeEngine = Callable[[AgentConfig, Clock], Engine]


def make_engine(config: AgentConfig, clock: Clock) -> Engine:
    """The engine that ``[agent]`` names.

    Raises:
        ConfigError: it is not installed, or its settings name no server.
    """
    table = config.agent
    if table.engine == "fake":
        from edge_agent.engines.fake import FakeEngine

        return FakeEngine(table.slots, table.fake, clock=clock)
    if table.engine == "vllm":
        from edge_agent.engines.vllm_engine import VllmEngine

        return VllmEngine(
            table.slots,
            table.vllm,
            device=table.device,
            threads=table.threads,
            memory=Path(table.folder) / "vllm-room.json",
            clock=clock,
        )
    if table.engine == "openai":
        from edge_agent.engines.openai_engine import OpenaiEngine

        return OpenaiEngine(table.slots, table.openai, clock=clock)
    from edge_agent.engines.torch_engine import TorchEngine

    return TorchEngine(table.slots, table.device, table.threads, clock=clock)


async def run_daemon(
    config: AgentConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[dict[str, Any]], None],
    network: Network | None = None,
    clock: Clock | None = None,
    engines: MakeEngine = make_engine,
) -> int:
    """Serve until ``stop`` is set or the scheduler refuses us; returns the exit status.

    ``on_ready`` is called once everything of ours works, whether or not anybody answers yet.

    Raises:
        ConfigError: settings or keys are wrong.
        StoreError: the folder is in use, or the disk refused.
    """
    if not config.agent.token_file:
        load_keys(config.transport, config.agent.key)  # what is wrong is said before anything else
    clock = SystemClock() if clock is None else clock
    own_network = network is None
    if network is None:
        from transport.zmq_links import ZmqNetwork

        network = ZmqNetwork()
    try:
        found = await _unless_stopped(enrolled_config(config, network), stop)
        if found is None:
            return 0
        config = found
        key, server_key = load_keys(config.transport, config.agent.key)
        folder = await asyncio.to_thread(private_dir, Path(config.agent.folder))
        with lock_folder(folder), LogRing() as log_ring:
            home = await asyncio.to_thread(AgentHome, folder, config, clock.wall_s())
            marks = ProgramMarks(folder)
            await asyncio.to_thread(marks.end_all)  # what an earlier life left
            engine = engines(config, clock)
            await probe_sandbox()
            await engine.start()
            try:
                links = PlaneLinks(network, config.transport, key=key, server_key=server_key)
                try:
                    sources = partial(
                        SourceLinks,
                        network,
                        config.transport,
                        links,
                        key=key,
                        server_key=server_key,
                        window_bytes=config.agent.download_window_bytes,
                        clock=clock,
                    )
                    shell = AgentShell(
                        config,
                        home,
                        engine,
                        links,
                        lambda arrived, changed: sources(arrived=arrived, changed=changed),
                        clock,
                        log_ring,
                    )
                    on_ready({"ready": True, "ports": {}, "agent": key.name})
                    modules = {name.partition(":")[0] for name in config.agent.workflows}
                    with Watchdog(config.agent.stall_s, modules=modules, before_exit=marks.end_all):
                        return await shell.run(stop)
                finally:
                    await links.close()
            finally:
                await engine.close()
                await asyncio.to_thread(marks.end_all)
    finally:
        if own_network:
            await network.close()


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of ``work``; None when ``stop`` was set before."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stopped):
            one.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def load_keys(transport: TransportConfig, path: str) -> tuple[KeyPair, PinnedServerKeys]:
    """Our own pair and the scheduler's public keys.

    Raises:
        ConfigError: a file is missing, or is not an agent's.
    """
    if not path:
        raise ConfigError("agent.key: name the agent's key file, as in keys/NAME.toml")
    pair = KeyPair.load(Path(path), "farflow agent enrol")
    if pair.role is not Role.AGENT:
        raise ConfigError(
            f"{path}: is the key of role {pair.role.value}, agent.key needs an agent's"
        )
    return pair, PinnedServerKeys(Path(transport.keys))
