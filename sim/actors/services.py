"""The trajectory log and the weight store, modelled: they speak the messages of the real ones and
keep their promises (durable before acknowledged, announced until accepted), in memory.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sim.actors.modelled import ModelledPlan, Spooled
from sim.actors.names import LOG, SCHEDULER, STORE
from sim.kernel import Alarm, Kernel
from sim.ledger import Ledger
from sim.network import Network
from sim.workload import Steps, Workload
from transport.messages import (
    BodiesGone,
    BodiesReleased,
    Body,
    BodyRequest,
    ChunkRequest,
    Hello,
    Message,
    PlanStep,
    Role,
    SummariesAccepted,
    TrajectoriesStored,
    TrajectoryAck,
    TrajectoryOffer,
    TrajectoryPut,
    VersionAccepted,
    VersionDurable,
    VersionOffer,
    VersionRef,
    VersionStored,
    WeightsPlan,
    WeightsRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ANNOUNCE_AGAIN_S: Final = 5.0
_REST_OF_MANIFEST: Final = b"\0" * 8192
"""A real manifest lists files and chunk hashes; about so much of it."""


class ModelledVersion(msgspec.Struct, frozen=True):
    """What stands in a modelled ``VersionOffer``."""

    policy: str
    version: int
    parent: int | None
    step: int
    digest: str
    delta_bytes: int


class TrajectoryLogActor:
    """Bodies by digest; ``_unaccepted`` are those that the scheduler has not accepted. What comes
    again after its release is acknowledged and not stored."""

    def __init__(
        self, *, kernel: Kernel, network: Network, workload: Workload, ledger: Ledger
    ) -> None:
        self.bodies: dict[str, Spooled] = {}
        self._released: set[str] = set()
        self._kernel = kernel
        self._network = network
        self._workload = workload
        self._ledger = ledger
        self._unaccepted: dict[str, float] = {}
        self._again = Alarm(kernel, self._announce_again)

    def start(self) -> None:
        self._network.send(LOG, SCHEDULER, Hello(role=Role.SERVICE, incarnation=1, build="sim"))

    def receive(self, source: str, message: Message, extra: object) -> None:
        match message:
            case TrajectoryPut(summary=summary):
                assert isinstance(extra, Spooled)  # noqa: S101 - what our agents send
                summary = msgspec.structs.replace(summary, agent=source)
                put = (source, extra._replace(summary=summary))
                self._kernel.after(self._workload.store_s, self._stored, put)
            case TrajectoryOffer():
                assert isinstance(extra, tuple)  # noqa: S101 - what our agents send
                for body in extra:
                    self._offered(source, body)
            case BodyRequest(digests=digests):
                for digest in digests:
                    found = self.bodies.get(digest)
                    size_bytes = 0 if found is None else found.summary.size_bytes
                    self._network.send(
                        LOG,
                        source,
                        Body(digest=digest, found=found is not None),
                        payload_bytes=size_bytes,
                        extra=found,
                    )
            case SummariesAccepted(digests=digests):
                for digest in digests:
                    self._unaccepted.pop(digest, None)
            case BodiesReleased(digests=digests):
                for digest in digests:
                    self._unaccepted.pop(digest, None)
                    self._released.add(digest)
                    gone = self.bodies.pop(digest, None)
                    if gone is not None:
                        self._ledger.body_gone(digest, gone.tokens)
                self._network.send(LOG, SCHEDULER, BodiesGone(digests=digests))
            case _:
                pass  # welcomes and pongs

    def _offered(self, agent: str, offered: Spooled) -> None:
        """Ask for a large body; it comes in chunks, as fast as the link brings them."""
        summary = msgspec.structs.replace(offered.summary, agent=agent)
        digest, put = summary.digest, (agent, offered._replace(summary=summary))
        if digest in self.bodies or digest in self._released:
            self._stored(put)
            return

        def asked(_: object) -> None:
            self._network.transfer(agent, LOG, summary.size_bytes, arrived)

        def arrived() -> None:
            self._kernel.after(self._workload.store_s, self._stored, put)

        self._network.send(LOG, agent, ChunkRequest(digest=digest, indices=(0,)))
        self._kernel.after(self._network.delay_s(LOG, agent), asked)

    def _stored(self, put: tuple[str, Spooled]) -> None:
        agent, body = put
        summary = body.summary
        if summary.digest not in self.bodies and summary.digest not in self._released:
            self.bodies[summary.digest] = body
            self._ledger.turnaround_s.append(self._kernel.now - body.accepted_s)
            if self._ledger.recorder is not None:
                self._ledger.recorder.stored(summary.digest)
            self._announce((summary.digest,))
        ack = TrajectoryAck(attempt=summary.attempt, digest=summary.digest)
        self._network.send(LOG, agent, ack)

    def _announce(self, digests: tuple[str, ...]) -> None:
        now = self._kernel.now
        for digest in digests:
            self._unaccepted[digest] = now
        summaries = tuple(self.bodies[digest].summary for digest in digests)
        self._network.send(LOG, SCHEDULER, TrajectoriesStored(summaries=summaries))
        self._again.set(now + ANNOUNCE_AGAIN_S)

    def _announce_again(self) -> None:
        before = self._kernel.now - ANNOUNCE_AGAIN_S
        late = tuple(digest for digest, at_s in self._unaccepted.items() if at_s <= before)
        if late:
            self._announce(late)
        elif self._unaccepted:
            self._again.set(self._kernel.now + ANNOUNCE_AGAIN_S)


class _Stored(NamedTuple):
    announcement: VersionStored
    accepted: bool


class WeightStoreActor:
    """Versions of all policies; standing requests are answered as soon as there is news.

    The quickest way from what an agent has to the newest version is the union of the changes in
    between (``Steps.gap_bytes``), never more than the whole model.
    """

    def __init__(
        self, *, kernel: Kernel, network: Network, workload: Workload, deltas: Steps | None = None
    ) -> None:
        self._kernel = kernel
        self._network = network
        self._workload = workload
        self._deltas = deltas or Steps(workload)
        self._versions: dict[str, dict[int, _Stored]] = {}
        self._newest: dict[str, int] = {}
        self.on_durable: Callable[[str, int, int], None] | None = None
        """Called with policy, version and step of each version that has become durable."""
        self._standing: dict[tuple[str, str], WeightsRequest] = {}
        self._taking: dict[tuple[str, int], int] = {}
        self._again = Alarm(kernel, self._announce_again)

    def start(self) -> None:
        self._network.send(STORE, SCHEDULER, Hello(role=Role.SERVICE, incarnation=1, build="sim"))

    def ref(self, policy: str, version: int) -> VersionRef:
        stored = self._versions[policy][version].announcement
        return VersionRef(version=version, digest=stored.digest)

    def newest(self, policy: str) -> int | None:
        return self._newest.get(policy)

    def adopt(self, version: ModelledVersion) -> None:
        """Have a version from the beginning, without anybody sending it."""
        self._keep(version)

    def receive(self, source: str, message: Message, _: object) -> None:
        match message:
            case VersionOffer(manifest=manifest):
                self._offered(source, _decode(manifest))
            case WeightsRequest():
                self._standing[source, message.policy] = message
                self._answer(source, message)
            case VersionAccepted(policy=policy, version=number):
                stored = self._versions[policy][number]
                self._versions[policy][number] = stored._replace(accepted=True)
            case _:
                pass  # welcomes and pongs

    def _offered(self, trainer: str, offered: ModelledVersion) -> None:
        key = (offered.policy, offered.version)
        if offered.version in self._versions.get(offered.policy, {}):
            durable = VersionDurable(policy=offered.policy, version=offered.version)
            self._network.send(STORE, trainer, durable)
            return
        life = self._network.life(trainer)
        if self._taking.get(key) == life:
            return
        # An upload whose trainer died in the middle of it begins anew.
        self._taking[key] = life

        def arrived() -> None:
            self._kernel.after(self._workload.store_s, self._durable, (trainer, offered))

        self._network.transfer(trainer, STORE, offered.delta_bytes, arrived)

    def _durable(self, taken: tuple[str, ModelledVersion]) -> None:
        trainer, version = taken
        if self._taking.pop((version.policy, version.version), None) is None:
            return  # another upload of the same version was faster
        if self.on_durable is not None:
            self.on_durable(version.policy, version.version, version.step)
        self._keep(version)
        durable = VersionDurable(policy=version.policy, version=version.version)
        self._network.send(STORE, trainer, durable)
        for (agent, policy), request in tuple(self._standing.items()):
            if policy == version.policy:
                self._answer(agent, request)

    def _keep(self, version: ModelledVersion) -> None:
        announcement = VersionStored(
            policy=version.policy,
            version=version.version,
            parent=version.parent,
            step=version.step,
            digest=version.digest,
            delta_bytes=version.delta_bytes,
            full_bytes=self._workload.full_bytes,
        )
        self._versions.setdefault(version.policy, {})[version.version] = _Stored(
            announcement, accepted=False
        )
        self._newest[version.policy] = max(
            version.version, self._newest.get(version.policy, version.version)
        )
        self._network.send(STORE, SCHEDULER, announcement)
        self._again.set(self._kernel.now + ANNOUNCE_AGAIN_S)

    def _announce_again(self) -> None:
        open_ones = [
            stored.announcement
            for versions in self._versions.values()
            for stored in versions.values()
            if not stored.accepted
        ]
        for announcement in open_ones:
            self._network.send(STORE, SCHEDULER, announcement)
        if open_ones:
            self._again.set(self._kernel.now + ANNOUNCE_AGAIN_S)

    def _answer(self, agent: str, request: WeightsRequest) -> None:
        policy = request.policy
        newest = self._newest.get(policy)
        if newest is None:
            return
        target = newest if request.upto is None else min(newest, request.upto)
        have = request.have_version
        versions = self._versions[policy]
        if target not in versions or (have is not None and have >= target):
            return
        del self._standing[agent, policy]
        size_bytes = self._workload.full_bytes
        if have in versions:
            steps = versions[have].announcement.step, versions[target].announcement.step
            size_bytes = min(size_bytes, self._deltas.gap_bytes(*steps))
        digest = versions[target].announcement.digest
        modelled = ModelledPlan(size_bytes, digest, follows=have in versions)
        step = PlanStep(
            manifest=msgspec.msgpack.encode(modelled),
            signature=_REST_OF_MANIFEST,
            key_id="sim",
            files=("delta",),
        )
        plan = WeightsPlan(policy=policy, version=target, steps=(step,))
        self._network.send(STORE, agent, plan)


def _decode(manifest: bytes) -> ModelledVersion:
    return msgspec.msgpack.decode(manifest, type=ModelledVersion)
