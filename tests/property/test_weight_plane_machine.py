"""Trainer, weight store, relay and agents through any history of publications and faults.

The production parts do the work: the publisher and its outbox, the store's versions, the chunk
fetcher, the agents' copies; only sockets and the engine are small. What must hold: an agent's copy
and engine have the bits of a version that was published, under its number, or it holds nothing and
says why; and once faults stop, every agent reaches the newest version by itself.
"""

import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from signing import signing_key

from cloud_trainer.config import PublicationTable
from cloud_trainer.core.effects import BuildVersion
from cloud_trainer.outbox import Outbox
from cloud_trainer.publisher import Publisher
from edge_agent.weight_copy import WeightCopies
from scheduler.weight_composites import perform
from scheduler.weight_upkeep import Asked
from scheduler.weight_versions import WeightVersions
from transport.chunk_parts import ChunkSource, place_of
from transport.chunks import ChunkFetcher
from transport.delivery_window import DeliveryWindow
from transport.errors import FarflowError, IntegrityError, ParentLost, StoreError
from transport.runtime.clock import SystemClock
from transport.weights.folder import write_model_folder
from transport.weights.manifest import SignedManifest
from transport.weights.patch import patched
from transport.weights.tensors import TensorBytes

KEY = signing_key()
TRUSTED = {KEY.key_id: KEY.public}
POLICY = "r/p"
CELLS = {"a": ("BF16", 1500), "b": ("BF16", 400), "n": ("F32", 30)}
AGENTS = ("one", "two", "three")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
"""Thousands of synced writes: not on a disk."""
FAULTS = st.sampled_from(["none", "none", "corrupt", "reorder", "duplicate", "lie", "cut", "gone"])


def first_weights(rng):
    patterns = {"BF16": (0x3B00, 0x3D00, "<u2"), "F32": (0x3E000000, 0x3F000000, "<u4")}
    tensors = {}
    for name, (dtype, n) in CELLS.items():
        low, high, kind = patterns[dtype]
        tensors[name] = TensorBytes(dtype, (n,), rng.integers(low, high, n, kind).tobytes())
    return tensors


