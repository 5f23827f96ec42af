"""The agent's weights client with real files and an engine: what the engine is given, and when."""

import asyncio
import random

import msgspec
import pytest
import pytest_asyncio
from published_versions import PLACE, POLICY, TRUSTED, Versions
from structlog.testing import capture_logs

from edge_agent.core.effects import DiscardCopy, FetchPlan, OpenCopy, SwapWeights, VerifyWeights
from edge_agent.core.events import (
    CopyDiscarded,
    CopyOpened,
    PlanStaged,
    StageFailed,
    SwapFailed,
    VerifyFailed,
    WeightsSwapped,
    WeightsVerified,
)
from edge_agent.engine import WeightsHidden
from edge_agent.engines.fake import FakeEngine
from edge_agent.weight_copy import WeightCopies
from edge_agent.weights_client import WeightsClient
from transport.chunk_parts import ChunkSource
from transport.delivery_window import DeliveryWindow
from transport.errors import EngineCrashed
from transport.messages import Chunk, PlanStep, WeightsPlan
from transport.runtime.clock import SystemClock
from transport.weights.manifest import describe_file
from transport.weights.manifest_folder import StoredManifest
from transport.weights.patch import whole
from transport.weights.publication import build_delta_version, build_version0


class Store:
    """The only source of chunks: all files of ``versions``."""

    rate_bytes_s = 0.0

    def __init__(self, versions):
        self.versions = versions
        self.client = None
        self.asked = 0
        self._window = DeliveryWindow()

    def sources(self):
        return [ChunkSource("origin", self._window)]

    def is_up(self, source):
        return True

    def busy(self, busy):
        pass

    def send(self, source, request):
        publications = self.versions.publications.values()
        published = [entry for made in publications for entry in made.manifest.files]
        (entry,) = {e.digest: e for e in published if e.digest == request.digest}.values()
        data = self.versions.file(entry)
        for index in request.indices:
            self.asked += 1
            size = request.part_bytes or entry.chunk_bytes
            chunk = Chunk(digest=request.digest, index=index, part_bytes=request.part_bytes)
            body = data[index * size : (index + 1) * size]
            asyncio.get_running_loop().call_soon(self.client.arrived, "origin", chunk, [body])


class Agent:
    """A client, told what to do in the core's words."""

    def __init__(self, tmp_path, versions, engine=None, **local):
        self.engine = FakeEngine(4) if engine is None else engine
        self.copies = WeightCopies(tmp_path / "copies", trusted=TRUSTED)
        self.store = Store(versions)
        self.events = asyncio.Queue()
        self.client = WeightsClient(
            self.engine,
            self.copies,
            self.store,
            clock=SystemClock(),
            rng=random.Random(0),
            feed=self.events.put_nowait,
            refresh_trust=lambda: None,
            local_models=local,
        )
        self.store.client = self.client

    async def do(self, effect):
        async with asyncio.TaskGroup() as tasks:
            self.client.perform(effect, tasks)
        return self.events.get_nowait()

    async def bring(self, plan):
        staged = await self.do(FetchPlan(policy=POLICY, ticket=1, plan=plan))
        assert isinstance(staged, PlanStaged)
        return await self.do(SwapWeights(policy=POLICY, ticket=1))

    def in_engine(self):
        return dict(self.engine.read_weights(POLICY))


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "model", sparse=True)


@pytest_asyncio.fixture
async def agent(tmp_path, versions):
    made = Agent(tmp_path, versions, p=str(versions.folder))
    yield made
    await made.client.close()


def snapshot_plan(versions, target):
    """From nothing by a snapshot that the store made."""
    first = StoredManifest(versions.publications[0].manifest, versions.signed(0))
    manifest = versions.publications[target].manifest
    proof = StoredManifest(manifest, versions.signed(target)).step(())
    entry = describe_file("model.safetensors", "snapshot", b"not fetched")
    catalogue = msgspec.msgpack.encode(msgspec.structs.replace(manifest, files=(entry,)))
    files = PlanStep(manifest=catalogue, signature=b"", key_id="", files=(entry.name,))
    artefacts = first.step(first.manifest.of_kind("artefact"))
    return WeightsPlan(policy=POLICY, version=target, steps=(artefacts, proof, files))


