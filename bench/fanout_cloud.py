"""The cloud side of ``bench.fanout``: keys, the real weight store as a child process, a control
plane that says welcome, and trainers' publishing sides over real CURVE sockets.

What always holds: the store is the production process with its production settings; a version is
offered, uploaded in chunks and durable as in a deployment; the moment at which it is durable is
the moment at which its trainer hears so, over loopback, on the machine's one monotonic clock.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bench.fanout_link import START_S
from cloud_trainer.outbox import Outbox
from transport.chunk_service import ChunkService
from transport.keys import KeyPair, SigningKey, create_keys, load_server_key, trainer_name
from transport.messages import (
    ChunkRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    Ping,
    Plane,
    Pong,
    VersionAccepted,
    VersionDurable,
    VersionOffer,
    VersionRejected,
    VersionServing,
    VersionStored,
    Welcome,
)
from transport.plane_hub import PlaneHub
from transport.plane_links import PlaneLinks
from transport.runtime.clock import SystemClock
from transport.runtime.processes import ChildSpec, start_child
from transport.runtime.settings import TransportConfig
from transport.weights.folder import write_model_folder
from transport.weights.manifest import sign
from transport.weights.publication import Publication, build_delta_version, build_version0
from transport.weights.segments import CodecSettings
from transport.weights.tensors import TensorBytes
from transport.zmq_links import ZmqNetwork

DURABLE_S = 180.0
OFFER_AGAIN_S = 5.0
RUN = "bench"

Tensors = Mapping[str, TensorBytes]


class ControlStandIn:
    """As much of a scheduler as the peers of the weight plane need."""

    def __init__(self, hub: PlaneHub, hosted: Mapping[str, tuple[str, ...]]) -> None:
        self._hub = hub
        self._hosted = hosted
        self.serving: dict[str, list[VersionServing]] = {}
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            for arrival in await self._hub.recv():
                name, route = arrival.peer.name, arrival.route
                answer: Message | None = None
                match arrival.message:
                    case Hello():
                        answer = Welcome(
                            term=1,
                            heartbeat_s=2.0,
                            lost_after_s=60.0,
                            policies=self._hosted.get(name, ()),
                        )
                    case Ping(sequence=sequence, sent_s=sent_s):
                        answer = Pong(sequence=sequence, sent_s=sent_s)
                    case Heartbeat(sequence=sequence, sent_s=sent_s):
                        answer = HeartbeatReply(sequence=sequence, sent_s=sent_s)
                    case VersionStored(policy=policy, version=version):
                        answer = VersionAccepted(policy=policy, version=version)
                    case VersionServing() as serving:
                        self.serving.setdefault(name, []).append(serving)
                    case _:
                        pass
                if answer is not None:
                    self._hub.send(route, answer)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._hub.close()


class Publishing:
    """The publishing side of one policy's trainer."""

    def __init__(self, cloud: "Cloud", policy: str) -> None:
        keys = cloud.folder / "keys"
        name = trainer_name(policy)
        self.policy = policy
        self.model = cloud.model(policy)
        self._key = SigningKey.load(keys / "signing" / f"{name}.toml")
        self._outbox = Outbox(cloud.folder / f"outbox-{name}")
        self._links = PlaneLinks(
            cloud.network,
            cloud.transport(cloud.store_port),
            key=KeyPair.load(keys / f"{name}.toml"),
            server_key=load_server_key(keys),
            planes=[Plane.WEIGHTS],
        )
        self._reader = ThreadPoolExecutor(1)
        self._chunks = ChunkService(self._outbox, self._links, self._reader)
        self._durable: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._links.receive(Plane.WEIGHTS, self._arrived)),
            asyncio.create_task(self._chunks.run()),
        ]

    def _arrived(self, message: Message, payload: list[bytes]) -> None:
        match message:
            case ChunkRequest():
                self._chunks.ask(message)
            case VersionDurable(version=version):
                self._durable.setdefault(version, time.monotonic())
                self._changed.set()
            case VersionRejected():
                self._changed.set()
                raise AssertionError(f"the store refuses {message.version}: {message.message}")
            case _:
                pass

    def first(self, tensors: Tensors, artefacts: Mapping[str, bytes]) -> Publication:
        """Write the model folder and make it version 0."""
        write_model_folder(self.model, tensors, artefacts)
        return build_version0(self.model, run=RUN, policy=self.policy, created_wall_s=0.0)

    async def publish(self, made: Publication) -> float:
        """Offer until durable; returns the moment at which the trainer hears so."""
        signed = sign(made.manifest, self._key)
        version = made.manifest.version
        offer = await asyncio.to_thread(self._outbox.add, made, signed)
        return await self._offered(offer, version)

    async def _offered(self, offer: VersionOffer, version: int) -> float:
        async with asyncio.timeout(DURABLE_S):
            while version not in self._durable:
                if not self._links.send(Plane.WEIGHTS, offer):
                    await asyncio.sleep(0.05)
                    continue
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OFFER_AGAIN_S):
                        while version not in self._durable:
                            self._failed()
                            await self._changed.wait()
                            self._changed.clear()
        return self._durable[version]

    def _failed(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._links.close()
        self._reader.shutdown()


class Cloud:
    """Keys, control plane and weight store; ``store_port`` is the store's weights plane."""

    def __init__(
        self, folder: Path, network: ZmqNetwork, control: ControlStandIn, control_port: int
    ) -> None:
        self.folder = folder
        self.network = network
        self.control = control
        self.control_port = control_port
        self.store_port = 0
        self.store_pid = 0
        self._publishing: list[Publishing] = []

    def transport(self, weights_port: int, control_port: int = 0) -> TransportConfig:
        """How a peer reaches the planes; the plane of trajectories is not part of this bench and
        shares the port of control."""
        control_port = control_port or self.control_port
        return TransportConfig(
            host="127.0.0.1",
            control_port=control_port,
            trajectories_port=control_port,
            weights_port=weights_port,
            keys=str(self.folder / "keys"),
        )

    def model(self, policy: str) -> Path:
        """The folder of the policy's version 0, once its trainer has made it."""
        return self.folder / f"model-{trainer_name(policy)}"

    def publishing(self, policy: str) -> Publishing:
        made = Publishing(self, policy)
        self._publishing.append(made)
        return made

    async def close(self) -> None:
        for publishing in self._publishing:
            await publishing.close()


@asynccontextmanager
async def cloud(
    folder: Path, *, hosted: Mapping[str, tuple[str, ...]], relays: Sequence[str] = ()
) -> AsyncIterator[Cloud]:
    """A cloud in ``folder`` whose agents (by name) are to host those policies."""
    policies = sorted({policy for wanted in hosted.values() for policy in wanted})
    keys = folder / "keys"
    create_keys(keys, agents=hosted, trainers=policies, relays=relays)
    network = ZmqNetwork()
    hub = PlaneHub(
        network,
        Plane.CONTROL,
        TransportConfig(host="127.0.0.1", keys=str(keys)),
        port=0,
        port_file=folder / "control-port",
        clock=SystemClock(),
    )
    made = Cloud(folder, network, ControlStandIn(hub, hosted), hub.port)
    argv = [sys.executable, "-m", "scheduler.weight_store", "--stop-on-eof"]
    settings = {
        **{f"transport.{k}": v for k, v in msgspec.to_builtins(made.transport(0)).items()},
        "scheduler.folder": str(folder / "scheduler"),
        "log.level": "warning",
    }
    for key, value in settings.items():
        argv += ["--set", f"{key}={json.dumps(value)}"]
    store = await start_child(
        ChildSpec(
            name="weight-store",
            argv=tuple(argv),
            log_path=folder / "weight-store.log",
            capture_stdout=True,
            grace_s=5.0,
        )
    )
    try:
        made.store_port = int(json.loads(await store.read_line(START_S))["port"])
        made.store_pid = store.pid
        yield made
    finally:
        await made.close()
        await store.terminate()
        await made.control.close()
        await network.close()


def next_version(
    old: Tensors,
    new: Tensors,
    parent: Publication,
    *,
    policy: str,
    settings: CodecSettings | None = None,
    threads: int = 1,
) -> Publication:
    """The version after ``parent``, whose weights are ``old``."""
    number = parent.manifest.version + 1
    return build_delta_version(
        old,
        new,
        run=RUN,
        policy=policy,
        version=number,
        parent=parent.manifest.version,
        step=number,
        created_wall_s=0.0,
        base=parent.digests,
        settings=settings,
        threads=threads,
    )


def payload_bytes(made: Publication) -> int:
    """Size of the version's delta file."""
    return sum(entry.size_bytes for entry in made.manifest.of_kind("delta"))