def stepped(tensors, rng):
    new = {}
    for name, tensor in tensors.items():
        cells = tensor.cells().copy()
        where = rng.integers(0, cells.size, max(1, cells.size // 50))
        cells[where] += cells.dtype.type(1)
        new[name] = TensorBytes(tensor.dtype, tensor.shape, cells.tobytes())
    return new


class Engine:
    """What an engine is to the copy: absolute values go in, and it may fail."""

    def __init__(self):
        self.version = None
        self.tensors = {}

    def load(self, version, tensors):
        self.version = version
        self.tensors = {n: TensorBytes(t.dtype, t.shape, bytes(t.data)) for n, t in tensors.items()}

    def apply(self, version, patch):
        self.tensors = {n: patched(t, patch.get(n, ())) for n, t in self.tensors.items()}
        self.version = version


class Agent:
    def __init__(self, folder):
        self.folder = folder
        self.engine = Engine()
        self.reason = "new"
        self.copies = self.opened()

    def opened(self):
        return WeightCopies(self.folder, trusted=TRUSTED, fold_every=3, decode_threads=1)

    def restart(self):
        self.copies.close()
        self.copies = self.opened()
        self.engine = Engine()
        held = self.copies.held().get(POLICY)
        if held is None:
            self.reason = "new"
        else:
            self.engine.load(held.version, self.copies.tensors(POLICY))


class WeightPlane(RuleBasedStateMachine):
    published: ClassVar[dict]

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed):
        self.root = Path(tempfile.mkdtemp(prefix="plane-", dir=MEMORY))
        self.rng, self.random = np.random.default_rng(seed), random.Random(seed)
        self.published = {0: first_weights(self.rng)}
        write_model_folder(self.root / "model", self.published[0], {"config.json": b"{}"})
        self.outbox = Outbox(self.root / "outbox")
        self.checkpoint = (0, 0)  # version and step
        self.head, self.step = 0, 0
        self.store = self.opened_store()
        self.publisher = self.new_publisher(0)
        self.build(BuildVersion(version=0, parent=None, step=0, whole=True))
        self.agents = {name: Agent(self.root / name) for name in AGENTS}
        self.rotten = False

    # ---- trainer and store --------------------------------------------------------------------

    def opened_store(self):
        return WeightVersions(
            self.root / "store",
            trusted=TRUSTED,
            cumulative_every=3,
            keep_versions=4,
            keep_versions_max=8,
        )

    def new_publisher(self, version):
        return Publisher(
            self.outbox, KEY, SystemClock(), run="r", policy=POLICY, model=self.root / "model",
            base_version=version, base=self.published[version], table=PublicationTable(threads=1),
        )  # fmt: skip

    def build(self, order):
        offer, _ = self.publisher.build(order)
        signed = SignedManifest(
            manifest=offer.manifest, signature=offer.signature, key_id=offer.key_id
        )
        blobs = self.store.blobs(POLICY)
        manifest = self.outbox.manifest(order.version)
        self.store.awaits_whole(manifest)  # as the intake does with every offer
        for entry in manifest.files:
            for index in range(len(entry.chunk_digests)):
                data = self.outbox.read_chunk(entry.digest, index)
                blobs.write_chunk(entry, index, data)
            blobs.complete(entry)
        added = self.store.add_version(signed)
        assert added.version == order.version
        assert self.store.add_version(signed).version == order.version  # offered twice

    @rule(count=st.integers(1, 5))
    def publish(self, count):
        for _ in range(count):
            version = self.outbox.highest + 1
            self.step += 1
            new = stepped(self.published[self.head], self.rng)
            self.publisher.capture(self.step, new)
            try:
                self.build(BuildVersion(version=version, parent=self.head, step=self.step))
            except ParentLost:
                self.trainer_dies(whole=True)  # its answer to that refusal
                return
            self.published[version] = new
            self.head = version

    @rule()
    def take_a_checkpoint(self):
        self.checkpoint = (self.head, self.step)

    @rule(whole=st.just(False))
    def trainer_dies(self, whole):
        """It goes on from its checkpoint, whose weights it publishes once more."""
        at, self.step = self.checkpoint
        self.outbox = Outbox(self.root / "outbox")
        self.publisher = self.new_publisher(at)
        self.head = at
        if whole:
            self.outbox.clear()
            self.build(BuildVersion(version=at, parent=None, step=self.step, whole=True))
        if self.outbox.highest > at:
            version = self.outbox.highest + 1
            order = BuildVersion(version=version, parent=at, step=self.step, again=True)
            try:
                self.build(order)
            except ParentLost:
                self.trainer_dies(whole=True)
                return
            self.published[version] = self.published[at]
            self.head = version
            self.checkpoint = (version, self.step)

    @rule()
    def a_version_that_is_not_finite(self):
        tensors = dict(self.published[self.head])
        cells = tensors["a"].cells().copy()
        cells[7] = 0x7FC0
        tensors["a"] = TensorBytes("BF16", tensors["a"].shape, cells.tobytes())
        version, step = self.outbox.highest + 1, self.step + 1
        self.publisher.capture(step, tensors)
        with pytest.raises(IntegrityError, match="'a'"):
            self.publisher.build(BuildVersion(version=version, parent=self.head, step=step))

    @rule()
    def store_dies(self):
        """Not between a rotten file and the next look at it: then the newest weights may be gone
        from disk and memory, and agents wait for the trainer's next version."""
        if self.rotten:
            self.upkeep()
        self.store = self.opened_store()
        build = self.store.way_to_head(POLICY)
        if build is not None:
            self.store.take_head(POLICY, build())

    @rule()
    def upkeep(self):
        held = [
            a.copies.held()[POLICY].version
            for a in self.agents.values()
            if POLICY in a.copies.held()
        ]
        asked = [Asked(version, self.head) for version in held]
        self.store.scrub(POLICY, 1 << 30)
        for _ in range(20):
            job = self.store.next_job(POLICY, asked)
            if job is None:
                break
            try:
                self.store.adopt(perform(job, threading.Event()))
            except (IntegrityError, StoreError) as error:
                self.store.job_failed(POLICY, job, error)
        self.store.maintain(POLICY, acked=held)
        self.rotten = False

    @rule(data=st.data())
    def a_file_of_the_store_rots(self, data):
        """Not the newest delta and not the first version: these have no second source."""
        spared = {e.digest for m in self.store.versions(POLICY)[:1] for e in m.files}
        spared |= {e.digest for m in self.store.versions(POLICY)[-1:] for e in m.files}
        folder = self.store.blobs(POLICY).folder
        files = sorted(f for f in folder.iterdir() if f.name not in spared and f.stat().st_size)
        if files:
            file = data.draw(st.sampled_from(files))
            damaged = bytearray(file.read_bytes())
            damaged[self.random.randrange(len(damaged))] ^= 0x40
            replacement = folder / "rot.tmp"
            replacement.write_bytes(damaged)
            replacement.rename(file)
            self.rotten = True

    # ---- agents -------------------------------------------------------------------------------

    def plan_for(self, agent):
        held = agent.copies.held().get(POLICY)
        return self.store.plan(POLICY, held and held.version, held.digest if held else "")

    def fetch(self, agent, intake, fault):
        """Chunks through the production fetcher, from a relay that may lie and the origin."""
        window = DeliveryWindow(max_window_bytes=1 << 20)
        sources = [ChunkSource("origin", window)]
        if fault == "lie":
            sources.insert(
                0, ChunkSource("relay", DeliveryWindow(max_window_bytes=1 << 20), relay=True)
            )
        fetcher = ChunkFetcher(intake.wanted, intake.present, sources=sources)
        entries = {entry.digest: entry for entry in intake.wanted}
        now, rounds, damaged = 0.0, 0, False
        while not fetcher.done:
            rounds += 1
            assert rounds < 500
            answers = [
                (source, request.digest, index, request.part_bytes)
                for source, request in fetcher.next_requests(now)
                for index in request.indices
            ]
            if fetcher.failed is not None:
                raise StoreError(f"fetch failed: {fetcher.failed}")
            if fault == "reorder":
                self.random.shuffle(answers)
            if fault == "duplicate":
                answers *= 2
            for number, (source, digest, index, part_bytes) in enumerate(answers):
                entry = entries[digest]
                place = place_of(index, part_bytes, entry.chunk_bytes)
                whole = self.store.read_chunk(digest, place.number)
                if whole is None or (fault == "gone" and number % 3 == 2):
                    fetcher.chunk_not_found(source, digest, index, part_bytes)
                    continue
                data = whole[place.start : place.stop]
                if source == "relay" or (fault == "corrupt" and not damaged):
                    data = bytes([data[0] ^ 1]) + data[1:]
                    damaged = True
                accepted = fetcher.chunk_arrived(source, digest, index, part_bytes, data, now)
                if accepted is None:
                    continue
                agent.copies.blobs(POLICY).write_chunk(
                    accepted.entry, accepted.index, accepted.data
                )
                intake.staging.chunk_written(accepted.entry, accepted.index)
                if fault == "cut" and self.random.random() < 0.3:
                    return False
            now += 0.05
            if not answers:
                now = max(now, fetcher.next_deadline() or now)
        if fault == "lie" and "relay" in fetcher.dropped:
            assert fetcher.dropped["relay"] == "relay.wrong_chunk"
        return True

    @rule(name=st.sampled_from(AGENTS), fault=FAULTS, engine_fails=st.booleans())
    def agent_asks(self, name, fault, engine_fails):
        """One turn of an agent: plan, chunks, staging, engine, commit; anything may go wrong."""
        agent = self.agents[name]
        try:
            plan = self.plan_for(agent)
            if plan is None:
                return
            intake = agent.copies.begin(plan)
            if not self.fetch(agent, intake, fault):
                agent.restart()  # killed in mid-transfer
                return
            staged = agent.copies.finish(intake)
        except FarflowError as error:
            agent.reason = error.code
            return
        if agent.engine.version is None:
            agent.copies.commit(staged)
            agent.engine.load(staged.version, agent.copies.tensors(POLICY))
            return
        if engine_fails:
            return  # nothing is committed; the next plan takes back what was staged
        agent.engine.apply(staged.version, staged.changed)
        agent.engine.apply(staged.version, staged.changed)  # twice is harmless
        agent.copies.commit(staged)

    @rule(name=st.sampled_from(AGENTS))
    def agent_dies(self, name):
        self.agents[name].restart()

    @precondition(lambda self: POLICY in self.agents["three"].copies.held())
    @rule()
    def an_agent_loses_its_copy(self):
        agent = self.agents["three"]
        agent.copies.discard(POLICY)
        agent.engine = Engine()
        agent.reason = "discarded"

    # ---- what must hold -----------------------------------------------------------------------

    @invariant()
    def everybody_holds_published_bits_or_nothing(self):
        for agent in self.agents.values():
            held = agent.copies.held().get(POLICY)
            if held is None:
                assert agent.engine.version is None
                assert agent.reason
                continue
            assert agent.engine.version == held.version
            assert agent.engine.tensors == self.published[held.version]
            digest = {m.version: m.digest for m in self.store.versions(POLICY)}[held.version]
            assert held.digest == digest

    def teardown(self):
        if not hasattr(self, "agents"):
            return
        try:
            for agent in self.agents.values():
                self.heal(agent)
                assert agent.copies.held()[POLICY].version == self.outbox.highest
                assert agent.copies.tensors(POLICY) == self.published[self.outbox.highest]
            self.everybody_holds_published_bits_or_nothing()
        finally:
            for agent in self.agents.values():
                agent.copies.close()
            shutil.rmtree(self.root)

    def heal(self, agent):
        """What happens by itself: the agent asks again, the store's upkeep runs."""
        for _ in range(12):
            for name in AGENTS:
                if self.agents[name] is agent:
                    self.agent_asks(name=name, fault="none", engine_fails=False)
            held = agent.copies.held().get(POLICY)
            if held is not None and held.version == self.outbox.highest:
                return
            self.upkeep()


TestWeightPlane = WeightPlane.TestCase
TestWeightPlane.settings = settings(
    max_examples=8,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWeightPlane.pytestmark = [pytest.mark.timeout(60)]