class Away(FakeEngine):
    """Does not start ``times`` times."""

    times = 0

    async def load_policy(self, policy, folder, version, base=None):
        if self.times:
            self.times -= 1
            raise EngineCrashed(f"{policy}: vLLM did not start")
        await super().load_policy(policy, folder, version, base)


@pytest.mark.asyncio
async def test_a_copy_is_kept_while_its_engine_does_not_start(tmp_path, versions):
    agent = Agent(tmp_path, versions, Away(4), p=str(versions.folder))
    agent.engine.times = 3
    swapped = await agent.bring(versions.plan(3))
    assert (swapped.version, agent.in_engine()) == (3, versions.states[3])
    await agent.engine.unload_policy(POLICY)
    agent.engine.times = 3
    opened = await agent.do(OpenCopy(policy=POLICY))
    assert (opened.version, opened.digest) == (3, versions.ref(3).digest)
    await agent.engine.unload_policy(POLICY)
    agent.engine.times = 10**9  # tries end, too
    assert (await agent.do(OpenCopy(policy=POLICY))).version is None
    await agent.client.close()


@pytest.mark.asyncio
async def test_a_copy_that_is_not_wanted_any_more_is_not_waited_for(tmp_path, versions):
    agent = Agent(tmp_path, versions, Away(4), p=str(versions.folder))
    await agent.bring(versions.plan(3))
    await agent.engine.unload_policy(POLICY)
    agent.engine.times = 10**9
    async with asyncio.TaskGroup() as tasks:
        agent.client.perform(OpenCopy(policy=POLICY), tasks)
        agent.client.perform(DiscardCopy(policy=POLICY, unload=True), tasks)
    assert agent.engine.times == 10**9 - 1
    assert agent.events.get_nowait().version is None
    assert isinstance(agent.events.get_nowait(), CopyDiscarded)
    agent.engine.times = 1
    assert (await agent.bring(versions.plan(3))).version == 3
    await agent.client.close()


@pytest.mark.asyncio
async def test_a_local_folder_is_served_instead_of_fetching_a_snapshot(agent, versions):
    swapped = await agent.bring(snapshot_plan(versions, 3))
    assert isinstance(swapped, WeightsSwapped)
    assert (swapped.version, swapped.fetched_bytes, agent.store.asked) == (0, 0, 0)
    later = await agent.bring(versions.plan(3, have=0))
    assert (later.version, later.digest) == (3, versions.ref(3).digest)
    assert later.fetched_bytes == sum(versions.delta(v).size_bytes for v in (1, 2, 3))
    assert agent.in_engine() == versions.states[3]


@pytest.mark.asyncio
async def test_an_engine_that_is_not_trusted_gets_everything(agent, versions):
    await agent.bring(versions.plan(0))
    await agent.engine.apply(POLICY, 7, whole(versions.states[7]))
    assert isinstance(await agent.do(DiscardCopy(policy=POLICY)), CopyDiscarded)
    swapped = await agent.bring(versions.plan(2))
    assert swapped.version == 2
    assert agent.in_engine() == versions.states[2]
    assert agent.engine.version(POLICY) == 2


@pytest.mark.asyncio
async def test_cells_that_the_engine_lost_are_found_and_good_ones_are_confirmed(agent, versions):
    await agent.bring(versions.plan(1))
    check = VerifyWeights(policy=POLICY, ticket=9, rescan=True, read_back=True)
    assert await agent.do(check) == WeightsVerified(policy=POLICY, ticket=9)
    await agent.engine.apply(POLICY, 1, whole(versions.states[8]))
    failed = await agent.do(check)
    assert isinstance(failed, VerifyFailed)
    assert failed.code == "engine.weights"
    assert "cells of 'a'" in failed.detail or "cells of 'b'" in failed.detail


class Hiding(FakeEngine):
    """A server of somebody else's, which shows no weights."""

    def read_weights(self, policy):
        raise WeightsHidden(policy)

    def read_cells(self, policy, tensor, positions):
        raise WeightsHidden(policy)


