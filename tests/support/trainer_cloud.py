"""The cloud side as one trainer sees it, over in-memory links: a scripted scheduler that grants
batches of made-up groups, a trajectory log that holds them, and a weight store that verifies every
version with the production code."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from trainer_peers import POLICY, Scheduler

from cloud_trainer.config import TrainerConfig, TrainerTable
from cloud_trainer.daemon import run_daemon
from cloud_trainer.factory import MakeTrainer, make_trainer
from cloud_trainer.numpy_trainer import make_numpy_model
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import ChunkSource
from transport.chunks import ChunkFetcher
from transport.delivery_window import DeliveryWindow
from transport.envelope import LIMITS, decode, encode
from transport.errors import LinkClosed, LinkError, ProtocolError
from transport.keys import DeploymentKeys, Peer, create_keys
from transport.links import Hub, LinkOptions, Network
from transport.memory_links import MemoryNetwork
from transport.messages import (
    WORK_PLANES,
    BatchGrant,
    Body,
    BodyRequest,
    Chunk,
    GroupRef,
    Message,
    Plane,
    Role,
    VersionDurable,
    VersionOffer,
    VersionRejected,
)
from transport.runs import PolicySpec, RunSpec, TaskSpec, WorkflowSpec
from transport.runtime.clock import SystemClock
from transport.runtime.settings import TransportConfig
from transport.trajectory import SequenceRecord, TrajectoryGroup, body_digest, pack
from transport.weights.manifest import SignedManifest, VersionManifest, verify


def make_group(job: str, *, seed: int = 0, policy: str = POLICY, siblings: int = 4) -> bytes:
    """The packed body of a made-up group; the same for the same arguments."""
    rng = np.random.default_rng([seed, *job.encode()])
    sequences = []
    for _ in range(siblings):
        tokens = tuple(int(token) for token in rng.integers(0, 64, rng.integers(2, 9)))
        sequences.append(
            SequenceRecord(
                prompt=0,
                tokens=tokens,
                logprobs=(-rng.random(len(tokens)) - 3).astype(np.float32),
                segments=((len(tokens), 0, 0),),
                reward=float(tokens[0] % 2),
                finish_reason="length",
            )
        )
    group = TrajectoryGroup(
        job=job,
        attempt=f"{job}#1",
        policies=(policy,),
        prompts=((1, 2, 3),),
        sequences=tuple(sequences),
    )
    return pack(group)


class BodyScheduler(Scheduler):
    """Grants real bodies; those of ``withheld`` jobs are lost by the log."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self.bodies: dict[str, bytes] = {}
        self.withheld: set[str] = set()

    def _grant(self, step: int) -> list[Message]:
        (grant,) = super()._grant(step)
        assert isinstance(grant, BatchGrant)
        return [BatchGrant(policy=POLICY, step=step, groups=tuple(map(self._real, grant.groups)))]

    def _real(self, ref: GroupRef) -> GroupRef:
        data = make_group(ref.job)
        digest = body_digest(data)
        if ref.job not in self.withheld:
            self.bodies[digest] = data
        return GroupRef(job=ref.job, digest=digest, size_bytes=len(data), policy_lag=1)


