"""The cloud side as one agent sees it: a scripted scheduler, a trajectory log that keeps bodies,
and a weight store with the production's versions and plans. Over in-memory links or real sockets.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cloud_trainer.numpy_trainer import make_numpy_model
from edge_agent.config import AgentConfig, AgentTable, FakeEngineTable
from edge_agent.daemon import MakeEngine, make_engine, run_daemon
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import place_of
from transport.envelope import LIMITS, decode, encode
from transport.errors import LinkClosed, LinkError
from transport.keys import DeploymentKeys, Peer, create_keys
from transport.links import Hub, LinkOptions, Network
from transport.messages import (
    WORK_PLANES,
    Chunk,
    ChunkRequest,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRequired,
    Item,
    LeaseOffer,
    Message,
    Plane,
    RewardSpec,
    Role,
    TrajectoryAck,
    TrajectoryPut,
    WeightsRequest,
    Welcome,
)
from transport.runtime.settings import RelayAddress, TransportConfig
from transport.trajectory import TrajectoryGroup, unpack
from transport.weights.folder import read_model_folder
from transport.weights.manifest import sign
from transport.weights.publication import Publication, build_delta_version, build_version0
from transport.weights.tensors import TensorBytes

POLICY = "run/solver"
WAIT_S = 10.0
M = TypeVar("M", bound=Message)


class AgentCloud:
    """Everything that an agent connects to. ``folder`` gets keys, model, store and agent."""

    def __init__(self, folder: Path, network: Network, model: Path | None = None) -> None:
        self.folder = folder
        self.network = network
        self.model = model or make_numpy_model(folder / "model", seed=1)
        self.keys: DeploymentKeys = create_keys(folder / "keys", agents=["near"], trainers=[POLICY])
        signer = self.keys.signers[POLICY]
        self.signing = signer
        self.versions = WeightVersions(
            folder / "store", trusted={signer.public.key_id: signer.public}
        )
        self._newest: tuple[Publication, dict[str, TensorBytes]] | None = None
        self.policies: tuple[str, ...] = (POLICY,)
        self.relays: tuple[RelayAddress, ...] = ()
        self.heard: list[Message] = []
        self.bodies: dict[str, bytes] = {}
        self.unknown: tuple[str, ...] = ()
        self.deaf: set[Plane] = set()
        self.known = False
        self.changed = asyncio.Event()
        self.chunks_served = 0
        self.damage_chunks = 0
        self._standing: tuple[bytes, WeightsRequest] | None = None
        self._route = b""
        self._hubs: dict[Plane, Hub] = {}
        self._tasks: dict[Plane, asyncio.Task[None]] = {}
        self._ports = dict.fromkeys(Plane, 0)

    async def __aenter__(self) -> "AgentCloud":
        for plane in WORK_PLANES:
            self.listen(plane)
        return self

    async def __aexit__(self, *_: object) -> None:
        for plane in list(self._hubs):
            await self.shut(plane)
        await self.network.close()

    def listen(self, plane: Plane) -> None:
        """Start a plane's service, on the port that it had before."""
        peer = Peer(name="near", role=Role.AGENT)
        public = self.keys.agents["near"].public_key
        hub = self.network.hub(
            f"tcp://127.0.0.1:{self._ports[plane]}",
            LinkOptions.for_plane(plane),
            key=self.keys.server,
            authorise=lambda key: peer if key == public else None,
        )
        self._ports[plane] = hub.port
        self._hubs[plane] = hub
        self._tasks[plane] = asyncio.create_task(self._serve(plane, hub))

    async def shut(self, plane: Plane) -> None:
        """A plane's service dies."""
        if plane is Plane.CONTROL:
            self.known = False
        task = self._tasks.pop(plane)
        await self._hubs.pop(plane).close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # ---- the agent ---------------------------------------------------------------------------

    def config(self, fake: dict[str, Any] | None = None, **table: Any) -> AgentConfig:
        values = {
            "folder": str(self.folder / "agent"),
            "key": str(self.folder / "keys" / "near.toml"),
            "engine": "fake",
            "slots": 16,
            "drain_s": 2.0,
            "fake": FakeEngineTable(
                **{"tokens_per_s": 1e4, "first_token_s": 0.0, "mean_tokens": 8.0, **(fake or {})}
            ),
            **table,
        }
        return AgentConfig(
            transport=TransportConfig(
                control_port=self._ports[Plane.CONTROL],
                trajectories_port=self._ports[Plane.TRAJECTORIES],
                weights_port=self._ports[Plane.WEIGHTS],
                keys=str(self.folder / "keys"),
                relays=self.relays,
            ),
            agent=AgentTable(**values),
        )

    def start(
        self, stop: asyncio.Event, engines: MakeEngine = make_engine, **table: Any
    ) -> asyncio.Task[int]:
        """One life of the agent daemon."""
        life = run_daemon(
            self.config(**table),
            stop=stop,
            on_ready=lambda facts: None,
            network=self.network,
            engines=engines,
        )
        return asyncio.create_task(life)

    # ---- what tests say and see ----------------------------------------------------------------

    def publish(self) -> int:
        """A new version: the model's own weights first, then one tensor rotated by an item."""
        place: dict[str, Any] = {"run": "run", "policy": POLICY, "created_wall_s": 0.0}
        if self._newest is None:
            publication = build_version0(self.model, **place)
            state = read_model_folder(self.model)
        else:
            before, old = self._newest
            number = before.manifest.version
            name = "output.weight" if "output.weight" in old else min(old)
            data = bytes(old[name].data)
            rotated = TensorBytes(old[name].dtype, old[name].shape, data[2:] + data[:2])
            state = {**old, name: rotated}
            publication = build_delta_version(
                old, state, version=number + 1, parent=number, step=number + 1, **place
            )
        self.versions.add_version(sign(publication.manifest, self.signing), publication.files)
        self._newest = (publication, state)
        self._answer_standing()
        return publication.manifest.version

    def digest(self) -> str:
        """Of the newest version."""
        assert self._newest is not None
        return self._newest[0].manifest.digest

    def offer(self, number: int, **changes: Any) -> LeaseOffer:
        values: dict[str, Any] = {
            "attempt": f"run/t-{number:06d}#1",
            "fence": (1, number),
            "job": f"run/t-{number:06d}",
            "kind": "train",
            "items": (Item(index=number, prompt=f"{number} + 1 =", answer=str(number + 1)),),
            "group_size": 4,
            "workflow": "single_turn",
            "settings": {},
            "policies": {"solver": POLICY},
            "reward": RewardSpec(name="exact"),
            "max_new_tokens": 12,
            "temperature": 1.0,
            "seed": number,
            "lease_s": 120.0,
        }
        offer = LeaseOffer(**{**values, **changes})
        self.say(offer)
        return offer

    def say(self, message: Message) -> None:
        """Something from the scheduler to the agent."""
        self._send(Plane.CONTROL, self._route, message)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def groups(self) -> dict[str, TrajectoryGroup]:
        """Stored groups by attempt."""
        found = [unpack(body) for body in self.bodies.values()]
        return {group.attempt: group for group in found}

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once the condition holds; looked at after each message."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def hear(self, kind: type[M], count: int = 1) -> M:
        """The ``count``-th message of a kind, as soon as it is there."""
        await self.until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]

    # ---- services ----------------------------------------------------------------------------

    async def _serve(self, plane: Plane, hub: Hub) -> None:
        answer = {
            Plane.CONTROL: self._control,
            Plane.TRAJECTORIES: self._trajectories,
            Plane.WEIGHTS: self._weights,
        }[plane]
        while True:
            try:
                batch = await hub.recv()
            except LinkClosed:
                return
            for inbound in batch:
                message, payload = decode(inbound.frames, LIMITS[plane])
                if plane not in self.deaf:
                    self.heard.append(message)
                    answer(inbound.route, message, payload)
                self.changed.set()

    def _control(self, route: bytes, message: Message, payload: list[bytes]) -> None:
        self._route = route
        match message:
            case Hello():
                self.known = True
                welcome = Welcome(
                    term=1, heartbeat_s=0.05, lost_after_s=0.5, policies=self.policies
                )
                self._send(Plane.CONTROL, route, welcome)
            case Goodbye():
                self.known = False
            case _ if not self.known:
                self._send(Plane.CONTROL, route, HelloRequired())
            case Heartbeat(sequence=sequence, sent_s=sent_s, held=held):
                unknown = tuple(one.attempt for one in held if one.attempt in self.unknown)
                reply = HeartbeatReply(sequence=sequence, sent_s=sent_s, unknown=unknown)
                self._send(Plane.CONTROL, route, reply)

    def _trajectories(self, route: bytes, message: Message, payload: list[bytes]) -> None:
        assert isinstance(message, TrajectoryPut)
        summary = message.summary
        self.bodies[summary.digest] = payload[0]
        ack = TrajectoryAck(attempt=summary.attempt, digest=summary.digest)
        self._send(Plane.TRAJECTORIES, route, ack)

    def _weights(self, route: bytes, message: Message, payload: list[bytes]) -> None:
        match message:
            case WeightsRequest():
                self._standing = (route, message)
                self._answer_standing()
            case ChunkRequest(digest=digest, indices=indices, part_bytes=part_bytes):
                for index in indices:
                    self._give_piece(route, digest, index, part_bytes)

    def _answer_standing(self) -> None:
        if self._standing is None:
            return
        route, request = self._standing
        plan = self.versions.plan(
            request.policy, request.have_version, request.have_digest, request.upto
        )
        if plan is not None:
            self._standing = None
            self._send(Plane.WEIGHTS, route, plan)

    def _give_piece(self, route: bytes, digest: str, index: int, part_bytes: int) -> None:
        place = place_of(index, part_bytes, self.versions.chunk_bytes(digest) or 0)
        data = None if place is None else self.versions.read_chunk(digest, place.number)
        if place is None or data is None:
            chunk = Chunk(digest=digest, index=index, part_bytes=part_bytes, found=False)
            self._send(Plane.WEIGHTS, route, chunk)
            return
        data = data[place.start : place.stop]
        self.chunks_served += 1
        if self.damage_chunks:
            self.damage_chunks -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        chunk = Chunk(digest=digest, index=index, part_bytes=part_bytes)
        self._send(Plane.WEIGHTS, route, chunk, [data])

    def _send(
        self, plane: Plane, route: bytes, message: Message, payload: list[bytes] | None = None
    ) -> None:
        hub = self._hubs.get(plane)
        try:
            if hub is not None:
                hub.send(route, encode(message, payload or ()))
        except LinkError:
            return  # the agent is gone; what matters is said again


class Life:
    """One life of the agent: stopped in order, or cut off as by a crash."""

    def __init__(self, cloud: AgentCloud, **options: Any) -> None:
        self.stop: asyncio.Event = options.pop("stop", None) or asyncio.Event()
        self.task = cloud.start(self.stop, **options)

    async def end(self) -> int:
        self.stop.set()
        return await asyncio.wait_for(self.task, WAIT_S)

    async def crash(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
