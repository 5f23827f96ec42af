"""Real agent daemons in a child process of ``bench.fanout``, watched at their edges.

``python -m bench.fanout_agents SPEC.json`` runs one whole daemon per entry of the file until its
standard input ends; several share the process, as the machine has fewer cores than agents. What is
watched is what crosses an edge: frames of a link, calls of the engine. It says as JSON lines:

    {"agent", "policy", "asks": version | null}        a standing request has left
    {"agent", "policy", "version", "planned_s", "chunk_s", "bytes", "apply_s", "served_s",
     "pause_s"}                                        a version is in the engine

all on the machine's monotonic clock: the plan's arrival, the arrival of the last chunk with the
time that its hash takes, when the engine was handed the patch and when it had swapped.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.fanout_link import START_S, count_files
from transport.envelope import LIMITS, decode, peek
from transport.links import Link, LinkOptions
from transport.messages import Chunk, Plane, WeightsPlan, WeightsRequest
from transport.runtime.clock import Clock, SystemClock
from transport.runtime.processes import ChildProcess, ChildSpec, start_child
from transport.zmq_links import ZmqNetwork

EVENT_S = 240.0

Say = Callable[[dict[str, Any]], None]


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon: how it reaches the planes, its key, and what ``[agent]`` says."""

    name: str
    transport: dict[str, Any]
    agent: dict[str, Any]


class _Watch:
    """What one agent's links and engine have seen of the version that is under way."""

    def __init__(self, agent: str, say: Say) -> None:
        self.agent = agent
        self._say = say
        self._planned_s: dict[str, float] = {}
        self._chunk_s = 0.0
        self._bytes = 0

    def asks(self, request: WeightsRequest) -> None:
        self._say({"agent": self.agent, "policy": request.policy, "asks": request.have_version})

    def plan(self, plan: WeightsPlan) -> None:
        self._planned_s[plan.policy] = time.monotonic()
        self._bytes = 0

    def chunk(self, data: bytes) -> None:
        # Hashed here too, to know when the agent, which gets it now, will be through with that.
        hashlib.sha256(data).digest()
        self._bytes += len(data)
        self._chunk_s = time.monotonic()

    def served(self, policy: str, version: int, apply_s: float, pause_s: float) -> None:
        self._say(
            {
                "agent": self.agent,
                "policy": policy,
                "version": version,
                "planned_s": self._planned_s.get(policy, 0.0),
                "chunk_s": self._chunk_s,
                "bytes": self._bytes,
                "apply_s": apply_s,
                "served_s": time.monotonic(),
                "pause_s": pause_s,
            }
        )


class _WatchedLink:
    def __init__(self, link: Link, watch: _Watch) -> None:
        self._link = link
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, frames: Sequence[bytes]) -> None:
        self._link.send(frames)
        if peek(frames) is WeightsRequest:
            message, _ = decode(frames, LIMITS[Plane.WEIGHTS])
            assert isinstance(message, WeightsRequest)
            self._watch.asks(message)

    async def recv(self) -> list[list[bytes]]:
        batch = await self._link.recv()
        for frames in batch:
            kind = peek(frames)
            if kind is Chunk:
                self._watch.chunk(frames[-1])
            elif kind is WeightsPlan:
                message, _ = decode(frames, LIMITS[Plane.WEIGHTS])
                assert isinstance(message, WeightsPlan)
                self._watch.plan(message)
        return batch


class _WatchedNetwork(ZmqNetwork):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def link(self, endpoint: str, options: LinkOptions, **keys: Any) -> Any:
        return _WatchedLink(super().link(endpoint, options, **keys), self._watch)


class _WatchedEngine:
    def __init__(self, engine: Any, watch: _Watch) -> None:
        self._engine = engine
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load_policy(
        self, policy: str, folder: Path, version: int, base: Path | None = None
    ) -> None:
        began_s = time.monotonic()
        await self._engine.load_policy(policy, folder, version, base)
        self._watch.served(policy, version, began_s, 0.0)

    async def apply(self, policy: str, version: int, patch: Any) -> float:
        began_s = time.monotonic()
        pause_s: float = await self._engine.apply(policy, version, patch)
        self._watch.served(policy, version, began_s, pause_s)
        return pause_s


async def run_agents(specs: Sequence[AgentSpec], say: Say) -> None:
    """Run the daemons until standard input ends."""
    from edge_agent.config import AgentConfig
    from edge_agent.daemon import make_engine, run_daemon
    from transport.runtime.shutdown import read_until_eof

    stop = asyncio.Event()
    tasks = []
    for spec in specs:
        config = msgspec.convert({"transport": spec.transport, "agent": spec.agent}, AgentConfig)
        watch = _Watch(spec.name, say)

        def engines(config: AgentConfig, clock: Clock, watch: _Watch = watch) -> Any:
            return _WatchedEngine(make_engine(config, clock), watch)

        network = _WatchedNetwork(watch)
        daemon = run_daemon(
            config,
            stop=stop,
            on_ready=lambda line: None,
            network=network,
            clock=SystemClock(),
            engines=engines,
        )
        tasks.append(asyncio.create_task(daemon))
    ended = asyncio.create_task(read_until_eof(lambda line: None))
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.gather(*tasks)


class Agents:
    """The parent's side: events as they come, bounded waits for what is expected."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.asks: dict[tuple[str, str], int | None] = {}
        self._served: dict[tuple[str, str, int], dict[str, float]] = {}

    async def _event(self) -> None:
        event = json.loads(await self._child.read_line(EVENT_S))
        key = event["agent"], event["policy"]
        if "asks" in event:
            self.asks[key] = event["asks"]
        else:
            self._served[*key, event["version"]] = event

    async def until_asking(self, agents: Sequence[str], policy: str, version: int | None) -> None:
        """Until a standing request of each agent says that it has exactly ``version``."""
        async with asyncio.timeout(EVENT_S):
            while any(self.asks.get((a, policy), "never") != version for a in agents):
                await self._event()

    async def served(self, agent: str, policy: str, version: int) -> dict[str, float]:
        """What was seen of that version on its way into the agent's engine."""
        async with asyncio.timeout(EVENT_S):
            while (agent, policy, version) not in self._served:
                await self._event()
        return self._served[agent, policy, version]


@asynccontextmanager
async def agents(specs: Sequence[AgentSpec], folder: Path) -> AsyncIterator[Agents]:
    """Daemons in a child process, ended at the end; their folders are in ``folder``."""
    number = count_files(folder, "agents-*.json")
    path = folder / f"agents-{number}.json"
    path.write_bytes(msgspec.json.encode(specs))
    child = await start_child(
        ChildSpec(
            name="agents",
            argv=(sys.executable, "-m", "bench.fanout_agents", str(path)),
            log_path=folder / f"agents-{number}.log",
            capture_stdout=True,
            environment={"PYTHONPATH": str(Path(__file__).parents[1])},
            grace_s=5.0,
        )
    )
    try:
        json.loads(await child.read_line(START_S))
        yield Agents(child)
    finally:
        await child.terminate()


def _say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    from transport.runtime.logs import configure_logging

    configure_logging("warning", component="agents")
    _say({"ready": True})
    asyncio.run(
        run_agents(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[AgentSpec]), _say)
    )
