"""What every engine does alike: the fake one here, the torch one among the slow tests, those
with vLLM where vLLM is (`make test-vllm`)."""

import asyncio
import importlib.util
import itertools
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio

from cloud_trainer.numpy_trainer import make_numpy_model
from edge_agent.config import FakeEngineTable
from edge_agent.engine import Completion, Engine, GenerationRequest, SamplingParams
from edge_agent.engines.fake import FakeEngine
from transport.errors import GenerationFailed, ModelError, WeightApplyFailed
from transport.weights.folder import read_model_folder
from transport.weights.patch import CellList, CellRun, Patch, patched, whole
from transport.weights.tensors import TensorBytes

A, B = "run/a", "run/b"
SLOTS = 4
names = itertools.count()


class Case:
    """An engine with policy A loaded from ``folder`` as version 3."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder

    def request(
        self, n: int = 2, policy: str = A, name: str = "", **changes: Any
    ) -> GenerationRequest:
        values: dict[str, Any] = {"max_new_tokens": 12, "seed": 5}
        return GenerationRequest(
            request_id=name or f"request {next(names)}",
            policy=policy,
            prompt_tokens=self.engine.encode(A, "3 + 4 ="),
            n=n,
            sampling=SamplingParams(**{**values, **changes}),
        )

    def weights(self, policy: str = A) -> dict[str, TensorBytes]:
        return dict(self.engine.read_weights(policy))

    def changed(self) -> Patch:
        """One tensor rotated by one cell, and a few cells of another: all finite."""
        (first, one), (second, other), *_ = self.weights().items()
        cells, positions = one.cells(), np.arange(1, other.cells().size, 3, dtype=np.int32)
        return {
            first: (CellRun(0, np.roll(cells, 1)),),
            second: (CellList(positions, other.cells()[positions - 1]),),
        }

    def after(self, patch: Patch) -> dict[str, TensorBytes]:
        """The folder's weights with a patch."""
        folder = read_model_folder(self.folder)
        return {name: patched(tensor, patch.get(name, ())) for name, tensor in folder.items()}


def fake_case(folder: Path) -> Case:
    """Sequences as long as they may be, at a rate that leaves time to interrupt long ones."""
    settings = FakeEngineTable(tokens_per_s=4000.0, first_token_s=0.0, mean_tokens=1e4)
    return Case(FakeEngine(SLOTS, settings), make_numpy_model(folder, seed=1))


def torch_case(folder: Path, swap: Literal["reference", "in_place"] = "reference") -> Case:
    from torch_models import random_qwen3

    from edge_agent.engines.torch_engine import TorchEngine

    return Case(TorchEngine(SLOTS, swap=swap), random_qwen3(folder))


def torch_in_place_case(folder: Path) -> Case:
    return torch_case(folder, "in_place")


def vllm_case(folder: Path) -> Case:
    """Float32, so that company does not change what is drawn."""
    from torch_models import served_qwen3

    from edge_agent.config import VllmTable
    from edge_agent.engines.vllm_engine import VllmEngine

    table = VllmTable(
        dtype="float32", max_model_len=512, kv_cache_gib=0.05, max_sequences=8, enforce_eager=True
    )
    return Case(VllmEngine(SLOTS, table), served_qwen3(folder))


def openai_case(folder: Path, urls: Sequence[str]) -> Case:
    """Each policy has a server of its own."""
    from edge_agent.config import OpenaiServer, OpenaiTable
    from edge_agent.engines.openai_engine import OpenaiEngine

    a, b = (OpenaiServer(base_url=url, weight_updates="vllm") for url in urls)
    return Case(OpenaiEngine(SLOTS, OpenaiTable(servers={A: a, B: b})), folder)