@pytest.mark.asyncio
async def test_weights_that_cannot_be_read_are_served_but_never_called_verified(tmp_path, versions):
    agent = Agent(tmp_path, versions, Hiding(4))
    with capture_logs() as logs:
        swapped = await agent.bring(versions.plan(0))
        read_back = VerifyWeights(policy=POLICY, ticket=8, rescan=False, read_back=True)
        assert await agent.do(read_back) == WeightsVerified(policy=POLICY, ticket=8)
        both = VerifyWeights(policy=POLICY, ticket=9, rescan=True, read_back=True)
        assert await agent.do(both) == WeightsVerified(policy=POLICY, ticket=9)
    assert (swapped.version, agent.engine.version(POLICY)) == (0, 0)
    assert [one["version"] for one in logs if one["event"] == "weights.unverified"] == [0]
    claims = [one for one in logs if one["event"] == "weights.verified"]
    assert [(one["rescan"], one["read_back"]) for one in claims] == [(True, False)]
    await agent.client.close()


@pytest.mark.asyncio
async def test_a_plan_from_another_version_is_refused_with_its_code(agent, versions):
    await agent.bring(versions.plan(1))
    failed = await agent.do(FetchPlan(policy=POLICY, ticket=2, plan=versions.plan(4, have=2)))
    assert isinstance(failed, StageFailed)
    assert failed.code == "integrity.base"
    assert agent.store.asked == 1
    assert (await agent.bring(versions.plan(4, have=1))).version == 4


class AdapterVersions(Versions):
    """Versions 0 to 3 of an adapter on ``model``, one step each."""

    def __init__(self, model):
        from training_groups import groups_of

        from cloud_trainer.torch_trainer import TorchTrainer

        lora = {"rank": 4, "publish": "adapter"}
        trainer = TorchTrainer({"lr": 1e-2, "warmup_steps": 0, "lora": lora})
        trainer.load(model)
        self.states = {0: trainer.published_state()}
        first = build_version0(
            model, tensors=self.states[0], artefacts=trainer.artefacts(), **PLACE
        )
        self.publications = {0: first}
        self.made = {}
        for version in (1, 2, 3):
            trainer.step(groups_of(version))
            self.states[version] = trainer.published_state()
            self.publications[version] = build_delta_version(
                self.states[version - 1],
                self.states[version],
                version=version,
                parent=version - 1,
                step=version,
                **PLACE,
            )


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_adapter_comes_onto_the_model_that_its_owner_names(tmp_path):
    from torch_models import random_qwen3

    from edge_agent.engines.torch_engine import TorchEngine

    model = random_qwen3(tmp_path / "model")
    versions = AdapterVersions(model)
    for life in range(2):
        agent = Agent(tmp_path, versions, TorchEngine(4), p=str(model))
        await agent.engine.start()
        opened = await agent.do(OpenCopy(policy=POLICY))
        assert isinstance(opened, CopyOpened)
        if life == 0:
            assert opened.version is None
            assert (await agent.bring(versions.plan(0))).version == 0
            assert (await agent.bring(versions.plan(2, have=0))).version == 2
        else:
            assert (opened.version, opened.digest) == (2, versions.ref(2).digest)
            assert (await agent.bring(versions.plan(3, have=2))).version == 3
        version = agent.engine.version(POLICY)
        assert agent.in_engine() == versions.states[version]
        check = VerifyWeights(policy=POLICY, ticket=9, rescan=True, read_back=True)
        assert isinstance(await agent.do(check), WeightsVerified)
        await agent.client.close()
        await agent.engine.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_adapter_without_its_model_or_its_engine_is_refused(tmp_path):
    from torch_models import random_qwen3

    from edge_agent.engines.torch_engine import TorchEngine

    model = random_qwen3(tmp_path / "model")
    versions = AdapterVersions(model)
    other = {"p": str(random_qwen3(tmp_path / "other", seed=1))}
    for number, (engine, local, words) in enumerate(
        (
            (TorchEngine(4), {}, "agent.local_models"),
            (TorchEngine(4), other, "full digest"),
            (FakeEngine(4), {"p": str(model)}, "agent.engine"),
        )
    ):
        agent = Agent(tmp_path / str(number), versions, engine, **local)
        failed = await agent.bring(versions.plan(0))
        assert isinstance(failed, SwapFailed)
        assert words in failed.detail
        await agent.client.close()
