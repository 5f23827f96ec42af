"""The openai engine on the wire: what it asks a server, and what it makes of every answer. The
server here plays answers; what the real vLLM does is in tests/vllm."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from torch_models import EXAMPLE, VOCABULARY

from edge_agent.config import AgentTable, OpenaiServer, OpenaiTable
from edge_agent.engine import GenerationRequest, SamplingParams, WeightsHidden
from edge_agent.engine_probes import openai_verdict
from edge_agent.engines import openai_engine, openai_served
from edge_agent.engines.openai_engine import TRIES, OpenaiEngine
from edge_agent.engines.openai_stream import Drawing
from edge_agent.engines.openai_wire import Piece, Span
from transport.errors import (
    ConfigError,
    EngineCrashed,
    GenerationFailed,
    ModelError,
    WeightApplyFailed,
)
from transport.weights.folder import read_artefacts, read_model_folder, write_model_folder
from transport.weights.tensors import TensorBytes

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

POLICY = "run/p"
KEY = "secret-key-of-the-server"
DONE = "data: [DONE]\n\n"


def choice(tokens, logprobs, reason):
    return {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
    }


def chunk(tokens, reason=None, **changes):
    made = choice(tokens, [-0.5 - token / 100 for token in tokens], reason)
    return "data: " + json.dumps({"choices": [{**made, **changes}]}) + "\n\n"


GOOD = (chunk([5]), ": a comment\n\n", chunk([6, 7]), chunk([1], "stop"), DONE)


class Played:
    """A server that lists ``models`` and plays ``script``, an answer a request: a status, a list of
    pieces of a stream, or None: it hangs. At the end of the script all is good."""

    def __init__(self):
        self.models = [{"id": "served", "root": "somewhere", "max_model_len": 64}]
        self.script = []
        self.asked = []
        self.logprob = 0.0
        self.vocabulary = VOCABULARY
        self.running = self.most = 0
        self.gone = 0
        self.hang = asyncio.Event()
        self.runner = None

    async def start(self, port=0):
        app = web.Application()
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/completions", self.complete)
        # A closed connection is to end its handler, as in the servers that are meant.
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def list(self, request):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"data": self.models})

    async def complete(self, request):
        body = await request.json()
        if max(body["prompt"]) >= self.vocabulary:
            return web.json_response({"error": {"message": "out of vocabulary"}}, status=400)
        if not body["stream"]:
            return web.json_response(
                {"choices": [choice(body["allowed_token_ids"], [self.logprob], "length")]}
            )
        self.asked.append(body)
        answer = self.script.pop(0) if self.script else GOOD
        if isinstance(answer, int):
            headers = {"Retry-After": "0.001"}
            said = {"error": {"message": "the maximum context length is 64"}}
            return web.json_response(said, status=answer, headers=headers)
        if isinstance(answer, str):
            raise web.HTTPTemporaryRedirect(answer)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            for piece in answer or GOOD[:1]:
                await response.write(piece.encode())
                await asyncio.sleep(0)
            if answer is None:
                await self.hang.wait()
            if answer and "broken" in answer[-1]:
                request.transport.close()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1
        return response


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(openai_engine, "BACKOFF_S", 0.002)
    monkeypatch.setattr(openai_served, "LOOK_S", 0.01)


@pytest_asyncio.fixture
async def server():
    played = Played()
    await played.start()
    yield played
    await played.runner.cleanup()


@pytest.fixture
def table(server, tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    return OpenaiTable(
        base_url=server.url,
        api_key_file=str(tmp_path / "key"),
        accept_unverified=True,
        timeout_s=20.0,
        away_s=0.05,
    )


@pytest_asyncio.fixture
async def engine(table):
    """With the policy loaded."""
    made = OpenaiEngine(2, table)
    await made.start()
    await made.load_policy(POLICY, EXAMPLE, 0)
    yield made
    await made.close()


def request(n=1, prompt=(4, 5), **sampling):
    return GenerationRequest(
        request_id="request",
        policy=POLICY,
        prompt_tokens=prompt,
        n=n,
        sampling=SamplingParams(**{"max_new_tokens": 8, "seed": 5, **sampling}),
    )


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_tokens_go_and_tokens_come_back(engine, server):
    freed = []
    engine.when_freed = lambda: freed.append(engine.stats().running)
    made = await engine.generate(request(3, stop=("END",), stop_token_ids=(9,), top_p=0.5))
    assert [each.tokens for each in made] == [(5, 6, 7, 1)] * 3
    assert made[0].logprobs == pytest.approx((-0.55, -0.56, -0.57, -0.51))
    assert (made[0].versions, made[0].finish_reason) == ((0,) * 4, "stop")
    assert len({body["seed"] for body in server.asked}) == 3
    body = server.asked[0]
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("served", [4, 5], 8)
    assert (body["stop"], body["stop_token_ids"], body["top_p"]) == (["END"], [9], 0.5)
    assert (body["logprobs"], body["return_token_ids"]) == (0, True)
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    assert body["include_stop_str_in_output"]
    assert engine.stats().tokens_generated == 12
    assert freed[-1] == engine.stats().running == 0
    assert engine.decode(POLICY, engine.encode(POLICY, "3 + 4 ="))
    await engine.generate(request(temperature=0.0, top_p=0.5))
    assert (server.asked[-1]["temperature"], server.asked[-1]["top_p"]) == (0.0, 1.0)


async def test_no_more_sequences_than_slots_are_at_the_server(engine, server):
    server.script = [None, None]
    task = asyncio.create_task(engine.generate(request(5)))
    await until(lambda: server.running == 2)
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    server.hang.set()  # both break off, and are drawn again
    assert len(await task) == 5
    assert len(server.asked) == 7
    assert server.most == 2


async def test_what_is_cancelled_is_gone_from_the_server(engine, server):
    server.script = [None, None]
    task = asyncio.create_task(engine.generate(request(2)))
    await until(lambda: server.running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.gone == 2)
    assert engine.stats().running == 0
    assert len(await engine.generate(request(2))) == 2


async def test_a_busy_server_and_a_broken_answer_are_tried_again(engine, server):
    server.script = [429, 503, GOOD[:2], [GOOD[0], ": broken\n\n"]]
    (made,) = await engine.generate(request())
    assert made.tokens == (5, 6, 7, 1)
    assert len({body["seed"] for body in server.asked}) == 1
    assert len(server.asked) == 5


async def test_a_server_that_stays_busy_fails_the_request_only(engine, server):
    server.script = [503] * TRIES
    with pytest.raises(GenerationFailed, match="HTTP 503") as failed:
        await engine.generate(request())
    assert (failed.value.code, failed.value.retryable) == ("engine.busy", True)
    assert len(server.asked) == TRIES
    assert len(await engine.generate(request())) == 1


async def test_a_server_that_went_away_is_a_policy_that_is_lost(engine, server):
    lost = []
    engine.when_lost = lost.append
    server.script = [None]
    hanging = asyncio.create_task(engine.generate(request()))
    await until(lambda: server.running == 1)
    await server.runner.cleanup()
    with pytest.raises(EngineCrashed):
        await hanging
    assert lost == [POLICY]
    assert engine.version(POLICY) is None
    with pytest.raises(GenerationFailed, match="not loaded"):
        await engine.generate(request())
    with pytest.raises(EngineCrashed) as away:
        await engine.load_policy(POLICY, EXAMPLE, 0)
    assert away.value.code == "engine.away"
    await server.start(server.port)
    await engine.load_policy(POLICY, EXAMPLE, 0)
    assert len(await engine.generate(request())) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (["data: {nonsense\n\n"], "malformed"),
        (['data: {"choices": 3}\n\n'], "malformed"),
        (['data: {"error": {"message": "out of memory"}}\n\n'], "out of memory"),
        ([chunk([5] * 9, "length")], "too many tokens"),
        ([chunk([VOCABULARY], "stop")], "unknown ones"),
        ([chunk([-1], "stop")], "unknown ones"),
        ([chunk([5], token_ids=None)], "no token ids"),
        ([chunk([5], logprobs=None)], "0 log-probabilities for 1 tokens"),
        ([chunk([5], "stop", logprobs={"token_logprobs": [-9999.0]})], "not finite"),
        ([chunk([5], "stop", logprobs={"token_logprobs": [None]})], "not finite"),
        ([chunk([5], "abort")], "ended it: abort"),
        (["data: " + "x" * 3 * 2**20], "malformed"),
        (400, "maximum context length"),
        (404, "HTTP 404"),
        (500, "HTTP 500"),
    ],
)
async def test_an_answer_that_is_of_no_use_fails_its_request(engine, server, answer, said):
    server.script = [answer]
    with pytest.raises(GenerationFailed, match=said):
        await engine.generate(request())
    assert len(server.asked) == 1
    assert len(await engine.generate(request())) == 1


@pytest.mark.parametrize(
    "spans", [[(0, 3)], [(0, 5)], [(1, 4)], [(0, 2), (1, 4)], [(2, 1), (0, 4)], [(0, 4)] * 9, []]
)
async def test_spans_that_are_not_of_the_tokens_are_refused(engine, spans):
    served = engine._find(POLICY).served
    weights = SimpleNamespace(version_of=int, close=lambda: None)
    task = asyncio.current_task()
    drawing = Drawing(served._replace(weights=weights), request(), 0, task, lambda tokens: None)
    good = drawing._versions(Piece((), (), "stop", (Span("3", 0, 1), Span("4", 1, 4))), 4)
    assert good == (3, 4, 4, 4)
    piece = Piece((), (), "stop", tuple(Span("3", start, end) for start, end in spans))
    with pytest.raises(GenerationFailed, match="4 tokens, versions of"):
        drawing._versions(piece, 4)


async def test_nobody_but_the_server_gets_a_prompt(engine, server):
    other = Played()
    await other.start()
    server.script = [f"{other.url}/v1/completions"]
    with pytest.raises(GenerationFailed, match="HTTP 307"):
        await engine.generate(request())
    assert other.asked == []
    await other.runner.cleanup()


async def test_what_the_server_would_refuse_is_refused_here(engine, server):
    for fault in (
        request(max_new_tokens=63),
        request(prompt=(VOCABULARY,)),
        request(temperature=3.0),
        request(n=0),
    ):
        with pytest.raises(GenerationFailed):
            await engine.generate(fault)
    assert server.asked == []


async def test_closing_fails_what_is_in_the_engine(table, server):
    engine = OpenaiEngine(1, table)
    await engine.start()
    await engine.load_policy(POLICY, EXAMPLE, 0)
    server.script = [None]
    task = asyncio.create_task(engine.generate(request(3)))
    await until(lambda: server.running == 1)
    await engine.close()
    with pytest.raises(GenerationFailed, match="closed"):
        await task
    await until(lambda: server.gone == 1)
    with pytest.raises(GenerationFailed, match="not running"):
        await engine.generate(request())


async def test_weights_that_nobody_can_read_are_called_so_and_never_change(engine):
    with pytest.raises(WeightsHidden, match="shows no weights"):
        list(engine.read_weights(POLICY))
    with pytest.raises(WeightsHidden):
        engine.read_cells(POLICY, "a", [])
    with pytest.raises(WeightApplyFailed, match=r"agent\.openai\.weight_updates"):
        await engine.apply(POLICY, 1, {})
    assert engine.version(POLICY) == 0
    await engine.unload_policy(POLICY)
    await engine.unload_policy(POLICY)
    assert engine.version(POLICY) is None


async def refusal(table, policy=POLICY, version=0, **changes):
    engine = OpenaiEngine(2, openai_with(table, **changes))
    await engine.start()
    try:
        with pytest.raises(ModelError) as refused:
            await engine.load_policy(policy, EXAMPLE, version)
    finally:
        await engine.close()
    return str(refused.value)


def settings(table):
    return {name: getattr(table, name) for name in OpenaiServer.__struct_fields__}


def openai_with(table, **changes):
    values = {name: getattr(table, name) for name in table.__struct_fields__}
    return OpenaiTable(**{**values, **changes})


async def test_a_server_that_is_no_way_to_the_policy_is_refused(table, server, tmp_path):
    assert "weight_updates" in await refusal(table, version=3)
    assert "accept_unverified" in await refusal(table, accept_unverified=False)
    assert "serves 'served'" in await refusal(table, model="another")
    assert KEY not in (said := await refusal(table, api_key_file=""))
    assert "api_key_file" in said
    updates = {POLICY: OpenaiServer(base_url=server.url, weight_updates="vllm")}
    assert "HTTP 401" in await refusal(table, servers=updates)
    updates = {POLICY: OpenaiServer(**{**settings(table), "weight_updates": "vllm"})}
    assert "VLLM_SERVER_DEV_MODE=1" in await refusal(table, servers=updates)
    server.models[0]["root"] = str(tmp_path / "nowhere")
    server.logprob = -1.5
    assert "--logprobs-mode processed_logprobs" in await refusal(table)
    server.logprob = 0.0
    server.vocabulary += 1
    assert "another model" in await refusal(table)
    server.vocabulary -= 1
    server.models.append({"id": "second"})
    assert "agent.openai.model" in await refusal(table)
    server.models = [{"id": "served"}, {"id": "an adapter", "parent": "served"}]
    engine = OpenaiEngine(2, table)
    await engine.start()
    with pytest.raises(ModelError, match="adapter"):
        await engine.load_policy(POLICY, EXAMPLE, 0, base=EXAMPLE)
    await engine.load_policy(POLICY, EXAMPLE, 0)
    await engine.close()


async def test_a_folder_of_other_weights_behind_the_server_is_seen(table, server, tmp_path):
    tensors = read_model_folder(EXAMPLE)
    name, tensor = next(iter(tensors.items()))
    cells = np.roll(tensor.cells(), 1).tobytes()
    changed = {**tensors, name: TensorBytes(tensor.dtype, tensor.shape, cells)}
    write_model_folder(tmp_path / "other", changed, read_artefacts(EXAMPLE))
    server.models[0]["root"] = str(tmp_path / "other")
    assert "whose weights are" in await refusal(table)
    server.models[0]["root"] = str(EXAMPLE)
    engine = OpenaiEngine(2, table)
    await engine.start()
    await engine.load_policy(POLICY, EXAMPLE, 0)
    await engine.close()


async def test_settings_are_refused_by_field(tmp_path):
    addresses = ("", "127.0.0.1:8000", "ftp://x", "http://x/v1", "http://x:none", "http://x:65536")
    for url in (*addresses, "http://[::1", "http://x/?key=word", "http://user:word@x"):
        servers = {"p": OpenaiServer(base_url=url)}
        with pytest.raises(ConfigError, match=r"agent\.openai\.base_url") as refused:
            OpenaiEngine(1, OpenaiTable(servers=servers))
        assert "user:word" not in str(refused.value)
    with pytest.raises(ValueError, match=r"openai\.base_url"):
        AgentTable(engine="openai")
    (tmp_path / "key").write_text("two words\n")
    for file in ("key", "nothing"):
        keyed = OpenaiTable(base_url="http://127.0.0.1:1", api_key_file=str(tmp_path / file))
        with pytest.raises(ConfigError, match=r"agent\.openai\.api_key_file"):
            OpenaiEngine(1, keyed)


async def test_the_doctor_says_what_the_server_lacks(table, server):
    agent = AgentTable(engine="openai", openai=table)
    found = await asyncio.to_thread(openai_verdict, agent)
    assert found.remedy == ""
    assert "'served'" in found.text
    server.logprob = -2.0
    found = await asyncio.to_thread(openai_verdict, agent)
    assert "--logprobs-mode" in found.text
    assert "[agent.openai]" in found.remedy
    await server.runner.cleanup()
    found = await asyncio.to_thread(openai_verdict, agent)
    assert "agent.openai" in found.remedy
    assert server.url in found.text