CASES = {
    "fake": fake_case,
    "torch": torch_case,
    "torch-in-place": torch_in_place_case,
    "vllm": vllm_case,
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(120)]
REAL = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
PARAMS = ["fake", *(pytest.param(name, marks=SLOW) for name in ("torch", "torch-in-place"))]
if importlib.util.find_spec("vllm") is not None:
    PARAMS += [pytest.param(name, marks=REAL) for name in ("vllm", "openai")]


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """Engines whose processes outlive a test: they take long to start."""
    made: dict[str, Case] = {}
    yield made
    for case in made.values():
        asyncio.run(case.engine.close())


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A model's folder, and two real vLLM servers that serve it."""
    from torch_models import served_qwen3
    from vllm_server import TAKES_WEIGHTS, VllmServer

    place = tmp_path_factory.mktemp("servers")
    folder = served_qwen3(place / "model")
    exact = (*TAKES_WEIGHTS, "--dtype", "float32", "--max-model-len", "512")
    started = [VllmServer(folder, name, place / name, *exact) for name in ("a", "b")]
    for server in started:
        server.wait()
    yield folder, [server.url for server in started]
    for server in started:
        server.stop()


@pytest_asyncio.fixture(params=PARAMS)
async def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    lasting: dict[str, Case],
) -> AsyncIterator[Case]:
    lasts = request.param == "vllm"
    if request.param == "openai":
        made = openai_case(*request.getfixturevalue("servers"))
    else:
        made = lasting.get(request.param) or CASES[request.param](
            tmp_path_factory.mktemp("c") / "model"
        )
    await made.engine.start()
    if lasts:
        lasting[request.param] = made
        made.engine.when_freed = None
    else:
        assert made.engine.version(A) is None
    await made.engine.load_policy(A, made.folder, 3)
    yield made
    if lasts:
        await made.engine.unload_policy(B)
    else:
        await made.engine.close()


async def until_tokens(engine: Engine, count: int) -> None:
    """Wait until the engine has generated so many more tokens."""
    goal = engine.stats().tokens_generated + count
    while engine.stats().tokens_generated < goal:
        await asyncio.sleep(0.002)


async def until_idle(engine: Engine) -> None:
    while engine.stats().running or engine.stats().waiting:
        await asyncio.sleep(0.002)


def check_shape(completion: Completion, most: int) -> None:
    count = len(completion.tokens)
    assert 1 <= count <= most
    assert len(completion.logprobs) == len(completion.versions) == count
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in completion.logprobs)
    assert completion.finish_reason in {"stop", "length"}
    assert completion.finish_reason == "stop" or count == most


@pytest.mark.asyncio
async def test_completions_are_whole_and_of_the_loaded_version(case: Case) -> None:
    completions = await case.engine.generate(case.request(n=3))
    assert len(completions) == 3
    for completion in completions:
        check_shape(completion, 12)
        assert set(completion.versions) == {3}
        assert isinstance(case.engine.decode(A, completion.tokens), str)
    assert case.engine.version(A) == 3


@pytest.mark.asyncio
async def test_a_request_is_repeatable_and_its_seed_matters(case: Case) -> None:
    first = await case.engine.generate(case.request(name="same"))
    again = await case.engine.generate(case.request(name="same"))
    other = await case.engine.generate(case.request(name="same", seed=6))
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert [c.tokens for c in first] != [c.tokens for c in other]
    assert first[0].tokens != first[1].tokens


@pytest.mark.asyncio
async def test_greedy_takes_the_same_way_in_any_company(case: Case) -> None:
    alone = await case.engine.generate(case.request(n=1, name="greedy", temperature=0.0))
    company = [case.engine.generate(case.request()) for _ in range(2)]
    again, *_ = await asyncio.gather(
        case.engine.generate(case.request(n=1, name="greedy", temperature=0.0)), *company
    )
    assert again[0].tokens == alone[0].tokens