class TrainerCloud:
    """Everything a trainer connects to. ``folder`` gets keys, model, store and trainer; with a
    ``network`` of sockets the trainer may be another process."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 6,
        checkpoint_every: int = 2,
        trainer: Literal["numpy", "torch"] = "numpy",
        network: Network | None = None,
    ) -> None:
        self.folder = folder
        self.model = folder / "model"
        if not self.model.exists():
            make_numpy_model(self.model, seed=1)
        self.run = RunSpec(
            name="run",
            policies={
                "solver": PolicySpec(
                    model=str(self.model),
                    trainer=trainer,
                    steps=steps,
                    batch_groups=2,
                    checkpoint_every=checkpoint_every,
                    settings={"lr": 0.05},
                )
            },
            task=TaskSpec(source="jsonl", path="items.jsonl", reward="exact"),
            workflow=WorkflowSpec(policies=("solver",)),
        )
        self.keys: DeploymentKeys = create_keys(folder / "keys", trainers=[POLICY])
        self.scheduler = BodyScheduler(self.run)
        signer = self.keys.signers[POLICY].public
        self.trusted = {signer.key_id: signer}
        self.versions = WeightVersions(folder / "store", trusted=self.trusted)
        self.network = MemoryNetwork() if network is None else network
        self.heard: Counter[str] = Counter()
        self.deaf: set[Plane] = set()
        self.reject: VersionRejected | None = None
        self.changed = asyncio.Event()
        self._fetch: tuple[SignedManifest, VersionManifest, ChunkFetcher] | None = None
        self._route = b""
        self._hubs: dict[Plane, Hub] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._clock = SystemClock()

    async def __aenter__(self) -> "TrainerCloud":
        peer = Peer(name="trainer-run-solver", role=Role.TRAINER, policy=POLICY)
        public = self.keys.trainers[POLICY].public_key
        for plane in WORK_PLANES:
            hub = self.network.hub(
                "tcp://127.0.0.1:0",
                LinkOptions.for_plane(plane),
                key=self.keys.server,
                authorise=lambda key: peer if key == public else None,
            )
            self._hubs[plane] = hub
            self._tasks.append(asyncio.create_task(self._serve(plane, hub)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.network.close()

    def config(self, **table: object) -> TrainerConfig:
        ports = {plane: hub.port for plane, hub in self._hubs.items()}
        values = {"policy": POLICY, "folder": str(self.folder / "trainer"), **table}
        return TrainerConfig(
            transport=TransportConfig(
                control_port=ports[Plane.CONTROL],
                trajectories_port=ports[Plane.TRAJECTORIES],
                weights_port=ports[Plane.WEIGHTS],
                keys=str(self.folder / "keys"),
            ),
            trainer=TrainerTable(**values),  # type: ignore[arg-type]
        )

    async def train(
        self,
        stop: asyncio.Event | None = None,
        trainers: MakeTrainer = make_trainer,
        **table: object,
    ) -> int:
        """One life of the trainer daemon."""
        return await run_daemon(
            self.config(**table),
            stop=stop or asyncio.Event(),
            on_ready=lambda facts: self.heard.update(["ready"]),
            network=self.network,
            trainers=trainers,
        )

    async def train_until(self, condition: Callable[["TrainerCloud"], bool]) -> None:
        """A life of the daemon that is cut off, as by a crash, once the condition holds."""
        life = asyncio.create_task(self.train())
        waiting = asyncio.create_task(self.until(condition))
        await asyncio.wait({life, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), "the trainer ended too early"
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)

    async def until(self, condition: Callable[["TrainerCloud"], bool]) -> None:
        """Return once the condition holds; looked at after each message."""
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    # ---- services --------------------------------------------------------------------------

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
                self.heard[type(message).__name__] += 1
                if plane not in self.deaf:
                    await answer(hub, inbound.route, message, payload)
                self.changed.set()

    async def _control(
        self, hub: Hub, route: bytes, message: Message, payload: list[bytes]
    ) -> None:
        for reply in self.scheduler.take(message):
            self._send(hub, route, reply)

    async def _trajectories(
        self, hub: Hub, route: bytes, message: Message, payload: list[bytes]
    ) -> None:
        assert isinstance(message, BodyRequest)
        for digest in message.digests:
            data = self.scheduler.bodies.get(digest)
            reply = Body(digest=digest, found=data is not None)
            self._send(hub, route, reply, [] if data is None else [data])

    async def _weights(
        self, hub: Hub, route: bytes, message: Message, payload: list[bytes]
    ) -> None:
        match message:
            case VersionOffer(manifest=manifest, signature=signature, key_id=key_id):
                signed = SignedManifest(manifest=manifest, signature=signature, key_id=key_id)
                await self._offered(hub, route, signed)
            case Chunk(digest=digest, index=index, part_bytes=part) if self._fetch is not None:
                fetcher = self._fetch[2]
                accepted = fetcher.chunk_arrived(
                    "trainer", digest, index, part, payload[0], self._now()
                )
                if accepted is not None:
                    blobs = self.versions.blobs(POLICY)
                    blobs.write_chunk(accepted.entry, accepted.index, accepted.data)
                    if accepted.file_complete:
                        blobs.complete(accepted.entry)
                self._go_on(hub, route)

    async def _offered(self, hub: Hub, route: bytes, signed: SignedManifest) -> None:
        manifest = verify(signed, self.trusted)
        if self.reject is not None and manifest.version == self.reject.version:
            rejection, self.reject = self.reject, None
            self._send(hub, route, rejection)
            return
        if self._fetch is not None and route != self._route:
            self._fetch[2].source_up("trainer")
        self._route = route
        if self._fetch is None or self._fetch[0] != signed:
            known = {stored.version: stored for stored in self.versions.versions(POLICY)}
            entries = () if manifest.version in known else manifest.files
            sources = [ChunkSource("trainer", DeliveryWindow())]
            self._fetch = (signed, manifest, ChunkFetcher(entries, sources=sources))
        self._go_on(hub, route)

    def _go_on(self, hub: Hub, route: bytes) -> None:
        assert self._fetch is not None
        signed, manifest, fetcher = self._fetch
        for _, request in fetcher.next_requests(self._now()):
            self._send(hub, route, request)
        if not fetcher.done:
            return
        self._fetch = None
        try:
            self.versions.add_version(signed)
        except ProtocolError as error:
            rejected = VersionRejected(
                policy=POLICY, version=manifest.version, code=error.code, message=str(error)
            )
            self._send(hub, route, rejected)
            return
        self._send(hub, route, VersionDurable(policy=POLICY, version=manifest.version))

    def _send(
        self, hub: Hub, route: bytes, message: Message, payload: list[bytes] | None = None
    ) -> None:
        try:
            hub.send(route, encode(message, payload or ()))
        except LinkError as error:
            self.heard[error.code] += 1

    def _now(self) -> float:
        return self._clock.monotonic_s()