@pytest.mark.asyncio
async def test_more_sequences_than_slots_run_in_waves(case: Case) -> None:
    before = case.engine.stats().tokens_generated
    results = await asyncio.gather(*(case.engine.generate(case.request(n=5)) for _ in range(3)))
    assert [len(result) for result in results] == [5, 5, 5]
    await until_idle(case.engine)
    stats = case.engine.stats()
    drawn = sum(len(c.tokens) for result in results for c in result)
    assert stats.tokens_generated == before + drawn
    assert stats.busy_s > 0


@pytest.mark.asyncio
async def test_it_tells_on_the_loop_when_sequences_have_left(case: Case) -> None:
    """The last call comes once nothing runs any more, however the requests ended."""
    seen: list[int] = []
    told = asyncio.Event()

    def freed() -> None:
        asyncio.get_running_loop()
        seen.append(case.engine.stats().running)
        told.set()

    case.engine.when_freed = freed
    await case.engine.generate(case.request(n=2))
    async with asyncio.timeout(5.0):
        while not seen or seen[-1]:
            told.clear()
            await told.wait()
    seen.clear()
    cancelled = asyncio.create_task(case.engine.generate(case.request(max_new_tokens=400)))
    await until_tokens(case.engine, 4)
    cancelled.cancel()
    async with asyncio.timeout(20.0):
        while not seen or seen[-1]:
            told.clear()
            await told.wait()


QUESTION = {"role": "user", "content": "3 + 4 ="}


@pytest.mark.asyncio
async def test_a_conversation_goes_on_behind_what_was_drawn(case: Case) -> None:
    """Token for token what the template makes of the whole, whether or not the end was drawn."""
    engine = case.engine
    asked = engine.encode_chat(A, [QUESTION])
    assert asked == engine.encode(A, "3 + 4 =")
    more = [{"role": "tool", "content": "12"}, {"role": "user", "content": "And 5 + 5 =?"}]
    whole = engine.encode_chat(A, [QUESTION, {"role": "assistant", "content": "7"}, *more])
    open_answer = engine.encode_chat(A, [QUESTION, {"role": "assistant", "content": "7"}])
    behind = engine.encode_next(A, (), more)
    assert whole[-len(behind) :] == behind
    answer = whole[len(asked) : -len(behind)]
    assert engine.decode(A, answer) == "7"
    assert whole == (*asked, *answer, *engine.encode_next(A, answer, more))
    end = behind[0]
    assert whole == (*asked, *answer, end, *engine.encode_next(A, (*answer, end), more))
    assert open_answer[: len(asked) + len(answer) + 1] == (*asked, *answer, end)
    assert engine.encode_chat(A, [{"role": "system", "content": "Be brief."}, QUESTION]) != asked


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"role": "user", "content": ["3 + 4 ="]}], [{"content": "3 + 4 ="}]],
)
@pytest.mark.asyncio
async def test_messages_that_make_no_conversation_are_refused(
    case: Case, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(GenerationFailed):
        case.engine.encode_chat(A, messages)
    with pytest.raises(GenerationFailed):
        case.engine.encode_next(A, (), messages)
    with pytest.raises(GenerationFailed, match=B):
        case.engine.encode_chat(B, [QUESTION])


@pytest.mark.asyncio
async def test_a_stop_text_ends_a_sequence_with_the_token_that_completes_it(case: Case) -> None:
    """Alone and in company, in each sequence where its text comes up, and nowhere else."""
    most = {"max_new_tokens": 60, "temperature": 1.0}
    free = await case.engine.generate(case.request(n=6, name="stop", **most))
    texts = [case.engine.decode(A, c.tokens) for c in free]
    longest = max(texts, key=len)
    middle = len(longest) // 2
    stop = (longest[middle : middle + 2] or longest[-1:], "\N{SNOWMAN} never")
    plain = [case.request(n=2, **most) for _ in range(2)]
    stopped, *_ = await asyncio.gather(
        case.engine.generate(case.request(n=6, name="stop", stop=stop, **most)),
        *map(case.engine.generate, plain),
    )
    assert any(stop[0] in text for text in texts)
    for first, ended in zip(free, stopped, strict=True):
        check_shape(ended, 60)
        assert ended.tokens == first.tokens[: len(ended.tokens)]
        if stop[0] in case.engine.decode(A, first.tokens):
            assert ended.finish_reason == "stop"
            assert stop[0] in case.engine.decode(A, ended.tokens)
            assert stop[0] not in case.engine.decode(A, ended.tokens[:-1])
        else:
            assert (ended.tokens, ended.finish_reason) == (first.tokens, first.finish_reason)


@pytest.mark.parametrize("stop", [("",), ("x" * 1000,), ("x",) * 99])
@pytest.mark.asyncio
async def test_stop_texts_are_bounded(case: Case, stop: tuple[str, ...]) -> None:
    with pytest.raises(GenerationFailed, match="stop text"):
        await case.engine.generate(case.request(stop=stop))


@pytest.mark.asyncio
async def test_weights_come_back_exactly_as_they_came_in(case: Case) -> None:
    assert case.weights() == dict(sorted(read_model_folder(case.folder).items()))
    change = case.changed()
    pause_s = await case.engine.apply(A, 4, change)
    assert pause_s >= 0
    assert case.engine.version(A) == 4
    assert case.weights() == case.after(change)
    await case.engine.apply(A, 4, change)
    assert case.weights() == case.after(change)
    (completion,) = await case.engine.generate(case.request(n=1))
    assert set(completion.versions) == {4}


@pytest.mark.asyncio
async def test_a_later_change_of_the_same_cells_wins(case: Case) -> None:
    name, tensor = next(iter(case.weights().items()))
    cells = tensor.cells()
    twice = {name: (CellRun(1, cells[:2]), CellList(np.array([2]), cells[5:6]))}
    await case.engine.apply(A, 4, twice)
    read = case.engine.read_cells(A, name, np.array([0, 1, 2, 3]))
    assert read.tolist() == [cells[0], cells[0], cells[5], cells[3]]


@pytest.mark.asyncio
async def test_single_cells_are_read_in_the_published_type(case: Case) -> None:
    patch = case.changed()
    await case.engine.apply(A, 4, patch)
    for name, tensor in case.after(patch).items():
        positions = np.array([tensor.cells().size - 1, 0, 7])
        read = case.engine.read_cells(A, name, positions)
        assert read.dtype == tensor.cells().dtype
        assert read.tolist() == tensor.cells()[positions].tolist()
    for bad in ("no.such.weight", name):
        with pytest.raises(WeightApplyFailed):
            case.engine.read_cells(A, bad, np.array([tensor.cells().size]))
    with pytest.raises(GenerationFailed, match=B):
        case.engine.read_cells(B, name, np.array([0]))


@pytest.mark.parametrize("fault", ["name", "range", "run", "type", "order"])
@pytest.mark.asyncio
async def test_changes_that_do_not_fit_change_nothing(case: Case, fault: str) -> None:
    before = case.weights()
    good = case.changed()
    (name, (run, *_)), *_ = good.items()
    two, end = run.values[:2], run.values.size
    wrong: dict[str, Patch] = {
        "name": {"no.such.weight": (run,)},
        "range": {name: (CellList(np.array([3, end]), two),)},
        "run": {name: (CellRun(end - 1, two),)},
        "type": {name: (CellRun(0, two.view(np.uint8)),)},
        "order": {name: (CellList(np.array([3, 2]), two),)},
    }
    with pytest.raises(WeightApplyFailed):
        await case.engine.apply(A, 4, {**dict(reversed(good.items())), **wrong[fault]})
    assert case.engine.version(A) == 3
    assert case.weights() == before


@pytest.mark.asyncio
async def test_what_is_not_loaded_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(GenerationFailed, match=B):
        await case.engine.generate(case.request(policy=B))
    with pytest.raises(WeightApplyFailed, match=B):
        await case.engine.apply(B, 1, {})
    assert case.engine.version(B) is None
    with pytest.raises(ModelError, match="nowhere"):
        await case.engine.load_policy(B, tmp_path / "nowhere", 0)
    assert case.engine.version(B) is None


@pytest.mark.asyncio
async def test_two_policies_live_side_by_side(case: Case) -> None:
    await case.engine.load_policy(B, case.folder, 0)
    await case.engine.apply(A, 9, case.changed())
    ours, theirs = await asyncio.gather(
        case.engine.generate(case.request(policy=A)), case.engine.generate(case.request(policy=B))
    )
    assert {v for c in ours for v in c.versions} == {9}
    assert {v for c in theirs for v in c.versions} == {0}
    assert case.weights(B) == read_model_folder(case.folder)


@pytest.mark.asyncio
async def test_a_policy_loaded_anew_starts_over(case: Case) -> None:
    await case.engine.apply(A, 4, case.changed())
    await case.engine.load_policy(A, case.folder, 7)
    assert case.engine.version(A) == 7
    assert case.weights() == read_model_folder(case.folder)


@pytest.mark.asyncio
async def test_a_policy_can_be_unloaded_and_loaded_again(case: Case) -> None:
    await case.engine.load_policy(B, case.folder, 1)
    before = await case.engine.generate(case.request(name="before", policy=B))
    await case.engine.unload_policy(A)
    await case.engine.unload_policy(A)
    await case.engine.unload_policy("run/unheard-of")
    assert (case.engine.version(A), case.engine.version(B)) == (None, 1)
    with pytest.raises(GenerationFailed, match=A):
        case.engine.encode(A, "3 + 4 =")
    with pytest.raises(WeightApplyFailed, match=A):
        await case.engine.apply(A, 4, whole(case.weights(B)))
    await case.engine.load_policy(A, case.folder, 5)
    again = await case.engine.generate(case.request(name="before", policy=B))
    assert [c.tokens for c in again] == [c.tokens for c in before]
    (completion,) = await case.engine.generate(case.request(n=1))
    assert set(completion.versions) == {5}


@pytest.mark.asyncio
async def test_unloading_takes_nothing_from_what_is_in_flight(case: Case) -> None:
    task = asyncio.create_task(case.engine.generate(case.request(n=4, max_new_tokens=200)))
    await until_tokens(case.engine, 8)
    await case.engine.unload_policy(A)
    completions = await task
    assert {version for c in completions for version in c.versions} == {3}
    for completion in completions:
        check_shape(completion, 200)


@pytest.mark.asyncio
async def test_sequences_in_flight_go_on_through_a_swap(case: Case) -> None:
    change = case.changed()
    task = asyncio.create_task(case.engine.generate(case.request(n=4, max_new_tokens=400)))
    await until_tokens(case.engine, 8)
    await case.engine.apply(A, 4, change)
    completions = await task
    assert {version for c in completions for version in c.versions} == {3, 4}
    for completion in completions:
        check_shape(completion, 400)
        assert list(completion.versions) == sorted(completion.versions)


@pytest.mark.asyncio
async def test_a_cancelled_request_leaves_and_others_go_on(case: Case) -> None:
    gone = asyncio.create_task(case.engine.generate(case.request(n=6, max_new_tokens=400)))
    stays = asyncio.create_task(case.engine.generate(case.request(n=1, max_new_tokens=50)))
    await until_tokens(case.engine, 4)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(await stays) == 1
    await until_idle(case.engine)


@pytest.mark.asyncio
async def test_closing_fails_what_is_in_flight_and_refuses_more(case: Case) -> None:
    task = asyncio.create_task(case.engine.generate(case.request(n=6, max_new_tokens=400)))
    await until_tokens(case.engine, 4)
    await case.engine.close()
    with pytest.raises(GenerationFailed):
        await task
    with pytest.raises(GenerationFailed):
        await case.engine.generate(case.request())
    await case.engine.close()
